"""Rules for the axes of sparse arrays: transposing, broadcasting, joining, slicing and indexing."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Int

from ...core.policy import dense
from ...core.rules import register
from ...core.values import ArrayValue
from ...kernels.padded import add_at
from ..batch_axes import cut_batch, reshape_batch, squeeze_batch, transpose_batch
from ..bounds import (
    as_gathered,
    clamped_start,
    cuts_of,
    dynamic_slice_in_dim,
    fill_value_of,
    filled,
    in_bounds,
    slice_in_dim,
)
from .block import BlockSparseArray
from .stacks import broadcast_stack
from .unstructured import SparseArray, fits_int32, flattened, smaller, unflattened, unstacked


@register("transpose")
def _transpose(x: SparseArray, *, permutation: Sequence[int], **params: Any) -> SparseArray:
    n = x.num_batch
    # If a batch axis is moved amongst the sparse axes, every element needs an index along it.
    if any(axis >= n for axis in permutation[:n]):
        x, n = unstacked(x), 0
    x = transpose_batch(x, permutation[:n])
    moved = [axis - n for axis in permutation[n:]]
    return x.replace(
        indices=tuple(x.indices[axis] for axis in moved),
        sizes=tuple(x.sizes[axis] for axis in moved),
        # There's no need to reorder the elements: `major` records which axis is called rows.
        major=x.major if x.order is None or moved == [0, 1] else 1 - x.major,
    )


@register("reshape")
def _reshape(x: SparseArray, *, new_sizes: Sequence[int], **params: Any) -> Any:
    if any(value is not None for value in params.values()):
        return NotImplemented
    out = reshape_batch(x, new_sizes)
    if out is not NotImplemented:
        return out
    if not new_sizes:
        return jnp.sum(x.elements, dtype=x.dtype)
    if not fits_int32(x.shape):
        hint = f"Its elements are moved by their flat indices, and those into {x.shape} do not fit int32."
        return lax.reshape(dense(x, "reshape", hint=hint), new_sizes)
    x = unstacked(x)
    inside = x.is_stored
    indices = unflattened(flattened(x.indices, x.sizes, inside), new_sizes, inside)
    return x.placed(x.data, indices, new_sizes)


@register("squeeze")
def _squeeze(x: SparseArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    n = x.num_batch
    x = squeeze_batch(x, [axis for axis in dimensions if axis < n])
    kept = [axis for axis in range(len(x.sizes)) if axis + n not in dimensions]
    if len(kept) == len(x.sizes):
        return x
    if not kept:
        return jnp.sum(x.elements, -1, dtype=x.dtype)
    return x.placed(x.data, [x.indices[axis] for axis in kept], [x.sizes[axis] for axis in kept])


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: SparseArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
) -> Any:
    """Adds leading axes as batch axes. Repeats the elements along any other new axis."""
    if params.get("sharding") is not None:
        return NotImplemented
    out = broadcast_stack(x, shape, broadcast_dimensions)
    if out is not NotImplemented:
        return out
    x = unstacked(x)
    from_axis = dict(zip(broadcast_dimensions, range(len(x.sizes)), strict=True))
    # Elements are repeated along new axes, and along expanded axes of size one.
    grown = [axis for axis in range(len(shape)) if axis not in from_axis or x.sizes[from_axis[axis]] == 1]
    grown = [axis for axis in grown if shape[axis] != 1 or axis not in from_axis]
    repeats = (x.nse, *(shape[axis] for axis in grown))

    def repeat(array: Any) -> Any:
        return jnp.broadcast_to(array.reshape(-1, *[1] * len(grown)), repeats).reshape(-1)

    inside = repeat(x.is_stored)
    indices: list[Array] = []
    for axis, size in enumerate(shape):
        if axis in grown:
            along = lax.broadcasted_iota(jnp.int32, repeats, 1 + grown.index(axis)).reshape(-1)
            indices.append(jnp.where(inside, along, size))
        else:
            indices.append(repeat(x.indices[from_axis[axis]]))
    return x.placed(repeat(x.data), indices, shape)


@register("rev")
def _rev(x: SparseArray, *, dimensions: Sequence[Any], **params: Any) -> SparseArray:
    n = x.num_batch
    x = x.each(lambda leaf, _: lax.rev(leaf, [axis for axis in dimensions if axis < n]))
    if all(axis < n for axis in dimensions):
        return x
    indices = [
        # Don't reverse the index of padding. It would become -1, and refer to the last element.
        jnp.where(x.is_stored, size - 1 - index, size) if axis + n in dimensions else index
        for axis, (index, size) in enumerate(zip(x.indices, x.sizes, strict=True))
    ]
    return x.placed(x.data, indices, x.sizes)


@register("concatenate")
def _concatenate(*xs: SparseArray, dimension: Any, **params: Any) -> SparseArray:
    if len({(x.num_batch, x.sizes, x.order is None, x.major) for x in xs}) == 1 and (
        dimension < xs[0].num_batch
    ):
        padded = [_padded(x, max(x.nse for x in xs)) for x in xs]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, dimension), *padded)
    if len({x.data.shape[:-1] for x in xs}) > 1 or dimension < xs[0].num_batch:
        xs = tuple(map(unstacked, xs))
    along = dimension - xs[0].num_batch
    total = sum(x.sizes[along] for x in xs)
    parts: list[list[Array]] = []
    before = 0
    for x in xs:
        indices = list(x.indices)
        # The index of padding is the axis size, so increase it along with the axis.
        indices[along] = jnp.where(x.is_stored, indices[along] + before, total)
        parts.append([x.data, *indices])
        before += x.sizes[along]
    data, *indices = (jnp.concatenate(arrays, -1) for arrays in zip(*parts, strict=True))
    sizes = list(xs[0].sizes)
    sizes[along] = total
    return xs[0].placed(data, indices, sizes)


def _padded(x: SparseArray, nse: int) -> SparseArray:
    """Pads an array to `nse` stored elements."""
    extra = nse - x.nse

    def end(array: Any, fill: Any) -> Any:
        return jnp.pad(array, [(0, 0)] * x.num_batch + [(0, extra)], constant_values=fill)

    out = x.replace(data=end(x.elements, 0), indices=tuple(map(end, x.indices, x.sizes)))
    if x.order is None:
        return out
    row_ptr, by_column, column_ptr = x.order
    # Padding comes last in both orders.
    last = jnp.broadcast_to(jnp.arange(x.nse, nse, dtype=jnp.int32), (*by_column.shape[:-1], extra))
    return out.replace(order=(row_ptr, jnp.concatenate([by_column, last], -1), column_ptr))


@register("stack")
def _stack(*xs: SparseArray, axis: int, **params: Any) -> Any:
    new = [x for x in range(xs[0].ndim + 1) if x != axis]
    shape = [1] * (xs[0].ndim + 1)
    for size, place in zip(xs[0].shape, new, strict=True):
        shape[place] = size
    # Stacking is the same as adding an axis of size one, and concatenating along it.
    parts = [_broadcast_in_dim(x, shape=shape, broadcast_dimensions=new) for x in xs]
    return _concatenate(*parts, dimension=axis)


@register("slice")
def _slice(x: SparseArray, **params: Any) -> Any:
    cuts, touched = cuts_of(x.shape, **params)
    n = x.num_batch
    batch = [axis for axis in touched if axis < n]
    x = cut_batch(x, lambda leaf, axis: slice_in_dim(leaf, *cuts[axis], axis), batch)
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

    def cut(leaf: Any, axis: Any) -> Any:
        return dynamic_slice_in_dim(leaf, starts[axis], slice_sizes[axis], axis)

    x = cut_batch(x, cut, batch)
    if len(batch) == len(touched):
        return x
    sizes = slice_sizes[n:]
    begin = list(map(clamped_start, starts[n:], x.sizes, sizes))
    return smaller(_cut(x, begin, sizes, [1] * len(sizes)))


def _cut(x: SparseArray, starts: Sequence[Any], sizes: Sequence[int], steps: Sequence[int]) -> SparseArray:
    """Slices an array. Elements outside the slice become padding."""
    moved = [index - start for index, start in zip(x.indices, starts, strict=True)]
    inside = x.is_stored
    for index, size, step in zip(moved, sizes, steps, strict=True):
        # The number of elements in a slice depends on their indices, so it can't be a shape. Instead, keep
        # all elements, and convert the ones outside the slice to padding.
        inside &= (index >= 0) & (index < size * step) & (index % step == 0)
    indices = [
        jnp.where(inside, index // step, size) for index, size, step in zip(moved, sizes, steps, strict=True)
    ]
    return x.placed(x.data, indices, sizes)


# -------------------------------------------------------------------------------------------------
# Gathers rows or columns of a matrix at dynamic indices, as for an embedding. The result is dense: rows of an
# embedding are activations. No other rows are read.
# -------------------------------------------------------------------------------------------------


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
    # The only valid index for a slice of a whole axis is zero. Any other index is either clamped to this or
    # filled.
    indexed = [axis for axis in dims.start_index_map if slice_sizes[axis] != x.shape[axis]]
    outside = fill_value_of(mode, fill_value, x.dtype)
    is_one_line = len(indexed) == 1 and (outside is None or len(dims.start_index_map) == 1)
    if x.num_batch or x.ndim != 2 or not is_one_line or dims.operand_batching_dims:
        return NotImplemented
    (axis,) = indexed
    one = tuple(1 if i == axis else size for i, size in enumerate(x.shape))
    if tuple(slice_sizes) != one or not {axis}.issuperset(dims.collapsed_slice_dims):
        return NotImplemented
    starts = jnp.asarray(indices)[..., dims.start_index_map.index(axis)]
    out = lines(x, axis, clamped_start(starts, x.shape[axis], 1))
    if out is NotImplemented:
        return out
    if not dims.collapsed_slice_dims:
        out = jnp.expand_dims(out, out.ndim - 1 + axis)
    out = as_gathered(out, dims)
    if outside is None:
        return out
    return filled(out, in_bounds(indices, x.shape, dims, slice_sizes), dims, outside)


def lines(x: SparseArray | BlockSparseArray, axis: int, positions: Int[Array, "*batch"]) -> Array | Any:
    """Returns the rows of a matrix (or its columns, if `axis` is 1) at these positions, `(*batch, size)`.

    Returns `NotImplemented` if finding them requires reading the whole matrix.
    """
    stored, look_up = (
        (x.data, _lines_of_elements) if isinstance(x, SparseArray) else (x.blocks, _lines_of_blocks)
    )
    if not stored.size:
        return jnp.zeros((*positions.shape, x.shape[1 - axis]), x.dtype)
    return look_up(x, axis, positions)


def _lines_of_elements(x: Any, axis: int, positions: Int[Array, "*batch"]) -> Any:
    csr, size = x.csr, x.shape[1 - axis]
    # Without an order, a row's elements can be anywhere, so finding them means looking at all elements.
    if csr is None:
        return NotImplemented
    data, pointer, across = x.data, csr.row_ptr, csr.columns
    if axis != x.major:
        data, pointer, across = data[csr.by_column], csr.column_ptr, csr.rows[csr.by_column]
    width = min(size, x.nse)
    # If the pattern is known, as many slots as there are elements in the fullest row are enough.
    if not isinstance(pointer, jax.core.Tracer):
        width = int(np.diff(np.asarray(pointer)).max(initial=0))
    number = jnp.arange(width, dtype=jnp.int32).reshape((1,) * positions.ndim + (-1,))
    number = pointer[positions][..., None] + number
    stored = number < pointer[positions + 1][..., None]
    number = jnp.where(stored, number, 0)
    return _placed(size, jnp.where(stored, across[number], size), data[number])


def _lines_of_blocks(x: Any, axis: int, positions: Int[Array, "*batch"]) -> Any:
    if isinstance(x.blocks, ArrayValue):
        return NotImplemented
    rows, slots, b, _ = x.blocks.shape
    block, inside = positions // b, positions % b
    if axis == x.transposed:  # rows of the stored matrix
        at, number = x.col_idx[block], x.transposed_idx.shape[0]
        found = jnp.moveaxis(x.blocks, 2, 1)[block, inside]
    else:
        # Columns of the stored matrix: `transposed_idx` contains flat indices of slots.
        stored, number = x.transposed_idx[block], rows
        at = stored // max(slots, 1)
        flat = jnp.moveaxis(x.blocks.reshape(rows * slots, b, b), 2, 1)
        found = flat[jnp.minimum(stored, max(rows * slots - 1, 0)), inside[..., None]]
    out = _placed(number, at, found)
    return out.reshape(*positions.shape, number * b)


def _placed(size: int, at: Int[Array, "*batch slots"], found: Array) -> Array:
    """Scatters `found`, `(*batch, slots, ...)`, into zeros, `(*batch, size, ...)`. This turns each row's
    stored elements into a dense row.
    """
    n = at.ndim - 1
    zeros = jnp.zeros((*at.shape[:n], size, *found.shape[n + 1 :]), found.dtype)
    return add_at(zeros, (at,), found, num_batch=n)
