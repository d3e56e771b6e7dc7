"""Lookup of rows and columns of a sparse matrix at indices that are data, as in embeddings.

They become dense: the rows that are looked up in an embedding are activations. Other rows are not read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Int

from ...core.rules import register
from ...core.values import ArrayValue
from ..batch_axes import mapped
from ..bounds import fill_value_of, filled, in_bounds
from .block import BlockSparseArray
from .stacks import add_at
from .unstructured import SparseArray


@register("gather")
def _gather(
    x: SparseArray | BlockSparseArray,
    indices: ArrayLike,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    dims = dimension_numbers
    # A slice of a whole axis has only one valid index; any other is clamped to it, or fills.
    indexed = [axis for axis in dims.start_index_map if slice_sizes[axis] != x.shape[axis]]
    outside = fill_value_of(mode, fill_value, x.dtype)
    is_one_line = len(indexed) == 1 and (outside is None or len(dims.start_index_map) == 1)
    if x.num_batch or x.ndim != 2 or not is_one_line or dims.operand_batching_dims:
        return NotImplemented
    (axis,) = indexed
    one = tuple(1 if i == axis else size for i, size in enumerate(x.shape))
    if tuple(slice_sizes) != one or not {axis}.issuperset(dims.collapsed_slice_dims):
        return NotImplemented
    positions = jnp.asarray(indices)[..., dims.start_index_map.index(axis)].astype(jnp.int32)
    out = lines(x, axis, jnp.clip(positions, 0, x.shape[axis] - 1))
    if out is NotImplemented:
        return out
    if not dims.collapsed_slice_dims:
        out = jnp.expand_dims(out, out.ndim - 1 + axis)
    batch = [place for place in range(out.ndim) if place not in dims.offset_dims]
    order = [*batch, *dims.offset_dims]
    out = out.transpose([order.index(place) for place in range(out.ndim)])
    if outside is None:
        return out
    return filled(out, in_bounds(indices, x.shape, dims, slice_sizes), dims, outside)


def lines(x: SparseArray | BlockSparseArray, axis: int, positions: Int[Array, "*batch"]) -> Array | Any:
    """The rows of a matrix at these positions, or its columns for `axis` 1, `(*batch, size)`;
    `NotImplemented` if finding them would read the whole matrix."""
    stored, look_up = (x.data, _of_elements) if isinstance(x, SparseArray) else (x.blocks, _of_blocks)
    if not stored.size:
        return jnp.zeros((*positions.shape, x.shape[1 - axis]), x.dtype)
    return look_up(x, axis, positions)


def _of_elements(x: Any, axis: int, positions: Int[Array, "*batch"]) -> Any:
    csr, size = x.csr, x.shape[1 - axis]
    if csr is None:
        return NotImplemented
    data, pointer, across = x.data, csr.row_ptr, csr.columns
    if axis != x.major:
        data, pointer, across = data[csr.by_column], csr.column_ptr, csr.rows[csr.by_column]
    width = min(size, x.nse)
    if not isinstance(pointer, jax.core.Tracer):
        width = int(np.diff(np.asarray(pointer)).max(initial=0))
    number = jnp.arange(width, dtype=jnp.int32).reshape((1,) * positions.ndim + (-1,))
    number = pointer[positions][..., None] + number
    stored = number < pointer[positions + 1][..., None]
    number = jnp.where(stored, number, 0)
    return _placed(size, jnp.where(stored, across[number], size), data[number])


def _of_blocks(x: Any, axis: int, positions: Int[Array, "*batch"]) -> Any:
    if isinstance(x.blocks, ArrayValue):
        return NotImplemented
    rows, slots, b, _ = x.blocks.shape
    block, inside = positions // b, positions % b
    if axis == x.transposed:  # along stored block rows
        at, number = x.col_idx[block], x.transposed_idx.shape[0]
        found = jnp.moveaxis(x.blocks, 2, 1)[block, inside]
    else:
        stored, number = x.transposed_idx[block], rows
        at = stored // max(slots, 1)
        flat = jnp.moveaxis(x.blocks.reshape(rows * slots, b, b), 2, 1)
        found = flat[jnp.minimum(stored, max(rows * slots - 1, 0)), inside[..., None]]
    out = _placed(number, at, found)
    return out.reshape(*positions.shape, number * b)


def _placed(size: int, at: Int[Array, "*batch slots"], found: Array) -> Array:
    """Scatters what was `found`, `(*batch, slots, ...)`, into zeros `(*batch, size, ...)`."""
    place = lambda at, found: add_at(jnp.zeros((size, *found.shape[1:]), found.dtype), at, found)
    return mapped(place, at.ndim - 1)(at, found)
