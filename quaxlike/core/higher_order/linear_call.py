"""Functions that are linear in some of their operands and have a custom transpose.

As `jax.custom_derivatives.linear_call`, but differentiable with respect to all operands, and under `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..jaxprs.slots import split

# Takes the operands that are not linear, and the cotangents of the results; returns those of the linear ones.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_linear_call_p = jexc.Primitive("linear_call_on_leaves")
_linear_call_p.multiple_results = True


def linear_call(
    fun: jexc.ClosedJaxpr, transpose: Transpose, others: Sequence[Any], linear: Sequence[Any]
) -> list[Any]:
    """Calls the jaxpr `fun` on the operands `others`, followed by those that it is `linear` in."""
    return _linear_call_p.bind(*others, *linear, fun=fun, transpose=transpose, n_others=len(others))


def _evaluate(*operands: Any, fun: jexc.ClosedJaxpr, **_: Any) -> Sequence[Any]:
    return jexc.jaxpr_as_fun(fun)(*operands)


def _abstract(*_: Any, fun: jexc.ClosedJaxpr, **__: Any) -> Sequence[Any]:
    return fun.out_avals


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    n_others = params["n_others"]
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if moving[0] < n_others:

        def of_moving(*xs: Any) -> Sequence[Any]:
            operands = list(primals)
            for i, x in zip(moving, xs, strict=True):
                operands[i] = x
            return _evaluate(*operands, **params)

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    out = _linear_call_p.bind(*primals, **params)
    linear = map(ad.instantiate_zeros, tangents[n_others:])
    dots = _linear_call_p.bind(*primals[:n_others], *linear, **params)
    avals = [aval.to_tangent_aval() for aval in params["fun"].out_avals]
    return out, [ad.Zero(a) if a.dtype == jax.dtypes.float0 else t for a, t in zip(avals, dots, strict=True)]


def _transpose(
    cts: Sequence[Any], *operands: Any, fun: jexc.ClosedJaxpr, transpose: Transpose, n_others: int
) -> list[Any]:
    others, linear = split(operands, n_others)
    found = transpose(others, cts)
    return [
        *[None] * n_others,
        *(ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, found, strict=True)),
    ]


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    fun: jexc.ClosedJaxpr,
    transpose: Transpose,
    n_others: int,
) -> tuple[Sequence[Any], Sequence[int]]:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    others, linear = split(operands, n_others)
    axes, linear_axes = split(dims, n_others)
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(linear, linear_axes, strict=True)
    ]
    in_axes = (*axes, *[0] * len(linear))
    mapped = jax.make_jaxpr(jax.vmap(jexc.jaxpr_as_fun(fun), in_axes, axis_size=size))(*others, *linear)

    def mapped_transpose(others: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
        moving = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]

        def one(others: Sequence[Any], *xs: Any) -> Sequence[Any]:
            full: list[Any] = [ad.Zero(aval.to_ct_aval()) for aval in fun.out_avals]
            for i, x in zip(moving, xs, strict=True):
                full[i] = x
            return transpose(others, full)

        each = jax.vmap(one, (list(axes), *[0] * len(moving)), axis_size=size)
        return each(list(others), *(cts[i] for i in moving))

    return linear_call(mapped, mapped_transpose, others, linear), [0] * len(fun.out_avals)


_linear_call_p.def_impl(_evaluate)
_linear_call_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear_call_p] = _jvp
ad.primitive_transposes[_linear_call_p] = _transpose
batching.primitive_batchers[_linear_call_p] = _batch
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
