"""Rules for transforms in `jax.experimental`, i.e. Taylor coefficients for jet and costs for roofline.

The rule for jet only requires the primitive's (first) derivative: the coefficients of `f(x(t))` are those of
`f'(x(t)) x'(t)`, each divided by its order (Griewank & Walther, Evaluating Derivatives, chapter 13).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.interpreters import ad

from .derive import result_tangents
from .forms import Params, merge, split, zero_tangent
from .primitive import DefinedPrimitive

# These modules are experimental and may not be available in later versions of JAX.
try:
    from jax.experimental import jet as jax_jet
except ImportError:
    jax_jet = None
try:
    from jax.experimental import roofline
except ImportError:
    roofline = None


def register(p: DefinedPrimitive) -> None:
    """Registers a primitive with `jax.experimental.jet` and `jax.experimental.roofline`."""
    if jax_jet is not None:
        jax_jet.jet_rules[p] = functools.partial(jet, p)
    if roofline is not None:
        roofline.register_roofline(p)(functools.partial(_cost, p))


def jet(
    p: DefinedPrimitive, primals: Sequence[Any], series: Sequence[Sequence[Any]], /, **params: Any
) -> tuple[Any, Any]:
    """Returns the results together with their Taylor coefficients, starting at first order.

    **Arguments:**

    - `series`: the coefficients for each operand, without factorials.
    """
    out = p.bind(*primals, **params)
    results = out if p.multiple_results else [out]
    orders = len(series[0])
    live = [not _is_constant(x, terms) for x, terms in zip(primals, series, strict=True)]
    moving, held = split(live, primals)
    steps = split(live, series)[0]

    def derivative(*moving_and_tangents: Any) -> list[Any]:
        now, tangents = moving_and_tangents[: len(moving)], moving_and_tangents[len(moving) :]
        return split(smooth, _derivative(p, live, now, tangents, held, results, params))[0]

    smooth = [_is_inexact(x) for x in results]  # integers have no derivative
    speeds = [[(k + 1) * term for k, term in enumerate(terms)] for terms in steps]
    start = [*moving, *(speed[0] for speed in speeds)]
    still = [[jnp.zeros_like(x)] * orders for x in results]
    if not moving:
        rates = split(smooth, still)[0]
    elif orders == 1:
        rates = [[x] for x in derivative(*start)]
    else:
        assert jax_jet is not None
        terms = [*(terms[:-1] for terms in steps), *(speed[1:] for speed in speeds)]
        first, later = jax_jet.jet(derivative, start, terms, factorial_scaled=False)
        rates = [[x, *rest] for x, rest in zip(first, later, strict=True)]
    smooth_terms = [[rate / (k + 1) for k, rate in enumerate(of_result)] for of_result in rates]
    found = merge(smooth, smooth_terms, split(smooth, still)[1])
    return (out, found) if p.multiple_results else (out, found[0])


def _derivative(
    p: DefinedPrimitive,
    live: Sequence[bool],
    moving: Sequence[Any],
    tangents: Sequence[Any],
    held: Sequence[Any],
    results: Sequence[Any],
    params: Params,
) -> list[Any]:
    primals = merge(live, moving, held)
    # Here the derivative also depends on the results, so recompute them.
    if p.root.rules.vjp_with_results:
        out = p.bind(*primals, **params)
        results = out if p.multiple_results else [out]
    found = result_tangents(p, primals, results, merge(live, tangents, list(map(zero_tangent, held))), params)
    return [ad.instantiate_zeros(t) for t in found]


def _is_constant(primal: Any, terms: Sequence[Any]) -> bool:
    """Returns whether an operand is known to be constant: an integer, or with a series of zeros."""
    if not _is_inexact(primal):
        return True
    return not any(isinstance(term, jax.core.Tracer) or np.any(np.asarray(term)) for term in terms)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _cost(p: DefinedPrimitive, ctx: Any, *_: Any, **params: Any) -> Any:
    assert roofline is not None
    operands = ctx.avals_in
    by_hand = p.slot("flops")
    params = p.plain_params(params)
    flops = by_hand(*operands, **params) if by_hand.registered else _flops_of(p.jaxpr(operands, params))
    size = roofline.RooflineShape.total_bytes
    moved = 0 if ctx.pin_lhs_in_vmem else size(operands[:1]) + size(ctx.avals_out)
    moved += 0 if ctx.pin_rhs_in_vmem else size(operands[1:])
    return roofline.RooflineResult(flops=flops, unfused_flops=flops, hbm_bytes=moved, unfused_hbm_bytes=moved)


def _flops_of(jaxpr: Any) -> int:
    return sum(map(_flops, getattr(jaxpr, "jaxpr", jaxpr).eqns))


def _flops(eqn: JaxprEqn) -> int:
    """Returns the FLOPs that JAX counts for this equation."""
    assert roofline is not None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is not None:
        return eqn.params.get("length", 1) * _flops_of(inner)

    def call(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]  # pyright: ignore
    return roofline.roofline(call)(*shapes)[1].flops
