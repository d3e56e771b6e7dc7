"""A jaxpr on Values as a flat jaxpr on their leaves: what every primitive that carries code is made of."""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc

from . import compat, recording
from .policy import policy_key
from .slots import Slot, conform, flatten, split, unflatten
from .trace import QuaxTrace, kind_of


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr on leaves: its inputs are `consts`, then the leaves of the operands."""

    jaxpr: jexc.ClosedJaxpr  # constants that are concrete are closed over
    consts: tuple[Any, ...]  # those that are traced by an outer transform; they lead the inputs
    out: tuple[Slot, ...]


memo: "weakref.WeakKeyDictionary[Any, dict[Any, Flat]]" = weakref.WeakKeyDictionary()
_memo_lock = threading.Lock()


def subjaxpr(
    trace: QuaxTrace,
    jaxpr: jexc.ClosedJaxpr,
    slots: Sequence[Slot],
    *,
    targets: Sequence[Slot | None] | None = None,
    order: Sequence[int] | None = None,
    what: str = "",
    closed: bool = True,
) -> Flat:
    """Quaxifies `jaxpr` for operands in `slots`. Memoised for as long as `jaxpr` lives.

    **Arguments:**

    - `trace`: the level on whose behalf, for its rules.
    - `targets`: for each result, the slot that it is brought to; None leaves it as it comes.
    - `order`: where each leaf of the operands stands among the flat inputs. Default: in order.
    - `what`: names the caller in messages.
    - `closed`: whether concrete constants may stay inside the jaxpr; else they lead the inputs as well.
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
        known = memo.setdefault(jaxpr, {})
    flat = known.get(key)
    if flat is None:
        flat = _trace(trace, jaxpr, slots, targets, order, what, closed)
        if not any(isinstance(c, jax.core.Tracer) for c in (*flat.consts, *jaxpr.consts)):
            known[key] = flat
    return flat


def _trace(
    trace: QuaxTrace,
    jaxpr: jexc.ClosedJaxpr,
    slots: Sequence[Slot],
    targets: Sequence[Slot | None] | None,
    order: Sequence[int] | None,
    what: str,
    closed: bool,
) -> Flat:
    out: tuple[Slot, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        if order is not None:
            leaves = tuple(leaves[i] for i in order)
        results = evaluate(trace, jaxpr, unflatten(slots, leaves))
        if targets is not None:
            results = [
                x if slot is None else conform(x, slot, what)
                for x, slot in zip(results, targets, strict=True)
            ]
        flat, out = flatten(results)
        return flat

    avals = [a for slot in slots for a in slot.avals]
    if order is not None:
        avals = [avals[list(order).index(i)] for i in range(len(avals))]
    debug_info = compat.debug_info_of(jaxpr)
    flat, consts = compat.trace_to_jaxpr(on_leaves, avals, debug_info)
    if closed and not any(isinstance(c, jax.core.Tracer) for c in consts):
        return Flat(compat.with_consts(flat, consts), (), out)
    return Flat(compat.with_consts(flat, ()), tuple(consts), out)


# -------------------------------------------------------------------------------------------------
# Running a jaxpr on Values
# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One equation, with places in a list for variables."""

    eqn: Any
    primitive: jexc.Primitive
    params: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    dead: list[int]  # what is not read again
    named: bool  # has a name stack of its own
    in_context: bool  # traced under a setting that also matters when it is run eagerly
    takes_functions: bool  # custom derivatives and shard_map, which are bound with functions


class _Plan:
    """A jaxpr, laid out once so that running it again looks nothing up."""

    def __init__(self, jaxpr: jexc.ClosedJaxpr) -> None:
        opened = compat.opened(jaxpr)
        self.start: list[Any] = []  # the values to begin with: those of literals
        places: dict[Any, int] = {}

        def place(atom: Any) -> int:
            literal = isinstance(atom, jexc.Literal)
            if literal or atom not in places:
                self.start.append(atom.val if literal else None)
                if literal:
                    return len(self.start) - 1
                places[atom] = len(self.start) - 1
            return places[atom]

        n_consts = len(jaxpr.consts)
        invars = list(map(place, compat.all_invars(opened)))
        self.consts, self.invars = invars[:n_consts], invars[n_consts:]
        placed = [(eqn, list(map(place, eqn.invars)), list(map(place, eqn.outvars))) for eqn in opened.eqns]
        self.outvars = list(map(place, opened.outvars))
        self.steps: list[_Step] = []
        alive = set(self.outvars)
        for eqn, inputs, outputs in reversed(placed):
            dead = {*inputs, *outputs} - alive
            alive |= set(inputs)
            takes_functions = type(eqn.primitive).get_bind_params is not jexc.Primitive.get_bind_params
            named = bool(str(eqn.source_info.name_stack))
            flags = (named, compat.has_context(eqn), takes_functions)
            self.steps.append(_Step(eqn, eqn.primitive, eqn.params, inputs, outputs, list(dead), *flags))
        self.steps.reverse()


_plan = compat.weakly_cached(_Plan)


def evaluate(
    trace: QuaxTrace, jaxpr: jexc.ClosedJaxpr, operands: Sequence[Any], *, inlined: bool = False
) -> list[Any]:
    """Runs `jaxpr` on Values and plain arrays, for the level of `trace`, under the current trace.

    What is staged gets the source lines of the equations; of the caller, if `inlined`.
    """
    plan = _plan(jaxpr)
    parent = compat.current_trace()
    eager = compat.is_eval_trace(parent)
    level = trace if parent is trace.parent_trace else QuaxTrace(parent, trace.tag, trace.resolver)
    env = plan.start.copy()
    for i, x in zip(plan.consts, jaxpr.consts, strict=True):
        env[i] = level.unwrap(x)
    for i, x in zip(plan.invars, operands, strict=True):
        env[i] = x
    for step in plan.steps:
        inputs = [env[i] for i in step.inputs]
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


def _run(level: QuaxTrace, step: _Step, inputs: list[Any]) -> Sequence[Any]:
    primitive = step.primitive
    if step.takes_functions:
        with jexc.set_current_trace(level):
            params = primitive.get_bind_params(step.params)
            return list(map(level.unwrap, primitive.bind(*map(level.box, inputs), **params)))
    key = (primitive, *[type(x) if kind_of(x) == "value" else None for x in inputs])
    if any(key[1:]):
        out = level.dispatch_key(key, inputs, step.params)
        return list(map(level.settle, out)) if primitive.multiple_results else [level.settle(out)]
    out = primitive.bind(*inputs, **step.params)
    return out if primitive.multiple_results else [out]


def with_leading_inputs(flats: Sequence[Flat], n_leaves: int) -> tuple[list[Flat], tuple[Any, ...]]:
    """Several jaxprs of the same operands, made to take the constants of all of them."""
    consts = tuple(c for flat in flats for c in flat.consts)
    if not consts:
        return list(flats), ()
    sizes = [len(flat.consts) for flat in flats]
    out = []
    for i, flat in enumerate(flats):

        def widened(*inputs: Any, i: int = i, flat: Flat = flat) -> list[Any]:
            *groups, leaves = split(inputs, *sizes)
            return jexc.jaxpr_as_fun(flat.jaxpr)(*groups[i], *leaves)

        avals = (
            [*map(jax.typeof, consts), *compat.in_avals(flat.jaxpr)[-n_leaves:]]
            if n_leaves
            else [*map(jax.typeof, consts)]
        )
        jaxpr, more = compat.trace_to_jaxpr(widened, avals, compat.debug_info_of(flat.jaxpr))
        out.append(dataclasses.replace(flat, jaxpr=compat.with_consts(jaxpr, more), consts=()))
    return out, consts
