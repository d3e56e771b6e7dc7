"""Slices of structured matrices that are structured: blocks on the diagonal, matrices of a stack."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ..batch_axes import cut_batch
from ..bounds import dynamic_slice_in_dim, fill_value_of, fills
from .base import StructuredMatrix, inside


@register("slice")
def _slice(
    x: StructuredMatrix, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any = None
):
    n = x.num_batch
    strides = tuple(strides or (1,) * x.ndim)
    cuts = [slice(*cut) for cut in zip(start_indices, limit_indices, strides, strict=True)]
    rows, columns = cuts[n:]
    if n:
        x = x.stacked().each(lambda part, core: part[tuple(cuts[:n])])
    if all(cut == slice(0, size, 1) for cut, size in zip(cuts[n:], x.matrix_shape, strict=True)):
        return x
    return NotImplemented if rows != columns else inside(lambda x: x.diagonal_block(rows), x)


@register("dynamic_slice")
def _dynamic_slice(x: StructuredMatrix, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    n = x.num_batch
    if tuple(slice_sizes[n:]) != x.matrix_shape:
        return NotImplemented

    touched = [axis for axis in range(n) if slice_sizes[axis] != x.shape[axis]]
    cut = lambda part, axis: dynamic_slice_in_dim(part, starts[axis], slice_sizes[axis], axis)
    return cut_batch(x, cut, touched)


@register("gather")
def _gather(
    x: StructuredMatrix,
    indices: ArrayLike,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
):
    """Picks whole matrices from a stack by index."""
    dnums, n = dimension_numbers, x.num_batch
    touched = {*dnums.start_index_map, *dnums.collapsed_slice_dims, *dnums.operand_batching_dims}
    ndim = jnp.ndim(indices) - 1 + len(dnums.offset_dims)
    kept = tuple(slice_sizes[n:]) == x.matrix_shape and not touched & {n, n + 1}
    if not kept or tuple(dnums.offset_dims[-2:]) != (ndim - 2, ndim - 1):
        return NotImplemented

    if fills(indices, x.shape, dnums, slice_sizes, mode):
        fill = fill_value_of(mode, fill_value, x.dtype)
        if x.OTHERS is None and fill != 0:
            return NotImplemented  # a matrix that is filled with a number is not of this type
        constant_of = dict.fromkeys(x.CORE, 0) | {x.FACTORS[0]: fill} | (x.OTHERS or {})
    else:
        mode = lax.GatherScatterMode.from_any(mode)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:  # all indices are concrete, and in bounds
            mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        constant_of = dict.fromkeys(x.CORE)

    def pick(name: str, part: Any) -> Any:
        core = x.CORE[name]
        offsets = (*dnums.offset_dims[:-2], *range(ndim - 2, ndim - 2 + core))
        numbers = lax.GatherDimensionNumbers(
            offset_dims=offsets,
            collapsed_slice_dims=dnums.collapsed_slice_dims,
            start_index_map=dnums.start_index_map,
            operand_batching_dims=dnums.operand_batching_dims,
            start_indices_batching_dims=dnums.start_indices_batching_dims,
        )
        sizes = (*slice_sizes[:n], *part.shape[n:])
        gather = lambda part: lax.gather(
            part, jnp.asarray(indices), numbers, sizes, mode=mode, fill_value=constant_of[name], **params
        )
        return quaxify(gather)(part)

    whole = x.converted(x.dtype).stacked()
    return whole.with_parts({name: pick(name, part) for name, part in whole.parts.items()})
