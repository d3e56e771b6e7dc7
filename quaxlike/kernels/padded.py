"""Gathers and scatter-adds for which out-of-bounds indices denote padding, and are ignored.

We clamp the indices and mask the values, rather than using JAX's modes "fill" and "drop". Otherwise
`checkify` would report an error for every out-of-bounds index.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


def get_at(y: Array, at: Sequence[Any], fill: Any, num_batch: int = 0) -> Array:
    """Returns the elements of `y` at some indices, or `fill` for padding. The indices' axes come first.

    **Arguments:**

    - `at`: an index for each axis after the batch axes, or `slice(None)`. Trailing axes can be omitted.
    - `num_batch`: the number of leading batch axes, shared by `y` and all indices. Defaults to 0.
    """
    places, inside = _clamped(y, at, num_batch)
    if not y.size:
        rest = [y.shape[i] for i in range(num_batch, y.ndim) if _is_whole(at, i - num_batch)]
        return jnp.full((*inside.shape, *rest), fill, y.dtype)
    out = y.at[places].get(mode="promise_in_bounds")
    # Use a `where`, rather than multiplying by a mask, because the element read for padding might be NaN.
    return jnp.where(_before(inside, out), out, jnp.asarray(fill, out.dtype))


def add_at(y: Array, at: Sequence[Any], values: Array, num_batch: int = 0) -> Array:
    """Adds `values`, whose leading axes are the indices' axes, to `y`. (Or takes the logical or of booleans.)

    See `get_at` for `at` and `num_batch`.
    """
    if not y.size:
        return y
    places, inside = _clamped(y, at, num_batch)
    # Padding is clamped to index 0, which is a valid element. Adding zero leaves it unchanged.
    values = jnp.where(_before(inside, values), values, jnp.zeros_like(values))
    into = y.at[places]
    return (into.max if y.dtype == bool else into.add)(values, mode="promise_in_bounds")


def _clamped(y: Array, at: Sequence[Any], num_batch: int) -> tuple[tuple[Any, ...], Array]:
    """Returns clamped indices into all axes of `y`, and a mask for those that were already in bounds."""
    shape = np.broadcast_shapes(*(np.shape(index) for index in at if not isinstance(index, slice)))
    places: list[Any] = [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(num_batch)]
    inside = jnp.ones(shape, bool)
    for index, size in zip(at, y.shape[num_batch:], strict=False):
        if not isinstance(index, slice):
            stored = (index >= 0) & (index < size)
            inside, index = inside & stored, jnp.where(stored, index, 0).astype(jnp.int32)
        places.append(index)
    return tuple(places), inside


def _is_whole(at: Sequence[Any], i: int) -> bool:
    return i >= len(at) or isinstance(at[i], slice)


def _before(inside: Array, x: Array) -> Array:
    """Expands a mask over the leading axes of `x`, so that it broadcasts against all axes."""
    return jnp.expand_dims(inside, tuple(range(inside.ndim, x.ndim)))
