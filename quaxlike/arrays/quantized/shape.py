"""Rules for the axes of quantised arrays: permuted, sliced and gathered without reading any codes.

Except for a `CacheArray`, these rules must never change any codes. If an operation splits a block, then the
rule declines, so the array is materialised, and the policy applies. (Requantising would silently change the
weights.)

Rows gathered from a matrix at dynamic indices are dense: rows of an embedding are activations. Matrices
gathered from a stack remain quantised.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core.quaxify import quaxify
from ...core.rules import register
from ..bounds import as_gathered, clamped_start, cuts_of, filled
from ..gradients import Gradients, strongest
from .array import CacheArray
from .base import AbstractQuantizedArray, shortest

_Q = TypeVar("_Q", bound=AbstractQuantizedArray)


@register("transpose")
def _transpose(w: AbstractQuantizedArray, *, permutation: Sequence[int], **params: Any) -> Any:
    return w.with_axes([w.permutation[axis] for axis in permutation])


@register("convert_element_type")
def _convert_element_type(w: AbstractQuantizedArray, *, new_dtype: Any, **params: Any) -> Any:
    if not jnp.issubdtype(new_dtype, jnp.floating) or params.get("sharding") is not None:
        return NotImplemented
    return dataclasses.replace(w, logical_dtype=jnp.dtype(new_dtype))


@register("reshape")
def _reshape(w: AbstractQuantizedArray, *, new_sizes: Sequence[int], **params: Any) -> Any:
    if any(value is not None for value in params.values()):
        return NotImplemented
    out = reshaped(w, tuple(new_sizes))
    return NotImplemented if out is None else out


@register("squeeze")
def _squeeze(w: AbstractQuantizedArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    gone = {w.permutation[axis] for axis in dimensions}
    # Removing an inner axis changes how the codes' last axis is interpreted, so this is a reshape.
    if any(axis >= w.num_lead for axis in gone):
        shape = tuple(size for axis, size in enumerate(w.shape) if axis not in dimensions)
        out = reshaped(w, shape)
        return NotImplemented if out is None else out
    left = [axis for axis in range(len(w.stored_shape)) if axis not in gone]
    out = jax.tree.map(lambda leaf: lax.squeeze(leaf, sorted(gone)), w)
    return out.with_axes([left.index(axis) for axis in w.permutation if axis not in gone])


@register("broadcast_in_dim")
def _broadcast_in_dim(
    w: AbstractQuantizedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
) -> Any:
    """Adds axes, or expands axes of size one. Either way, this repeats the leaves along leading axes."""
    if params.get("sharding") is not None:
        return NotImplemented
    dims, n, shape = tuple(broadcast_dimensions), w.num_lead, tuple(shape)
    stretched = {w.permutation[i] for i, axis in enumerate(dims) if shape[axis] != w.shape[i]}
    new = [axis for axis in range(len(shape)) if axis not in dims]
    outer = len(shape) - len(w.inner_shape)
    # The simplest case: only leading axes are added or expanded.
    if not w.axes and dims[n:] == tuple(range(outer, len(shape))) and all(i < n for i in stretched):
        return _broadcast_lead(w, shape[:outer], dims[:n])
    # Only adding axes of size one is a reshape.
    if not stretched and all(shape[axis] == 1 for axis in new):
        out = reshaped(w, shape)
        if out is not None:
            return out
    inner = [i for i in range(n, len(w.stored_shape)) if i not in stretched]
    if w.order is not None and len(inner) < len(w.inner_shape):
        return NotImplemented  # rows share an order, and the codes of each row are packed separately
    # Inner axes can't be expanded without cutting blocks. But they have size one, so remove them, and add
    # them as leading axes, like new axes.
    gone = {dims[i] for i, at in enumerate(w.permutation) if at in stretched and at >= n}
    new = sorted({*new, *gone})
    kept = [*range(n), *inner]
    logical = [dims[w.permutation.index(at)] for at in kept]
    w = dataclasses.replace(w, inner=shortest(tuple(w.stored_shape[at] for at in inner), w.codec), axes=())
    lead = [shape[axis] for axis in (*new, *logical[:n])]
    return _broadcast_lead(w, lead, range(len(new), len(lead))).with_axes(
        [(new + logical).index(axis) for axis in range(len(shape))]
    )


def _broadcast_lead(w: _Q, lead: Sequence[int], dimensions: Sequence[Any]) -> _Q:
    def broadcast(leaf: Array) -> Array:
        rest = leaf.shape[w.num_lead :]
        shape = (*lead, *rest)
        return lax.broadcast_in_dim(leaf, shape, (*dimensions, *range(len(lead), len(shape))))

    return jax.tree.map(broadcast, w)


@register("slice")
def _slice(w: AbstractQuantizedArray, **params: Any) -> Any:
    cuts, touched = cuts_of(w.shape, **params)
    free = with_free_axes(w, touched)
    if free is None:
        return NotImplemented
    per_axis = [slice(*cuts[free.permutation.index(axis)]) for axis in range(free.num_lead)]
    return jax.tree.map(lambda leaf: leaf[tuple(per_axis)], free)


@register("split")
def _split(w: AbstractQuantizedArray, *, sizes: Sequence[Any], axis: int, **params: Any) -> Any:
    free = with_free_axes(w, [axis])
    if free is None:
        return NotImplemented
    stored_axis = free.permutation[axis]
    leaves, structure = jax.tree.flatten(free)
    parts = zip(*(lax.split(leaf, sizes, axis=stored_axis) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, part) for part in parts]


@register("unstack")
def _unstack(w: AbstractQuantizedArray, *, axis: int, **params: Any) -> Any:
    free = with_free_axes(w, [axis])
    if free is None:
        return NotImplemented
    stored_axis = free.permutation[axis]
    order = [i - (i > stored_axis) for i in free.permutation if i != stored_axis]
    leaves, structure = jax.tree.flatten(free)
    parts = zip(*(jnp.unstack(leaf, axis=stored_axis) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, part).with_axes(order) for part in parts]


@register("stack")
def _stack(*ws: AbstractQuantizedArray, axis: int, **params: Any) -> Any:
    """Stacks arrays along a new axis: the first axis of the stored array, so no block is cut."""
    ws = _alike(ws)
    if len({jax.tree.structure(w) for w in ws}) > 1:
        ws = tuple(with_most_leading_axes(w) for w in ws)
        if len({jax.tree.structure(w) for w in ws}) > 1:
            return NotImplemented
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    order = [1 + i for i in ws[0].permutation]
    return stacked.with_axes([*order[:axis], 0, *order[axis:]])


@register("concatenate")
def _concatenate(*ws: AbstractQuantizedArray, dimension: Any, **params: Any) -> Any:
    ws = _alike(ws)
    if len({jax.tree.structure(w.scale) for w in ws}) > 1:
        ws = tuple(with_most_leading_axes(w) for w in ws)
    parts = [part for w in ws if (part := with_free_axes(w, [int(dimension)])) is not None]
    if len(parts) < len(ws) or len({jax.tree.structure(part) for part in parts}) > 1:
        return NotImplemented
    stored_axis = parts[0].permutation[dimension]
    return jax.tree.map(lambda *leaves: lax.concatenate(leaves, stored_axis), *parts)


def _alike(ws: Sequence[_Q]) -> tuple[_Q, ...]:
    """Sets the strongest `gradients` on all arrays, and converts scales to float32 if any were scaled.

    Use this before joining arrays: their static fields and dtypes must match.
    """
    if len({tuple(leaf.dtype for leaf in jax.tree.leaves(w)) for w in ws}) > 1:
        ws = tuple(w.times(jnp.float32(1)) for w in ws)
    marks: list[Gradients] = [w.gradients for w in ws]
    return tuple(w.with_gradients(strongest(*marks)) for w in ws)


def with_free_axes(w: _Q, axes: Sequence[int]) -> _Q | None:
    """Converts to a form in which these logical axes are leading axes. None if this cuts blocks."""
    # Try the current form first: the second one takes more memory, because it repeats or decodes scales.
    for form in (lambda: w, lambda: with_most_leading_axes(w)):
        free = form()
        if all(free.permutation[axis] < free.num_lead for axis in axes):
            return free
    return None


def with_most_leading_axes(w: _Q) -> _Q:
    """Converts to a form with as many leading axes as possible without cutting blocks.

    Nested scales are converted to float32, because their blocks cross rows.
    """
    return w if w.order is not None else w.joined().cut(w.codes.shape[:-1], w.inner_shape)


def reshaped(w: _Q, shape: tuple[int, ...]) -> _Q | None:
    """Reshapes the stored array. None if this cuts blocks."""
    if w.axes:
        return None
    lead, count, n = w.codes.shape[:-1], w.matrix[1], w.num_lead
    if w.order is not None:
        # Rows sharing an order can't be separated, so only reshape what comes after them.
        same = shape[:n] == lead and shape[n : n + 1] == w.inner_shape[:1]
        return dataclasses.replace(w, inner=tuple(shape[n:])) if same else None
    if shape[:n] == lead and math.prod(shape[n:]) == count:
        return w.cut(lead, shape[n:])
    for at in range(len(shape) - 1, -1, -1):  # this preserves rows of codes
        if math.prod(shape[at:]) == count and math.prod(shape[:at]) == math.prod(lead):
            return w.joined().cut(shape[:at], shape[at:])
    # If blocks don't cross rows, then rows can be split or merged without cutting blocks.
    if w.codec.cuts(count, w.block):
        for at in range(len(shape) - 1, -1, -1):
            if w.codec.cuts(math.prod(shape[at:]), w.block):
                return w.joined().cut(shape[:at], shape[at:])
    return None


@register("dynamic_slice")
def _dynamic_slice(
    w: AbstractQuantizedArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any
) -> Any:
    cut = [axis for axis, size in enumerate(w.shape) if slice_sizes[axis] != size]
    if not cut:
        return w
    free = with_free_axes(w, cut)
    if free is None:
        # The slice cuts blocks. Only support this for a single row, which is decoded.
        if cut != [0] or slice_sizes[0] != 1 or w.axes:
            return NotImplemented
        index = clamped_start(starts[0], w.shape[0], 1)
        return w.rows_at(index[None])
    axes = [free.permutation.index(axis) for axis in range(free.num_lead)]

    def take(leaf: Array) -> Array:
        rest = leaf.shape[free.num_lead :]
        begin = [clamped_start(starts[axis], w.shape[axis], slice_sizes[axis]) for axis in axes]
        starts_of_rest = [np.int32(0)] * len(rest)
        return lax.dynamic_slice(leaf, [*begin, *starts_of_rest], (*(slice_sizes[i] for i in axes), *rest))

    out = jax.tree.map(take, free)
    # A single row is typically an activation (e.g. a token's embedding). The next operation needs its values
    # rather than its codes.
    return out.materialise() if math.prod(slice_sizes[:-1]) == 1 else out


@register("dynamic_update_slice")
def _dynamic_update_slice(w: CacheArray, update: ArrayLike, *starts: ArrayLike, **params: Any) -> Any:
    """Rounds the update, which must be whole rows of codes.

    (Otherwise some of its elements would share a scale with elements not being updated.)
    """
    update = jnp.asarray(update)
    free = with_free_axes(w, _cut_by(update, w))
    if free is None:
        return NotImplemented
    sizes = [update.shape[free.permutation.index(axis)] for axis in range(free.num_lead)]
    part = jax.tree.map(lambda leaf: leaf[tuple(slice(size) for size in sizes)], free)  # for its shape only
    return _written(free, part.requantized(update), starts)


@register("dynamic_update_slice")
def _dynamic_update_slice_of_codes(
    w: CacheArray, update: CacheArray, *starts: ArrayLike, **params: Any
) -> Any:
    """Copies the codes of an update in the same format, without rounding again."""
    free, new = (with_free_axes(x, _cut_by(update, w)) for x in (w, update))
    if free is None or new is None or jax.tree.structure(free) != jax.tree.structure(new):
        return NotImplemented
    return _written(free, new, starts)


def _cut_by(part: Any, w: CacheArray) -> list[int]:
    """Returns the axes along which `part` is smaller than `w`."""
    return [axis for axis, size in enumerate(w.shape) if part.shape[axis] != size]


def _written(free: CacheArray, part: CacheArray, starts: Sequence[ArrayLike]) -> CacheArray:
    begin = [starts[free.permutation.index(axis)] for axis in range(free.num_lead)]

    def put(leaf: Array, new: Array) -> Array:
        rest = [np.zeros((), jnp.result_type(starts[0]))] * (leaf.ndim - len(begin))
        # Negative starts were wrapped before this rule was called. What is still negative is clamped.
        return lax.dynamic_update_slice(leaf, new, [*begin, *rest], allow_negative_indices=False)

    return jax.tree.map(put, free, part)


@register("gather")
def _gather(
    w: AbstractQuantizedArray,
    indices: ArrayLike,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    dims = dimension_numbers
    mode = lax.GatherScatterMode.from_any(mode)
    if w.axes:
        # Convert this to a lookup in the stored array, without permuted axes.
        out, order = _gather_stored(w, indices, dims, slice_sizes, mode=mode, fill_value=fill_value, **params)
        return out if out is NotImplemented else quaxify(lambda out: lax.transpose(out, order))(out)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    # Filled leaves can decode to NaN, but not to any other value.
    if fills and not (fill_value is None or np.isnan(fill_value)):
        return NotImplemented
    indexed = [axis for axis in dims.start_index_map if slice_sizes[axis] != w.shape[axis]]
    if fills and len(indexed) < len(dims.start_index_map):
        return NotImplemented  # a slice of the whole axis only has one valid index, and any other fills
    if not {*dims.collapsed_slice_dims} <= {*indexed}:
        return _with_all_axes(
            w, indices, dims, slice_sizes, indexed, mode=mode, fill_value=fill_value, **params
        )
    # If the slice has the full size of an axis, its index is always clamped to 0, so ignore it.
    columns = [i for i, axis in enumerate(dims.start_index_map) if axis in indexed]
    indices = jnp.asarray(indices)[..., np.asarray(columns, np.int32)]
    free = with_free_axes(w, [*indexed, *dims.operand_batching_dims, *dims.collapsed_slice_dims])
    if free is None:
        if indexed != [0] or slice_sizes[0] != 1 or dims.operand_batching_dims:
            return NotImplemented
        positions = indices[..., 0]
        out = w.rows_at(jnp.clip(positions, 0, w.shape[0] - 1))
        if 0 not in dims.collapsed_slice_dims:
            out = jnp.expand_dims(out, positions.ndim)
        out, inside = as_gathered(out, dims), (positions >= 0) & (positions < w.shape[0])
        return filled(out, inside, dims, jnp.nan) if fills else out
    out = _gather_leaves(free, indices, dims, slice_sizes, indexed, mode=mode, **params)
    # Rows of a matrix are activations, but matrices from a stack are still weights.
    return out.materialise() if len(w.shape) <= 2 else out


def _gather_leaves(
    w: AbstractQuantizedArray,
    indices: Array,
    dims: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    indexed: Sequence[int],
    **params: Any,
) -> AbstractQuantizedArray:
    """Looks up the leaves of an array. Only leading axes may be `indexed` or dropped."""
    # The array's inner axes correspond to a single axis of the leaves: the last one.
    num_inner = len(w.shape) - w.num_lead
    inner = dims.offset_dims[len(dims.offset_dims) - num_inner :]
    others = dims.offset_dims[: len(dims.offset_dims) - num_inner]
    out_ndim = indices.ndim - 1 + len(dims.offset_dims)
    lead = [axis for axis in range(out_ndim) if axis not in inner]

    def take(leaf: Array) -> Array:
        rest = leaf.shape[w.num_lead :]
        offsets = [lead.index(axis) for axis in others]
        offsets += range(len(lead), len(lead) + len(rest))
        if not indices.shape[-1]:  # `checkify` doesn't support a gather without indices
            leaf = lax.slice(leaf, (0,) * leaf.ndim, (*slice_sizes[: w.num_lead], *rest))
            sizes = dict(zip(offsets, leaf.shape, strict=True))
            batch = iter(indices.shape[:-1])
            shape = [sizes[i] if i in sizes else next(batch) for i in range(len(offsets) + indices.ndim - 1)]
            return lax.broadcast_in_dim(leaf, shape, offsets)
        return lax.gather(
            leaf,
            indices,
            dims._replace(offset_dims=tuple(offsets), start_index_map=tuple(indexed)),
            (*slice_sizes[: w.num_lead], *rest),
            fill_value=_nan_of(leaf.dtype),
            **params,
        )

    out = jax.tree.map(take, w)
    order = [*lead, *inner]
    return out.with_axes([order.index(axis) for axis in range(out_ndim)])


def _with_all_axes(
    w: AbstractQuantizedArray,
    indices: ArrayLike,
    dims: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    indexed: Sequence[int],
    **params: Any,
) -> Any:
    """Implements lookups dropping axes of size 1: keeps these at first, then squeezes the result."""
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    collapsed = [axis for axis in dims.collapsed_slice_dims if axis in indexed]
    kept = [axis for axis in range(len(w.shape)) if axis not in {*collapsed, *dims.operand_batching_dims}]
    num_batch = np.ndim(indices) - 1
    offsets = tuple(range(num_batch, num_batch + len(kept)))
    with_all = dims._replace(collapsed_slice_dims=tuple(collapsed), offset_dims=offsets)
    out = _gather(w, indices, dimension_numbers=with_all, slice_sizes=slice_sizes, **params)
    if out is NotImplemented:
        return out
    num_out = num_batch + len(dims.offset_dims)
    order = [*(i for i in range(num_out) if i not in dims.offset_dims), *dims.offset_dims]
    squeezed = [i for i, axis in zip(offsets, kept, strict=True) if axis in gone]

    def move(out: Any) -> Any:
        return lax.transpose(lax.squeeze(out, squeezed), [order.index(i) for i in range(num_out)])

    return quaxify(move)(out)


def _gather_stored(
    w: AbstractQuantizedArray,
    indices: ArrayLike,
    dims: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    **params: Any,
) -> tuple[Any, Sequence[int]]:
    """Performs the equivalent lookup in the stored array.

    Also returns the permutation moving the result's axes to where the caller expects them.
    """
    stored = w.permutation
    gone = {stored[axis] for axis in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)}
    pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    paired = sorted((stored[axis], other) for axis, other in pairs)
    of_stored = dims._replace(
        collapsed_slice_dims=tuple(sorted(stored[axis] for axis in dims.collapsed_slice_dims)),
        start_index_map=tuple(stored[axis] for axis in dims.start_index_map),
        operand_batching_dims=tuple(axis for axis, _ in paired),
        start_indices_batching_dims=tuple(other for _, other in paired),
    )
    sizes = [slice_sizes[stored.index(axis)] for axis in range(len(stored))]
    plain = w.with_axes(range(len(stored)))
    out = _gather(plain, indices, dimension_numbers=of_stored, slice_sizes=sizes, **params)
    kept = [axis for axis in stored if axis not in gone]
    order = list(range(np.ndim(indices) - 1 + len(kept)))
    for offset, axis in zip(dims.offset_dims, kept, strict=True):
        order[offset] = dims.offset_dims[sorted(kept).index(axis)]
    return out, order


def _nan_of(dtype: Any) -> Any:
    """Returns a fill value for a leaf, decoding to NaN. For 8-bit floats this has all bits set."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return np.nan
    return 255 if dtype == np.uint8 else 0
