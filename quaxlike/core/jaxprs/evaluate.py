"""Running a jaxpr on Values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import compat
from ..known_constants import follow
from ..rules import asking
from ..trace import QuaxTrace, ValueTracer, makes_values, value_types


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One equation, with indices into a list for its variables."""

    eqn: Any
    primitive: jexc.Primitive
    params: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    dead: list[int]  # variables that are not read again
    named: bool  # has a name stack of its own
    in_context: bool  # traced under a setting that matters even when it is run eagerly
    takes_functions: bool  # custom derivatives and shard_map, which take functions when bound
    makes_values: bool  # of plain arrays


class _Plan:
    """A jaxpr, laid out once so that running it needs no lookups."""

    def __init__(self, jaxpr: jexc.ClosedJaxpr) -> None:
        opened = compat.opened(jaxpr)
        self.start: list[Any] = []  # the initial values: those of literals, else None
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
            flags = (named, compat.has_context(eqn), takes_functions, makes_values(eqn.primitive, eqn.params))
            self.steps.append(_Step(eqn, eqn.primitive, eqn.params, inputs, outputs, list(dead), *flags))
        self.steps.reverse()
        # Fast path: most functions of jax.numpy are a single equation on their own operands.
        alone = [s for s in self.steps if (s.inputs, s.outputs) == (self.invars, self.outvars)]
        self.only = alone[0] if len(self.steps) == 1 and alone and not alone[0].in_context else None


_plan = compat.weakly_cached(_Plan)


def evaluate(
    trace: QuaxTrace | None, jaxpr: jexc.ClosedJaxpr, operands: Sequence[Any], *, inlined: bool = False
) -> list[Any]:
    """Runs `jaxpr` on Values and plain arrays, for the level of `trace`, under the current trace. Without a
    `trace` it takes plain arrays only.

    What is staged gets the source lines of the equations, or those of the caller if `inlined`.
    """
    plan = _plan(jaxpr)
    parent = compat.current_trace()
    eager = compat.is_eval_trace(parent)
    level = trace
    if trace is not None and parent is not trace.parent_trace:
        level = QuaxTrace(parent, trace.tag, trace.resolver)
    if plan.only is not None and (eager or (inlined and not plan.only.named)):
        return list(_run(level, plan.only, operands))
    env = plan.start.copy()
    for i, x in zip(plan.consts, jaxpr.consts, strict=True):
        env[i] = x if level is None else level.unwrap(x)
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


def _run(level: QuaxTrace | None, step: _Step, inputs: Sequence[Any]) -> Sequence[Any]:
    primitive = step.primitive
    if level is None:
        params = primitive.get_bind_params(step.params) if step.takes_functions else step.params
        out = primitive.bind(*inputs, **params)
        return list(out) if primitive.multiple_results else [out]
    if step.takes_functions:
        with jexc.set_current_trace(level):
            params = primitive.get_bind_params(step.params)
            return list(map(level.unwrap, primitive.bind(*map(level.box, inputs), **params)))
    types = value_types(inputs)
    if any(types) or step.makes_values:
        out = level.dispatch_key((primitive, *types), list(inputs), step.params)
        return list(map(level.settle, out)) if primitive.multiple_results else [level.settle(out)]
    out = primitive.bind(*inputs, **step.params)
    if level.tag.follows_constants:
        follow(primitive, inputs, step.params, out)
    return list(out) if primitive.multiple_results else [out]


def call_on_values(trace: QuaxTrace, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Runs one of the user's functions on Values, under a new trace of the level of `trace`."""
    # It may run after the quaxified function has returned, as a backward pass does; a `quaxify` in it still
    # inherits the rules.
    with asking(trace.resolver.layers), jexc.take_current_trace() as parent:
        inner = QuaxTrace(parent, trace.tag, trace.resolver)
        with jexc.set_current_trace(inner):
            outs = fun(*[inner.box(x) for x in operands])
        with jexc.set_current_trace(parent):
            unwrap = lambda x: inner.unwrap(x) if isinstance(x, ValueTracer) else x
            is_leaf = lambda x: not isinstance(x, list | tuple)
            return jtu.tree_map(unwrap, outs, is_leaf=is_leaf)
