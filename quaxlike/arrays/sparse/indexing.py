"""Slices of sparse arrays."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.rules import register
from ..batch_axes import cut_batch
from ..bounds import clamped_start, dynamic_slice_in_dim
from .coordinates import smaller
from .unstructured import SparseArray


@register("slice")
def _slice(
    x: SparseArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **params: Any,
) -> Any:
    cuts = list(zip(start_indices, limit_indices, strides or [1] * x.ndim, strict=True))
    touched = [axis for axis, size in enumerate(x.shape) if cuts[axis] != (0, size, 1)]
    n = x.num_batch
    batch = [axis for axis in touched if axis < n]
    x = cut_batch(x, lambda leaf, axis: lax.slice_in_dim(leaf, *cuts[axis], axis), batch)
    starts, sizes, steps = [], list(x.sizes), [1] * len(x.sizes)
    for axis, (start, limit, step) in enumerate(cuts[n:]):
        starts.append(start)
        sizes[axis], steps[axis] = max(0, -(-(limit - start) // step)), step
    return x if len(batch) == len(touched) else smaller(_cut(x, starts, sizes, steps))


@register("split")
def _split(x: SparseArray, *, sizes: Sequence[Any], axis: int, **params: Any) -> list[Any]:
    starts, limits, parts = [0] * x.ndim, list(x.shape), []
    for size in map(int, sizes):
        limits[axis] = starts[axis] + size
        parts.append(_slice(x, start_indices=starts, limit_indices=limits, strides=None))
        starts[axis] = limits[axis]
    return parts


@register("dynamic_slice")
def _dynamic_slice(x: SparseArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any) -> Any:
    n, shape = x.num_batch, x.shape
    touched = [axis for axis, size in enumerate(shape) if slice_sizes[axis] != size]
    batch = [axis for axis in touched if axis < n]
    cut = lambda leaf, axis: dynamic_slice_in_dim(leaf, starts[axis], slice_sizes[axis], axis)
    x = cut_batch(x, cut, batch)
    if len(batch) == len(touched):
        return x
    sizes = slice_sizes[n:]
    begin = list(map(clamped_start, starts[n:], x.sizes, sizes))
    return smaller(_cut(x, begin, sizes, [1] * len(sizes)))


def _cut(x: SparseArray, starts: Sequence[Any], sizes: Sequence[int], steps: Sequence[int]) -> SparseArray:
    """Cuts out a part; elements outside become padding."""
    moved = [index - start for index, start in zip(x.indices, starts, strict=True)]
    inside = x.is_stored
    for index, size, step in zip(moved, sizes, steps, strict=True):
        inside &= (index >= 0) & (index < size * step) & (index % step == 0)
    indices = [
        jnp.where(inside, index // step, size) for index, size, step in zip(moved, sizes, steps, strict=True)
    ]
    return x.placed(x.data, indices, sizes)
