"""Elementwise functions of block-sparse arrays, and sums of their elements."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.policy import dense
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue
from ...primitives.classes import ZERO_PRESERVING
from .block import BlockSparseArray
from .stacks import (
    add_at,
    is_covered,
    same_index,
)


@register(ZERO_PRESERVING)
def _zero_preserving(primitive: Primitive, x: BlockSparseArray, **params: Any) -> BlockSparseArray:
    return x.replace(blocks=quaxify(functools.partial(primitive.bind, **params))(x.stored_blocks))


@register("integer_pow")
def _integer_pow(primitive: Primitive, x: BlockSparseArray, *, y: int, **params: Any) -> Any:
    if y <= 0:
        return NotImplemented
    return x.replace(blocks=quaxify(functools.partial(primitive.bind, y=y, **params))(x.stored_blocks))


@register_on_either_side("mul", BlockSparseArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    if isinstance(x, BlockSparseArray) and isinstance(y, BlockSparseArray):
        return _on_blocks(primitive, x, y, **params)
    w, other = (x, y) if isinstance(x, BlockSparseArray) else (y, x)
    if not is_covered(w, other):
        return NotImplemented
    bind = quaxify(lambda a, b: primitive.bind(a, b, **params))
    return w.replace(blocks=bind(w.stored_blocks, _at(w, other)))


@register("div")
def _div(primitive: Primitive, x: BlockSparseArray, y: ArrayLike, **params: Any) -> Any:
    if not is_covered(x, y):
        return NotImplemented
    bind = quaxify(lambda a, b: primitive.bind(a, b, **params))
    return x.replace(blocks=bind(x.stored_blocks, _at(x, y)))


@register("div")
def _div_blocks(primitive: Primitive, x: BlockSparseArray, y: BlockSparseArray, **params: Any) -> Any:
    out = _on_blocks(primitive, x, y, **params)
    return _div(primitive, x, dense(y, primitive.name, (x, y)), **params) if out is NotImplemented else out


def _at(w: BlockSparseArray, y: ArrayLike) -> Array:
    """The elements of `y`, broadcast to the shape of `w`, at the places of the blocks; 1 in empty slots."""
    y = jnp.asarray(y)
    if y.ndim == 0:
        return y
    y = jnp.broadcast_to(y, w.shape)
    b, columns = w.block_size, w.transposed_idx.shape[-2]
    y = y.swapaxes(-2, -1) if w.transposed else y

    def take(y: Array, col_idx: Array) -> Array:
        cut = y.reshape(-1, b, columns, b)
        return cut.at[jnp.arange(cut.shape[0])[:, None], :, col_idx].get(mode="fill", fill_value=1)

    for _ in range(w.num_batch):
        take = jax.vmap(take)
    return take(y, w.col_idx)


@register_on_either_side(["add", "sub", "add_any"], BlockSparseArray, other=ArrayLike)
def _add(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Adds the blocks to a dense array or a number, which gives a dense array."""
    if isinstance(x, BlockSparseArray) and isinstance(y, BlockSparseArray):
        return _on_blocks(primitive, x, y, **params)
    w, other = (x, y) if isinstance(x, BlockSparseArray) else (y, x)
    if not is_covered(w, other) or isinstance(w.blocks, ArrayValue):
        return NotImplemented
    other = jnp.broadcast_to(jnp.asarray(other), w.shape)
    minus = primitive.name == "sub"
    blocks = -w.blocks if minus and w is y else w.blocks
    return _add_blocks(-other if minus and w is x else other, w.replace(blocks=blocks))


def _add_blocks(y: Array, w: BlockSparseArray) -> Array:
    b, columns = w.block_size, w.transposed_idx.shape[-2]

    def add(y: Array, blocks: Array, col_idx: Array) -> Array:
        cut = y.reshape(-1, b, columns, b)
        rows = jnp.arange(cut.shape[0])[:, None]
        return add_at(cut, (rows, slice(None), col_idx), blocks).reshape(y.shape)

    for _ in range(w.num_batch):
        add = jax.vmap(add)
    if not w.transposed:
        return add(y, w.blocks, w.col_idx)
    return add(y.swapaxes(-2, -1), w.blocks, w.col_idx).swapaxes(-2, -1)


def _on_blocks(primitive: Primitive, x: BlockSparseArray, y: BlockSparseArray, **params: Any) -> Any:
    """Applies the primitive to two matrices that store the same blocks."""
    if x.shape != y.shape or x.transposed != y.transposed or not same_index(x.col_idx, y.col_idx):
        return NotImplemented
    bind = quaxify(lambda a, b: primitive.bind(a, b, **params))
    return x.replace(blocks=bind(x.stored_blocks, y.stored_blocks))


@register("reduce_sum")
def _reduce_sum(x: BlockSparseArray, *, axes: Sequence[int], **params: Any) -> Any:
    n = x.num_batch
    summed = {(axis - n) ^ x.transposed for axis in axes if axis >= n}  # of the stored matrix
    if not summed or isinstance(x.blocks, ArrayValue):
        return NotImplemented
    batch = tuple(axis for axis in axes if axis < n)
    if len(summed) == 2:
        return jnp.sum(x.stored_blocks, (*batch, *range(n, n + 4)), dtype=x.dtype)
    if summed == {1}:
        rows = jnp.sum(x.stored_blocks, (-3, -1), dtype=x.dtype)
        return jnp.sum(rows.reshape(*rows.shape[:n], -1), batch, dtype=x.dtype)

    def columns(blocks: Array, col_idx: Array, number: int) -> Array:
        total = jnp.zeros((number, blocks.shape[-1]), blocks.dtype)
        return add_at(total, col_idx, jnp.sum(blocks, -2, dtype=blocks.dtype)).reshape(-1)

    add = functools.partial(columns, number=x.transposed_idx.shape[-2])
    for _ in range(n):
        add = jax.vmap(add)
    return jnp.sum(add(x.blocks, x.col_idx), batch, dtype=x.dtype)
