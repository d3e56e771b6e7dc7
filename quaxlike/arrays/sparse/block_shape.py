"""Axes of block-sparse arrays: batch axes are axes of every leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.rules import register
from ..batch_axes import cut_batch, reshape_batch, squeeze_batch, transpose_batch
from ..bounds import clamped_start, dynamic_slice_in_dim
from .block import BlockSparseArray
from .rows import lines
from .stacks import broadcast_stack, is_stacked


def leaves_are_stacked(x: BlockSparseArray) -> bool:
    """Whether the leaves have the batch axes, if there are any."""
    return not x.num_batch or is_stacked(x.blocks)


@register("transpose")
def _transpose(x: BlockSparseArray, *, permutation: Sequence[int], **params: Any) -> Any:
    n = x.num_batch
    *batch, first, second = permutation
    if {first, second} != {n, n + 1} or not leaves_are_stacked(x):
        return NotImplemented
    out = transpose_batch(x, batch)
    return out if first == n else out.replace(transposed=not x.transposed)


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: BlockSparseArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
) -> Any:
    if params.get("sharding") is not None or not leaves_are_stacked(x):
        return NotImplemented
    return broadcast_stack(x, shape, broadcast_dimensions)


@register("reshape")
def _reshape(x: BlockSparseArray, *, new_sizes: Sequence[int], **params: Any) -> Any:
    if any(value is not None for value in params.values()) or not leaves_are_stacked(x):
        return NotImplemented
    return reshape_batch(x, new_sizes)


@register("squeeze")
def _squeeze(x: BlockSparseArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    if any(axis >= x.num_batch for axis in dimensions) or not leaves_are_stacked(x):
        return NotImplemented
    return squeeze_batch(x, dimensions)


def _cut(x: BlockSparseArray, cut: Callable[[Any, int], Any], touched: Sequence[int]) -> Any:
    if any(axis >= x.num_batch for axis in touched) or not leaves_are_stacked(x):
        return NotImplemented
    return cut_batch(x, cut, touched)


@register("slice")
def _slice(
    x: BlockSparseArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **params: Any,
) -> Any:
    cuts = list(zip(start_indices, limit_indices, strides or [1] * x.ndim, strict=True))
    touched = [i for i, size in enumerate(x.shape) if cuts[i] != (0, size, 1)]
    return _cut(x, lambda leaf, i: lax.slice_in_dim(leaf, *cuts[i], i), touched)


@register("dynamic_slice")
def _dynamic_slice(x: BlockSparseArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any) -> Any:
    touched = [i for i, size in enumerate(x.shape) if slice_sizes[i] != size]
    if not x.num_batch and len(touched) == 1 and slice_sizes[touched[0]] == 1:
        (axis,) = touched
        line = lines(x, axis, clamped_start(starts[axis], x.shape[axis], 1))
        return line if line is NotImplemented else jnp.expand_dims(line, axis)
    cut = lambda leaf, i: dynamic_slice_in_dim(leaf, starts[i], slice_sizes[i], i)
    return _cut(x, cut, touched)
