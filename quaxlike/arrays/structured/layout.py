"""What moves, cuts or joins the axes of a structured matrix, as far as it stays one: the batch axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ..bounds import dynamic_slice_in_dim, fill_value_of, fills
from .base import StructuredMatrix
from .diagonal import DiagonalMatrix
from .tridiagonal import TridiagonalMatrix


@register("transpose")
def _transpose(x: StructuredMatrix, *, permutation: Sequence[int]):
    n = len(x.batch)
    *stack, i, j = permutation
    if {i, j} != {n, n + 1}:
        return NotImplemented
    if stack != list(range(n)):
        x = x.stacked().each(lambda part, core: jnp.transpose(part, [*stack, *range(n, n + core)]))
    return x if i == n else x.transposed()


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: StructuredMatrix, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **params: Any
):
    n, new = len(x.batch), len(shape) - 2
    *stack, i, j = broadcast_dimensions
    if (i, j) != (new, new + 1) or tuple(shape[-2:]) != x.matrix_shape:
        return NotImplemented

    def broadcast(part: Any, core: int) -> Any:
        own = stack[n - (part.ndim - core) :]
        if not own:
            return part  # shared by the new axes as well
        sizes = (*shape[:new], *part.shape[part.ndim - core :])
        return lax.broadcast_in_dim(part, sizes, (*own, *range(new, new + core)))

    out = x.each(broadcast)
    if out.batch == tuple(shape[:new]):
        return out
    # One part has to carry the new axes.
    (carrier, *_), part = x.FACTORS, x.parts[x.FACTORS[0]]
    sizes = (*shape[:new], *part.shape[part.ndim - x.CORE[carrier] :])
    return out.with_parts(out.parts | {carrier: quaxify(jnp.broadcast_to)(part, sizes)})


@register("reshape")
def _reshape(x: StructuredMatrix, *, new_sizes: Sequence[int], dimensions: Any = None, **params: Any):
    stack = tuple(new_sizes[:-2])
    kept = tuple(new_sizes[-2:]) == x.matrix_shape and math.prod(stack) == math.prod(x.batch)
    if not kept or dimensions is not None:
        return NotImplemented
    n = len(x.batch)
    return x.stacked().each(lambda part, _: jnp.reshape(part, (*stack, *part.shape[n:])))


@register("squeeze")
def _squeeze(x: StructuredMatrix, *, dimensions: Sequence[int]):
    if any(axis >= len(x.batch) for axis in dimensions):
        return NotImplemented
    return x.stacked().each(lambda part, _: jnp.squeeze(part, tuple(dimensions)))


# -------------------------------------------------------------------------------------------------
# Cutting
# -------------------------------------------------------------------------------------------------


@register("slice")
def _slice(
    x: StructuredMatrix, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any = None
):
    n = len(x.batch)
    strides = tuple(strides or (1,) * x.ndim)
    cuts = [slice(*cut) for cut in zip(start_indices, limit_indices, strides, strict=True)]
    rows, columns = cuts[n:]
    if any(cut != slice(0, size, 1) for cut, size in zip(cuts[n:], x.matrix_shape, strict=True)):
        # A square block on the diagonal is one of these again.
        if rows != columns or not isinstance(x, DiagonalMatrix | TridiagonalMatrix):
            return NotImplemented
        if isinstance(x, TridiagonalMatrix) and (rows.step != 1 or rows.stop <= rows.start):
            return NotImplemented
    x = x.stacked() if n else x
    shorter = slice(rows.start, max(rows.stop - 1, rows.start), rows.step)

    def cut(name: str, part: Any) -> Any:
        core = [rows] if name == "diagonal" else [shorter] if x.CORE[name] == 1 else []
        return quaxify(lambda part: part[(*cuts[:n], *core)])(part)

    return x.with_parts({name: cut(name, part) for name, part in x.parts.items()})


@register("dynamic_slice")
def _dynamic_slice(x: StructuredMatrix, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    n = len(x.batch)
    if tuple(slice_sizes[n:]) != x.matrix_shape:
        return NotImplemented

    def cut(part: Any, _: int) -> Any:
        for axis in touched:
            part = dynamic_slice_in_dim(part, starts[axis], slice_sizes[axis], axis)
        return part

    touched = [axis for axis in range(n) if slice_sizes[axis] != x.shape[axis]]
    return x.stacked().each(cut) if touched else x


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
    """Whole matrices, picked from a stack by index."""
    dnums, n = dimension_numbers, len(x.batch)
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
        if mode == lax.GatherScatterMode.FILL_OR_DROP:  # all indices are known, and in bounds
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


# -------------------------------------------------------------------------------------------------
# Joining
# -------------------------------------------------------------------------------------------------


def _join(xs: Sequence[StructuredMatrix], join: Any) -> Any:
    """`join` of each part of several matrices of one type."""
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
def _concatenate(x: StructuredMatrix, *rest: StructuredMatrix, dimension: int):
    if dimension >= len(x.batch):
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.concatenate(parts, dimension))


@register("stack")
def _stack(x: StructuredMatrix, *rest: StructuredMatrix, axis: int, **params: Any):
    if axis > len(x.batch):
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.stack(parts, axis))
