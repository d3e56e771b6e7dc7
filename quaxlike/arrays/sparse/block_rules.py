"""Rules for sums and axes of block-sparse arrays.

Most of these only apply to batch axes, and require all leaves to have them. (A block that is a Value may
not.)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import ArrayLike

from ...core.rules import register
from ...core.values import ArrayValue
from ...kernels.padded import add_at
from ..batch_axes import cut_batch, reshape_batch, squeeze_batch, transpose_batch
from ..bounds import clamped_start, cuts_of, dynamic_slice_in_dim, slice_in_dim
from .block import BlockSparseArray
from .shape import lines
from .stacks import broadcast_stack


@register("transpose")
def _transpose(x: BlockSparseArray, *, permutation: Sequence[int], **params: Any) -> Any:
    n = x.num_batch
    *batch, first, second = permutation
    if {first, second} != {n, n + 1} or not x.leaves_are_stacked:
        return NotImplemented
    out = transpose_batch(x, batch)
    return out if first == n else out.replace(transposed=not x.transposed)


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: BlockSparseArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
) -> Any:
    if params.get("sharding") is not None or not x.leaves_are_stacked:
        return NotImplemented
    return broadcast_stack(x, shape, broadcast_dimensions)


@register("reshape")
def _reshape(x: BlockSparseArray, *, new_sizes: Sequence[int], **params: Any) -> Any:
    if any(value is not None for value in params.values()) or not x.leaves_are_stacked:
        return NotImplemented
    return reshape_batch(x, new_sizes)


@register("squeeze")
def _squeeze(x: BlockSparseArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    if any(axis >= x.num_batch for axis in dimensions) or not x.leaves_are_stacked:
        return NotImplemented
    return squeeze_batch(x, dimensions)


def _cut(x: BlockSparseArray, cut: Callable[[Any, int], Any], touched: Sequence[int]) -> Any:
    if any(axis >= x.num_batch for axis in touched) or not x.leaves_are_stacked:
        return NotImplemented
    return cut_batch(x, cut, touched)


@register("slice")
def _slice(x: BlockSparseArray, **params: Any) -> Any:
    cuts, touched = cuts_of(x.shape, **params)
    return _cut(x, lambda leaf, i: slice_in_dim(leaf, *cuts[i], i), touched)


@register("dynamic_slice")
def _dynamic_slice(x: BlockSparseArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any) -> Any:
    touched = [i for i, size in enumerate(x.shape) if slice_sizes[i] != size]
    if not x.num_batch and len(touched) == 1 and slice_sizes[touched[0]] == 1:
        (axis,) = touched
        line = lines(x, axis, clamped_start(starts[axis], x.shape[axis], 1))
        return line if line is NotImplemented else jnp.expand_dims(line, axis)

    def cut(leaf: Any, i: Any) -> Any:
        return dynamic_slice_in_dim(leaf, starts[i], slice_sizes[i], i)

    return _cut(x, cut, touched)


@register("reduce_sum")
def _reduce_sum(x: BlockSparseArray, *, axes: Sequence[Any], **params: Any) -> Any:
    n = x.num_batch
    summed = {(axis - n) ^ x.transposed for axis in axes if axis >= n}  # axes of the stored matrix
    if not summed or isinstance(x.blocks, ArrayValue):
        return NotImplemented
    batch = tuple(axis for axis in axes if axis < n)
    if len(summed) == 2:
        return jnp.sum(x.elements, (*batch, *range(n, n + 4)), dtype=x.dtype)
    if summed == {1}:
        rows = jnp.sum(x.elements, (-3, -1), dtype=x.dtype)
        return jnp.sum(rows.reshape(*rows.shape[:n], math.prod(rows.shape[n:])), batch, dtype=x.dtype)

    zeros = jnp.zeros((*x.col_idx.shape[:n], x.transposed_idx.shape[-2], x.block_size), x.dtype)
    columns = add_at(zeros, (x.col_idx,), jnp.sum(x.elements, -2, dtype=x.dtype), num_batch=n)
    return jnp.sum(columns.reshape(*columns.shape[:n], math.prod(columns.shape[n:])), batch, dtype=x.dtype)
