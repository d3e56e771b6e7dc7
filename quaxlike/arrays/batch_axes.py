"""Transposes, reshapes and slices the batch axes of stacked arrays, one part at a time.

A stack has several parts, each with the batch axes in front of its own axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from ..core.quaxify import quaxify

_S = TypeVar("_S", bound="Stack")


@runtime_checkable
class Stack(Protocol):
    """The interface required by this module's functions."""

    @property
    def num_batch(self) -> int:
        """The number of batch axes, which come first."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def each(self: _S, fn: Callable[[Any, int], Any]) -> _S:
        """Replaces each part by `fn(part, own)`, where all but the last `own` axes are batch axes."""
        ...

    def stacked(self: _S) -> _S:
        """Adds any missing batch axes to every part."""
        ...


def transpose_batch(x: _S, order: Sequence[int]) -> _S:
    """Transposes the batch axes to this `order`."""
    n = len(order)
    if tuple(order) == tuple(range(n)):
        return x
    # A part that doesn't depend on some batch axes may not have them. Add these first (`stacked`), so that
    # `order` is valid for every part.
    return x.stacked().each(lambda part, own: jnp.transpose(part, (*order, *range(n, n + own))))


def squeeze_batch(x: _S, axes: Sequence[int]) -> _S:
    """Removes these batch axes, which must have size one."""
    return x.stacked().each(lambda part, _: lax.squeeze(part, axes)) if axes else x


def reshape_batch(x: Stack, new_sizes: Sequence[int]) -> Any:
    """Reshapes the batch axes. Returns `NotImplemented` if any other axes change."""
    n = x.num_batch
    num_new = len(new_sizes) - (len(x.shape) - n)
    batch = new_sizes[: max(num_new, 0)]
    # Any other reshape moves elements between arrays of the stack.
    if num_new < 0 or tuple(new_sizes[num_new:]) != x.shape[n:] or math.prod(batch) != math.prod(x.shape[:n]):
        return NotImplemented
    return x.stacked().each(lambda part, own: jnp.reshape(part, (*batch, *part.shape[part.ndim - own :])))


def cut_batch(x: _S, cut: Callable[[Any, int], Any], axes: Sequence[int]) -> _S:
    """Applies `cut(part, axis)` along each of these batch axes."""

    def along_each(part: Any, _: int) -> Any:
        for axis in axes:
            part = cut(part, axis)
        return part

    return x.stacked().each(along_each) if axes else x


def mapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Applies `jax.vmap` to `fn` this many times, i.e. maps it over the leading axes of all arguments."""
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


def with_batch_of(part: Any, like: Any, core: int) -> Any:
    """Broadcasts a part to the batch axes of `like`, if `like` has more.

    All but the last `core` axes are batch axes.
    """
    batch = like.shape[: like.ndim - core]
    if part.ndim - core >= len(batch):
        return part
    return quaxify(jnp.broadcast_to)(part, (*batch, *part.shape[part.ndim - core :]))
