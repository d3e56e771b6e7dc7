"""Batch axes, which stack arrays of one kind: moved, resized and cut part by part.

A stack is an array that is made of parts, each of which has the batch axes in front of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jax import lax

from ..core.quaxify import quaxify

_S = TypeVar("_S", bound="Stack")


@runtime_checkable
class Stack(Protocol):
    """An array, as the functions of this module need it."""

    @property
    def num_batch(self) -> int:
        """How many of the leading axes are batch axes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def each(self: _S, fn: Callable[[Any, int], Any]) -> _S:
        """`fn(part, own)` in place of each part, of which the last `own` axes are not batch axes."""
        ...

    def stacked(self: _S) -> _S:
        """The same, with all batch axes on every part."""
        ...


def transpose_batch(x: _S, order: Sequence[int]) -> _S:
    """Batch axes in another `order`."""
    n = len(order)
    if tuple(order) == tuple(range(n)):
        return x
    return x.stacked().each(lambda part, own: jnp.transpose(part, (*order, *range(n, n + own))))


def squeeze_batch(x: _S, axes: Sequence[int]) -> _S:
    """Without these batch axes of size one."""
    return x.stacked().each(lambda part, _: lax.squeeze(part, axes)) if axes else x


def reshape_batch(x: Stack, new_sizes: Sequence[int]) -> Any:
    """`reshape`; `NotImplemented` unless it is of batch axes alone."""
    n = x.num_batch
    num_new = len(new_sizes) - (len(x.shape) - n)
    batch = new_sizes[: max(num_new, 0)]
    if num_new < 0 or tuple(new_sizes[num_new:]) != x.shape[n:] or math.prod(batch) != math.prod(x.shape[:n]):
        return NotImplemented
    return x.stacked().each(lambda part, own: jnp.reshape(part, (*batch, *part.shape[part.ndim - own :])))


def cut_batch(x: _S, cut: Callable[[Any, int], Any], axes: Sequence[int]) -> _S:
    """`cut(part, axis)` along each of these batch axes."""

    def along_each(part: Any, _: int) -> Any:
        for axis in axes:
            part = cut(part, axis)
        return part

    return x.stacked().each(along_each) if axes else x


def with_batch_of(part: Any, like: Any, core: int) -> Any:
    """A part with the batch axes of `like`, if that has more; the last `core` axes of both are none."""
    batch = like.shape[: like.ndim - core]
    if part.ndim - core >= len(batch):
        return part
    return quaxify(jnp.broadcast_to)(part, (*batch, *part.shape[part.ndim - core :]))
