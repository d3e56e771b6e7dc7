"""Sums, scaling and elementwise functions that keep the structure of a matrix."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
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

# Types that are zero outside the bands that they store.
Banded = DiagonalMatrix | TridiagonalMatrix


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: Banded, **params: Any):
    return x.converted(x.dtype).each(lambda part, _: primitive.bind(part, **params))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: Banded, *, y: int, **params: Any):
    if y <= 0:
        return NotImplemented
    return x.converted(x.dtype).each(lambda part, _: primitive.bind(part, y=y, **params))


@register(["abs", "conj", "sign"])
def _multiplicative(primitive: Primitive, x: KroneckerMatrix, **params: Any):
    return x.converted(x.dtype).each(lambda part, _: primitive.bind(part, **params))


@register("convert_element_type")
def _convert_element_type(
    primitive: Primitive, x: KroneckerMatrix | LowRankUpdate, *, new_dtype: Any, **params: Any
):
    if (
        x.dtype == bool
        or not jnp.issubdtype(new_dtype, jnp.inexact)
        or (
            jnp.issubdtype(x.dtype, jnp.complexfloating)
            and not jnp.issubdtype(new_dtype, jnp.complexfloating)
        )
    ):
        return NotImplemented
    return x.each(lambda part, _: primitive.bind(part, new_dtype=new_dtype, **params))


@register("neg")
def _neg(primitive: Primitive, x: KroneckerMatrix | LowRankUpdate, **params: Any):
    negative = {name: quaxify(primitive.bind)(getattr(x, name), **params) for name in x.FACTORS}
    return x.with_parts(x.parts | negative)


# -------------------------------------------------------------------------------------------------
# Elementwise products and quotients
# -------------------------------------------------------------------------------------------------


@register("mul")
def _times_array(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    if np.broadcast_shapes(x.shape, np.shape(y)) != x.shape:
        return NotImplemented
    factor = _factor(x, y)
    if factor is not None:
        return x.scaled(factor)
    return _bands(primitive, x, y, **params) if isinstance(x, Banded) else NotImplemented


@register("mul")
def _array_times(primitive: Primitive, x: ArrayLike, y: StructuredMatrix, **params: Any):
    return _times_array(primitive, y, x, **params)


@register("div")
def _divided(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    factor = _factor(x, y)
    whole = not isinstance(x, Banded) and not jnp.issubdtype(x.dtype, jnp.inexact)
    if factor is None or whole or np.broadcast_shapes(x.shape, np.shape(y)) != x.shape:
        return NotImplemented  # 0 / 0, or integer division, which rounds
    return x.scaled(factor, lambda part, factor: primitive.bind(part, factor, **params))


def _factor(x: StructuredMatrix, y: ArrayLike) -> Any:
    """`y` as a single number, or as one for each matrix of a stack, if it is that; else None. JAX may bind
    primitives with axes of size 1, too."""
    shape = np.shape(y)
    if not shape:
        return y
    if shape[-2:] != (1, 1):
        return None
    if math.prod(shape) == 1:
        return jnp.reshape(y, ())
    return jnp.broadcast_to(jnp.reshape(y, shape[:-2]), x.batch)


def _bands(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Applies an elementwise function of `x` and a dense array, broadcast to the same shape, to the bands."""
    n = x.matrix_shape[0]
    at, y, x = jnp.arange(n), jnp.broadcast_to(y, x.shape), x.converted(x.dtype).stacked()
    rows = {"lower": (at[1:], at[:-1]), "diagonal": (at, at), "upper": (at[:-1], at[1:])}
    return x.with_parts(
        {
            name: quaxify(primitive.bind)(part, y[(..., *rows[name])], **params)
            for name, part in x.parts.items()
        }
    )


@register("mul")
def _times_diagonal(primitive: Primitive, x: DiagonalMatrix, y: StructuredMatrix, **params: Any):
    if x.matrix_shape != y.matrix_shape:
        return NotImplemented
    other = inside(lambda y: y.diagonal_elements(), y)
    return replace_fields(x, diagonal=quaxify(primitive.bind)(x.stacked().diagonal, other, **params))


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
    if x.a.shape[-2:] != y.a.shape[-2:]:
        return NotImplemented
    return _pairwise(primitive, x, y, **params)


# -------------------------------------------------------------------------------------------------
# Sums
# -------------------------------------------------------------------------------------------------

_SUMS = ["add", "sub", "add_any"]


def _pairwise(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    if x.matrix_shape != y.matrix_shape:
        return NotImplemented
    x, y = x.converted(x.dtype).stacked(), y.converted(y.dtype).stacked()
    return x.with_parts(
        {name: quaxify(primitive.bind)(part, y.parts[name], **params) for name, part in x.parts.items()}
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


# Excludes LowRankUpdate: if the rule for two updates declines, these rules must not match.
_Other = ArrayLike | DiagonalMatrix | TridiagonalMatrix | KroneckerMatrix


@register(_SUMS)
def _update_plus(primitive: Primitive, x: LowRankUpdate, y: _Other, **params: Any):
    repeated = _repeated(x, jnp.shape(y))
    if repeated is NotImplemented:
        return NotImplemented
    return replace_fields(repeated, base=quaxify(primitive.bind)(_full_base(repeated), y, **params))


@register(_SUMS)
def _plus_update(primitive: Primitive, x: _Other, y: LowRankUpdate, **params: Any):
    repeated = _repeated(y, jnp.shape(x))
    if repeated is NotImplemented:
        return NotImplemented
    base = quaxify(primitive.bind)(x, _full_base(repeated), **params)
    return replace_fields(repeated, base=base, u=-repeated.u if primitive.name == "sub" else repeated.u)


@register(_SUMS)
def _sum_of_updates(primitive: Primitive, x: LowRankUpdate, y: LowRankUpdate, **params: Any):
    x, y = _repeated(x, y.shape), _repeated(y, x.shape)
    if x is NotImplemented or y is NotImplemented:
        return NotImplemented
    base = quaxify(primitive.bind)(_full_base(x), _full_base(y), **params)
    x, y = x.converted(x.dtype), y.converted(y.dtype)
    u, v = ([jnp.broadcast_to(p, (*x.batch, *p.shape[-2:])) for p in ps] for ps in ((x.u, y.u), (x.v, y.v)))
    if primitive.name == "sub":
        u[1] = -u[1]
    return replace_fields(x, base=base, u=jnp.concatenate(u, -1), v=jnp.concatenate(v, -1))


def _repeated(x: LowRankUpdate, shape: tuple[int, ...]) -> Any:
    """Repeats an update along the batch axes in which it has size one and an array of this shape has not;
    NotImplemented if the axes of its matrices would be repeated."""
    full = np.broadcast_shapes(x.shape, shape)
    if not shape or full[-2:] != x.matrix_shape:
        return NotImplemented
    return x if full == x.shape else x.stacked(full[:-2])


def _full_base(x: LowRankUpdate) -> Any:
    base = x.converted(x.dtype).base
    return base if base.shape == x.shape else quaxify(jnp.broadcast_to)(base, x.shape)


# -------------------------------------------------------------------------------------------------
# Reductions
# -------------------------------------------------------------------------------------------------


@register("reduce_sum")
def _reduce_sum(x: StructuredMatrix, *, axes: Sequence[int], **params: Any):
    n = x.num_batch
    rows, columns = n in axes, n + 1 in axes
    if not rows and not columns:
        if not isinstance(x, Banded):
            return NotImplemented
        return x.stacked().each(lambda part, _: jnp.sum(part, tuple(axes), dtype=part.dtype))

    def total(x: Any) -> Any:
        # A product with ones, followed by plain sums over the remaining axes.
        matrix = x if columns else x.transposed()
        size = matrix.matrix_shape[1]
        y = matrix.times(jnp.ones((*[1] * n, size, 1), x.dtype))
        y = jnp.broadcast_to(y, (*x.batch, *y.shape[-2:]))[..., 0]
        summed = tuple(axis for axis in axes if axis < n) + ((n,) if rows and columns else ())
        return jnp.sum(y, summed, dtype=x.dtype)

    return inside(total, x)
