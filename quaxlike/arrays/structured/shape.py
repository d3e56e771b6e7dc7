"""Rules for the axes of structured matrices.

These handle batch axes, and structured slices, i.e. diagonal blocks. Everything else is materialised.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ..batch_axes import cut_batch, reshape_batch, squeeze_batch, transpose_batch
from ..bounds import cuts_of, dynamic_slice_in_dim, fill_value_of, fills
from .base import StructuredMatrix, inside


@register("transpose")
def _transpose(x: StructuredMatrix, *, permutation: Sequence[int]):
    n = x.num_batch
    *stack, i, j = permutation
    if {i, j} != {n, n + 1}:
        return NotImplemented
    x = transpose_batch(x, stack)
    return x if i == n else x.transposed()


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: StructuredMatrix, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
):
    n, new = x.num_batch, len(shape) - 2
    *stack, i, j = broadcast_dimensions
    if (i, j) != (new, new + 1) or tuple(shape[-2:]) != x.matrix_shape:
        return NotImplemented

    def broadcast(part: Any, core: int) -> Any:
        own = stack[n - (part.ndim - core) :]
        if not own:
            return part  # it's also shared along the new axes
        sizes = (*shape[:new], *part.shape[part.ndim - core :])
        return lax.broadcast_in_dim(part, sizes, (*own, *range(new, new + core)))

    out = x.each(broadcast)
    if out.batch == tuple(shape[:new]):
        return out
    # The shape is determined by the parts, so at least one of these must have the new axes.
    (carrier, *_), part = x.FACTORS, x.parts[x.FACTORS[0]]
    sizes = (*shape[:new], *part.shape[part.ndim - x.CORE[carrier] :])
    return out.with_parts(out.parts | {carrier: quaxify(jnp.broadcast_to)(part, sizes)})


@register("reshape")
def _reshape(x: StructuredMatrix, *, new_sizes: Sequence[int], dimensions: Any = None, **params: Any):
    return NotImplemented if dimensions is not None else reshape_batch(x, new_sizes)


@register("squeeze")
def _squeeze(x: StructuredMatrix, *, dimensions: Sequence[Any]):
    return NotImplemented if any(axis >= x.num_batch for axis in dimensions) else squeeze_batch(x, dimensions)


def _join(xs: Sequence[StructuredMatrix], join: Any) -> Any:
    """Applies `join` to each part of several matrices with the same type."""
    xs = [x.stacked() for x in xs]
    first = xs[0]
    if any(type(x) is not type(first) for x in xs):
        return NotImplemented
    for name, part in first.parts.items():
        n = part.ndim - first.CORE[name]
        if any(x.parts[name].shape[n:] != part.shape[n:] for x in xs):
            return NotImplemented
    return first.with_parts({name: quaxify(join)([x.parts[name] for x in xs]) for name in first.CORE})


@register("concatenate")
def _concatenate(x: StructuredMatrix, *rest: StructuredMatrix, dimension: Any):
    if dimension >= x.num_batch:
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.concatenate(parts, dimension))


@register("stack")
def _stack(x: StructuredMatrix, *rest: StructuredMatrix, axis: int, **params: Any):
    if axis > x.num_batch:
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.stack(parts, axis))


@register("slice")
def _slice(x: StructuredMatrix, **params: Any):
    n = x.num_batch
    cuts = [slice(*cut) for cut in cuts_of(x.shape, **params)[0]]
    rows, columns = cuts[n:]
    if n:
        x = x.stacked().each(lambda part, core: part[tuple(cuts[:n])])
    if all(cut == slice(0, size, 1) for cut, size in zip(cuts[n:], x.matrix_shape, strict=True)):
        return x
    return NotImplemented if rows != columns else inside(lambda x: x.diagonal_block(rows), x)


@register("dynamic_slice")
def _dynamic_slice(x: StructuredMatrix, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    n = x.num_batch
    # A block with dynamic rows and columns isn't structured, so only support slices of batch axes.
    if tuple(slice_sizes[n:]) != x.matrix_shape:
        return NotImplemented

    touched = [axis for axis in range(n) if slice_sizes[axis] != x.shape[axis]]

    def cut(part: Any, axis: Any) -> Any:
        return dynamic_slice_in_dim(part, starts[axis], slice_sizes[axis], axis)

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
    """Selects whole matrices from a stack."""
    dnums, n = dimension_numbers, x.num_batch
    touched = {*dnums.start_index_map, *dnums.collapsed_slice_dims, *dnums.operand_batching_dims}
    ndim = jnp.ndim(indices) - 1 + len(dnums.offset_dims)
    kept = tuple(slice_sizes[n:]) == x.matrix_shape and not touched & {n, n + 1}
    # Slices have to be whole matrices, with their axes last in the result.
    if not kept or tuple(dnums.offset_dims[-2:]) != (ndim - 2, ndim - 1):
        return NotImplemented

    if fills(indices, x.shape, dnums, slice_sizes, mode):
        fill = fill_value_of(mode, fill_value, x.dtype)
        if x.OTHERS is None and fill != 0:
            return NotImplemented  # this type can't be filled with this value
        constant_of = dict.fromkeys(x.CORE, 0) | {x.FACTORS[0]: fill} | (x.OTHERS or {})
    else:
        mode = lax.GatherScatterMode.from_any(mode)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:  # here all indices are concrete and in bounds
            mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        constant_of = dict.fromkeys(x.CORE)

    def pick(name: str, part: Any) -> Any:
        core = x.CORE[name]
        numbers = dnums._replace(offset_dims=(*dnums.offset_dims[:-2], *range(ndim - 2, ndim - 2 + core)))
        sizes = (*slice_sizes[:n], *part.shape[n:])

        def gather(part: Any) -> Any:
            return lax.gather(
                part, jnp.asarray(indices), numbers, sizes, mode=mode, fill_value=constant_of[name], **params
            )

        return quaxify(gather)(part)

    whole = x.converted(x.dtype).stacked()
    return whole.with_parts({name: pick(name, part) for name, part in whole.parts.items()})
