"""Rules for the axes of a `LoraArray`, where they differ from those for all adapters (`axis_rules`).

Adapters with different ranks can be joined, including along outputs or inputs. Slices along the inputs of a
DoRA, single rows, and rows looked up in an embedding are materialised.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ...core.values import is_value
from ..adapted import alike_in_training, labels_of, matrix_labels
from ..axis_rules import Lookup, concatenated, joined, looked_up, stacked, with_all_axes
from ..dot_axes import arrange, cast, common_dtype, contract
from .array import RANK, LoraArray, drops, labels, padded_to, parts_of, plainly_scaled, row_scale
from .dot import add, multiply


@register("squeeze")
def _squeeze(x: LoraArray, *, dimensions: Sequence[Any]):
    """Materialises a single row or column, deliberately: it's no longer a weight."""
    left = set(range(-x.ndim, 0)) - {i - x.ndim for i in dimensions}
    if left & {*x.out_axes} and left & {*x.in_axes}:
        return NotImplemented
    return jax.lax.squeeze(x.materialise(), dimensions)


@register("concatenate")
def _concatenate(*operands: LoraArray | ArrayLike, dimension: Any):
    loras = alike(operands)
    if loras is None:
        return NotImplemented
    if dimension in matrix_labels(loras[0]):
        return _fused(loras, int(dimension))
    return _in_a_row(loras, joined, int(dimension))


@register("stack")
def _stack(*operands: LoraArray | ArrayLike, axis: int):
    loras = alike(operands)
    return NotImplemented if loras is None else _in_a_row(loras, stacked, axis)


def alike(operands: Sequence[Any]) -> list[LoraArray] | None:
    """Converts the operands to adapted arrays with the same axes. None if this isn't possible."""
    like = with_all_axes(next(x for x in operands if isinstance(x, LoraArray)))
    loras = [
        with_all_axes(x) if isinstance(x, LoraArray) else without_adapter(jnp.asarray(x), like)
        for x in operands
    ]
    axes = {(x.ndim, x.out_axes, x.in_axes, x.magnitude is None) for x in loras}
    return loras if len(axes) == 1 and not any(map(drops, loras)) else None


def without_adapter(w: Any, like: LoraArray) -> LoraArray:
    """Adds an adapter of rank 0 to `w`, and propagates gradients to `w`."""
    sizes = dict(enumerate(w.shape)) | {RANK: 0}
    _, a_labels, b_labels = labels(like)
    a, b = (jnp.zeros([sizes[i] for i in own], part.dtype) for own, part in
            ((a_labels, like.a), (b_labels, like.b)))  # fmt: skip
    return LoraArray(w, a, b, gradients="pass", out_axes=like.out_axes, in_axes=like.in_axes)


def _in_a_row(loras: Sequence[LoraArray], join: Callable[..., Any], axis: int) -> Any:
    """Joins arrays along a batch axis, after padding them to a common rank. Each keeps its scaling."""
    first, *_ = loras = alike_in_training(loras)
    if any(statics(x) != statics(first) for x in loras):
        rank = max(x.rank for x in loras)
        loras = [padded_to(x, rank).replace(dropout=0.0) for x in loras]
    return join([x.replace(key=None) for x in loras], axis)  # dropout is zero for all


def _fused(loras: Sequence[LoraArray], axis: int) -> Any:
    """Joins arrays along a matrix axis.

    The result's rank is the sum of all ranks: each adapter acts only on its own part.
    """
    parts = parts_of(loras[0])
    if loras[0].magnitude is not None and axis not in parts["b"]:
        return NotImplemented  # this would change the norms of the rows
    loras = [plainly_scaled(x) for x in alike_in_training(loras)]
    rank, before, padded = sum(x.rank for x in loras), 0, []
    # Pad each adapter with zeros, so that it has its own range of the common rank.
    for x in loras:
        padded.append(padded_to(x, rank, before))
        before += x.rank
    # The factor with this axis becomes block diagonal. Concatenate the other one along the rank.
    fused: dict[str, Any] = {}
    for name, own in parts.items():
        arrays = [getattr(x, name) for x in (padded if axis in own and RANK in own else loras)]
        fused[name] = concatenated(arrays, own.index(axis if axis in own else RANK))
    return loras[0].replace(**fused, alpha=float(rank))


def statics(x: LoraArray) -> Any:
    """Returns the static values that must agree for stacking adapters."""
    return x.rank, x.rslora, x.dropout


@register(["slice", "dynamic_slice", "split"])
def _cut_dora(primitive: Primitive, x: LoraArray, *starts: ArrayLike, **params: Any):
    """Slices the inputs of a DoRA. Its norms are those of whole rows, so the result is materialised."""
    if x.magnitude is None:
        return NotImplemented
    pieces = jtu.tree_leaves(jax.eval_shape(functools.partial(primitive.bind, **params), x.aval(), *starts))
    if all(piece.shape[axis] == x.shape[axis] for piece in pieces for axis in x.in_axes):
        return NotImplemented
    found = quaxify(primitive.bind)(x.replace(magnitude=None), *starts, **params)
    scale = jnp.broadcast_to(arrange(*row_scale(x), range(x.ndim)), x.shape)
    scales = primitive.bind(scale, *starts, **params)

    def scaled(piece: Any, scale: Any) -> Any:
        return multiply(piece.materialise(), scale)

    return jtu.tree_map(scaled, found, scales, is_leaf=is_value)


@register("gather")
def _gather(x: LoraArray, indices: ArrayLike, **params: Any):
    """Implements `jnp.take`, indexing with arrays, and `jax.vmap` of these."""
    return looked_up(x, indices, _rows, **params)


def _rows(x: LoraArray, lookup: Lookup) -> Any:
    """Gathers rows from the base and both factors, then multiplies the factors."""
    w_labels, a_labels, b_labels = labels(x)
    out = lookup.out

    def rows(w: Any, a: Any, b: Any) -> Any:
        w = arrange(*lookup(w, w_labels), out)
        dtype = common_dtype(a, b)
        a, own_a = lookup(cast(a, dtype), a_labels)
        b, own_b = lookup(cast(b, dtype), b_labels)
        scaling, own = lookup(jnp.asarray(x.scaling_in(dtype)), labels_of(x)["alpha"])
        return add(w, arrange(*contract(b, own_b, a, own_a, out), out) * arrange(scaling, own, out))

    y = quaxify(rows)(x.base, x.a, x.b)
    if x.magnitude is not None:
        y = multiply(y, arrange(*lookup(*row_scale(x)), out))
    return y
