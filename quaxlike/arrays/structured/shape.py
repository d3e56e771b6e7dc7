"""Axes of structured matrices: moving and joining the batch axes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...core.quaxify import quaxify
from ...core.rules import register
from ..batch_axes import reshape_batch, squeeze_batch, transpose_batch
from .base import StructuredMatrix


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
            return part  # shared along the new axes as well
        sizes = (*shape[:new], *part.shape[part.ndim - core :])
        return lax.broadcast_in_dim(part, sizes, (*own, *range(new, new + core)))

    out = x.each(broadcast)
    if out.batch == tuple(shape[:new]):
        return out
    # At least one part must have the new axes.
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
    """Applies `join` to each part of several matrices of one type."""
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
    if dimension >= x.num_batch:
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.concatenate(parts, dimension))


@register("stack")
def _stack(x: StructuredMatrix, *rest: StructuredMatrix, axis: int, **params: Any):
    if axis > x.num_batch:
        return NotImplemented
    return _join([x, *rest], lambda parts: jnp.stack(parts, axis))
