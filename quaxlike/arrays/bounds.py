"""Starts, bounds and fill values for `dynamic_slice` and `gather` when indices are out of bounds.

`jax.numpy` and `jax.lax` wrap negative indices before binding a primitive, whereas the primitives themselves
never do. So rules mustn't wrap indices either: they would return actual elements where JAX clamps or fills.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int32


def cuts_of(
    shape: Sequence[int],
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Returns a `slice`'s start, end and step along each axis, and the list of axes it changes."""
    cuts = list(zip(start_indices, limit_indices, strides or [1] * len(shape), strict=True))
    return cuts, [axis for axis, size in enumerate(shape) if cuts[axis] != (0, size, 1)]


def slice_in_dim(operand: Any, start: int, limit: int, step: int = 1, axis: int = 0) -> Any:
    """As `lax.slice_in_dim`, but without strides if they are 1.

    This is much faster for many different slices: with strides, JAX compiles each one separately; without,
    the start is just an operand.
    """
    starts, limits = [0] * operand.ndim, list(operand.shape)
    starts[axis], limits[axis] = start, limit
    steps = None if step == 1 else [step if i == axis else 1 for i in range(operand.ndim)]
    return lax.slice(operand, starts, limits, steps)


def clamped_start(start: ArrayLike, size: int, slice_size: int) -> Int32[Array, "..."]:
    """Clamps `start`, to keep a dynamic slice along an axis within bounds.

    **Arguments:**

    - `start`: an operand of `dynamic_slice` or `dynamic_update_slice`, or several, with any integer dtype.
    - `size`: the axis size.
    - `slice_size`: the slice size along this axis.
    """
    start = jnp.asarray(start)
    # A long axis's last valid start may not be representable, e.g. in int8. If it wrapped around, every start
    # would be clamped to the wrong value.
    last = min(size - slice_size, jnp.iinfo(start.dtype).max)
    zero = jnp.zeros((), start.dtype)
    return lax.clamp(zero, start, jnp.asarray(last, start.dtype)).astype(jnp.int32)


def dynamic_slice_in_dim(operand: Any, start: ArrayLike, slice_size: int, axis: int) -> Any:
    """Takes a dynamic slice along one axis.

    `start` is clamped but never wrapped, just like in JAX.
    """
    start = clamped_start(start, operand.shape[axis], slice_size)
    return lax.dynamic_slice_in_dim(operand, start, slice_size, axis, allow_negative_indices=False)


def fill_value_of(mode: Any, fill_value: Any, dtype: Any) -> Any:
    """Returns `gather`'s fill value for slices out of bounds. None if its mode never fills.

    **Arguments:**

    - `mode`, `fill_value`: parameters for `gather`.
    - `dtype`: the operand's dtype. The default fill value is NaN for inexact dtypes, the smallest value for
        signed integers, the largest for unsigned ones, and True for booleans.
    """
    if lax.GatherScatterMode.from_any(mode) != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    if fill_value is not None:
        return np.asarray(fill_value).astype(dtype).item()
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


def in_bounds(
    indices: ArrayLike,
    shape: Sequence[int],
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
) -> Bool[Any, "*batch"]:
    """Returns which slices of a `gather` are within bounds: a NumPy array if the indices are concrete.

    **Arguments:**

    - `indices`: `(*batch, axes)`, the second operand of `gather`.
    - `shape`: the first operand's shape.
    - `dimension_numbers`, `slice_sizes`: parameters for `gather`.
    """
    xp = jnp if isinstance(indices, jax.core.Tracer) else np
    picked = dimension_numbers.start_index_map
    last = np.asarray([shape[axis] - slice_sizes[axis] for axis in picked], np.int32)
    wide = xp.asarray(indices).astype(np.int32)
    return ((wide >= 0) & (wide <= last.reshape(*[1] * (wide.ndim - 1), -1))).all(-1)


def fills(
    indices: ArrayLike,
    shape: Sequence[int],
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
) -> bool:
    """Returns whether a `gather` may have slices out of bounds, to be filled.

    See `in_bounds` for the arguments.
    """
    if lax.GatherScatterMode.from_any(mode) != lax.GatherScatterMode.FILL_OR_DROP:
        return False
    inside = in_bounds(indices, shape, dimension_numbers, slice_sizes)
    return not isinstance(inside, np.ndarray | np.bool_) or not bool(inside.all())


def as_gathered(out: Array, dimension_numbers: lax.GatherDimensionNumbers) -> Array:
    """Transposes from (index axes, slice axes) to the axes in `gather`'s result."""
    batch = [axis for axis in range(out.ndim) if axis not in dimension_numbers.offset_dims]
    order = [*batch, *dimension_numbers.offset_dims]
    return out.transpose([order.index(axis) for axis in range(out.ndim)])


def filled(
    out: Array, inside: Bool[Any, "*batch"], dimension_numbers: lax.GatherDimensionNumbers, fill_value: Any
) -> Array:
    """Replaces all slices not `inside` by `fill_value`."""
    batch = [axis for axis in range(out.ndim) if axis not in dimension_numbers.offset_dims]
    mask = lax.broadcast_in_dim(jnp.asarray(inside), out.shape, batch)
    return jnp.where(mask, out, jnp.asarray(fill_value, out.dtype))
