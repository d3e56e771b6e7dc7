"""Reshaping of the stored axes of a quantised array, without cutting blocks."""

import dataclasses
import math
from typing import Any, TypeVar

import jax.numpy as jnp

from ...kernels import bits as bitstream
from .base import AbstractQuantizedArray
from .codecs import Codec
from .scales import BlockScales, NestedScales

_Q = TypeVar("_Q", bound=AbstractQuantizedArray)


def shortest(inner: tuple[int, ...], codec: Codec) -> tuple[int, ...] | None:
    """`inner`, or None if the number of bytes determines that of the codes."""
    return None if len(inner) == 1 and inner[0] % bitstream.stride_of(codec.bits) == 0 else tuple(inner)


def cut(w: _Q, first: tuple[int, ...], inner: tuple[int, ...]) -> _Q:
    """The stored array in the shape `first + inner`, with as few inner axes as possible: only those along
    which blocks would be cut.

    Nested scales keep all of them, since their own blocks cross rows. A scale for a whole row is repeated for
    each part of it.
    """
    count, block, cuts = math.prod(inner), w.block, w.codec.cuts
    shared = w.block_size is None and count == w.matrix[1] > 0
    if isinstance(w.scale, NestedScales):
        n = len(inner)
    elif shared and inner[-1:] > (1,) and cuts(inner[-1], inner[-1]):
        n = 1
    else:
        whole = (n for n in range(1, len(inner)) if cuts(math.prod(inner[-n:]), block))
        n = next(whole, len(inner))
    at = len(inner) - n
    lead, inner = (*first, *inner[:at]), inner[at:]
    changes: dict[str, Any] = {"inner": shortest(inner, w.codec)}
    if lead != w.codes.shape[:-1]:
        scale: Any = w.scale
        in_blocks = isinstance(scale, BlockScales)
        codes, *sizes = w.codec.sizes(math.prod(inner), math.prod(inner) if shared else block)
        scales: Any = scale.parts() if in_blocks else (scale, None, None, None)
        if shared:
            row = (*first, *[1] * at, 1)
            scales = [x if x is None else jnp.broadcast_to(x.reshape(row), (*lead, 1)) for x in scales]
        scales = [x if x is None else x.reshape(*lead, n) for x, n in zip(scales, sizes, strict=True)]
        changes["codes"] = w.codes.reshape(*lead, codes)
        changes["scale"] = BlockScales(*scales) if in_blocks else scales[0]
        changes["block_size"] = block if w.block_size is None and not shared else w.block_size
    return dataclasses.replace(w, **changes)


def untied(w: _Q) -> _Q:
    """The same array with as many leading axes as are possible without cutting blocks: nested scales, whose
    blocks cross rows, become float32."""
    return w if w.order is not None else cut(w.joined(), w.codes.shape[:-1], w.inner_shape)


def reshaped(w: _Q, shape: tuple[int, ...]) -> _Q | None:
    """The stored array in another shape; None if that would cut blocks."""
    if w.axes:
        return None
    lead, count, n = w.codes.shape[:-1], w.matrix[1], w.num_lead
    if w.order is not None:
        same = shape[:n] == lead and shape[n : n + 1] == w.inner_shape[:1]
        return dataclasses.replace(w, inner=tuple(shape[n:])) if same else None
    if shape[:n] == lead and math.prod(shape[n:]) == count:
        return cut(w, lead, shape[n:])
    for at in range(len(shape) - 1, -1, -1):  # keeps rows of codes
        if math.prod(shape[at:]) == count and math.prod(shape[:at]) == math.prod(lead):
            return cut(w.joined(), shape[:at], shape[at:])
    if w.codec.cuts(count, w.block):
        for at in range(len(shape) - 1, -1, -1):
            if w.codec.cuts(math.prod(shape[at:]), w.block):
                return cut(w.joined(), shape[:at], shape[at:])
    return None
