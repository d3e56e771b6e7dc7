"""Runs jaxprs on Values: one equation at a time, as a flat jaxpr on leaves, or cached for a rule.

A cached program may only be reused with exactly the settings it was traced with. So the key consists of the
jaxpr object itself (held weakly), the slots, the rules, the policy and JAX's trace context. If any were
missing, outdated rules or shapes could be used. A program closing over a tracer is never stored: it would
outlive the tracer's trace.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import compat, recording
from ..levels import running
from ..plain_arrays import hooks
from ..policy import MaterialisationError, entered, on_materialise, policy_key
from ..rules import Lost, use_rule_sets
from ..trace import QuaxTrace, ValueTracer, makes_values, value_types
from .slots import LeafLayout, flatten, split, unflatten
from .unify import convert_to


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """An equation. Its variables are indices into a list, which is faster than a dict."""

    eqn: Any
    primitive: jexc.Primitive
    params: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    dead: list[int]  # variables that no later equation uses
    named: bool  # whether it has its own name stack
    in_context: bool  # whether it was traced with settings that matter even when running eagerly
    takes_functions: bool  # whether functions are passed to `bind`, e.g. for custom derivatives
    makes_values: bool  # whether it creates Values out of plain arrays


class _JaxprPlan:
    """A preprocessed jaxpr, run without any dict lookups."""

    def __init__(self, jaxpr: compat.ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(jaxpr)
        self.start: list[Any] = []  # the initial values of all variables, i.e. None unless it's a literal
        indices: dict[Any, int] = {}

        def index(atom: Any) -> int:
            literal = isinstance(atom, jexc.Literal)
            if literal or atom not in indices:
                self.start.append(atom.val if literal else None)
                if literal:
                    return len(self.start) - 1
                indices[atom] = len(self.start) - 1
            return indices[atom]

        n_consts = len(jaxpr.consts)
        invars = list(map(index, compat.all_invars(opened)))
        self.consts, self.invars = invars[:n_consts], invars[n_consts:]
        indexed = [(eqn, list(map(index, eqn.invars)), list(map(index, eqn.outvars))) for eqn in opened.eqns]
        self.outvars = list(map(index, opened.outvars))
        self.steps: list[_Step] = []
        alive = set(self.outvars)
        # Go backwards, so that `alive` contains the variables used by later equations. Each variable is
        # dropped after its last use: with all intermediate arrays alive, eager programs would require more
        # memory than in JAX.
        for eqn, inputs, outputs in reversed(indexed):
            dead = {*inputs, *outputs} - alive
            alive |= set(inputs)
            takes_functions = type(eqn.primitive).get_bind_params is not jexc.Primitive.get_bind_params
            named = bool(str(eqn.source_info.name_stack))
            flags = (named, compat.has_context(eqn), takes_functions, makes_values(eqn.primitive, eqn.params))
            self.steps.append(_Step(eqn, eqn.primitive, eqn.params, inputs, outputs, list(dead), *flags))
        self.steps.reverse()
        # Fast path: most jax.numpy functions are just a single equation, with the same operands as the
        # function.
        alone = [s for s in self.steps if (s.inputs, s.outputs) == (self.invars, self.outvars)]
        self.only = alone[0] if len(self.steps) == 1 and alone and not alone[0].in_context else None


_plan = compat.weakly_cached(_JaxprPlan)


def evaluate(
    trace: QuaxTrace | None, jaxpr: compat.ClosedJaxpr, operands: Sequence[Any], *, inlined: bool = False
) -> list[Any]:
    """Runs `jaxpr` on Values and plain arrays, for the level of `trace`, under the current trace.

    If `trace` is None, only plain arrays are supported. Staged equations have the same source lines as in the
    jaxpr or, if `inlined`, the caller's.
    """
    plan = _plan(jaxpr)
    parent = compat.current_trace()
    eager = compat.is_eval_trace(parent)
    level = trace
    # Some transform was entered after this level started: e.g. the jaxpr runs inside `grad`. Rules must run
    # under the transform, so use a second trace at the same level.
    if trace is not None and parent is not trace.parent_trace:
        level = QuaxTrace(parent, trace.tag, trace.resolver)
    if plan.only is not None and (eager or (inlined and not plan.only.named)):
        return list(_run(level, plan.only, operands))
    env = plan.start.copy()
    # If the function was traced while this level was running, some constants may be tracers of this level.
    for i, x in zip(plan.consts, jaxpr.consts, strict=True):
        env[i] = x if level is None else level.unwrap(x)
    for i, x in zip(plan.invars, operands, strict=True):
        env[i] = x
    for step in plan.steps:
        inputs = [env[i] for i in step.inputs]
        # Source lines and contexts only matter for staged equations. Otherwise don't enter them: this takes
        # longer than running a small primitive.
        if (eager or (inlined and not step.named)) and not step.in_context:
            results = _run(level, step, inputs)
        else:
            with compat.source_of(step.eqn), step.eqn.ctx.manager:
                results = _run(level, step, inputs)
        for i, x in zip(step.outputs, results, strict=True):
            env[i] = x
        for i in step.dead:
            env[i] = None
    return [env[i] for i in plan.outvars]


def _run(level: QuaxTrace | None, step: _Step, inputs: Sequence[Any]) -> Sequence[Any]:
    primitive = step.primitive
    if level is None:
        params = primitive.get_bind_params(step.params) if step.takes_functions else step.params
        out = primitive.bind(*inputs, **params)
        return list(out) if primitive.multiple_results else [out]
    # For these, JAX calls a `process_*` method of the current trace. So bind them under our level, rather
    # than dispatch them here.
    if step.takes_functions:
        with jexc.set_current_trace(level):
            params = primitive.get_bind_params(step.params)
            return list(map(level.unwrap, primitive.bind(*map(level.box, inputs), **params)))
    types = value_types(inputs)
    if any(types) or step.makes_values:
        out = level.dispatch_key((primitive, *types), list(inputs), step.params)
        return list(map(level.as_array, out)) if primitive.multiple_results else [level.as_array(out)]
    out = primitive.bind(*inputs, **step.params)
    if level.tag.follow is not None:
        level.tag.follow(primitive, inputs, step.params, out)
    return list(out) if primitive.multiple_results else [out]


def call_on_values(trace: QuaxTrace, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Calls a user's function with Values, under a new trace at the same level."""
    # This may run after the quaxified function has returned, e.g. in a backward pass. Any `quaxify` inside
    # must still inherit the rules.
    with use_rule_sets(trace.resolver.layers), jexc.take_current_trace() as parent:
        inner = QuaxTrace(parent, trace.tag, trace.resolver)
        running.levels.append(inner)
        try:
            with jexc.set_current_trace(inner):
                outs = fun(*[inner.box(x) for x in operands])
        finally:
            running.levels.pop()
        with jexc.set_current_trace(parent):

            def unwrap(x: Any) -> Any:
                return inner.unwrap(x) if isinstance(x, ValueTracer) else x

            return jtu.tree_map(unwrap, outs, is_leaf=lambda x: not isinstance(x, list | tuple))


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr on leaves. Its inputs are `consts`, followed by all operand leaves."""

    jaxpr: compat.ClosedJaxpr  # may close over concrete constants
    consts: tuple[Any, ...]  # the first inputs, traced by some outer transform
    out: tuple[LeafLayout, ...]


memo: "weakref.WeakKeyDictionary[Any, dict[Any, Flat]]" = weakref.WeakKeyDictionary()
_memo_lock = threading.Lock()


def subjaxpr(
    trace: QuaxTrace,
    jaxpr: compat.ClosedJaxpr,
    slots: Sequence[LeafLayout],
    *,
    targets: Sequence[LeafLayout | None] | None = None,
    order: Sequence[int] | None = None,
    what: str = "",
    closed: bool = True,
) -> Flat:
    """Quaxifies `jaxpr` for operands in `slots`. Memoised for the lifetime of `jaxpr`.

    **Arguments:**

    - `trace`: the level providing the rules.
    - `targets`: the slot to convert each result to, or None to leave it unchanged.
    - `order`: the position of each operand leaf in the flat inputs. Default: in order.
    - `what`: the caller's name, for use in messages.
    - `closed`: whether concrete constants may remain inside the jaxpr. If not, they become the first inputs.
    """
    key = (
        tuple(slots),
        None if targets is None else tuple(targets),
        None if order is None else tuple(order),
        what,
        closed,
        trace.resolver,
        policy_key(),
        compat.trace_context(),
    )
    if (recorder := recording.active()) is not None:
        tracing = functools.partial(_trace, trace, jaxpr, slots, targets, order, what, closed)
        return recorder.trace(jaxpr, what, key, tracing)
    with _memo_lock:
        # The lock is only for inserting. Two threads may trace the same program: the results are equal.
        known = memo.setdefault(jaxpr, {})
    flat = known.get(key)
    if flat is None:
        flat = _trace(trace, jaxpr, slots, targets, order, what, closed)
        # A program closing over tracers is only valid during this call, so don't store it.
        if not any(isinstance(c, jax.core.Tracer) for c in (*flat.consts, *jaxpr.consts)):
            known[key] = flat
    return flat


def _trace(
    trace: QuaxTrace,
    jaxpr: compat.ClosedJaxpr,
    slots: Sequence[LeafLayout],
    targets: Sequence[LeafLayout | None] | None,
    order: Sequence[int] | None,
    what: str,
    closed: bool,
) -> Flat:
    out: tuple[LeafLayout, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        if order is not None:
            leaves = tuple(leaves[i] for i in order)
        results = evaluate(trace, jaxpr, unflatten(slots, leaves))
        if targets is not None:
            results = [
                x if slot is None else convert_to(x, slot, what)
                for x, slot in zip(results, targets, strict=True)
            ]
        flat, out = flatten(results)
        if hooks.placeholders:
            out = hooks.placeholders.marked(out, results, slots)
        return flat

    avals = [a for slot in slots for a in slot.avals]
    if order is not None:
        avals = [avals[list(order).index(i)] for i in range(len(avals))]
    debug_info = compat.debug_info_of(jaxpr)
    flat, consts = compat.trace_to_jaxpr(on_leaves, avals, debug_info)
    if closed and not any(isinstance(c, jax.core.Tracer) for c in consts):
        return Flat(compat.with_consts(flat, consts), (), out)
    return Flat(compat.with_consts(flat, ()), tuple(consts), out)


def with_leading_inputs(flats: Sequence[Flat]) -> tuple[list[Flat], tuple[Any, ...]]:
    """Makes each of several jaxprs with the same operands accept the constants of all of them."""
    consts = tuple(c for flat in flats for c in flat.consts)
    if not consts:
        return list(flats), ()
    sizes = [len(flat.consts) for flat in flats]
    out = []
    for i, flat in enumerate(flats):

        def widened(*inputs: Any, i: int = i, flat: Flat = flat) -> list[Any]:
            *groups, leaves = split(inputs, *sizes)
            return jexc.jaxpr_as_fun(flat.jaxpr)(*groups[i], *leaves)

        avals = [*map(jax.typeof, consts), *flat.jaxpr.in_avals[len(flat.consts) :]]
        jaxpr, more = compat.trace_to_jaxpr(widened, avals, compat.debug_info_of(flat.jaxpr))
        out.append(dataclasses.replace(flat, jaxpr=compat.with_consts(jaxpr, more), consts=()))
    return out, consts


_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_RAISES_IF_DENSE = on_materialise("error")
_MOST_STRUCTURES = 1024  # the maximal number of operand structures cached for each rule


def cached_trace(rule: _Fn) -> _Fn:
    """Decorates a rule, to trace it only once for operands with the same structure.

    A model's layers tend to repeat the same product, over and over again. So what the rule computes is cached
    as a jaxpr, with the operands' structures and avals as the key. Under an outer transform, its equations
    are bound again; eagerly, it runs as a single compiled function.

    The primitive must have a single result. Only use this for pure and expensive rules: a lookup costs more
    than just calling a cheap rule.
    """
    known: dict[Any, _TracedRule | None] = {}
    lock = threading.Lock()

    @functools.wraps(rule)
    def on_operands(*args: Any, **params: Any) -> Any:
        # A recorder has to see each primitive used by the rule. And if the user has disabled jit, nothing may
        # be compiled.
        if recording.active() is not None or jax.config.jax_disable_jit:
            return rule(*args, **params)
        n = isinstance(args[0], jexc.Primitive)
        leaves, slots = flatten(args[n:])
        key = (args[:n], slots, tuple(params.items()), compat.trace_context())
        try:
            traced = known[key]
        except TypeError:  # unhashable params
            return rule(*args, **params)
        except KeyError:
            traced = _trace_rule(rule, args[:n], slots, params)
            with lock:
                # Just clear the whole cache. This only happens to programs with ever-changing shapes, so
                # tracking which entries were used last isn't worth it.
                if len(known) >= _MOST_STRUCTURES:
                    known.clear()
                known[key] = traced
        if traced is None:
            return rule(*args, **params)
        if compat.is_eval_trace(compat.current_trace()):
            return unflatten(traced.out, traced.compiled(*leaves))[0]
        return unflatten(traced.out, evaluate(None, traced.jaxpr, leaves, inlined=True))[0]

    return on_operands  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class _TracedRule:
    """What a rule computes on leaves, along with its result's slot."""

    jaxpr: compat.ClosedJaxpr
    out: tuple[LeafLayout, ...]

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return jax.jit(jexc.jaxpr_as_fun(self.jaxpr))


def _trace_rule(
    rule: Callable[..., Any],
    primitive: tuple[Any, ...],
    slots: tuple[LeafLayout, ...],
    params: dict[str, Any],
) -> _TracedRule | None:
    """Traces a rule. Returns None if the rule can't be cached, and so has to be called every time."""
    out: tuple[LeafLayout, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        result = rule(*primitive, *unflatten(slots, leaves), **params)
        if result is NotImplemented:
            raise _NotReplayable
        flat, out = flatten([result])
        return flat

    debug_info = jexc.DebugInfo("rule", rule.__name__, None, None)
    # Materialisations must be reported where they happen, so only rules without any are cached. Their traces
    # are valid for any policy, so setting this mode needn't change the keys of JAX's caches, which would take
    # longer than tracing a small rule.
    token = entered.set((*entered.get(), _RAISES_IF_DENSE))
    try:
        jaxpr, consts = compat.trace_to_jaxpr(on_leaves, [a for s in slots for a in s.avals], debug_info)
    except (_NotReplayable, MaterialisationError, Lost):
        return None
    finally:
        entered.reset(token)
    if any(isinstance(c, jax.core.Tracer) for c in consts):
        return None
    return _TracedRule(compat.with_consts(jaxpr, consts), out)


class _NotReplayable(Exception):
    pass
