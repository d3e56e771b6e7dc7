"""What leaves an adapted array an adapted array: transposing, slicing, converting, scaling."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ...core.jaxprs.cached import cached_trace
from ...core.quaxify import quaxify
from ...core.rules import register
from .array import LoraArray, labels, matrix_labels
from .einsum import Labels, arrange, cast


def each(lora: LoraArray, fn: Callable[[Any, Labels], Any], order: Sequence[int] | None = None) -> LoraArray:
    """`fn(part, labels)` in place of each array of `lora`; `order` are the labels that its axes have then."""
    n = lora.ndim
    order = range(n) if order is None else order
    at = {label: axis - len(order) for axis, label in enumerate(order)}
    w_labels, a_labels, b_labels = labels(lora)
    fn = quaxify(fn)
    return lora.replace(
        w=fn(lora.w, w_labels),
        a=fn(lora.a, a_labels),
        b=fn(lora.b, b_labels),
        magnitude=None if lora.magnitude is None else fn(lora.magnitude, b_labels[:-1]),
        out_axes=tuple(at[n + axis] for axis in lora.out_axes if n + axis in at),
        in_axes=tuple(at[n + axis] for axis in lora.in_axes if n + axis in at),
    )


@register("convert_element_type")
def _convert_element_type(x: LoraArray, *, new_dtype: Any, **params: Any):
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return each(x, lambda part, _: cast(part, new_dtype))


# -------------------------------------------------------------------------------------------------
# The order and number of axes
# -------------------------------------------------------------------------------------------------


@register("transpose")
@cached_trace
def _transpose(x: LoraArray, *, permutation: Sequence[int]):
    """The base is transposed; of the factors only batch axes move, and which axes they belong to changes."""
    matrix = matrix_labels(x)
    batch = [i for i in permutation if i not in matrix]
    w_labels, *factor_labels = labels(x)
    for own, order in ((w_labels, permutation), *((own, batch) for own in factor_labels)):
        missing = [i for i in order if i not in own]
        if missing != list(order[: len(missing)]):
            return NotImplemented  # a batch axis that this part does not have would come to stand inside

    def transposed(part: Any, own: Labels) -> Any:
        if matrix <= set(own):
            return arrange(part, own, [i for i in permutation if i in own])
        return arrange(part, own, [*(i for i in batch if i in own), *(i for i in own if i not in batch)])

    return each(x, transposed, permutation)


@register("squeeze")
def _squeeze(x: LoraArray, *, dimensions: Sequence[int]):
    left = set(range(-x.ndim, 0)) - {i - x.ndim for i in dimensions}
    if not left & {*x.out_axes} or not left & {*x.in_axes}:  # one row or column: an activation, not a weight
        return jax.lax.squeeze(x.materialise(), dimensions)

    def squeezed(part: Any, own: Labels) -> Any:
        return jax.lax.squeeze(part, [axis for axis, label in enumerate(own) if label in dimensions])

    return each(x, squeezed, [i for i in range(x.ndim) if i not in dimensions])


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: LoraArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **params: Any
):
    """New leading axes are batch axes that `a` alone has; axes of size one may come in anywhere."""
    n, n_new = x.ndim, len(shape) - x.ndim
    if x.shape != tuple(shape[i] for i in broadcast_dimensions):
        return NotImplemented
    batch = [i for i in range(n) if i not in matrix_labels(x)]
    if tuple(broadcast_dimensions) == tuple(range(n_new, len(shape))):
        sizes = (*shape[:n_new], *(x.shape[i] for i in batch))
        return x.replace(a=jnp.broadcast_to(x.a, sizes + x.a.shape[-1 - len(x.in_axes) :]))
    order = [n + axis for axis in range(len(shape))]  # n and up: the new ones
    for label, axis in enumerate(broadcast_dimensions):
        order[axis] = label
    new = [size for size, label in zip(shape, order, strict=True) if label >= n]
    return with_axes(x, order) if set(new) == {1} and has_all_axes(x) else NotImplemented


def has_all_axes(x: LoraArray) -> bool:
    """Whether each part has all batch axes."""
    batch = set(range(x.ndim)) - matrix_labels(x)
    return all(batch <= set(own) for own in labels(x))


def with_all_axes(x: LoraArray) -> LoraArray:
    """The same array, each part with all batch axes: those that a part lacks are in front of its own."""
    if has_all_axes(x):
        return x
    batch = [size for i, size in enumerate(x.shape) if i not in matrix_labels(x)]

    def stretched(part: Any, n_own: int) -> Any:
        shape = (*batch, *part.shape[part.ndim - n_own :])
        return quaxify(lambda part: jnp.broadcast_to(part, shape))(part)

    n_in, n_out = len(x.in_axes), len(x.out_axes)
    return x.replace(
        w=quaxify(lambda w: jnp.broadcast_to(w, x.shape))(x.w),
        a=stretched(x.a, 1 + n_in),
        b=stretched(x.b, n_out + 1),
        magnitude=None if x.magnitude is None else stretched(x.magnitude, n_out),
    )


def with_axes(x: LoraArray, order: Sequence[int]) -> LoraArray:
    """`x`, which has all axes, with new axes of size one: those with labels from `x.ndim` on in `order`."""
    matrix = matrix_labels(x)
    batch = [i for i in order if i not in matrix]

    def expanded(part: Any, own: Labels) -> Any:
        if matrix <= set(own):
            return arrange(part, own, order)
        return arrange(part, own, [*batch, *(i for i in own if i not in batch)])

    return each(x, expanded, order)


# -------------------------------------------------------------------------------------------------
# Arithmetic
# -------------------------------------------------------------------------------------------------
#
# The base may be frozen, but what it is combined with need not be: it is cut off before, and the result
# does not freeze its base.


@register("mul")
def _mul_array(x: LoraArray, y: ArrayLike, **params: Any):
    return _times(x, y)


@register("mul")
def _array_mul(x: ArrayLike, y: LoraArray, **params: Any):
    return _times(y, x)


@register("div")
def _div_array(x: LoraArray, y: ArrayLike, **params: Any):
    return _times(x, 1 / jnp.asarray(y))


@register("neg")
def _neg(x: LoraArray, **params: Any):
    return _times(x, jnp.asarray(-1, x.dtype))


def _times(x: LoraArray, y: Any) -> Any:
    """By a scalar, or by one number for each row or for each column: then one factor takes it, too."""
    y = jnp.asarray(y)
    if not isinstance(y, jax.core.Tracer) and not np.isfinite(y).all():
        return NotImplemented  # infinite parts cancel where the whole is infinite
    if x.magnitude is not None:
        return NotImplemented if y.ndim else x.replace(magnitude=x.magnitude * cast(y, x.magnitude.dtype))
    _, a_labels, b_labels = labels(x)
    varying = [i for i, size in enumerate(y.shape) if size != 1]
    field, own = ("b", b_labels) if set(varying) <= set(b_labels) else ("a", a_labels)
    fits = set(varying) <= set(own) and all(y.shape[i] == x.shape[i] for i in varying)
    if y.ndim and not (fits and y.ndim == x.ndim and has_all_axes(x)):
        return NotImplemented
    factor = getattr(x, field)
    numbers = arrange(jax.lax.squeeze(y, [i for i in range(y.ndim) if i not in varying]), varying, own)
    w = quaxify(jnp.multiply)(x.base, y)
    return x.replace(w=w, train_base=True, **{field: factor * cast(numbers, factor.dtype)})


@register("add")
def _add_array(x: LoraArray, y: ArrayLike, **params: Any):
    return _plus(x, y)


@register("add")
def _array_add(x: ArrayLike, y: LoraArray, **params: Any):
    return _plus(y, x)


@register("sub")
def _sub_array(x: LoraArray, y: ArrayLike, **params: Any):
    return _plus(x, -jnp.asarray(y))


def _plus(x: LoraArray, y: Any) -> Any:
    """A scalar, or an array of the same shape, goes into the base."""
    if x.magnitude is not None or x.w.shape != x.shape or jnp.shape(y) not in ((), x.shape):
        return NotImplemented
    return x.replace(w=quaxify(jnp.add)(x.base, y), train_base=True)
