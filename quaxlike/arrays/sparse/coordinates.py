"""Coordinates of sparse arrays: without batch axes, flattened, or concrete."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from .unstructured import SparseArray


def unstacked(x: SparseArray) -> SparseArray:
    """The same array, with its batch axes made sparse like the others."""
    if not x.num_batch:
        return x
    shape, batch = x.data.shape, x.data.shape[:-1]
    inside = x.is_stored
    stacked = [
        jnp.where(inside, lax.broadcasted_iota(jnp.int32, shape, axis), size)
        for axis, size in enumerate(batch)
    ]
    indices = tuple(index.reshape(-1) for index in (*stacked, *x.indices))
    return x.placed(x.data.reshape(-1), indices, (*batch, *x.sizes))


def flattened(
    indices: Sequence[Array], sizes: Sequence[int], inside: Bool[Array, " elements"]
) -> Int32[Array, " elements"]:
    """The flat indices of elements in an array of these sizes; its total size for those not `inside`."""
    place = jnp.zeros(inside.shape, jnp.int32)
    for index, size in zip(indices, sizes, strict=True):
        place = place * size + index
    return jnp.where(inside, place, math.prod(sizes))


def unflattened(
    place: Int32[Array, " elements"], sizes: Sequence[int], inside: Bool[Array, " elements"]
) -> tuple[Array, ...]:
    """The inverse of `flattened`."""
    indices: list[Array] = []
    for size in reversed(sizes):
        indices.append(jnp.where(inside, place % max(size, 1), size))
        place = place // max(size, 1)
    return tuple(reversed(indices))


def fits_int32(sizes: Sequence[int]) -> bool:
    """Whether flat indices into an array of these sizes fit int32."""
    return math.prod(sizes) < 2**31


def smaller(x: SparseArray) -> Any:
    """`x`, or the dense array if that needs no more elements."""
    return x.materialise() if x.data.size >= x.size else x


# -------------------------------------------------------------------------------------------------
# Concrete patterns
# -------------------------------------------------------------------------------------------------


def known_indices(x: SparseArray) -> np.ndarray | None:
    """The concrete indices of the elements, `(elements, axes)`; None if they are traced, or for a stack."""
    if x.num_batch or any(isinstance(index, jax.core.Tracer) for index in x.indices):
        return None
    return np.stack([np.asarray(index) for index in x.indices], -1)


def known_places(indices: np.ndarray, axes: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Flat indices into the array of these axes; -1 for padding."""
    inside = (indices < np.asarray(sizes)).all(1)
    safe = np.where(inside[:, None], indices, 0).astype(np.int64)
    place = np.zeros(len(indices), np.int64)
    for axis in axes:
        place = place * sizes[axis] + safe[:, axis]
    return np.where(inside, place, -1)


def pairs(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of positions at which `x` and `y` hold the same number that is not negative."""
    order = np.argsort(y, kind="stable")
    first = np.searchsorted(y[order], x, side="left")
    counts = np.searchsorted(y[order], x, side="right") - first
    counts[x < 0] = 0
    of_x = np.repeat(np.arange(len(x)), counts)
    nth = np.arange(len(of_x)) - np.repeat(np.cumsum(counts) - counts, counts)
    return of_x, order[np.repeat(first, counts) + nth]
