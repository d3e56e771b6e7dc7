"""The primitive behind `custom_dce`. It calls a jaxpr, with a rule for computing only some results.

Every transform produces an equation with the same primitive, and with the transformed jaxpr and rule.
(Otherwise the rule would be lost under `vmap` or `grad`.) The derivative is a separate equation, so unused
results and unused tangents can be eliminated independently.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core.primitives import while_p
from jax.interpreters import ad, batching, mlir

from ..core import compat
from ..core.high_level import as_call
from .forms import is_zero, merge, split, symbolic_tangents, zero_tangent

Used = tuple[bool, ...]
Narrowed = tuple[Any, Used]
"""A closed jaxpr that computes the used results, together with a mask of which operands it requires."""

Rule = Callable[[Used], Narrowed]
"""A function that computes some of the results, given which of them are used."""


class RuleInProgressError(Exception):
    """Raised if a rule calls its own function, and would apply to the same call a second time."""


dce_call_p = Primitive("custom_dce_call")
"""The operands are the inputs of `jaxpr`. The parameters are `jaxpr` (a closed jaxpr), `rule`, and the `name`
of the function.
"""
dce_call_p.multiple_results = True


def memoised(rule: Rule) -> Rule:
    """Memoises a rule, so equal equations also have identical jaxprs."""
    known: dict[Used, Narrowed] = {}
    lock = threading.Lock()

    @functools.wraps(rule)
    def remembered(used: Used) -> Narrowed:
        if used not in known:
            narrowed = rule(used)
            with lock:
                known.setdefault(used, narrowed)
        return known[used]

    return remembered


# Dead code ----------------------------------------------------------------------------------------


def _dce(used_outs: Sequence[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    if not any(used_outs) and not compat.has_effects(eqn):
        return [False] * len(eqn.invars), None
    if all(used_outs):
        return [True] * len(eqn.invars), eqn
    used = tuple(used_outs)
    try:
        with eqn.ctx.manager:
            jaxpr, used_ins = eqn.params["rule"](used)
    except RuleInProgressError:
        return [True] * len(eqn.invars), eqn
    narrowed = eqn.replace(
        invars=split(used_ins, eqn.invars)[0],
        outvars=split(used, eqn.outvars)[0],
        params=eqn.params | {"jaxpr": jaxpr, "rule": _later(eqn.params["rule"], used, jaxpr, used_ins)},
        effects=jaxpr.effects,
    )
    return list(used_ins), narrowed


def _later(rule: Rule, used: Used, jaxpr: Any, used_ins: Used) -> Rule:
    """Returns the rule to use after an equation has been narrowed down to its `used` results."""

    @memoised
    def narrow(still: Used) -> Narrowed:
        left, ins = rule(tuple(merge(used, still, [False] * used.count(False))))
        if any(split(used_ins, ins)[1]):
            # This needs an operand already removed: it wasn't used when more of the results were required. So
            # instead narrow down the existing jaxpr.
            return compat.dce(jaxpr, still)
        return left, tuple(split(used_ins, ins)[0])

    return narrow


def _dce_while(used_outs: Sequence[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """Eliminates dead code inside a loop that calls functions with rules, in its body or condition.

    The loop's carry is left unchanged. This is only used before JAX 0.12: later versions do it themselves.
    """
    if not any(used_outs) and not compat.has_effects(eqn):
        return [False] * len(eqn.invars), None
    jaxprs = {name: eqn.params[name] for name in ("cond_jaxpr", "body_jaxpr")}
    if not any(map(_has_rule, jaxprs.values())):
        return [True] * len(eqn.invars), eqn
    jaxprs = {
        name: compat.dce(jaxpr, [True] * len(jaxpr.out_avals), keep_inputs=True)[0]
        for name, jaxpr in jaxprs.items()
    }
    return [True] * len(eqn.invars), eqn.replace(params=eqn.params | jaxprs)


def _has_rule(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is dce_call_p or any(map(_has_rule, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns
    )


# Differentiation ----------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, rule: Rule, name: str
) -> tuple[list[Any], list[Any]]:
    out = dce_call_p.bind(*primals, jaxpr=jaxpr, rule=rule, name=name)
    zeros = [zero_tangent(x) for x in out]
    nonzero = tuple(not is_zero(t) for t in tangents)
    if not any(nonzero):
        return out, zeros
    tangent_jaxpr, outputs = _tangent_jaxpr(jaxpr, nonzero)
    if not any(outputs):
        return out, zeros

    @memoised
    def narrow(used: Used) -> Narrowed:
        wanted = tuple(merge(outputs, used, [False] * outputs.count(False)))
        jaxpr, used_ins = rule(wanted)
        moving = split(used_ins, nonzero)[0]
        tangents, _ = _tangent_jaxpr(jaxpr, moving, instantiate=True)
        tangents, ins = compat.dce(tangents, [True] * len(tangents.out_avals))
        of_primals, of_tangents = ins[: len(moving)], ins[len(moving) :]
        all_primals = merge(used_ins, of_primals, [False] * used_ins.count(False))
        all_tangents = merge(moving, of_tangents, [False] * moving.count(False))
        all_tangents = merge(used_ins, all_tangents, [False] * used_ins.count(False))
        return tangents, (*all_primals, *split(nonzero, all_tangents)[0])

    live = dce_call_p.bind(
        *primals, *split(nonzero, tangents)[0], jaxpr=tangent_jaxpr, rule=narrow, name=f"{name}.jvp"
    )
    return out, merge(outputs, live, split(outputs, zeros)[1])


_IN_REVERSE = frozenset(("custom_vjp_call", "custom_vjp_call_jaxpr"))
_DECLARED = _IN_REVERSE | {"custom_jvp_call", "stop_gradient"}


def declares_derivative(jaxpr: Any, by: frozenset[str] = _DECLARED) -> bool:
    """Returns whether a jaxpr contains a derivative declared by the user, rather than derived by JAX."""
    calls = (as_call(eqn.primitive, eqn.params) for eqn in jaxpr.eqns)
    return any(
        name in by or any(declares_derivative(inner, by) for inner in jaxprs_in_params(params))
        for name, params in calls
    )


def with_derivative_of(function: Any, used: Used, jaxpr: Any, used_ins: Used) -> Narrowed:
    """Returns the computation defined by the rule, but using the original function's derivative.

    Dead code may be eliminated before differentiation, so this requires the operands for both the rule and
    the function.
    """
    of_function, needed = compat.dce(function, used)
    taken = tuple(a or b for a, b in zip(used_ins, needed, strict=True))
    of_rule, of_derivative = split(taken, used_ins)[0], split(taken, needed)[0]

    def differentiated(*operands: Any) -> list[Any]:
        return jaxpr_as_fun(of_function)(*split(of_derivative, operands)[0])

    def narrowed(*operands: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*split(of_rule, operands)[0])

    def push(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = in_both_modes(*primals)
        moving = [not isinstance(t, SymbolicZero) for t in tangents]
        found = symbolic_tangents(differentiated, moving, primals, split(moving, tangents)[0])
        zeros = map(SymbolicZero.from_primal_value, out)
        return out, [zero if t is None else t for t, zero in zip(found, zeros, strict=True)]

    if declares_derivative(of_function, _IN_REVERSE):  # these only have a reverse-mode derivative
        with_derivative = jax.custom_vjp(narrowed)

        def forward(*operands: Any) -> tuple[Any, Any]:
            return with_derivative(*operands), jax.vjp(differentiated, *operands)[1]

        with_derivative.defvjp(forward, lambda pull, cotangents: pull(cotangents))
    else:
        with_derivative = in_both_modes = jax.custom_jvp(narrowed)
        in_both_modes.defjvp(push, symbolic_zeros=True)
    avals = split(taken, function.in_avals)[0]
    traced, consts = compat.trace_to_jaxpr(with_derivative, avals, compat.debug_info_of(jaxpr))
    return compat.with_consts(traced, consts), taken


def _tangent_jaxpr(jaxpr: Any, nonzero: Sequence[bool], instantiate: bool = False) -> tuple[Any, Used]:
    """Returns a jaxpr mapping primals and nonzero tangents to the results' tangents.

    This also returns a mask of which results are included. These are the results with a possibly nonzero
    tangent, or if `instantiate=True`, every result that can have a tangent at all.
    """
    outputs: Used = ()
    n = len(nonzero)

    def tangents(*operands: Any) -> list[Any]:
        nonlocal outputs
        primals = operands[:n]
        out = symbolic_tangents(jaxpr_as_fun(jaxpr), nonzero, primals, operands[n:])
        if instantiate:
            zeros = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
            out = [ad.instantiate_zeros(z) if t is None else t for t, z in zip(out, zeros, strict=True)]
        outputs = tuple(t is not None for t in out)
        return split(outputs, out)[0]

    avals = jaxpr.in_avals
    moving = [aval.to_tangent_aval() for aval in split(nonzero, avals)[0]]
    traced, consts = compat.trace_to_jaxpr(tangents, [*avals, *moving], compat.debug_info_of(jaxpr))
    return compat.with_consts(traced, consts), outputs


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: Any, rule: Rule, name: str) -> list[Any]:
    used = tuple(not is_zero(ct) for ct in cotangents)
    if not any(used):
        return [None] * len(operands)
    used_ins: Used = (True,) * len(operands)
    if not all(used):
        try:
            jaxpr, used_ins = rule(used)
        except RuleInProgressError:
            cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
            used = (True,) * len(cotangents)
    taken = split(used_ins, operands)[0]
    linear = [ad.is_undefined_primal(x) for x in taken]
    unknown, held = split(linear, taken)

    def of_linear(*linear_operands: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*merge(linear, linear_operands, held))

    transposed = jax.linear_transpose(of_linear, *[x.aval for x in unknown])
    out = merge(linear, transposed(split(used, cotangents)[0]), [None] * len(held))
    return merge(used_ins, out, [None] * used_ins.count(False))


# Batching -----------------------------------------------------------------------------------------


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, rule: Rule, name: str
) -> tuple[list[Any], list[int | None]]:
    batched, mapped = compat.batch_jaxpr(jaxpr, axis, dims, [None] * len(jaxpr.out_avals))

    @memoised
    def narrow(used: Used) -> Narrowed:
        jaxpr, used_ins = rule(used)
        wanted = split(used, mapped)[0]
        dims_left = split(used_ins, dims)[0]
        left, found = compat.batch_jaxpr(jaxpr, axis, dims_left, [m or None for m in wanted])
        if found != tuple(wanted):
            left = _one_of_equals(left, [f and not m for f, m in zip(found, wanted, strict=True)])
        return left, used_ins

    out = dce_call_p.bind(*operands, jaxpr=batched, rule=narrow, name=name)
    return out, [0 if m else None for m in mapped]


def _one_of_equals(jaxpr: Any, surplus: Sequence[bool]) -> Any:
    """Takes the first element along the batch axis, for results that aren't batched in the function.

    The rule may have batched them unnecessarily, but every element must be the same, so any of them will do.
    """

    def first(*operands: Any) -> list[Any]:
        out = jaxpr_as_fun(jaxpr)(*operands)
        return [x[0] if s else x for x, s in zip(out, surplus, strict=True)]

    traced, consts = compat.trace_to_jaxpr(first, jaxpr.in_avals, compat.debug_info_of(jaxpr))
    return compat.with_consts(traced, consts)


def _evaluate(*operands: Any, jaxpr: Any, rule: Rule, name: str) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


dce_call_p.def_impl(_evaluate)
dce_call_p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
mlir.register_lowering(dce_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
# The hijax equivalent of a lowering, for when `jaxpr` contains high-level primitives.
dce_call_p.to_lojax = _evaluate
batching.fancy_primitive_batchers[dce_call_p] = _batch
ad.primitive_jvps[dce_call_p] = _jvp
ad.primitive_transposes[dce_call_p] = _transpose
compat.register_dce(dce_call_p, _dce)
if not compat.WHILE_HAS_DCE:
    compat.register_dce(while_p, _dce_while)
