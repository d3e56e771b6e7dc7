"""`OneHotVector`: a vector with a single nonzero element."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._arrays import as_array
from ...core.operators import ArrayOperators
from ...core.policy import dense
from ...core.rules import register
from ...core.values import ArrayValue
from ...kernels.padded import add_at, get_at
from ...primitives.classes import ZERO_PRESERVING
from ..batch_axes import mapped
from ..dot_axes import dot_axes, product_dtype
from .stacks import is_covered


class OneHotVector(ArrayOperators, ArrayValue):
    """A vector that is `value` at `index`, and zero elsewhere.

    Any leading axes of `value` and `index` are the axes of a stack, as created by `jax.vmap`.

    **Arguments:**

    - `value`: the element's value, with shape `()`, or `(*batch,)` for a stack of vectors.
    - `index`: the element's index, an integer with the same shape as `value`. Out of bounds, the vector is
        zero.
    - `length`: the vector's length.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.sparse import OneHotVector

        x = OneHotVector(5.0, 2, length=4)
        jnp.ones((3, 4)) @ x  # looks up one column
        ```
    """

    value: jax.Array = eqx.field(converter=as_array)
    index: jax.Array = eqx.field(converter=as_array)
    length: int = eqx.field(static=True)

    linear = True
    stores_elements = True

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray((*self.value.shape, self.length), self.value.dtype)

    def materialise(self) -> jax.Array:
        zeros = jnp.zeros(self.shape, self.value.dtype)
        return add_at(zeros, (_place(self),), self.value, num_batch=self.value.ndim)

    def leading_axis(self) -> Any:
        return (0, 0) if self.value.ndim else NotImplemented


def _place(x: OneHotVector) -> jax.Array:
    """Returns the index, with negative indices counted from the end."""
    index = x.index.astype(jnp.promote_types(x.index.dtype, jnp.int32))
    return jnp.where(index < 0, index + x.length, index)


def _if_held(x: OneHotVector, value: jax.Array) -> jax.Array:
    """Returns `value`, or zero if the index is out of bounds."""
    place = _place(x)
    held = (place >= 0) & (place < x.length)
    return jnp.where(held, value, jnp.zeros_like(value))


def _with_value(x: OneHotVector, value: jax.Array) -> OneHotVector:
    return OneHotVector(value, x.index, x.length)


def _look_up(x: OneHotVector, y: jax.Array) -> jax.Array:
    """Contracts `y`'s last axis with the vector."""
    at = (*[slice(None)] * (y.ndim - 1), _place(x))
    return get_at(y, at, 0) * _if_held(x, x.value).astype(y.dtype)


def _contract(x: OneHotVector, y: jax.Array, dimension_numbers: Any, on_left: bool) -> Any:
    """Implements `dot_general` for a vector and an array by a lookup along the contracted axis."""
    of_x, of_y = dot_axes(x, y, dimension_numbers, on_left=on_left)
    if of_x.contracting != (x.value.ndim,):
        return NotImplemented  # this contracts no axis at all, or a batch axis
    # y: (*batch, *of_y.free, length); x: (*batch, *of_x.free)
    y = jnp.transpose(y, (*of_y.batch, *of_y.free, *of_y.contracting))
    order = (*of_x.batch, *of_x.free)
    x = OneHotVector(jnp.transpose(x.value, order), jnp.transpose(x.index, order), x.length)
    fn = _look_up
    for _ in of_x.free:
        fn = jax.vmap(fn, in_axes=(0, None), out_axes=0 if on_left else len(of_y.free))
    return mapped(fn, len(of_x.batch))(x, y)


@register("dot_general")
def _dot_general_array_one_hot(
    x: ArrayLike, y: OneHotVector, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> Any:
    x = jnp.asarray(x)
    dtype = product_dtype(x, y, preferred_element_type)
    return _contract(y, x.astype(dtype), dimension_numbers, on_left=False)


@register("dot_general")
def _dot_general_one_hot_array(
    x: OneHotVector, y: ArrayLike, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> Any:
    y = jnp.asarray(y)
    dtype = product_dtype(x, y, preferred_element_type)
    return _contract(x, y.astype(dtype), dimension_numbers, on_left=True)


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: OneHotVector, **params: Any) -> OneHotVector:
    return _with_value(x, primitive.bind(_if_held(x, x.value), **params))


@register("mul")
def _mul_array_one_hot(primitive: Primitive, x: ArrayLike, y: OneHotVector, **params: Any) -> Any:
    return _by_array(primitive, y, x, **params)


@register(["mul", "div"])
def _by_array(primitive: Primitive, x: OneHotVector, y: ArrayLike, **params: Any) -> Any:
    if not is_covered(x, y):
        return NotImplemented
    value = _if_held(x, x.value)
    return _with_value(x, primitive.bind(value, _at_index(x, jnp.asarray(y)), **params))


@register(["mul", "div"])
def _by_one_hot(primitive: Primitive, x: OneHotVector, y: OneHotVector, **params: Any) -> Any:
    # In general the two indices differ, and the result isn't a multiple of either vector.
    return _by_array(primitive, x, dense(y, primitive.name, (x, y)), **params)


def _at_index(x: OneHotVector, y: jax.Array) -> jax.Array:
    """Broadcasts `y` to `x`'s shape, then takes the elements at `x`'s index."""
    if y.ndim == 0:
        return jnp.broadcast_to(y, x.value.shape)
    y = jnp.broadcast_to(y, x.shape)
    return get_at(y, (_place(x),), 1, num_batch=x.value.ndim)


@register("reduce_sum")
def _reduce_sum(x: OneHotVector, *, axes: Any, **params: Any) -> Any:
    if x.value.ndim not in axes:
        return NotImplemented
    return jnp.sum(_if_held(x, x.value), axis=[i for i in axes if i != x.value.ndim], dtype=x.dtype)
