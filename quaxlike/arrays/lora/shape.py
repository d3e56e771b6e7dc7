"""Axes of adapted arrays: moving, reshaping, stacking, fusing and indexing them.

Slices are adapted arrays, and so are matrices looked up in a stack (experts); rows that are looked up
(embeddings) are dense.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ...core.jaxprs.evaluate import cached_trace
from ...core.quaxify import quaxify
from ...core.rules import register
from ..adapted import alike_in_training, matrix_labels
from ..adapted_rules import Lookup, gather_matrices
from ..bounds import cuts_of, dynamic_slice_in_dim, fill_value_of, filled, fills, in_bounds, slice_in_dim
from ..dot_axes import Labels, arrange, cast, common_dtype, contract
from .array import (
    RANK,
    LoraArray,
    drops,
    has_all_axes,
    labels,
    padded_to,
    parts_of,
    plainly_scaled,
    row_scale,
)
from .dot import add, multiply


def each(lora: LoraArray, fn: Callable[[Any, Labels], Any], order: Sequence[int] | None = None) -> LoraArray:
    """Replaces each array of `lora` by `fn(part, labels)`; `order` lists the labels of the result's axes."""
    n = lora.ndim
    order = range(n) if order is None else order
    at = {label: axis - len(order) for axis, label in enumerate(order)}
    fn = quaxify(fn)
    return lora.replace(
        **{name: fn(getattr(lora, name), own) for name, own in parts_of(lora).items()},
        out_axes=tuple(at[n + axis] for axis in lora.out_axes if n + axis in at),
        in_axes=tuple(at[n + axis] for axis in lora.in_axes if n + axis in at),
    )


@register("transpose")
@cached_trace
def _transpose(x: LoraArray, *, permutation: Sequence[int]):
    """Transposes the base. In the factors only batch axes move; `out_axes` and `in_axes` change instead."""
    matrix = matrix_labels(x)
    batch = [i for i in permutation if i not in matrix]
    w_labels, *factor_labels = labels(x)
    for own, order in ((w_labels, permutation), *((own, batch) for own in factor_labels)):
        missing = [i for i in order if i not in own]
        if missing != list(order[: len(missing)]):
            return NotImplemented  # a batch axis that this part lacks would have to follow one that it has

    def transposed(part: Any, own: Labels) -> Any:
        if matrix <= set(own):
            return arrange(part, own, [i for i in permutation if i in own])
        return arrange(part, own, [*(i for i in batch if i in own), *(i for i in own if i not in batch)])

    return each(x, transposed, permutation)


@register("rev")
def _rev(x: LoraArray, *, dimensions: Sequence[Any]):
    """Reverses each part along those of these axes that it has."""
    own_axes = lambda own: [axis for axis, label in enumerate(own) if label in dimensions]
    return each(x, lambda part, own: jax.lax.rev(part, own_axes(own)))


@register("squeeze")
def _squeeze(x: LoraArray, *, dimensions: Sequence[Any]):
    left = set(range(-x.ndim, 0)) - {i - x.ndim for i in dimensions}
    if not left & {*x.out_axes} or not left & {*x.in_axes}:  # a single row or column is not a weight
        return jax.lax.squeeze(x.materialise(), dimensions)

    def squeezed(part: Any, own: Labels) -> Any:
        return jax.lax.squeeze(part, [axis for axis, label in enumerate(own) if label in dimensions])

    return each(x, squeezed, [i for i in range(x.ndim) if i not in dimensions])


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: LoraArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
):
    """Adds new leading axes, as batch axes of `a` alone, or axes of size one anywhere."""
    n, n_new = x.ndim, len(shape) - x.ndim
    if x.shape != tuple(shape[i] for i in broadcast_dimensions):
        return NotImplemented
    batch = [i for i in range(n) if i not in matrix_labels(x)]
    if tuple(broadcast_dimensions) == tuple(range(n_new, len(shape))):
        sizes = (*shape[:n_new], *(x.shape[i] for i in batch))
        return x.replace(a=quaxify(jnp.broadcast_to)(x.a, sizes + x.a.shape[-1 - len(x.in_axes) :]))
    order = [n + axis for axis in range(len(shape))]  # labels from n on are new
    for label, axis in enumerate(broadcast_dimensions):
        order[axis] = label
    new = [size for size, label in zip(shape, order, strict=True) if label >= n]
    return with_axes(x, order) if set(new) == {1} and has_all_axes(x) else NotImplemented


def with_all_axes(x: LoraArray) -> LoraArray:
    """The same array with all batch axes on every part; those that a part lacks go in front of its own."""
    if has_all_axes(x):
        return x
    matrix = matrix_labels(x)
    batch = [size for i, size in enumerate(x.shape) if i not in matrix]

    def stretched(part: Any, own: Labels) -> Any:
        shape = (*batch, *part.shape[part.ndim - len({*own} & {RANK, *matrix}) :])
        return jnp.broadcast_to(part, x.shape if matrix <= {*own} else shape)

    return each(x, stretched)


def with_axes(x: LoraArray, order: Sequence[int]) -> LoraArray:
    """`x`, which has all axes, with new axes of size one, whose labels in `order` start at `x.ndim`."""
    matrix = matrix_labels(x)
    batch = [i for i in order if i not in matrix]

    def expanded(part: Any, own: Labels) -> Any:
        if matrix <= set(own):
            return arrange(part, own, order)
        return arrange(part, own, [*batch, *(i for i in own if i not in batch)])

    return each(x, expanded, order)


@register("concatenate")
def _concatenate(*operands: LoraArray | ArrayLike, dimension: int):
    loras = alike(operands)
    if loras is None:
        return NotImplemented
    return (_fused if dimension in matrix_labels(loras[0]) else _in_a_row)(loras, dimension)


@register("stack")
def _stack(*operands: LoraArray | ArrayLike, axis: int):
    loras = alike(operands)
    if loras is None:
        return NotImplemented
    order = list(range(loras[0].ndim))
    order.insert(axis, loras[0].ndim)
    return _in_a_row([with_axes(x, order) for x in loras], axis)


def alike(operands: Sequence[Any]) -> list[LoraArray] | None:
    """The operands as adapted arrays with the same axes; None if that is impossible."""
    like = with_all_axes(next(x for x in operands if isinstance(x, LoraArray)))
    loras = [
        with_all_axes(x) if isinstance(x, LoraArray) else without_adapter(jnp.asarray(x), like)
        for x in operands
    ]
    axes = {(x.ndim, x.out_axes, x.in_axes, x.magnitude is None) for x in loras}
    return loras if len(axes) == 1 and not any(map(drops, loras)) else None


def without_adapter(w: Any, like: LoraArray) -> LoraArray:
    """`w` with an adapter of rank 0; gradients flow to `w`."""
    sizes = dict(enumerate(w.shape)) | {RANK: 0}
    _, a_labels, b_labels = labels(like)
    a, b = (jnp.zeros([sizes[i] for i in own], part.dtype) for own, part in
            ((a_labels, like.a), (b_labels, like.b)))  # fmt: skip
    return LoraArray(w, a, b, gradients="pass", out_axes=like.out_axes, in_axes=like.in_axes)


def _in_a_row(loras: Sequence[LoraArray], axis: int) -> LoraArray:
    """Joins arrays along a batch axis."""
    first, *_ = loras = alike_in_training(loras)
    if any(statics(x) != statics(first) for x in loras):
        rank = max(x.rank for x in loras)
        loras = [padded_to(plainly_scaled(x), rank) for x in loras]
    return loras[0].replace(
        **{
            name: joined([getattr(x, name) for x in loras], own.index(axis))
            for name, own in parts_of(first).items()
        }
    )


def _fused(loras: Sequence[LoraArray], axis: int) -> Any:
    """Joins arrays along an axis of the matrix. The rank of the result is the sum of all ranks, since each
    adapter acts only on its own part."""
    parts = parts_of(loras[0])
    if loras[0].magnitude is not None and axis not in parts["b"]:
        return NotImplemented  # longer rows have other norms
    loras = [plainly_scaled(x) for x in alike_in_training(loras)]
    rank, before, padded = sum(x.rank for x in loras), 0, []
    for x in loras:
        padded.append(padded_to(x, rank, before))
        before += x.rank
    # The factor with the axis is block diagonal; the other one is concatenated along the rank.
    fused: dict[str, Any] = {}
    for name, own in parts.items():
        arrays = [getattr(x, name) for x in (padded if axis in own and RANK in own else loras)]
        fused[name] = joined(arrays, own.index(axis if axis in own else RANK))
    return loras[0].replace(**fused, alpha=float(rank))


def statics(x: LoraArray) -> Any:
    """The statics that stacked adapters must share."""
    return x.rank, x.alpha, x.rslora, x.dropout


def joined(parts: Sequence[Any], axis: int) -> Any:
    dtype = common_dtype(*parts)
    return quaxify(lambda parts: jnp.concatenate([cast(x, dtype) for x in parts], axis))(parts)


@register("reshape")
def _reshape(x: LoraArray, *, new_sizes: Sequence[int], **params: Any):
    """Splits or merges axes of `out`, of `in`, or of the batch; mixing these makes the array dense."""
    groups = _groups(x.shape, new_sizes)
    if groups is None or any(value is not None for value in params.values()) or not has_all_axes(x):
        return NotImplemented
    n, m = x.ndim, len(new_sizes)
    out, into = ([n + axis for axis in axes] for axes in (x.out_axes, x.in_axes))
    batch = [i for i in range(n) if i not in matrix_labels(x)]
    for old, _ in groups:
        kind = next(kind for kind in (out, into, batch) if old[0] in kind)
        start = kind.index(old[0])
        if kind[start : start + len(old)] != list(old) or (kind is batch and x.key is not None):
            return NotImplemented
    new = {old[0]: axes for old, axes in groups}

    def reshaped(part: Any, own: Labels) -> Any:
        size_of = lambda i: [x.rank] if i == RANK else [new_sizes[j] for j in new.get(i, ())]
        return part.reshape([size for i in own for size in size_of(i)])

    return each(x, reshaped).replace(
        out_axes=tuple(j - m for i in out for j in new.get(i, ())),
        in_axes=tuple(j - m for i in into for j in new.get(i, ())),
    )


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]] | None:
    """The shortest runs of old axes that become runs of new ones; None for arrays without elements."""
    if math.prod(new) == 0 or not old or not new:
        return None
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        start, left, right = (i, j), old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((range(start[0], i), range(start[1], j)))
    last_old, last_new = groups[-1]  # takes the remaining axes, which are of size one
    groups[-1] = (range(last_old.start, len(old)), range(last_new.start, len(new)))
    return groups


def _cut(x: LoraArray, cut: Callable[[Any, Labels], Any], touched: Sequence[int]) -> Any:
    """Applies `cut` to each part of `x`; `touched` are the labels of the axes that become shorter."""
    if x.magnitude is None or not any(i - x.ndim in x.in_axes for i in touched):
        return each(x, cut)
    # The norms of a DoRA are those of whole rows.
    scale, own = row_scale(x)
    part = each(x.replace(magnitude=None), cut).materialise()
    return multiply(part, arrange(cut(scale, own), own, range(x.ndim)))


@register("slice")
def _slice(x: LoraArray, **params: Any):
    cuts, touched = cuts_of(x.shape, **params)

    def cut(part: Any, own: Labels) -> Any:
        for axis, i in enumerate(own):
            if i in touched:
                part = slice_in_dim(part, *cuts[i], axis)
        return part

    return _cut(x, cut, touched)


@register("dynamic_slice")
def _dynamic_slice(x: LoraArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    def cut(part: Any, own: Labels) -> Any:
        for axis, i in enumerate(own):
            if i in touched:
                part = dynamic_slice_in_dim(part, starts[i], slice_sizes[i], axis)
        return part

    touched = [i for i, size in enumerate(x.shape) if slice_sizes[i] != size]
    return _cut(x, cut, touched)


@register("split")
def _split(x: LoraArray, *, sizes: Sequence[Any], axis: int):  # sizes may be NumPy integers
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    split = quaxify(lambda x, start, end: slice_in_dim(x, start, end, axis=axis))
    return [split(x, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@register("gather")
def _gather(
    x: LoraArray,
    indices: ArrayLike,
    *,
    dimension_numbers: jax.lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
):
    """Implements `jnp.take`, indexing with arrays, and their batched forms."""
    dnums = dimension_numbers
    where = indices, x.shape, dnums, slice_sizes
    stack = gather_matrices(
        x,
        indices,
        dimension_numbers=dnums,
        slice_sizes=slice_sizes,
        mode=mode,
        fill_value=fill_value,
        **params,
    )
    if stack is not NotImplemented:
        return stack
    picked, paired = dnums.start_index_map, dnums.operand_batching_dims
    if any(slice_sizes[i] != size for i, size in enumerate(x.shape) if i not in picked and i not in paired):
        return NotImplemented
    w_labels, a_labels, b_labels = labels(x)
    fill = fill_value_of(mode, fill_value, x.dtype)
    # Filling the base with NaN makes the sum NaN, but also gradients of the factors, unless these are filled
    # in the same slots.
    in_all = all(set(picked) <= set(own) for own in (w_labels, a_labels, b_labels))
    masked = fills(*where, mode) and not (in_all and np.isnan(fill))
    if masked:
        mode, fill_value = jax.lax.GatherScatterMode.CLIP, None
    gathered = Lookup(x, indices, dnums, slice_sizes, mode, params)
    out = gathered.out

    def rows(w: Any, a: Any, b: Any) -> Any:
        w = arrange(*gathered(w, w_labels, fill_value), out)
        dtype = common_dtype(a, b)
        a, own_a = gathered(cast(a, dtype), a_labels, 0)
        b, own_b = gathered(cast(b, dtype), b_labels, 0)
        return add(w, arrange(*contract(b, own_b, a, own_a, out), out) * x.scaling)

    y = quaxify(rows)(x.base, x.a, x.b)
    if x.magnitude is not None:
        y = multiply(y, arrange(*gathered(*row_scale(x), 1), out))
    return quaxify(lambda y: filled(y, in_bounds(*where), dnums, fill))(y) if masked else y
