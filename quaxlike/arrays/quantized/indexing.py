"""Lookup of slices of a quantised array at indices that are data: embeddings, experts, layers.

Rows of a matrix become dense: the rows that are looked up in an embedding are activations. Matrices of a
stack stay quantised.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core.quaxify import quaxify
from ...core.rules import register
from ..bounds import clamped_start
from .base import AbstractQuantizedArray
from .shape import with_free_axes


@register("dynamic_slice")
def _dynamic_slice(
    w: AbstractQuantizedArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any
) -> Any:
    cut = [axis for axis, size in enumerate(w.shape) if slice_sizes[axis] != size]
    free = with_free_axes(w, cut)
    if free is None:
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
    return out.materialise() if math.prod(slice_sizes[:-1]) == 1 else out


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
        out, order = _of_stored(w, indices, dims, slice_sizes, mode=mode, fill_value=fill_value, **params)
        return out if out is NotImplemented else quaxify(lambda out: lax.transpose(out, order))(out)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    if fills and not (fill_value is None or np.isnan(fill_value)):
        return NotImplemented
    indexed = [axis for axis in dims.start_index_map if slice_sizes[axis] != w.shape[axis]]
    if fills and len(indexed) < len(dims.start_index_map):
        return NotImplemented  # a slice of a whole axis has only one valid index; any other would fill
    if not {*dims.collapsed_slice_dims} <= {*indexed}:
        return _with_all_axes(
            w, indices, dims, slice_sizes, indexed, mode=mode, fill_value=fill_value, **params
        )
    # The index along an axis that is taken whole is clamped to 0.
    columns = [i for i, axis in enumerate(dims.start_index_map) if axis in indexed]
    indices = jnp.asarray(indices)[..., np.asarray(columns, np.int32)]
    free = with_free_axes(w, [*indexed, *dims.operand_batching_dims, *dims.collapsed_slice_dims])
    if free is None:
        if indexed != [0] or slice_sizes[0] != 1 or dims.operand_batching_dims:
            return NotImplemented
        positions = indices[..., 0]
        out = w.rows_at(jnp.clip(positions, 0, w.shape[0] - 1))
        if fills:
            inside = (positions >= 0) & (positions < w.shape[0])
            out = jnp.where(inside.reshape(*inside.shape, *[1] * (out.ndim - inside.ndim)), out, jnp.nan)
        if 0 not in dims.collapsed_slice_dims:
            out = jnp.expand_dims(out, positions.ndim)
        batch = [axis for axis in range(out.ndim) if axis not in dims.offset_dims]
        order = [*batch, *dims.offset_dims]
        return out.transpose([order.index(axis) for axis in range(out.ndim)])

    # In the leaves the inner axes are a single axis, the last one.
    num_inner = len(w.shape) - free.num_lead
    inner_places = dims.offset_dims[len(dims.offset_dims) - num_inner :]
    other_places = dims.offset_dims[: len(dims.offset_dims) - num_inner]
    out_ndim = indices.ndim - 1 + len(dims.offset_dims)
    lead_places = [place for place in range(out_ndim) if place not in inner_places]

    def take(leaf: Array) -> Array:
        rest = leaf.shape[free.num_lead :]
        offsets = [lead_places.index(place) for place in other_places]
        offsets += range(len(lead_places), len(lead_places) + len(rest))
        return lax.gather(
            leaf,
            indices,
            dims._replace(offset_dims=tuple(offsets), start_index_map=tuple(indexed)),
            (*slice_sizes[: free.num_lead], *rest),
            mode=mode,
            fill_value=_nan_of(leaf.dtype),
            **params,
        )

    out = jax.tree.map(take, free)
    order = [*lead_places, *inner_places]
    out = out.with_axes([order.index(place) for place in range(out_ndim)])
    return out.materialise() if len(w.shape) <= 2 else out


def _with_all_axes(
    w: AbstractQuantizedArray,
    indices: ArrayLike,
    dims: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    indexed: Sequence[int],
    **params: Any,
) -> Any:
    """A lookup that drops axes of size 1 which it takes whole: it keeps them, and squeezes the result."""
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    collapsed = [axis for axis in dims.collapsed_slice_dims if axis in indexed]
    kept = [axis for axis in range(len(w.shape)) if axis not in {*collapsed, *dims.operand_batching_dims}]
    num_batch = np.ndim(indices) - 1
    places = tuple(range(num_batch, num_batch + len(kept)))
    with_all = dims._replace(collapsed_slice_dims=tuple(collapsed), offset_dims=places)
    out = _gather(w, indices, dimension_numbers=with_all, slice_sizes=slice_sizes, **params)
    if out is NotImplemented:
        return out
    num_out = num_batch + len(dims.offset_dims)
    order = [*(i for i in range(num_out) if i not in dims.offset_dims), *dims.offset_dims]
    squeezed = [place for place, axis in zip(places, kept, strict=True) if axis in gone]
    move = lambda out: lax.transpose(lax.squeeze(out, squeezed), [order.index(i) for i in range(num_out)])
    return quaxify(move)(out)


def _of_stored(
    w: AbstractQuantizedArray,
    indices: ArrayLike,
    dims: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    **params: Any,
) -> tuple[Any, Sequence[int]]:
    """The same lookup in the stored array, and the order of the axes of its result."""
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
    for place, axis in zip(dims.offset_dims, kept, strict=True):
        order[place] = dims.offset_dims[sorted(kept).index(axis)]
    return out, order


def _nan_of(dtype: Any) -> Any:
    """The fill value for a leaf of this dtype, to decode as NaN: in 8-bit floats, that is all bits set."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return np.nan
    return 255 if dtype == np.uint8 else 0
