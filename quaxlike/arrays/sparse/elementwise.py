"""Elementwise functions of sparse arrays, and sums of their elements."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.policy import dense
from ...core.rules import register, register_on_either_side
from ...primitives.classes import ZERO_PRESERVING
from ..batch_axes import mapped
from .coordinates import fits_int32, flattened, known_indices, known_places, pairs, same_pattern, unstacked
from .stacks import add_at, is_covered
from .unstructured import SparseArray


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: SparseArray, **params: Any) -> SparseArray:
    return x.replace(data=primitive.bind(x.elements, **params))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: SparseArray, *, y: int, **params: Any) -> Any:
    return x.replace(data=primitive.bind(x.elements, y=y, **params)) if y > 0 else NotImplemented


@register_on_either_side("mul", SparseArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    if isinstance(x, SparseArray) and isinstance(y, SparseArray):
        return _where_both(primitive, x, y, **params)
    w, other = (x, y) if isinstance(x, SparseArray) else (y, x)
    if not is_covered(w, other):
        return NotImplemented
    return w.replace(data=primitive.bind(w.elements, _at(w, other), **params))


@register("div")
def _div(primitive: Primitive, x: SparseArray, y: ArrayLike, **params: Any) -> Any:
    if not is_covered(x, y):
        return NotImplemented
    return x.replace(data=primitive.bind(x.elements, _at(x, y), **params))


@register("div")
def _div_sparse(primitive: Primitive, x: SparseArray, y: SparseArray, **params: Any) -> Any:
    if x.shape == y.shape and same_pattern(x, y):
        return x.replace(data=primitive.bind(x.elements, y.elements, **params))
    return _div(primitive, x, dense(y, primitive.name, (x, y)), **params)


def _at(w: SparseArray, y: ArrayLike) -> Array:
    """The elements of `y` at the places of the elements of `w`; 1 for padding. `y` has the shape (), or axes
    that match those of `w` or are of size one."""
    y = jnp.asarray(y)
    if y.ndim == 0:
        return y
    n = w.num_batch
    y = jnp.broadcast_to(y, (*w.shape[:n], *y.shape[n:]))
    at = [
        jnp.where(index < size, 0, 1) if along == 1 else index
        for index, size, along in zip(w.indices, w.sizes, y.shape[n:], strict=True)
    ]
    if not y.size:
        return jnp.ones(w.data.shape, y.dtype)
    return mapped(lambda y, *indices: y.at[indices].get(mode="fill", fill_value=1), n)(y, *at)


def _where_both(primitive: Primitive, x: SparseArray, y: SparseArray, **params: Any) -> Any:
    """Applies a function that is zero where either operand is."""
    if x.shape != y.shape:
        return NotImplemented
    if same_pattern(x, y):
        return x.replace(data=primitive.bind(x.elements, y.elements, **params))
    at_x, at_y = known_indices(x), known_indices(y)
    if at_x is None or at_y is None:
        return NotImplemented
    axes = range(len(x.sizes))
    of_x, of_y = pairs(known_places(at_x, axes, x.sizes), known_places(at_y, axes, x.sizes))
    return SparseArray.from_coo(primitive.bind(x.data[of_x], y.data[of_y], **params), at_x[of_x], x.sizes)


@register_on_either_side(["add", "sub", "add_any"], SparseArray, other=ArrayLike)
def _add(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Adds the elements to a dense array or a number, which gives a dense array."""
    minus = primitive.name == "sub"
    if isinstance(x, SparseArray) and isinstance(y, SparseArray):
        return _where_either(x, y.replace(data=-y.data) if minus else y)
    w, other = (x, y) if isinstance(x, SparseArray) else (y, x)
    if not is_covered(w, other):
        return NotImplemented
    other = jnp.broadcast_to(jnp.asarray(other), w.shape)
    data = -w.data if minus and w is y else w.data
    add = mapped(lambda y, data, *indices: add_at(y, indices, data), w.num_batch)
    return add(-other if minus and w is x else other, data, *w.indices)


def _where_either(x: SparseArray, y: SparseArray) -> Any:
    """Adds two sparse arrays."""
    if x.shape != y.shape:
        return NotImplemented
    if same_pattern(x, y):
        return x.replace(data=x.data + y.data)
    at_x, at_y = known_indices(x), known_indices(y)
    if at_x is None or at_y is None:
        return NotImplemented
    return SparseArray.from_coo(jnp.concatenate([x.data, y.data]), np.concatenate([at_x, at_y]), x.sizes)


@register("reduce_sum")
def _reduce_sum(x: SparseArray, *, axes: Sequence[int], **params: Any) -> Any:
    shape, x = x.shape, unstacked(x)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    if not kept:
        return jnp.sum(x.elements, dtype=x.dtype)
    sizes = [shape[axis] for axis in kept]
    if not fits_int32(sizes):
        return NotImplemented
    place = flattened([x.indices[axis] for axis in kept], sizes, x.is_stored)
    return add_at(jnp.zeros(math.prod(sizes), x.dtype), place, x.data).reshape(sizes)


@register(["reduce_or", "reduce_and"])
def _reduce_booleans(primitive: Primitive, x: SparseArray, *, axes: Sequence[int], **params: Any) -> Any:
    """Reduces booleans by counting those that are True."""
    size = math.prod(x.shape[axis] for axis in axes)
    if x.dtype != bool or not fits_int32([size]):
        return NotImplemented
    count = _reduce_sum(x.replace(data=x.data.astype(jnp.int32)), axes=axes)
    if count is NotImplemented:
        return NotImplemented
    return count > 0 if primitive.name == "reduce_or" else count == size
