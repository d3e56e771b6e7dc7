"""Rules for combinators: matrix products, convolutions and lookups."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..arrays import precedence
from ..arrays.adapted import labels_of
from ..arrays.adapted_product import AdaptedProduct
from ..arrays.axis_rules import Lookup, looked_up
from ..arrays.dot_axes import Labels, arrange, cast, common_dtype, contract
from ..arrays.lora.dot import add, multiply, widened
from ..core.jaxprs.evaluate import cached_trace
from ..core.quaxify import quaxify
from ..core.rules import register, register_on_either_side
from ..core.values import ArrayValue
from .combinators import Combinator, HadamardArray, RotatedArray, ScaledArray, SumArray, axes_of


@register_on_either_side("dot_general", Combinator, precedence=precedence.COMBINATOR)
@cached_trace
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any):
    if isinstance(x, Combinator):
        return _product(_Product(x, y, True, **params))
    return _product(_Product(y, x, False, **params))


class _Product(AdaptedProduct):
    def with_matrix(
        self, matrix: Any, own: Labels, groups: Sequence[Labels], x: Any, labels: Labels,
        keep: Collection[int], **params: Any,
    ) -> tuple[Any, Labels]:  # fmt: skip
        """Multiplies by a matrix with one (flattened) axis group for each of its last two axes.

        This flattens these axes of `x` beforehand, and then unflattens the result's axes.
        """
        for group in groups:
            x, labels = _merged(x, labels, group)
        ends = {i for group in groups for i in group}
        heads = {group[0] for group in groups if group[0] in keep}
        y, labels = self.times(
            matrix,
            [*own[:-2], *(group[0] for group in groups)],
            x,
            labels,
            ({*keep} - ends) | heads,
            **params,
        )
        for group in groups:
            sizes = [self.w.shape[i] for i in (groups[-1] if group[0] < 0 else group)]
            y, labels = _split(y, labels, group, sizes)
        return y, labels


def _product(it: _Product) -> Any:
    w: Any = it.w
    out, into = axes_of(w, w.out_axes), axes_of(w, w.in_axes)
    apart = isinstance(w, ScaledArray | HadamardArray)
    if not apart and any(len({i in it.out for i in own}) > 1 for own in (out, into)):
        # Some (but not all) of the axes flattened in the matrix are contracted, so it can't be used.
        return NotImplemented
    match w:
        case HadamardArray():
            return quaxify(lambda x: it.with_base(w.materialise(), x, it.x_labels, [*range(w.ndim)]))(it.x)
        case SumArray():
            return quaxify(functools.partial(_sum_product, it, out, into))(w.base, w.delta, it.x)
        case RotatedArray():
            return quaxify(functools.partial(_rotated_product, it))(w.base, w.rotation, it.x)
        case _:
            return quaxify(functools.partial(_scaled_product, it))(w.base, w.outputs, w.inputs, it.x)


def _sum_product(it: _Product, out: Labels, into: Labels, w: Any, delta: Any, x: Any) -> Any:
    y = it.with_base(w, x, it.x_labels)
    dtype = common_dtype(delta, x)
    delta, x, params = cast(delta, dtype), cast(x, dtype), widened(it.params, dtype)
    z = it.with_matrix(delta, it.own["delta"], (out, into), x, it.x_labels, it.out, **params)
    return add(y, arrange(*z, it.out))


def _scaled_product(it: _Product, w: Any, outputs: Any, inputs: Any, x: Any) -> Any:
    """Multiplies `x` by the factors along contracted axes, and the result by all others.

    This never scales the base itself, because it may be quantised.
    """
    labels = it.x_labels
    factors = [(factor, it.own[name]) for name, factor in (("outputs", outputs), ("inputs", inputs))
               if factor is not None]  # fmt: skip
    in_result = [own for _, own in factors if {*own} <= {*it.out}]
    for factor, own in factors:
        if own not in in_result:
            more = [*(i for i in own if i not in labels), *labels]
            x = multiply(arrange(_inexact(x, w), labels, more), arrange(factor, own, more))
            labels = more
    y = it.with_base(w, x, labels)
    for factor, own in factors:
        if own in in_result:
            y = multiply(y, arrange(factor, own, it.out))
    return y


def _rotated_product(it: _Product, w: Any, rotation: Any, x: Any) -> Any:
    columns = it.w.rotated()
    # Between the two products, the rotated axes get separate (negative) labels. Otherwise each product would
    # have the same labels for the axes it contracts and for those it produces.
    between = [-1 - k for k in range(len(columns))]
    groups = (between, columns)
    own, precision = it.own["rotation"], {"precision": it.params["precision"]}

    def renamed(labels: Any, old: Any, new: Any) -> Any:
        return [new[old.index(i)] if i in old else i for i in labels]

    if not {*columns} & {*it.out}:  # The rotated axes are contracted, so rotate `x` instead of the result.
        x = _inexact(x, w)
        dtype = common_dtype(rotation, x)
        keep = {*between, *it.out, *it.own["w"]} - {*columns}
        turned, labels = it.with_matrix(
            cast(rotation, dtype), own, groups, cast(x, dtype), it.x_labels, keep, **precision
        )
        labels = renamed(labels, between, columns)
        order = [*(i for i in labels if i not in it.x_labels), *it.x_labels]
        return it.with_base(w, cast(arrange(turned, labels, order), x.dtype), order)
    keep = {*it.out, *between, *own[:-2]}
    y, labels = it.times(w, renamed(it.own["w"], columns, between), x, it.x_labels, keep, **it.params)
    dtype = common_dtype(rotation, y)
    turned, labels = it.with_matrix(
        cast(rotation, dtype), own, groups, cast(y, dtype), labels, it.out, **precision
    )
    return cast(arrange(turned, labels, it.out), y.dtype)


def _inexact(x: Any, w: Any) -> Any:
    """Promotes `x` to an inexact dtype if it is an integer.

    The factors it is about to be multiplied by are typically fractional.
    """
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else cast(x, common_dtype(w, x))


def _merged(x: Any, labels: Labels, group: Labels) -> tuple[Any, Labels]:
    """Flattens a group of axes into a single axis with the first one's label."""
    if len(group) == 1 or group[0] not in labels:
        return x, labels
    order = [*(i for i in labels if i not in group), *group]
    x, lead = arrange(x, labels, order), len(order) - len(group)
    return jnp.reshape(x, (*x.shape[:lead], math.prod(x.shape[lead:]))), order[: lead + 1]


def _split(y: Any, labels: Labels, group: Labels, sizes: Sequence[int]) -> tuple[Any, Labels]:
    """Unflattens a group of axes, i.e. the inverse of `_merged`."""
    if len(group) == 1 or group[0] not in labels:
        return y, labels
    at = labels.index(group[0])
    y = jnp.reshape(y, (*y.shape[:at], *sizes, *y.shape[at + 1 :]))
    return y, [*labels[:at], *group, *labels[at + 1 :]]


@register("conv_general_dilated", precedence=precedence.COMBINATOR)
def _conv(primitive: Primitive, x: ArrayLike | ArrayValue, w: Combinator, **params: Any):
    """Materialises the kernel, which is typically small compared to the operand."""
    return quaxify(lambda x: primitive.bind(x, w.materialise(), **params))(x)


@register("gather")
def _gather(x: Combinator, indices: ArrayLike, **params: Any):
    """Looks up rows of the base and then adapts just these rows, without materialising the array."""
    return looked_up(x, indices, _rows, **params)


def _rows(x: Combinator, lookup: Lookup) -> Any:
    own, out = dict(labels_of(x)), lookup.out

    def found(name: str) -> Any:
        return quaxify(lambda part: arrange(*lookup(part, own[name]), out))(getattr(x, name))

    rows = quaxify(lambda w: arrange(*lookup(w, own["w"]), out))(x.base)
    if isinstance(x, RotatedArray):
        return _turned_rows(x, rows, lookup)
    if isinstance(x, SumArray):
        ends = [*axes_of(x, x.out_axes), *axes_of(x, x.in_axes)]
        if len(ends) > 2:
            return NotImplemented  # Several axes are flattened into one in the matrix.
        own["delta"] = [*own["delta"][:-2], *ends]
        return quaxify(add)(rows, found("delta"))
    for name in own:
        rows = rows if name == "w" else quaxify(multiply)(rows, found(name))
    return rows


def _turned_rows(x: RotatedArray, rows: Any, lookup: Lookup) -> Any:
    own, columns, out = labels_of(x), x.rotated(), lookup.out
    batch = own["rotation"][:-2]
    if len(own["w"]) < x.ndim or {*columns, *batch} & lookup.cut:
        return NotImplemented

    def turned(rows: Any, rotation: Any) -> Any:
        dtype = common_dtype(rows, rotation)
        found, labels = _merged(cast(rows, dtype), out, columns)
        matrix = [*batch, columns[0], -1]
        y, labels = contract(found, labels, cast(rotation, dtype), matrix, {*out, -1} - {columns[0]})
        labels = [columns[0] if i == -1 else i for i in labels]
        y, labels = _split(y, labels, columns, [x.shape[i] for i in columns])
        return cast(arrange(y, labels, out), rows.dtype)

    return quaxify(turned)(rows, x.rotation)
