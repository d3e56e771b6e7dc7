"""Rules for the axes of adapted arrays: transposes, slices, joins, reshapes and lookups of each part.

The same rules work for every type, because the axes of all parts have labels (`labels_of`). If a part's axis
corresponds to an axis of the whole array, then its label is that axis number. If an axis only occurs in
parts, such as a LoRA's rank, then its label is negative. A part is constant along any axis with a label it
doesn't have. So a rule applies the same operation to each part as to the whole array, along whichever labels
the part has. Afterwards it records the new positions of the output and input axes.

Invariants before and after each rule:

- The base's axes are in the same order as the whole array's axes. Every other part starts with its
    batch axes, in this order, followed by the axes listed in `part_axes`. In particular, transposing the
    matrix only changes the base's axes.
- If a part doesn't have all batch axes, then the leading ones are missing: `labels_of` counts them from the
    end. If an operation would violate this, first add all batch axes to the part (`with_all_axes`).

Batch axes can always be sliced, because each matrix of a stack has its own adapter. Outputs and inputs can
only be sliced if the type allows it (`cuttable`), and only be moved or reshaped if the type can represent
their new positions (`any_axes`).
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import ArrayLike

from ..core.jaxprs.evaluate import cached_trace
from ..core.quaxify import quaxify
from ..core.rules import register
from .adapted import AdaptedArray, alike_in_training, array_fields, knows_axes, labels_of, matrix_labels
from .bounds import cuts_of, dynamic_slice_in_dim, fill_value_of, filled, fills, in_bounds, slice_in_dim
from .dot_axes import Labels, arrange, cast, common_dtype

# Part by part --------------------------------------------------------------------------------------


def each(
    x: AdaptedArray, fn: Callable[[Any, Labels, Labels], Any], order: Sequence[int] | None = None
) -> Any:
    """Replaces each part of `x` by `fn(part, labels, labels in the result)`.

    `order` lists the result's axis labels. Default: those of `x`. Returns `NotImplemented` if the type can't
    represent the resulting positions of the outputs or inputs.
    """
    order = range(x.ndim) if order is None else order
    axes = _axes_in(x, order)
    if axes is None:
        return NotImplemented
    wanted, fn = _labels_in(x, order), quaxify(fn)
    parts = {name: fn(getattr(x, name), own, wanted[name]) for name, own in labels_of(x).items()}
    return x.replace(**parts, **axes)


def _axes_in(x: AdaptedArray, order: Sequence[int]) -> dict[str, Any] | None:
    """Returns new values for `out_axes` and `in_axes` if these change. None if that isn't supported."""
    n = x.ndim
    at = {label: axis - len(order) for axis, label in enumerate(order)}
    old = {"out_axes": x.out_axes, "in_axes": x.in_axes}
    new = {name: tuple(at[n + i] for i in axes if n + i in at) for name, axes in old.items()}
    if new == old:
        return {}
    # Without outputs or inputs, this is a single row or column, which isn't a weight.
    return new if x.any_axes and all(new.values()) else None


def _labels_in(x: AdaptedArray, order: Sequence[int]) -> dict[str, Labels]:
    """Returns each part's labels, with all batch axes, for an array with the axes `order`."""
    matrix = matrix_labels(x)
    batch = [i for i in order if i not in matrix]
    found = {"w": [*order]}
    for name, own in labels_of(x).items():
        if name != "w":
            found[name] = [*batch, *(i for i in own if i < 0 or (i in matrix and i in order))]
    return found


def with_all_axes(x: AdaptedArray) -> Any:
    """Adds any missing batch axes to every part."""
    sizes = dict(enumerate(x.shape))

    def stretched(part: Any, own: Labels, wanted: Labels) -> Any:
        known = dict(zip(own, part.shape, strict=True)) | sizes
        shape = tuple(known[i] for i in wanted)
        return part if part.shape == shape else jnp.broadcast_to(part, shape)

    return each(x, stretched)


def _even(x: AdaptedArray) -> Any:
    """Expands any parts with size one along a batch axis where the whole array has another size."""
    for name, own in labels_of(x).items():
        sizes = zip(own, getattr(x, name).shape, strict=True)
        if any(i >= 0 and size != x.shape[i] for i, size in sizes):
            return with_all_axes(x)
    return x


def rearranged(x: AdaptedArray, order: Sequence[int]) -> Any:
    """Transposes to this label order. Labels from `x.ndim` on are new axes of size one."""
    n, wanted = x.ndim, _labels_in(x, order)
    lacked = {name: [i for i in wanted[name] if i not in own] for name, own in labels_of(x).items()}
    if any(i >= n for i in order) or any(wanted[name][: len(own)] != own for name, own in lacked.items()):
        x = with_all_axes(x)

    def moved(part: Any, own: Labels, wanted: Labels) -> Any:
        return arrange(part, own, [i for i in wanted if i in own or i >= n])

    return each(x, moved, order)


@register("transpose")
@cached_trace
def _transpose(x: AdaptedArray, *, permutation: Sequence[int]):
    return rearranged(x, permutation) if knows_axes(x) else NotImplemented


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: AdaptedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[Any], **params: Any
):
    """Adds leading axes (as batch axes, to the first part only), or axes of size one in any position."""
    n, n_new = x.ndim, len(shape) - x.ndim
    if not knows_axes(x) or x.shape != tuple(shape[i] for i in broadcast_dimensions):
        return NotImplemented
    # All other parts are constant along the new batch axes, so add these to one part only.
    if tuple(broadcast_dimensions) == tuple(range(n_new, len(shape))):
        name = next((name for name in labels_of(x) if name not in ("w", *x.numbers)), "w")
        part, own = getattr(x, name), _labels_in(x, range(n))[name]
        known = dict(zip(labels_of(x)[name], part.shape, strict=True)) | dict(enumerate(x.shape))
        sizes = (*shape[:n_new], *(known[i] for i in own))
        return x.replace(**{name: quaxify(jnp.broadcast_to)(part, sizes)})
    order = [n + axis for axis in range(len(shape))]
    for label, axis in enumerate(broadcast_dimensions):
        order[axis] = label
    new = {size for size, label in zip(shape, order, strict=True) if label >= n}
    return rearranged(x, order) if new == {1} else NotImplemented


@register("squeeze")
def _squeeze(x: AdaptedArray, *, dimensions: Sequence[Any]):
    def squeezed(part: Any, own: Labels, _: Labels) -> Any:
        return lax.squeeze(part, [axis for axis, label in enumerate(own) if label in dimensions])

    left = [i for i in range(x.ndim) if i not in dimensions]
    return each(x, squeezed, left) if knows_axes(x) else NotImplemented


# Slices --------------------------------------------------------------------------------------------


def _can_be_cut(x: AdaptedArray, axes: Collection[int]) -> bool:
    """Returns whether slicing the array along these axes slices its parts."""
    if not knows_axes(x):
        return False
    apart = {"out": x.out_axes, "in": x.in_axes}
    fixed = {x.ndim + axis for word in apart if word not in x.cuttable for axis in apart[word]}
    return fixed.isdisjoint(axes)


def _cut(x: AdaptedArray, axes: Collection[int], cut: Callable[[Any, int, int], Any]) -> Any:
    """Applies `cut(part, axis, label)` to each part, along whichever of the whole array's `axes` it has."""
    if not _can_be_cut(x, axes):
        return NotImplemented

    def along_each(part: Any, own: Labels, _: Labels) -> Any:
        for axis, label in enumerate(own):
            if label in axes:
                part = cut(part, axis, label)
        return part

    return each(_even(x), along_each)


@register("rev")
def _rev(x: AdaptedArray, *, dimensions: Sequence[Any]):
    return _cut(x, dimensions, lambda part, axis, _: lax.rev(part, [axis]))


@register("slice")
def _slice(x: AdaptedArray, **params: Any):
    cuts, touched = cuts_of(x.shape, **params)
    return _cut(x, touched, lambda part, axis, label: slice_in_dim(part, *cuts[label], axis))


@register("dynamic_slice")
def _dynamic_slice(x: AdaptedArray, *starts: ArrayLike, slice_sizes: Sequence[int], **params: Any):
    def cut(part: Any, axis: int, label: int) -> Any:
        return dynamic_slice_in_dim(part, starts[label], slice_sizes[label], axis)

    return _cut(x, [axis for axis, size in enumerate(x.shape) if slice_sizes[axis] != size], cut)


@register("split")
def _split(x: AdaptedArray, *, sizes: Sequence[Any], axis: int):  # sizes may be NumPy integers
    if not _can_be_cut(x, [axis]):
        return NotImplemented
    ends = [int(end) for end in np.cumsum(sizes)]
    split = quaxify(lambda x, start, end: slice_in_dim(x, start, end, axis=axis))
    return [split(x, end - int(size), end) for size, end in zip(sizes, ends, strict=True)]


# Joins ---------------------------------------------------------------------------------------------


@register("concatenate")
def _concatenate(*operands: AdaptedArray | ArrayLike, dimension: Any):  # may be a NumPy integer
    adapted = _unified(operands)
    if adapted is None or dimension in matrix_labels(adapted[0]):
        return NotImplemented
    return joined(adapted, int(dimension))


@register("stack")
def _stack(*operands: AdaptedArray | ArrayLike, axis: int):
    adapted = _unified(operands)
    return NotImplemented if adapted is None else stacked(adapted, axis)


def stacked(xs: Sequence[AdaptedArray], axis: int) -> Any:
    """Stacks adapters of the same form along a new batch axis. `NotImplemented` if that isn't supported."""
    order = list(range(xs[0].ndim))
    order.insert(axis, xs[0].ndim)
    expanded = [rearranged(x, order) for x in xs]
    return joined(expanded, axis) if expanded[0] is not NotImplemented else NotImplemented


def joined(xs: Sequence[AdaptedArray], axis: int) -> Any:
    """Concatenates adapters of the same form along a batch axis."""
    xs = [with_all_axes(x) for x in xs]
    parts = {
        name: concatenated([getattr(x, name) for x in xs], own.index(axis))
        for name, own in labels_of(xs[0]).items()
    }
    return xs[0].replace(**parts)


def concatenated(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays or Values in a common dtype."""
    dtype = common_dtype(*parts)
    return quaxify(lambda parts: jnp.concatenate([cast(x, dtype) for x in parts], axis))(parts)


def _unified(operands: Sequence[Any]) -> list[Any] | None:
    """Converts the operands to adapters of the same form. None if this isn't possible.

    Plain arrays get parts that don't change them.
    """
    like = next(x for x in operands if isinstance(x, AdaptedArray))
    if not knows_axes(like):
        return None
    adapted = [x if isinstance(x, AdaptedArray) else type(like).promote(x, like) for x in operands]
    form = _joining_form(like)
    if any(x is NotImplemented or not knows_axes(x) or _joining_form(x) != form for x in adapted):
        return None
    return alike_in_training(adapted)


def _joining_form(x: AdaptedArray) -> Any:
    """Returns everything that must agree for joining adapters."""
    matrix = matrix_labels(x)
    core: dict[str, Any] = {}
    for name, own in labels_of(x).items():
        part = getattr(x, name)
        if name != "w":
            sizes = zip(own, part.shape, strict=True)
            core[name] = [size for i, size in sizes if i < 0 or i in matrix], part.dtype
    statics = x.replace(**dict.fromkeys(array_fields(x)), gradients="none")
    return type(x), jtu.tree_structure(statics), core, x.ndim


# Reshapes ------------------------------------------------------------------------------------------


@register("reshape")
def _reshape(x: AdaptedArray, *, new_sizes: Sequence[int], **params: Any):
    """Splits or merges axes within `out`, `in`, or the batch. Materialises if this merges axes of several."""
    if not knows_axes(x) or any(value is not None for value in params.values()) or math.prod(new_sizes) == 0:
        return NotImplemented
    n, m, matrix = x.ndim, len(new_sizes), matrix_labels(x)
    batch = [i for i in range(n) if i not in matrix]
    ends = len(batch) - n  # used if all batch axes are leading ones, and the matrix isn't reshaped
    kept = batch == [*range(len(batch))] and tuple(new_sizes[ends:]) == x.shape[ends:]
    # Without batch axes so far, all new axes must have size one.
    if kept and not batch:
        return rearranged(x, [*range(n, m), *range(n)])
    if kept:
        last = range(ends, 0)
        groups = [(range(n + ends), range(m + ends)), *(([n + i], [m + i]) for i in last)]
    else:
        groups = _groups(x.shape, new_sizes)
    out, into = ([n + axis for axis in axes] for axes in (x.out_axes, x.in_axes))
    for old, _ in groups:
        kind = next(kind for kind in (out, into, batch) if old[0] in kind)
        start = kind.index(old[0])
        if kind[start : start + len(old)] != [*old]:
            return NotImplemented
    new = {old[0]: axes for old, axes in groups}
    axes = {
        "out_axes": tuple(j - m for i in out for j in new.get(i, ())),
        "in_axes": tuple(j - m for i in into for j in new.get(i, ())),
    }
    moved = axes != {"out_axes": x.out_axes, "in_axes": x.in_axes}
    if moved and not x.any_axes:
        return NotImplemented
    # If batch axes are split or merged, every part needs all of them.
    regrouped = any(old[0] in batch and (len(old), len(axes)) != (1, 1) for old, axes in groups)
    x = with_all_axes(x) if regrouped else _even(x)

    def reshaped(part: Any, own: Labels, _: Labels) -> Any:
        sizes: list[int] = []
        for i, size in zip(own, part.shape, strict=True):
            sizes += [size] if i < 0 else [new_sizes[j] for j in new.get(i, ())]
        return part.reshape(sizes)

    x = each(x, reshaped)
    return x.replace(**axes) if moved else x


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns the shortest runs of old axes, each with the run of new axes it is reshaped to.

    Assumes a nonempty array with at least one axis.
    """
    groups: list[tuple[Sequence[int], Sequence[int]]] = []
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
    if groups:  # the last run also includes the remaining axes, which have size one
        last_old, last_new = groups[-1]
        groups[-1] = (range(last_old[0], len(old)), range(last_new[0], len(new)))
    return groups


# Lookups -------------------------------------------------------------------------------------------


class Lookup:
    """A `gather` from an array with labelled parts.

    The index axes are labelled `ndim`, `ndim + 1`, and so on. The array's batching axes share their labels
    with the corresponding axes of the indices.
    """

    out: Labels
    """The labels of the axes of the result."""

    def __init__(
        self,
        x: AdaptedArray,
        indices: Any,
        dimension_numbers: lax.GatherDimensionNumbers,
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
        #: The labels of all axes that are indexed, or of which only a slice is read.
        self.cut = self.gone | {i for i, size in enumerate(x.shape) if slice_sizes[i] != size}

    def __call__(self, part: Any, own: Labels, outside: Any = None) -> tuple[Any, Labels]:
        """Gathers slices from a part, filling with `outside` if out of bounds. Also returns their labels."""
        n_indices, partner = len(self._of_indices), self._partner
        mine = [i for i in self._picked if i in own]
        # A part with none of the indexed axes is shared by all slices.
        if not mine:
            return part, [partner.get(i, i) for i in own]
        here = [i for i in own if i in partner]
        kept = [i for i in own if i not in self.gone]
        numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(range(n_indices, n_indices + len(kept))),
            collapsed_slice_dims=tuple(axis for axis, i in enumerate(own) if i in self._dropped),
            start_index_map=tuple(own.index(i) for i in mine),
            operand_batching_dims=tuple(own.index(i) for i in here),
            start_indices_batching_dims=tuple(partner[i] - self._n for i in here),
        )
        columns = jnp.asarray(self._indices)
        # Only use the columns of the indices for axes of this part.
        if len(mine) < len(self._picked):
            columns = columns[..., jnp.array([self._picked.index(i) for i in mine])]
        sizes = tuple(size if i < 0 else self._sizes[i] for i, size in zip(own, part.shape, strict=True))
        part = lax.gather(part, columns, numbers, sizes, mode=self._mode, fill_value=outside, **self._params)
        return part, [*self._of_indices, *kept]


@register("gather")
def _gather(x: AdaptedArray, indices: ArrayLike, **params: Any):
    return looked_up(x, indices, **params)


def looked_up(
    x: Any,
    indices: Any,
    rows: Callable[[Any, Lookup], Any] | None = None,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """Looks up whole matrices in a stack, each with its own adapter.

    If this isn't possible, returns `rows(x, lookup)`, a dense array.
    """
    dnums, where = dimension_numbers, (indices, x.shape, dimension_numbers, slice_sizes)
    if not knows_axes(x):
        return NotImplemented
    picked = {*dnums.start_index_map}
    untouched = {*range(x.ndim)} - picked - {*dnums.operand_batching_dims}
    if any(slice_sizes[i] != x.shape[i] for i in untouched):
        return NotImplemented
    x, outside = _even(x), fills(*where, mode)
    fill = fill_value_of(mode, fill_value, x.dtype)
    # Filling the base with NaN is enough: the result is then also NaN. But if a part doesn't have all indexed
    # axes, lookups share its slices, so these mustn't be filled.
    in_all = all(picked <= {*own} for own in labels_of(x).values() if own)
    if not outside or (in_all and np.isnan(fill)):
        found = _matrices(x, Lookup(x, indices, dnums, slice_sizes, mode, params), fill_value)
        if found is not NotImplemented:
            return found
    if rows is None:
        return NotImplemented
    # Only fill the rows at the end. Otherwise NaNs propagate to the gradients of all parts.
    found = rows(x, Lookup(x, indices, dnums, slice_sizes, "clip" if outside else mode, params))
    if found is NotImplemented or not outside:
        return found
    return quaxify(lambda found: filled(found, in_bounds(*where), dnums, fill))(found)


def _matrices(x: AdaptedArray, lookup: Lookup, fill_value: Any) -> Any:
    matrix, out, labels = matrix_labels(x), lookup.out, labels_of(x)
    keys = [name for name in labels if jnp.issubdtype(getattr(x, name).dtype, jax.dtypes.extended)]
    if matrix & lookup.cut or any(labels[name] for name in keys):
        return NotImplemented
    wanted, axes = _labels_in(x, out), _axes_in(x, out)
    if axes is None:
        return NotImplemented

    def part_of(part: Any, own: Labels, wanted: Labels, outside: Any) -> Any:
        part, found = lookup(part, own, outside)
        has = [i for i in wanted if i in found]
        return arrange(part, found, has) if has == wanted[len(wanted) - len(has) :] else None

    parts = {
        name: quaxify(part_of)(getattr(x, name), own, wanted[name], fill_value if name == "w" else 0)
        for name, own in labels.items()
        if name not in keys
    }
    if any(part is None for part in parts.values()):
        return NotImplemented  # a part lacks a batch axis after the new one, so its labels would be wrong
    return x.replace(**parts, **axes)
