"""Elementwise functions and reductions of sparse arrays.

Functions that don't map zero to zero have no rules, because their results aren't sparse.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.policy import dense
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import is_value
from ...kernels.padded import add_at
from ...primitives.classes import ZERO_PRESERVING
from .stacks import AbstractSparseArray, is_covered
from .unstructured import (
    SparseArray,
    fits_int32,
    flattened,
    known_indices,
    known_positions,
    pairs,
    unstacked,
)


def _bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Applies the primitive to the stored elements, which can be Values."""
    bind = functools.partial(primitive.bind, **params)
    return (quaxify(bind) if any(map(is_value, operands)) else bind)(*operands)


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: AbstractSparseArray, **params: Any) -> AbstractSparseArray:
    return x.with_elements(_bind(primitive, x.elements, **params))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: AbstractSparseArray, *, y: int, **params: Any) -> Any:
    # Zero to the power of zero (or of a negative number) is one (or infinite), so the result isn't sparse.
    return x.with_elements(_bind(primitive, x.elements, y=y, **params)) if y > 0 else NotImplemented


@register_on_either_side("mul", AbstractSparseArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    if isinstance(x, AbstractSparseArray) and isinstance(y, AbstractSparseArray):
        return _combined(primitive, x, y, **params)
    return _by_array(primitive, *((x, y) if isinstance(x, AbstractSparseArray) else (y, x)), **params)


@register("div")
def _by_array(primitive: Primitive, x: AbstractSparseArray, y: ArrayLike, **params: Any) -> Any:
    # If the other array is larger, broadcasting repeats the elements, so the result has a different pattern.
    if not is_covered(x, y):
        return NotImplemented
    y = jnp.asarray(y)
    return x.with_elements(_bind(primitive, x.elements, x.elements_of(y) if y.ndim else y, **params))


@register("div")
def _div_sparse(primitive: Primitive, x: AbstractSparseArray, y: AbstractSparseArray, **params: Any) -> Any:
    if type(x) is type(y) and x.has_pattern_of(y):
        return x.with_elements(_bind(primitive, x.elements, y.elements, **params))
    return _by_array(primitive, x, dense(y, primitive.name, (x, y)), **params)


@register_on_either_side(["add", "sub", "add_any"], AbstractSparseArray, other=ArrayLike)
def _add(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Adds the elements to a dense array or a scalar. The result is dense."""
    if isinstance(x, AbstractSparseArray) and isinstance(y, AbstractSparseArray):
        return _combined(primitive, x, y, **params)
    on_left, minus = isinstance(x, AbstractSparseArray), primitive.name == "sub"
    w, other = (x, y) if on_left else (y, x)
    if not is_covered(w, other) or is_value(w.elements):
        return NotImplemented
    w = w.with_elements(-w.elements) if minus and not on_left else w
    other = jnp.broadcast_to(jnp.asarray(other), w.shape)
    return w.added_to(-other if minus and on_left else other)


def _combined(primitive: Primitive, x: AbstractSparseArray, y: AbstractSparseArray, **params: Any) -> Any:
    """Returns the product, sum or difference of two arrays, merging different patterns."""
    if type(x) is not type(y) or x.shape != y.shape:
        return NotImplemented
    if x.has_pattern_of(y):
        return x.with_elements(_bind(primitive, x.elements, y.elements, **params))
    if not isinstance(x, SparseArray) or not isinstance(y, SparseArray):
        return NotImplemented
    at_x, at_y = known_indices(x), known_indices(y)
    # The number of merged elements determines a shape, so both patterns have to be known during tracing.
    if at_x is None or at_y is None:
        return NotImplemented
    # A product is only nonzero in positions stored by both arrays.
    if primitive.name == "mul":
        axes = range(len(x.sizes))
        of_x, of_y = pairs(known_positions(at_x, axes, x.sizes), known_positions(at_y, axes, x.sizes))
        return SparseArray.from_coo(primitive.bind(x.data[of_x], y.data[of_y], **params), at_x[of_x], x.sizes)
    data = jnp.concatenate([x.data, -y.data if primitive.name == "sub" else y.data])
    return SparseArray.from_coo(data, np.concatenate([at_x, at_y]), x.sizes)


@register("reduce_sum")
def _reduce_sum(x: SparseArray, *, axes: Sequence[Any], **params: Any) -> Any:
    shape, x = x.shape, unstacked(x)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    if not kept:
        return jnp.sum(x.elements, dtype=x.dtype)
    sizes = [shape[axis] for axis in kept]
    if not fits_int32(sizes):
        return NotImplemented
    positions = flattened([x.indices[axis] for axis in kept], sizes, x.is_stored)
    return add_at(jnp.zeros(math.prod(sizes), x.dtype), (positions,), x.data).reshape(sizes)


@register(["reduce_or", "reduce_and"])
def _reduce_booleans(primitive: Primitive, x: SparseArray, *, axes: Sequence[Any], **params: Any) -> Any:
    """Reduces booleans by counting those that are True."""
    size = math.prod(x.shape[axis] for axis in axes)
    if x.dtype != bool or not fits_int32([size]):
        return NotImplemented
    # Elements not stored are False, so `and` is only True if every element is stored and True.
    count = _reduce_sum(x.replace(data=x.data.astype(jnp.int32)), axes=axes)
    if count is NotImplemented:
        return NotImplemented
    return count > 0 if primitive.name == "reduce_or" else count == size
