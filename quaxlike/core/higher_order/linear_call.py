"""Calls of a function on arrays that have a custom transpose, as JAX's primitives have one.

As `jax.custom_derivatives.linear_call`, but differentiable with respect to all operands, and under `vmap`.
Which operands it is linear in shows when it is transposed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

# Takes the operands (an `UndefinedPrimal` for each linear one) and the cotangents of the results;
# returns one for each operand, of which those of the linear ones count.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_linear_call_p = jexc.Primitive("linear_call_on_leaves")
_linear_call_p.multiple_results = True


def linear_call(fun: jexc.ClosedJaxpr, transpose: Transpose, operands: Sequence[Any]) -> list[Any]:
    """Calls the jaxpr `fun` on the operands."""
    return _linear_call_p.bind(*operands, fun=fun, transpose=transpose)


def _evaluate(*operands: Any, fun: jexc.ClosedJaxpr, **_: Any) -> Sequence[Any]:
    return jexc.jaxpr_as_fun(fun)(*operands)


def _abstract(*_: Any, fun: jexc.ClosedJaxpr, **__: Any) -> Sequence[Any]:
    return fun.out_avals


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_moving(*xs: Any) -> Sequence[Any]:
        operands = list(primals)
        for i, x in zip(moving, xs, strict=True):
            operands[i] = x
        return _evaluate(*operands, **params)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose(cts: Sequence[Any], *operands: Any, fun: jexc.ClosedJaxpr, transpose: Transpose) -> list[Any]:
    found = transpose(operands, cts)
    return [ct if ad.is_undefined_primal(x) else None for x, ct in zip(operands, found, strict=True)]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, fun: jexc.ClosedJaxpr, transpose: Transpose
) -> tuple[Sequence[Any], Sequence[int]]:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    of_example = jax.vmap(jexc.jaxpr_as_fun(fun), dims, axis_size=size)
    mapped = jax.make_jaxpr(of_example)(*operands)

    def mapped_transpose(operands: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
        known = [i for i, x in enumerate(operands) if not ad.is_undefined_primal(x)]
        moving = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]

        def one(known_: Sequence[Any], *moving_: Any) -> Sequence[Any]:
            each: list[Any] = list(map(ad.UndefinedPrimal, fun.in_avals))
            for i, x in zip(known, known_, strict=True):
                each[i] = x
            full: list[Any] = [ad.Zero(aval.to_ct_aval()) for aval in fun.out_avals]
            for i, x in zip(moving, moving_, strict=True):
                full[i] = x
            found = transpose(each, full)
            return [ad.instantiate_zeros(ct) if i not in known else None for i, ct in enumerate(found)]

        axes = [dims[i] for i in known]
        found = jax.vmap(one, (axes, *[0] * len(moving)), axis_size=size)(
            [operands[i] for i in known], *(cts[i] for i in moving)
        )
        return [
            ct if ct is None else jnp.sum(ct, 0) if d is None else jnp.moveaxis(ct, 0, d)
            for ct, d in zip(found, dims, strict=True)
        ]

    return linear_call(mapped, mapped_transpose, operands), [0] * len(fun.out_avals)


_linear_call_p.def_impl(_evaluate)
_linear_call_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear_call_p] = _jvp
ad.primitive_transposes[_linear_call_p] = _transpose
batching.primitive_batchers[_linear_call_p] = _batch
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
