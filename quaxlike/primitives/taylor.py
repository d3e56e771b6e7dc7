"""Taylor coefficients of a defined primitive, for `jax.experimental.jet`.

jet has its own table of rules. The rule here only needs the primitive's derivative: the coefficients of
`f(x(t))` are those of `f'(x(t)) x'(t)`, each divided by its order.

Griewank & Walther, Evaluating Derivatives, chapter 13.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from .derive import result_tangents
from .forms import merge, split
from .layout import Params, zero_tangent

if TYPE_CHECKING:
    from .define import DefinedPrimitive

try:
    from jax.experimental import jet as jax_jet
except ImportError:  # it is experimental: a later release may lack it
    jax_jet = None


def register(p: "DefinedPrimitive") -> None:
    """Registers the rule for a primitive with `jax.experimental.jet`."""
    if jax_jet is not None:
        jax_jet.jet_rules[p] = functools.partial(jet, p)


def jet(
    p: "DefinedPrimitive", primals: Sequence[Any], series: Sequence[Sequence[Any]], /, **params: Any
) -> tuple[Any, Any]:
    """The results, and for each its Taylor coefficients from the first order on.

    **Arguments:**

    - `series`: the coefficients of each operand, without factorials.
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

    smooth = [_is_inexact(x) for x in results]  # integers have no derivatives
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
    p: "DefinedPrimitive",
    live: Sequence[bool],
    moving: Sequence[Any],
    tangents: Sequence[Any],
    held: Sequence[Any],
    results: Sequence[Any],
    params: Params,
) -> list[Any]:
    primals = merge(live, moving, held)
    if p.root.rules.vjp_with_results:  # the results that its derivative takes move too
        out = p.bind(*primals, **params)
        results = out if p.multiple_results else [out]
    found = result_tangents(p, primals, results, merge(live, tangents, list(map(zero_tangent, held))), params)
    return [ad.instantiate_zeros(t) for t in found]


def _is_constant(primal: Any, terms: Sequence[Any]) -> bool:
    """Whether an operand is known to be constant: integers, and operands with zero series in jet."""
    if not _is_inexact(primal):
        return True
    return not any(isinstance(term, jax.core.Tracer) or np.any(np.asarray(term)) for term in terms)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
