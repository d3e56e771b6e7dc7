"""Rules of block-sparse arrays: axes (batch axes are axes of every leaf), products, sums."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue
from ...kernels import block_sparse_matmul
from ...kernels.multilinear import accumulator_dtype, varying_zeros
from ..batch_axes import cut_batch, mapped, reshape_batch, squeeze_batch, transpose_batch
from ..bounds import clamped_start, cuts_of, dynamic_slice_in_dim
from ..dot_axes import product_dtype
from .block import BlockSparseArray
from .rows import lines
from .stacks import (
    add_at,
    broadcast_stack,
    dot_stack,
    is_stacked,
)


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
def _slice(x: BlockSparseArray, **params: Any) -> Any:
    cuts, touched = cuts_of(x.shape, **params)
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


@register_on_either_side("dot_general", BlockSparseArray, other=ArrayLike)
def _dot_general(
    primitive: Primitive,
    x: Any,
    y: Any,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    **params: Any,
) -> Any:
    on_left = isinstance(x, BlockSparseArray)
    w, x = (x, y) if on_left else (y, x)
    if isinstance(x, BlockSparseArray) or out_sharding is not None or not leaves_are_stacked(w):
        return NotImplemented
    x = jnp.asarray(x)
    dtype = product_dtype(x, w, preferred_element_type)
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented  # kernels accumulate in floating point
    product = functools.partial(_matmul, out_dtype=dtype)
    return dot_stack(w, x, product, dimension_numbers, on_left=on_left)


def _matmul(w: BlockSparseArray, x: Array, axis: int, *, out_dtype: np.dtype) -> Array:
    transpose = (axis == 0) != w.transposed
    if isinstance(w.blocks, ArrayValue):
        return _matmul_by_rows(w, x, transpose, accumulator_dtype(out_dtype)).astype(out_dtype)
    return block_sparse_matmul(
        x, w.blocks, w.col_idx, w.transposed_idx, transpose=transpose, out_dtype=out_dtype
    )


def _matmul_by_rows(w: BlockSparseArray, x: Array, transpose: bool, dtype: np.dtype) -> Array:
    """As `_matmul`, for blocks that are Values: multiplies one block row at a time by the rules of their
    type, and accumulates in `dtype`."""
    b, columns, lead = w.block_size, w.transposed_idx.shape[0], x.shape[:-1]
    x = jnp.moveaxis(x.reshape(math.prod(lead), x.shape[-1] // b, b), 1, 0)  # (features / b, rows of x, b)
    dot = functools.partial(lax.dot_general, preferred_element_type=dtype)

    def gather(x: Array, blocks: Any, col_idx: Array) -> Array:
        x = jnp.concatenate([x, jnp.zeros_like(x[:1])])

        def row(_: None, of_row: tuple[Any, Array]) -> tuple[None, Array]:
            blocks, columns = of_row
            return None, dot(x[columns], blocks, (((0, 2), (0, 2)), ((), ())))

        return lax.scan(row, None, (blocks, col_idx))[1]

    def scatter(x: Array, blocks: Any, col_idx: Array) -> Array:
        def row(acc: Array, of_row: tuple[Array, Any, Array]) -> tuple[Array, None]:
            x, blocks, columns = of_row
            y = dot(x, blocks, (((1,), (1,)), ((), ())))  # (rows of x, slots, b)
            return acc.at[columns].add(jnp.moveaxis(y, 1, 0), mode="drop"), None

        acc = varying_zeros((columns, x.shape[1], b), dtype, x, *jax.tree.leaves(w.blocks), col_idx)
        return lax.scan(row, acc, (x, blocks, col_idx))[0]

    y = quaxify(scatter if transpose else gather)(x, w.blocks, w.col_idx)
    return jnp.moveaxis(y, 0, 1).reshape(*lead, y.shape[0] * b)


@register("reduce_sum")
def _reduce_sum(x: BlockSparseArray, *, axes: Sequence[int], **params: Any) -> Any:
    n = x.num_batch
    summed = {(axis - n) ^ x.transposed for axis in axes if axis >= n}  # of the stored matrix
    if not summed or isinstance(x.blocks, ArrayValue):
        return NotImplemented
    batch = tuple(axis for axis in axes if axis < n)
    if len(summed) == 2:
        return jnp.sum(x.elements, (*batch, *range(n, n + 4)), dtype=x.dtype)
    if summed == {1}:
        rows = jnp.sum(x.elements, (-3, -1), dtype=x.dtype)
        return jnp.sum(rows.reshape(*rows.shape[:n], math.prod(rows.shape[n:])), batch, dtype=x.dtype)

    def columns(blocks: Array, col_idx: Array, number: int) -> Array:
        total = jnp.zeros((number, blocks.shape[-1]), blocks.dtype)
        return add_at(total, col_idx, jnp.sum(blocks, -2, dtype=blocks.dtype)).reshape(-1)

    add = mapped(functools.partial(columns, number=x.transposed_idx.shape[-2]), n)
    return jnp.sum(add(x.blocks, x.col_idx), batch, dtype=x.dtype)
