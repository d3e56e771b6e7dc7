"""Rules for axis names."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue
from ...primitives.classes import CUMULATIVE, ELEMENTWISE_BINARY, ELEMENTWISE_UNARY, REDUCTIONS, installed
from .. import precedence
from ..annotated import AnnotatedArray
from .array import AxisError, Name, NamedArray

_Any = ArrayLike | ArrayValue


def _names(x: Any) -> tuple[Name, ...]:
    if isinstance(x, AnnotatedArray):
        return x.names if isinstance(x, NamedArray) else _names(x.array)  # e.g. a unit around names
    return (None,) * len(getattr(x, "shape", ()))


def _bind(primitive: Primitive, operands: Iterable[Any], params: dict[str, Any]) -> Any:
    return quaxify(primitive.bind)(*map(_unnamed, operands), **params)


def _unnamed(x: Any) -> Any:
    if isinstance(x, NamedArray):
        return x.array
    return x.with_array(_unnamed(x.array)) if isinstance(x, AnnotatedArray) else x


def _named(array: Any, names: Sequence[Name]) -> Any:
    """Attaches names to an array, or returns it unchanged if no axis has a name."""
    if any(inner := _names(array)):  # its parts may already have names
        array, names = _unnamed(array), [n or m for n, m in zip(names, inner, strict=True)]
    return NamedArray(array, names) if any(names) else array


# One array ----------------------------------------------------------------------------------------


@register(
    ELEMENTWISE_UNARY
    + CUMULATIVE
    + installed("copy copy_p dynamic_slice rev slice fft reduce_precision sharding_constraint")
    + installed("reduce_window_max reduce_window_min reduce_window_sum")
)
def _kept(primitive: Primitive, x: NamedArray, *rest: ArrayLike | ArrayValue, **params: Any) -> Any:
    return _named(_bind(primitive, (x, *rest), params), x.names)


@register(("split", "top_k"))
def _parts(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    return [_named(part, x.names) for part in _bind(primitive, [x], params)]


@register(installed("unstack"))
def _unstack(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    return [_named(part, _without(x.names, [params["axis"]])) for part in _bind(primitive, [x], params)]


@register((*REDUCTIONS, "argmax", "argmin"))
def _reduced(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    return _named(_bind(primitive, [x], params), _without(x.names, params["axes"]))


@NamedArray.rule_for_several("reduce")
def _folded(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    arrays = xs[: len(xs) // 2]  # these are followed by their initial values
    names = _without(_agreed(primitive, arrays), params["dimensions"])
    return [_named(out, names) for out in _bind(primitive, xs, params)]


@NamedArray.rule_for_several("reduce_window")
def _windowed(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    names = _agreed(primitive, xs[: len(xs) // 2])
    return [_named(out, names) for out in _bind(primitive, xs, params)]


@register("squeeze")
def _squeeze(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    return _named(_bind(primitive, [x], params), _without(x.names, params["dimensions"]))


def _without(names: Sequence[Name], axes: Collection[Any]) -> list[Name]:
    return [n for i, n in enumerate(names) if i not in axes]


@register("transpose")
def _transpose(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    return _named(_bind(primitive, [x], params), [x.names[i] for i in params["permutation"]])


@register("broadcast_in_dim")
def _broadcast(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    names: list[Name] = [None] * len(params["shape"])
    for i, name in zip(params["broadcast_dimensions"], x.names, strict=True):
        names[i] = name
    return _named(_bind(primitive, [x], params), names)


@register("reshape")
def _reshape(primitive: Primitive, x: NamedArray, **params: Any) -> Any:
    out = _bind(primitive, [x], params)
    names = x.names
    if params["dimensions"] is not None:
        names = [names[i] for i in params["dimensions"]]
    return _named(out, reshaped_names(names, x.shape, out.shape))


def reshaped_names(names: Sequence[Name], old: Sequence[int], new: Sequence[int]) -> list[Name]:
    """Returns the names after a reshape. An axis keeps its name if it's neither merged nor split."""
    out: list[Name] = []
    i = 0
    for j, size in enumerate(new):
        before = math.prod(new[:j])
        # Skip old axes starting before the new one, and any removed axes of size one.
        while i < len(old) and (math.prod(old[:i]) < before or (old[i] == 1 != size)):
            i += 1
        whole = i < len(old) and math.prod(old[:i]) == before and old[i] == size
        out.append(names[i] if whole else None)
        i += whole
    return out


@register("gather")
def _gather(primitive: Primitive, x: NamedArray, indices: ArrayLike | ArrayValue, **params: Any) -> Any:
    if isinstance(indices, NamedArray):
        return NotImplemented
    out = _bind(primitive, (x, indices), params)
    dims = params["dimension_numbers"]
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    kept = [i for i in range(x.ndim) if i not in gone]
    names: list[Name] = [None] * out.ndim
    for at, i in zip(dims.offset_dims, kept, strict=True):
        names[at] = x.names[i]
    return _named(out, names)


# Several arrays -----------------------------------------------------------------------------------


def _agreed(primitive: Primitive, operands: Sequence[Any]) -> list[Name]:
    """Returns the names that all operands (except scalars) agree on, and raises if they don't."""
    shaped = [_names(x) for x in operands if _names(x)]
    out: list[Name] = []
    for of_axis in zip(*shaped, strict=True):
        found = {n for n in of_axis if n}
        if len(found) > 1:
            sides = " and ".join(str(names) for names in dict.fromkeys(shaped) if any(names))
            raise AxisError(
                f"`{primitive}` takes arrays with the same axes; found {sides}. Reorder or rename those "
                "of one of them, or use the operators of NamedArray, which broadcast by name."
            )
        out.append(found.pop() if found else None)
    return out


@register_on_either_side(ELEMENTWISE_BINARY, NamedArray, precedence=precedence.NAMED)
def _elementwise(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    return _named(_bind(primitive, (x, y), params), _agreed(primitive, (x, y)))


@register_on_either_side("dot_general", NamedArray, precedence=precedence.NAMED)
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    contract, batch = params["dimension_numbers"]
    xs, ys = _names(x), _names(y)
    for i, j in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        if xs[i] and ys[j] and xs[i] != ys[j]:
            raise AxisError(
                f"`dot_general` pairs axis {xs[i]!r} of an array with axes {xs} and axis {ys[j]!r} of one "
                f"with axes {ys}. Name what to contract with `x.contract(y, name)`, or rename one of them."
            )
    names = [xs[i] or ys[j] for i, j in zip(*batch, strict=True)]
    names += _without(xs, (*contract[0], *batch[0])) + _without(ys, (*contract[1], *batch[1]))
    return _named(_bind(primitive, (x, y), params), names)


@NamedArray.rule_for_several(("concatenate", "clamp"))
def _alike(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    return _named(_bind(primitive, xs, params), _agreed(primitive, xs))


@NamedArray.rule_for_several("stack")
def _stack(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    names = _agreed(primitive, xs)
    names.insert(params["axis"], None)
    return _named(_bind(primitive, xs, params), names)


@register("select_n", precedence=precedence.NAMED)
def _select_left(primitive: Primitive, which: ArrayLike, x: NamedArray, y: _Any, **params: Any) -> Any:
    return _select(primitive, which, x, y, **params)


@register("select_n", precedence=precedence.NAMED)
def _select_right(primitive: Primitive, which: ArrayLike, x: _Any, y: NamedArray, **params: Any) -> Any:
    return _select(primitive, which, x, y, **params)


@register("select_n", precedence=precedence.NAMED)
def _select_both(primitive: Primitive, which: ArrayLike, x: NamedArray, y: NamedArray, **params: Any) -> Any:
    return _select(primitive, which, x, y, **params)


@NamedArray.rule_for_several("select_n")
def _select(primitive: Primitive, which: Any, *cases: Any, **params: Any) -> Any:
    return _named(_bind(primitive, (which, *cases), params), _agreed(primitive, (which, *cases)))


@NamedArray.rule_for_several("sort")
def _sort(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    names = _agreed(primitive, xs)
    return [_named(out, names) for out in _bind(primitive, xs, params)]


@NamedArray.rule_for_several(
    installed(
        "pad dynamic_update_slice scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max "
        "select_and_scatter"
    )
)
def _named_like_first(primitive: Primitive, x: Any, *rest: Any, **params: Any) -> Any:
    """Writes arrays into another one. The result has the axes of the array being written to."""
    updates = rest[0] if primitive.name == "dynamic_update_slice" else None
    names = _agreed(primitive, (x, updates)) if updates is not None else _names(x)
    return _named(_bind(primitive, (x, *rest), params), names)
