"""Rules for adapters of any type: conversion, factors, and what is done to batch axes.

Each matrix of a batch keeps its own adapter. What happens to the axes of a matrix is for each type to say.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..core.quaxify import quaxify
from ..core.rules import register, register_on_either_side
from ..core.values import is_value
from . import precedence
from .adapted import (
    AdaptedArray,
    alike_in_training,
    array_fields,
    can_be_stacked,
    knows_axes,
    labels_of,
    matrix_labels,
)
from .batch_axes import cut_batch, reshape_batch, squeeze_batch, transpose_batch
from .bounds import cuts_of, dynamic_slice_in_dim, fill_value_of, fills, slice_in_dim
from .dot_axes import Labels, arrange, common_dtype
from .factors import is_infinite, multiplies_nothing, reciprocal


@register("convert_element_type")
def _convert_element_type(x: AdaptedArray, *, new_dtype: Any, **params: Any):
    """Converts the base and all floating-point parts."""
    if not jnp.issubdtype(new_dtype, jnp.floating) or type(x).default is not AdaptedArray.default:
        return NotImplemented

    def converted(part: Any) -> Any:
        floating = jnp.issubdtype(part.dtype, jnp.floating)
        return quaxify(lambda part: part.astype(new_dtype))(part) if floating else part

    fields = {name: getattr(x, name) for name in array_fields(x)}
    out = x.replace(**jtu.tree_map(converted, fields, is_leaf=is_value))
    return out if out.dtype == new_dtype else NotImplemented


@register_on_either_side("mul", AdaptedArray, other=ArrayLike, precedence=precedence.ADAPTED)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any):
    return _times(x, y) if isinstance(x, AdaptedArray) else _times(y, x)


@register("div", precedence=precedence.ADAPTED)
def _div(x: AdaptedArray, y: ArrayLike, **params: Any):
    return _times(x, reciprocal(y))


@register("neg")
def _neg(x: AdaptedArray, **params: Any):
    return _times(x, jnp.asarray(-1, x.dtype))


def _times(x: AdaptedArray, y: Any) -> Any:
    if multiplies_nothing(x, y):
        return x
    if isinstance(y, AdaptedArray) or is_infinite(y):
        return NotImplemented
    return x.times(jnp.asarray(y))


def _are_batch_axes(x: AdaptedArray, axes: Sequence[int]) -> bool:
    return x.num_batch > 0 and all(axis < x.num_batch for axis in axes)


@register("transpose")
def _transpose(x: AdaptedArray, *, permutation: Sequence[int]):
    moved = [i for i, axis in enumerate(permutation) if i != axis]
    return transpose_batch(x, permutation[: x.num_batch]) if _are_batch_axes(x, moved) else NotImplemented


@register("squeeze")
def _squeeze(x: AdaptedArray, *, dimensions: Sequence[Any]):
    return squeeze_batch(x, dimensions) if _are_batch_axes(x, dimensions) else NotImplemented


@register("reshape")
def _reshape(x: AdaptedArray, *, new_sizes: Sequence[int], dimensions: Any = None, **params: Any):
    known = can_be_stacked(x) and math.prod(new_sizes) and dimensions is None
    return reshape_batch(x, new_sizes) if known else NotImplemented


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: AdaptedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
):
    """Adds batch axes: of size one on each part, or else in front, on the first part alone."""
    n, n_new = x.num_batch, len(shape) - x.ndim
    new = [size for axis, size in enumerate(shape) if axis not in broadcast_dimensions]
    in_place = [*broadcast_dimensions[n:]] == [*range(n + n_new, len(shape))]
    same = x.shape == tuple(shape[i] for i in broadcast_dimensions)
    if not (can_be_stacked(x) and in_place and same):
        return NotImplemented
    if {*new} <= {1}:
        return reshape_batch(x, shape)
    labels = {name: own for name, own in labels_of(x).items() if name != "w"}
    if not labels or [*broadcast_dimensions[:n]] != [*range(n_new, n + n_new)]:
        return NotImplemented
    name, own = next(iter(labels.items()))
    part = getattr(x, name)
    core = part.shape[sum(0 <= i < n for i in own) :]
    return x.replace(**{name: quaxify(jnp.broadcast_to)(part, (*shape[: n + n_new], *core))})


@register("slice")
def _slice(x: AdaptedArray, **params: Any):
    cuts, touched = cuts_of(x.shape, **params)

    def cut(part: Any, axis: int) -> Any:
        start, stop, step = cuts[axis]
        return slice_in_dim(part, start, stop, step, axis)

    return cut_batch(x, cut, touched) if _are_batch_axes(x, touched) else NotImplemented


@register("dynamic_slice")
def _dynamic_slice(x: AdaptedArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    touched = [axis for axis, size in enumerate(x.shape) if slice_sizes[axis] != size]
    cut = lambda part, axis: dynamic_slice_in_dim(part, starts[axis], slice_sizes[axis], axis)
    return cut_batch(x, cut, touched) if _are_batch_axes(x, touched) else NotImplemented


@register("split")
def _split(x: AdaptedArray, *, sizes: Sequence[Any], axis: int):  # sizes may be NumPy integers
    if not _are_batch_axes(x, [axis]):
        return NotImplemented
    starts = np.cumsum([0, *sizes])
    return [
        x.stacked().each(lambda part, _, start=start, size=size: slice_in_dim(
            part, int(start), int(start + size), axis=axis))
        for start, size in zip(starts, sizes, strict=False)
    ]  # fmt: skip


@register("concatenate")
def _concatenate(*operands: AdaptedArray | ArrayLike, dimension: int):
    like = next(x for x in operands if isinstance(x, AdaptedArray))
    fits = _are_batch_axes(like, [dimension])
    return _joined(operands, dimension, jnp.concatenate) if fits else NotImplemented


@register("stack")
def _stack(*operands: AdaptedArray | ArrayLike, axis: int):
    like = next(x for x in operands if isinstance(x, AdaptedArray))
    fits = can_be_stacked(like) and axis <= like.num_batch
    return _joined(operands, axis, jnp.stack) if fits else NotImplemented


def _joined(operands: Sequence[Any], axis: int, join: Callable[..., Any]) -> Any:
    """Adapters of one form, joined part by part; an array among them gets parts that add nothing."""
    like = next(x for x in operands if isinstance(x, AdaptedArray))
    adapted = [x if isinstance(x, AdaptedArray) else type(like).promote(x, like) for x in operands]
    if any(x is NotImplemented or _form(x) != _form(like) for x in adapted):
        return NotImplemented
    adapted = [x.stacked() for x in alike_in_training(adapted)]

    def joined(*parts: Any) -> Any:
        dtype = common_dtype(*parts)
        return join([part.astype(dtype) for part in parts], axis)

    parts = {name: [getattr(x, name) for x in adapted] for name in labels_of(like)}
    return adapted[0].replace(**{name: quaxify(joined)(*own) for name, own in parts.items()})


def _form(x: AdaptedArray) -> Any:
    """What adapters that are joined must have in common."""
    n, labels = x.num_batch, labels_of(x)
    core = {
        name: (getattr(x, name).shape[sum(0 <= i < n for i in own) :], getattr(x, name).dtype)
        for name, own in labels.items()
        if name != "w"
    }
    statics = x.replace(**dict.fromkeys(array_fields(x)), gradients="none")
    return type(x), jtu.tree_structure(statics), core, x.ndim


class Lookup:
    """A `gather` from an array whose parts have labelled axes. Axes of the indices are labelled `ndim`,
    `ndim + 1`, ...; an axis that is paired with one of the indices shares its label."""

    out: Labels
    """The labels of the axes of the result."""

    def __init__(
        self,
        x: AdaptedArray,
        indices: Any,
        dimension_numbers: jax.lax.GatherDimensionNumbers,
        slice_sizes: Sequence[int],
        mode: Any,
        params: Any,
    ) -> None:
        dnums, n = dimension_numbers, x.ndim
        self._indices, self._sizes, self._mode, self._params = indices, slice_sizes, mode, params
        self._picked, self._dropped, self._n = dnums.start_index_map, dnums.collapsed_slice_dims, n
        self.gone = {*dnums.collapsed_slice_dims, *dnums.operand_batching_dims}
        of_indices = (n + i for i in dnums.start_indices_batching_dims)
        self._partner = dict(zip(dnums.operand_batching_dims, of_indices, strict=True))
        self._of_indices = [n + i for i in range(jnp.ndim(indices) - 1)]
        self.out = list(self._of_indices)
        kept = [i for i in range(n) if i not in self.gone]
        for position, label in zip(dnums.offset_dims, kept, strict=True):
            self.out.insert(position, label)

    def __call__(self, part: Any, own: Labels, outside: Any) -> tuple[Any, Labels]:
        """The slices of a part, and the labels of their axes; `outside` fills those out of bounds."""
        n_indices, partner = len(self._of_indices), self._partner
        mine = [i for i in self._picked if i in own]
        if not mine:
            return part, [partner.get(i, i) for i in own]
        here = [i for i in own if i in partner]
        kept = [i for i in own if i not in self.gone]
        numbers = jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(range(n_indices, n_indices + len(kept))),
            collapsed_slice_dims=tuple(axis for axis, i in enumerate(own) if i in self._dropped),
            start_index_map=tuple(own.index(i) for i in mine),
            operand_batching_dims=tuple(own.index(i) for i in here),
            start_indices_batching_dims=tuple(partner[i] - self._n for i in here),
        )
        columns = jnp.asarray(self._indices)[..., jnp.array([self._picked.index(i) for i in mine])]
        sizes = tuple(size if i < 0 else self._sizes[i] for i, size in zip(own, part.shape, strict=True))
        part = jax.lax.gather(
            part, columns, numbers, sizes, mode=self._mode, fill_value=outside, **self._params
        )
        return part, [*self._of_indices, *kept]


@register("gather")
def gather_matrices(
    x: AdaptedArray,
    indices: ArrayLike,
    *,
    dimension_numbers: jax.lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """Looks up whole matrices of a stack, each with its own adapter."""
    if not knows_axes(x):
        return NotImplemented
    labels, matrix, picked = labels_of(x), matrix_labels(x), dimension_numbers.start_index_map
    lookup = Lookup(x, indices, dimension_numbers, slice_sizes, mode, params)
    untouched = {*range(x.ndim)} - {*picked, *dimension_numbers.operand_batching_dims}
    if matrix & lookup.gone or any(slice_sizes[i] != x.shape[i] for i in matrix | untouched):
        return NotImplemented
    numbers = {name: own for name, own in labels.items() if not _is_key(getattr(x, name))}
    if any(own for name, own in labels.items() if name not in numbers):
        return NotImplemented  # keys of stacked adapters
    # Where the base is filled with NaN, so is the whole; parts that share a slice with others are not filled.
    fill = fill_value_of(mode, fill_value, x.dtype)
    in_all = all({*picked} <= {*own} for own in numbers.values())
    if fills(indices, x.shape, dimension_numbers, slice_sizes, mode) and not (in_all and np.isnan(fill)):
        return NotImplemented
    out = lookup.out
    batch = [i for i in out if i not in matrix]

    def part_of(part: Any, own: Labels, outside: Any) -> Any:
        part, found = lookup(part, own, outside)
        order = out if matrix <= {*found} else [*batch, *(i for i in found if i not in batch)]
        has = [i for i in order if i in found]
        return arrange(part, found, has) if has == order[len(order) - len(has) :] else None

    found = {
        name: quaxify(part_of)(getattr(x, name), own, fill_value if name == "w" else 0)
        for name, own in numbers.items()
    }
    if any(part is None for part in found.values()):
        return NotImplemented  # a part would have a batch axis in front of one that it lacks
    out_axes, in_axes = (
        tuple(out.index(x.ndim + axis) - len(out) for axis in axes) for axes in (x.out_axes, x.in_axes)
    )
    if (out_axes, in_axes) == (x.out_axes, x.in_axes):
        return x.replace(**found)
    fields = {field.name for field in dataclasses.fields(x)}
    stated = {"out_axes", "in_axes"} <= fields
    return x.replace(**found, out_axes=out_axes, in_axes=in_axes) if stated else NotImplemented


def _is_key(part: Any) -> bool:
    return jnp.issubdtype(part.dtype, jax.dtypes.extended)
