"""Axes of quantised arrays, rearranged without reading codes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ...core.rules import register
from .base import AbstractQuantizedArray
from .layout import reshaped, shortest, untied

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
    """Adds axes, or stretches those of size one: they become leading axes, whose leaves are repeated."""
    if params.get("sharding") is not None:
        return NotImplemented
    dims, n, shape = tuple(broadcast_dimensions), w.num_lead, tuple(shape)
    stretched = {w.permutation[i] for i, axis in enumerate(dims) if shape[axis] != w.shape[i]}
    new = [axis for axis in range(len(shape)) if axis not in dims]
    outer = len(shape) - len(w.inner_shape)
    if not w.axes and dims[n:] == tuple(range(outer, len(shape))) and all(i < n for i in stretched):
        return _broadcast_lead(w, shape[:outer], dims[:n])
    if not stretched and all(shape[axis] == 1 for axis in new):
        out = reshaped(w, shape)
        if out is not None:
            return out
    inner = [i for i in range(n, len(w.stored_shape)) if i not in stretched]
    if w.order is not None and n not in inner:
        return NotImplemented  # the first inner axis counts the rows that share the order
    # Stretched inner axes are dropped, and come first again, like new ones.
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
def _slice(
    w: AbstractQuantizedArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **params: Any,
) -> Any:
    strides = strides or (1,) * len(start_indices)
    cuts = list(zip(start_indices, limit_indices, strides, strict=True))
    whole = [cut == (0, size, 1) for cut, size in zip(cuts, w.shape, strict=True)]
    free = with_free_axes(w, [axis for axis, is_whole in enumerate(whole) if not is_whole])
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
    """Stacks arrays; the new axis comes first in the stored array."""
    ws = _alike(ws)
    if len({jax.tree.structure(w) for w in ws}) > 1:
        ws = tuple(untied(w) for w in ws)
        if len({jax.tree.structure(w) for w in ws}) > 1:
            return NotImplemented
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    order = [1 + i for i in ws[0].permutation]
    return stacked.with_axes([*order[:axis], 0, *order[axis:]])


@register("concatenate")
def _concatenate(*ws: AbstractQuantizedArray, dimension: int, **params: Any) -> Any:
    ws = _alike(ws)
    if len({jax.tree.structure(w.scale) for w in ws}) > 1:
        ws = tuple(untied(w) for w in ws)
    parts = [part for w in ws if (part := with_free_axes(w, [dimension])) is not None]
    if len(parts) < len(ws) or len({jax.tree.structure(part) for part in parts}) > 1:
        return NotImplemented
    stored_axis = parts[0].permutation[dimension]
    return jax.tree.map(lambda *leaves: lax.concatenate(leaves, stored_axis), *parts)


def _alike(ws: Sequence[_Q]) -> tuple[_Q, ...]:
    """Opens or trains the scales of all arrays if those of any are, and widens them if those of any were
    scaled."""
    if len({tuple(leaf.dtype for leaf in jax.tree.leaves(w)) for w in ws}) > 1:
        ws = tuple(w.times(jnp.float32(1)) for w in ws)
    train = any(w.train_scales for w in ws)
    return tuple(w.opened(train=train) for w in ws) if any(w.has_gradients for w in ws) else tuple(ws)


def with_free_axes(w: _Q, axes: Sequence[int]) -> _Q | None:
    """`w` in a form whose leading axes include these logical axes; None if that would cut blocks."""
    for form in (lambda: w, lambda: untied(w)):
        free = form()
        if all(free.permutation[axis] < free.num_lead for axis in axes):
            return free
    return None
