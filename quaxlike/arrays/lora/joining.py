"""Adapted arrays side by side: stacked layers, fused projections."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from .array import RANK, LoraArray, labels, matrix_labels, padded_to, plainly_scaled
from .contraction import drops
from .einsum import cast, common_dtype
from .layout import with_all_axes, with_axes


@register("concatenate")
def _concatenate(*operands: LoraArray | ArrayLike, dimension: int):
    loras = _alike(operands)
    if loras is None:
        return NotImplemented
    return (_fused if dimension in matrix_labels(loras[0]) else _in_a_row)(loras, dimension)


@register("stack")
def _stack(*operands: LoraArray | ArrayLike, axis: int):
    loras = _alike(operands)
    if loras is None:
        return NotImplemented
    order = list(range(loras[0].ndim))
    order.insert(axis, loras[0].ndim)
    return _in_a_row([with_axes(x, order) for x in loras], axis)


@register("add")
def _add(x: LoraArray, y: LoraArray, **params: Any):
    """One adapter beside the other, over the sum of the bases."""
    loras = _alike((x, y))
    if loras is None or x.shape != y.shape or x.magnitude is not None:
        return NotImplemented
    x, y = map(plainly_scaled, loras)
    _, a_labels, b_labels = labels(x)
    return x.replace(
        w=quaxify(jnp.add)(x.w, y.w),
        a=_joined([x.a, y.a], a_labels.index(RANK)),
        b=_joined([x.b, y.b], b_labels.index(RANK)),
        alpha=float(x.rank + y.rank),
    )


@register("sub")
def _sub(x: LoraArray, y: LoraArray, **params: Any):
    return quaxify(lambda x, y: x + (-y))(x, y)


def _alike(operands: Sequence[Any]) -> list[LoraArray] | None:
    """The operands as adapted arrays with the same axes; None if that cannot be."""
    like = with_all_axes(next(x for x in operands if isinstance(x, LoraArray)))
    loras = [
        with_all_axes(x) if isinstance(x, LoraArray) else without_adapter(jnp.asarray(x), like)
        for x in operands
    ]
    axes = {(x.ndim, x.out_axes, x.in_axes, x.magnitude is None) for x in loras}
    return loras if len(axes) == 1 and not any(map(drops, loras)) else None


def without_adapter(w: Any, like: LoraArray) -> LoraArray:
    """`w` with an adapter of rank 0, its base open to gradients."""
    sizes = dict(enumerate(w.shape)) | {RANK: 0}
    _, a_labels, b_labels = labels(like)
    a, b = (jnp.zeros([sizes[i] for i in own], part.dtype) for own, part in
            ((a_labels, like.a), (b_labels, like.b)))  # fmt: skip
    return LoraArray(w, a, b, train_base=True, out_axes=like.out_axes, in_axes=like.in_axes)


def _in_a_row(loras: Sequence[LoraArray], axis: int) -> LoraArray:
    """Joined along a batch axis."""
    first = loras[0]
    if any(statics(x) != statics(first) for x in loras):
        rank = max(x.rank for x in loras)
        loras = [padded_to(plainly_scaled(x), rank) for x in loras]
    w_labels, a_labels, b_labels = labels(first)
    return loras[0].replace(
        w=_joined([x.w for x in loras], w_labels.index(axis)),
        a=_joined([x.a for x in loras], a_labels.index(axis)),
        b=_joined([x.b for x in loras], b_labels.index(axis)),
        magnitude=_magnitudes(loras, axis),
    )


def _fused(loras: Sequence[LoraArray], axis: int) -> Any:
    """Joined along an axis of the matrix: an adapter whose rank is the sum of all, since each reaches its
    own part only."""
    w_labels, a_labels, b_labels = labels(loras[0])
    if loras[0].magnitude is not None and axis not in b_labels:
        return NotImplemented  # the norms of longer rows
    loras = [plainly_scaled(x) for x in loras]
    rank, before, padded = sum(x.rank for x in loras), 0, []
    for x in loras:
        padded.append(padded_to(x, rank, before))
        before += x.rank
    # The factor that has the axis is cut into parts; the other one is shared by all.
    along_a = a_labels.index(axis if axis in a_labels else RANK)
    along_b = b_labels.index(axis if axis in b_labels else RANK)
    return loras[0].replace(
        w=_joined([x.w for x in loras], w_labels.index(axis)),
        a=_joined([x.a for x in (padded if axis in a_labels else loras)], along_a),
        b=_joined([x.b for x in (padded if axis in b_labels else loras)], along_b),
        magnitude=_magnitudes(loras, axis),
        alpha=float(rank),
    )


def statics(x: LoraArray) -> Any:
    """What adapters that are stacked must have in common."""
    return x.rank, x.alpha, x.rslora, x.dropout, x.train_base


def _joined(parts: Sequence[Any], axis: int) -> Any:
    dtype = common_dtype(*parts)
    return quaxify(lambda parts: jnp.concatenate([cast(x, dtype) for x in parts], axis))(parts)


def _magnitudes(loras: Sequence[LoraArray], axis: int) -> Any:
    if loras[0].magnitude is None:
        return None
    return _joined([x.magnitude for x in loras], labels(loras[0])[2].index(axis))
