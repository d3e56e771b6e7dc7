"""Axes of a structured matrix, moved and joined as far as it stays one: the batch axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...core.quaxify import quaxify
from ...core.rules import register
from .base import StructuredMatrix


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
