"""Indexing of adapted arrays: slices are adapted arrays, and so are matrices looked up in a stack (experts);
rows that are looked up (embeddings) are dense."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ..bounds import dynamic_slice_in_dim, fill_value_of, filled, fills, in_bounds
from .array import RANK, LoraArray, labels, matrix_labels, row_scale
from .dot import add, multiply
from .einsum import Labels, arrange, cast, common_dtype, contract
from .shape import each


def _cut(x: LoraArray, cut: Callable[[Any, Labels], Any], touched: Sequence[int]) -> Any:
    """Applies `cut` to each part of `x`; `touched` are the labels of the axes that become shorter."""
    if x.magnitude is None or not any(i - x.ndim in x.in_axes for i in touched):
        return each(x, cut)
    # The norms of a DoRA are those of whole rows.
    scale, own = row_scale(x)
    part = each(x.replace(magnitude=None), cut).materialise()
    return multiply(part, arrange(cut(scale, own), own, range(x.ndim)))


@register("slice")
def _slice(
    x: LoraArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
):
    strides = strides or [1] * x.ndim

    def cut(part: Any, own: Labels) -> Any:
        for axis, i in enumerate(own):
            if i in touched:
                part = jax.lax.slice_in_dim(part, start_indices[i], limit_indices[i], strides[i], axis)
        return part

    touched = [
        i
        for i, size in enumerate(x.shape)
        if (start_indices[i], limit_indices[i], strides[i]) != (0, size, 1)
    ]
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
    split = quaxify(lambda x, start, end: jax.lax.slice_in_dim(x, start, end, axis=axis))
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
    dnums, n = dimension_numbers, x.ndim
    picked, paired, dropped = dnums.start_index_map, dnums.operand_batching_dims, dnums.collapsed_slice_dims
    gone = {*dropped, *paired}
    if any(slice_sizes[i] != size for i, size in enumerate(x.shape) if i not in picked and i not in paired):
        return NotImplemented
    w_labels, a_labels, b_labels = labels(x)
    where = indices, x.shape, dnums, slice_sizes
    fill = fill_value_of(mode, fill_value, x.dtype)
    # Filling the base with NaN makes the sum NaN, but also gradients of the factors, unless these are filled
    # in the same slots.
    in_all = all(set(picked) <= set(own) for own in (w_labels, a_labels, b_labels))
    masked = fills(*where, mode) and not (in_all and np.isnan(fill))
    if masked:
        mode, fill_value = jax.lax.GatherScatterMode.CLIP, None
    # Axes of the indices are labelled n, n + 1, ...; an operand axis paired with one shares its label.
    n_indices = jnp.ndim(indices) - 1
    index_labels = [n + i for i in range(n_indices)]
    partner = dict(zip(paired, (n + i for i in dnums.start_indices_batching_dims), strict=True))
    out = list(index_labels)
    for position, label in zip(dnums.offset_dims, [i for i in range(n) if i not in gone], strict=True):
        out.insert(position, label)

    def gathered(part: Any, own: Labels, outside: Any) -> tuple[Any, Labels]:
        mine = [i for i in picked if i in own]
        if not mine:
            return part, [partner.get(i, i) for i in own]
        here = [i for i in own if i in partner]
        kept = [i for i in own if i not in gone]
        numbers = jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(range(n_indices, n_indices + len(kept))),
            collapsed_slice_dims=tuple(axis for axis, i in enumerate(own) if i in dropped),
            start_index_map=tuple(own.index(i) for i in mine),
            operand_batching_dims=tuple(own.index(i) for i in here),
            start_indices_batching_dims=tuple(partner[i] - n for i in here),
        )
        columns = jnp.asarray(indices)[..., jnp.array([picked.index(i) for i in mine])]
        sizes = [size if i == RANK else slice_sizes[i] for i, size in zip(own, part.shape, strict=True)]
        part = jax.lax.gather(part, columns, numbers, tuple(sizes), mode=mode, fill_value=outside, **params)
        return part, [*index_labels, *kept]

    matrix = matrix_labels(x)
    whole = not matrix & gone and all(slice_sizes[i] == x.shape[i] for i in matrix)
    if whole and not masked and (x.key is None or not x.key.ndim):
        stack = _stack(x, gathered, out, fill_value)
        if stack is not None:
            return stack

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


def _stack(
    x: LoraArray, gathered: Callable[..., tuple[Any, Labels]], out: Labels, fill_value: Any
) -> LoraArray | None:
    """Looks up whole matrices, each with its own adapter; `out` are the labels of the axes of the result.
    None if a part would have a batch axis in front of one that it lacks."""
    matrix, (w_labels, a_labels, b_labels) = matrix_labels(x), labels(x)
    batch = [i for i in out if i not in matrix]

    def part_of(part: Any, own: Labels, outside: Any) -> Any:
        part, found = gathered(part, own, outside)
        order = out if matrix <= set(found) else [*batch, *(i for i in found if i not in batch)]
        has = [i for i in order if i in found]
        return arrange(part, found, has) if has == order[len(order) - len(has) :] else None

    def parts(w: Any, a: Any, b: Any, magnitude: Any) -> Any:
        scaled = None if magnitude is None else part_of(magnitude, b_labels[:-1], 1)
        return (
            part_of(w, w_labels, fill_value),
            part_of(a, a_labels, 0),
            part_of(b, b_labels, 0),
            scaled,
        )

    w, a, b, magnitude = quaxify(parts)(x.w, x.a, x.b, x.magnitude)
    if any(part is None for part in (w, a, b)) or (magnitude is None) != (x.magnitude is None):
        return None
    at = lambda axes: tuple(out.index(x.ndim + axis) - len(out) for axis in axes)
    return x.replace(w=w, a=a, b=b, magnitude=magnitude, out_axes=at(x.out_axes), in_axes=at(x.in_axes))
