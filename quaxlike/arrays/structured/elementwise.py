"""Addition, scaling and elementwise functions that preserve a matrix's structure.

If an operation doesn't, then its rule declines and the matrix is materialised.
"""

import functools
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
from ..factors import is_infinite, multiplies_nothing, reciprocal
from .base import StructuredMatrix, inside
from .diagonal import DiagonalMatrix
from .kronecker import KroneckerMatrix
from .low_rank import LowRankUpdate


@register(tuple(set(ZERO_PRESERVING) - {"neg", "convert_element_type"}))
def _zero_preserving(primitive: Primitive, x: StructuredMatrix, **params: Any):
    return NotImplemented if x.places() is None else _on_parts(primitive, x, **params)


def _on_parts(primitive: Primitive, x: StructuredMatrix, **params: Any) -> Any:
    return x.converted(x.dtype).each(lambda part, _: primitive.bind(part, **params))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: StructuredMatrix, *, y: int, **params: Any):
    return NotImplemented if y <= 0 or x.places() is None else _on_parts(primitive, x, y=y, **params)


# These are multiplicative, e.g. `abs(a * b) == abs(a) * abs(b)`, so apply them to both factors. Products of
# integers can wrap, which changes their signs.
@register(["abs", "conj", "sign"])
def _multiplicative(primitive: Primitive, x: KroneckerMatrix, **params: Any):
    return _on_parts(primitive, x, **params) if jnp.issubdtype(x.dtype, jnp.inexact) else NotImplemented


@register("convert_element_type")
def _convert_element_type(primitive: Primitive, x: StructuredMatrix, *, new_dtype: Any, **params: Any):
    if not x.converts_by_parts(new_dtype):
        return NotImplemented
    return x.each(lambda part, _: primitive.bind(part, new_dtype=new_dtype, **params))


@register("neg")
def _neg(primitive: Primitive, x: StructuredMatrix, **params: Any):
    negative = {name: quaxify(primitive.bind)(getattr(x, name), **params) for name in x.FACTORS}
    return x.with_parts(x.parts | negative)


# Elementwise products and quotients ---------------------------------------------------------------


@register("mul")
def _times_array(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    x = x.repeated(np.shape(y))
    if x is NotImplemented or multiplies_nothing(x, y):
        return x
    # Don't multiply each term by an infinite factor: infinities with opposite signs add up to NaN.
    if x.is_sum and is_infinite(y):
        return NotImplemented
    factor = _factor(x, y)
    if factor is not None:
        return x.scaled(factor)
    return NotImplemented if x.places() is None else _on_elements(primitive, x, y, **params)


def _on_elements(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any) -> Any:
    """Multiplies or divides the stored elements by the corresponding elements of an array."""
    places: Any = x.places()
    y, x = jnp.broadcast_to(y, x.shape), x.converted(x.dtype).stacked()

    def by(name: Any, part: Any) -> Any:
        return quaxify(primitive.bind)(part, y[(..., *places[name])], **params)

    return x.with_parts({name: by(name, part) for name, part in x.parts.items()})


@register("mul")
def _array_times(primitive: Primitive, x: ArrayLike, y: StructuredMatrix, **params: Any):
    return _times_array(primitive, y, x, **params)


@register("div")
def _divided(primitive: Primitive, x: StructuredMatrix, y: ArrayLike, **params: Any):
    x = x.repeated(np.shape(y))
    if x is NotImplemented or multiplies_nothing(x, y):
        return x
    # As for products, an infinite factor can turn a sum into NaN.
    if x.is_sum and is_infinite(reciprocal(y)):
        return NotImplemented
    factor = _factor(x, y)
    if factor is None and x.places() is not None:
        return _on_elements(primitive, x, y, **params)
    if factor is None or (x.places() is None and not jnp.issubdtype(x.dtype, jnp.inexact)):
        return NotImplemented  # division of integers rounds
    return x.scaled(factor, lambda part, factor: primitive.bind(part, factor, **params))


def _factor(x: StructuredMatrix, y: ArrayLike) -> Any:
    """Returns `y` as a scalar, or as one scalar per matrix in a stack. None if it's neither.

    JAX may also have added axes of size 1 before binding the primitive.
    """
    shape = np.shape(y)
    if not shape:
        return y
    if shape[-2:] != (1, 1):
        return None
    if math.prod(shape) == 1:
        return jnp.reshape(y, ())
    return jnp.broadcast_to(jnp.reshape(y, shape[:-2]), x.batch)


@register(["mul", "div"])
def _elementwise_product(primitive: Primitive, x: StructuredMatrix, y: StructuredMatrix, **params: Any):
    if x.matrix_shape != y.matrix_shape:
        return NotImplemented
    by = functools.partial(primitive.bind, **params)
    orders = ((x, y), (y, x)) if primitive.name == "mul" else ((x, y),)
    for first, second in orders:
        # An elementwise product with a diagonal matrix is diagonal, whatever the other matrix.
        if isinstance(first, DiagonalMatrix):
            other = inside(lambda second: second.diagonal_elements(), second)
            return replace_fields(first, diagonal=quaxify(by)(first.stacked().diagonal, other))
    integers = not jnp.issubdtype(x.dtype, jnp.inexact) and x.places() is None
    return NotImplemented if integers and primitive.name == "div" else x.multiplied(y, by)


# Sums ---------------------------------------------------------------------------------------------

_SUMS = ["add", "sub", "add_any"]


@register(_SUMS)
def _sum(primitive: Primitive, x: StructuredMatrix, y: StructuredMatrix, **params: Any):
    if x.matrix_shape != y.matrix_shape:
        return NotImplemented
    add = functools.partial(primitive.bind, **params)
    out = x.plus(y, add)
    return y.plus(x, lambda y, x: add(x, y)) if out is NotImplemented else out


@register(_SUMS)
def _update_plus(primitive: Primitive, x: LowRankUpdate, y: ArrayLike, **params: Any):
    add = functools.partial(primitive.bind, **params)
    x = x.repeated(np.shape(y))
    return NotImplemented if x is NotImplemented or not np.shape(y) else x.with_added(y, add)


@register(_SUMS)
def _plus_update(primitive: Primitive, x: ArrayLike, y: LowRankUpdate, **params: Any):
    add = functools.partial(primitive.bind, **params)
    y = y.repeated(np.shape(x))
    return (
        NotImplemented if y is NotImplemented or not np.shape(x) else y.with_added(x, lambda y, x: add(x, y))
    )


# Reductions ---------------------------------------------------------------------------------------


@register("reduce_sum")
def _reduce_sum(x: StructuredMatrix, *, axes: Sequence[Any], **params: Any):
    n = x.num_batch
    rows, columns = n in axes, n + 1 in axes
    if not rows and not columns:
        if x.places() is None:
            return NotImplemented
        return x.stacked().each(lambda part, _: jnp.sum(part, tuple(axes), dtype=part.dtype))

    def total(x: Any) -> Any:
        # Multiplying by a vector of ones sums along one axis, and exploits the structure. The result is
        # dense, so then sum over the remaining axes.
        matrix = x if columns else x.transposed()
        size = matrix.matrix_shape[1]
        y = matrix.applied_to(jnp.ones((*[1] * n, size, 1), x.dtype))
        y = jnp.broadcast_to(y, (*x.batch, *y.shape[-2:]))[..., 0]
        summed = tuple(axis for axis in axes if axis < n) + ((n,) if rows and columns else ())
        return jnp.sum(y, summed, dtype=x.dtype)

    return inside(total, x)
