"""Sums, scaling and elementwise functions that leave a structured matrix a structured matrix."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ...core.values import replace_fields
from ...primitives.classes import ZERO_PRESERVING
from .base import StructuredMatrix, inside
from .diagonal import DiagonalMatrix
from .kronecker import KroneckerMatrix
from .low_rank import LowRankUpdate
from .tridiagonal import TridiagonalMatrix

# Zero outside of the bands that they store.
Banded = DiagonalMatrix | TridiagonalMatrix


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: Banded, **params: Any):
    return x.each(lambda part, _: primitive.bind(part, **params))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: Banded, *, y: int, **params: Any):
    return x.each(lambda part, _: primitive.bind(part, y=y, **params)) if y > 0 else NotImplemented


@register(["abs", "conj", "sign"])
def _multiplicative(primitive: Primitive, x: KroneckerMatrix, **params: Any):
    return x.each(lambda part, _: primitive.bind(part, **params))


@register("convert_element_type")
def _convert_element_type(
    primitive: Primitive, x: KroneckerMatrix | LowRankUpdate, *, new_dtype: Any, **params: Any
):
    if not jnp.issubdtype(new_dtype, jnp.inexact) or (
        jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(new_dtype, jnp.complexfloating)
    ):
        return NotImplemented
    return x.each(lambda part, _: primitive.bind(part, new_dtype=new_dtype, **params))


@register("neg")
def _neg(x: KroneckerMatrix | LowRankUpdate, **params: Any):
    return x.scaled(jnp.asarray(-1, x.dtype))


# -------------------------------------------------------------------------------------------------
# Products and quotients, element by element
# -------------------------------------------------------------------------------------------------


@register("mul")
def _times_array(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    if jnp.ndim(y) == 0:
        return x.scaled(y)
    return _bands(primitive, x, y, **params) if isinstance(x, Banded) else NotImplemented


@register("mul")
def _array_times(primitive: Primitive, x: ArrayLike, y: StructuredMatrix, **params: Any):
    return _times_array(primitive, y, x, **params)


@register("div")
def _divided(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    if jnp.ndim(y) == 0:
        return x.with_parts(
            x.parts | {name: quaxify(primitive.bind)(x.parts[name], y, **params) for name in x.FACTORS}
        )
    return NotImplemented  # 0 / 0


def _bands(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Element by element with a dense array of the same shape: the bands of both."""
    n = x.matrix_shape[0]
    at, y, x = jnp.arange(n), jnp.asarray(y), x.stacked()
    rows = {"lower": (at[1:], at[:-1]), "diagonal": (at, at), "upper": (at[:-1], at[1:])}
    return x.with_parts(
        {name: primitive.bind(part, y[(..., *rows[name])], **params) for name, part in x.parts.items()}
    )


@register("mul")
def _times_diagonal(primitive: Primitive, x: DiagonalMatrix, y: StructuredMatrix, **params: Any):
    if x.batch != y.batch:
        return NotImplemented
    other = inside(lambda y: y.diagonal_elements(), y)
    return replace_fields(x, diagonal=primitive.bind(x.stacked().diagonal, other, **params))


@register("mul")
def _diagonal_times(
    primitive: Primitive,
    x: TridiagonalMatrix | KroneckerMatrix | LowRankUpdate,
    y: DiagonalMatrix,
    **params: Any,
):
    return _times_diagonal(primitive, y, x, **params)


@register("mul")
def _of_tridiagonals(primitive: Primitive, x: TridiagonalMatrix, y: TridiagonalMatrix, **params: Any):
    return _pairwise(primitive, x, y, **params)


@register("mul")
def _of_kroneckers(primitive: Primitive, x: KroneckerMatrix, y: KroneckerMatrix, **params: Any):
    if x.batch != y.batch or x.a.shape[-2:] != y.a.shape[-2:]:
        return NotImplemented
    x, y = x.stacked(), y.stacked()
    parts = {name: quaxify(primitive.bind)(part, y.parts[name], **params) for name, part in x.parts.items()}
    return x.with_parts(parts)


# -------------------------------------------------------------------------------------------------
# Sums
# -------------------------------------------------------------------------------------------------

_SUMS = ["add", "sub", "add_any"]


def _pairwise(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    x, y = x.stacked(), y.stacked()
    return x.with_parts(
        {name: primitive.bind(part, y.parts[name], **params) for name, part in x.parts.items()}
    )


@register(_SUMS)
def _sum_of_diagonals(primitive: Primitive, x: DiagonalMatrix, y: DiagonalMatrix, **params: Any):
    return _pairwise(primitive, x, y, **params)


@register(_SUMS)
def _sum_of_bands(primitive: Primitive, x: Banded, y: Banded, **params: Any):
    return _pairwise(primitive, _as_tridiagonal(x), _as_tridiagonal(y), **params)


def _as_tridiagonal(x: Banded) -> TridiagonalMatrix:
    if isinstance(x, TridiagonalMatrix):
        return x
    beside = jnp.zeros((*x.batch, max(x.matrix_shape[0] - 1, 0)), x.dtype)
    return TridiagonalMatrix(beside, x.diagonal, beside)


@register(_SUMS)
def _update_plus(primitive: Primitive, x: LowRankUpdate, y: ArrayLike | StructuredMatrix, **params: Any):
    if jnp.ndim(y) == 0:
        return NotImplemented
    return replace_fields(x, base=quaxify(primitive.bind)(_full_base(x), y, **params))


@register(_SUMS)
def _plus_update(primitive: Primitive, x: ArrayLike | StructuredMatrix, y: LowRankUpdate, **params: Any):
    if jnp.ndim(x) == 0:
        return NotImplemented
    base = quaxify(primitive.bind)(x, _full_base(y), **params)
    return replace_fields(y, base=base, u=-y.u if primitive.name == "sub" else y.u)


def _full_base(x: LowRankUpdate) -> Any:
    shape = (*x.batch, *x.matrix_shape)
    return x.base if x.base.shape == shape else quaxify(jnp.broadcast_to)(x.base, shape)


@register(_SUMS)
def _sum_of_updates(primitive: Primitive, x: LowRankUpdate, y: LowRankUpdate, **params: Any):
    base = quaxify(primitive.bind)(_full_base(x), _full_base(y), **params)
    u, v = ([jnp.broadcast_to(p, (*x.batch, *p.shape[-2:])) for p in ps] for ps in ((x.u, y.u), (x.v, y.v)))
    if primitive.name == "sub":
        u[1] = -u[1]
    return replace_fields(x, base=base, u=jnp.concatenate(u, -1), v=jnp.concatenate(v, -1))


# -------------------------------------------------------------------------------------------------
# Reductions
# -------------------------------------------------------------------------------------------------


@register("reduce_sum")
def _reduce_sum(x: StructuredMatrix, *, axes: Sequence[int], **params: Any):
    n = len(x.batch)
    rows, columns = n in axes, n + 1 in axes
    if not rows and not columns:
        if not isinstance(x, Banded):
            return NotImplemented
        return x.stacked().each(lambda part, _: jnp.sum(part, tuple(axes)))

    def total(x: Any) -> Any:
        # A product with ones; of what is left, plain sums.
        matrix = x if columns else x.transposed()
        size = matrix.matrix_shape[1]
        y = matrix.times(jnp.ones((*[1] * n, size, 1), x.dtype))
        y = jnp.broadcast_to(y, (*x.batch, *y.shape[-2:]))[..., 0]
        return jnp.sum(y, tuple(axis for axis in axes if axis < n) + ((n,) if rows and columns else ()))

    return inside(total, x)
