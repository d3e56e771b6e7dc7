"""Gathers and scatter-adds ignoring any out-of-bounds indices, which denote padding.

These clamp the indices and mask the values. (With JAX's modes "fill" and "drop", `checkify` would report an
error for every out-of-bounds index.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


def get_at(y: Array, at: Sequence[Any], fill: Any, num_batch: int = 0) -> Array:
    """Returns the elements of `y` at some indices, or `fill` for padding.

    The index axes come first in the result, followed by any unindexed axes of `y`.

    **Arguments:**

    - `at`: an index for each axis after the batch axes, or `slice(None)`. Trailing axes can be omitted.
    - `num_batch`: the number of leading batch axes, shared by `y` and all indices. Defaults to 0.
    """
    return _get_at(y, _without_slices(at), fill, num_batch)


# Outside `jit`, this compiles just one program, instead of one for each operation. Within `jit`, it is
# inlined.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _get_at(y: Array, at: tuple[Any, ...], fill: Any, num_batch: int) -> Array:
    places, inside = _clamped(y, at, num_batch)
    if not y.size:
        rest = [y.shape[i] for i in range(num_batch, y.ndim) if _is_whole(at, i - num_batch)]
        return jnp.full((*inside.shape, *rest), fill, y.dtype)
    out = y.at[places].get(mode="promise_in_bounds")
    # Don't multiply by a mask here: the element read in place of padding may be NaN.
    return jnp.where(_before(inside, out), out, jnp.asarray(fill, out.dtype))


def add_at(y: Array, at: Sequence[Any], values: Array, num_batch: int = 0) -> Array:
    """Adds `values` to `y` at some indices. For booleans, takes the logical or instead.

    The leading axes of `values` are the index axes. See `get_at` for `at` and `num_batch`.
    """
    return _add_at(y, _without_slices(at), values, num_batch) if y.size else y


@functools.partial(jax.jit, static_argnums=3, inline=True)
def _add_at(y: Array, at: tuple[Any, ...], values: Array, num_batch: int) -> Array:
    places, inside = _clamped(y, at, num_batch)
    # Padding is clamped to index 0. This is the index of a valid element, so add zero to leave it unchanged.
    values = jnp.where(_before(inside, values), values, jnp.zeros_like(values))
    into = y.at[places]
    return (into.max if y.dtype == bool else into.add)(values, mode="promise_in_bounds")


def _without_slices(at: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(index, slice) else index for index in at)


def _clamped(y: Array, at: tuple[Any, ...], num_batch: int) -> tuple[tuple[Any, ...], Array]:
    """Returns clamped indices into all axes of `y`, and a mask of the ones already in bounds.

    An index of `None` selects a whole axis.
    """
    shape = np.broadcast_shapes(*(np.shape(index) for index in at if index is not None))
    places: list[Any] = [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(num_batch)]
    inside = jnp.ones(shape, bool)
    for index, size in zip(at, y.shape[num_batch:], strict=False):
        if index is None:
            places.append(slice(None))
        else:
            stored = (index >= 0) & (index < size)
            inside = inside & stored
            places.append(jnp.where(stored, index, 0).astype(jnp.int32))
    return tuple(places), inside


def _is_whole(at: tuple[Any, ...], i: int) -> bool:
    return i >= len(at) or at[i] is None


def _before(inside: Array, x: Array) -> Array:
    """Expands a mask over the leading axes of `x`, so that it broadcasts against all axes."""
    return jnp.expand_dims(inside, tuple(range(inside.ndim, x.ndim)))
