"""Products with a weight that is decoded a few rows at a time.

A tile stays in the cache, and no dense copy of the weight ever exists: XLA on a CPU does not fuse
decoding into a dot.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..primitives.partitioning import is_spread

# Weights decoded at a time. Few: one MiB of float32, which fits in a core's L2. Many: enough work for
# each step to be shared between cores, and fewer passes over activations and accumulator.
_TILE_FEW, _TILE_MANY = 2**18, 2**20
_FEW_ROWS_OF_X = 4

Decode = Callable[[Array | int, int], list[Array]]
"""`decode(start, rows)` returns rows of `W` from an even `start` on, in `stride` arrays of every
`stride`-th column: columns 0, stride, 2·stride, …; columns 1, stride + 1, …; and so on."""


def contract_columns(
    x: Float[Array, "m k"], decode: Decode, n: int, k: int, stride: int = 1
) -> Float[Array, "m n"]:
    """Computes `x @ W.T` for `W` of shape (n, k)."""
    columns = [x[:, i::stride] for i in range(stride)]

    def rows_of_y(start: Array | int, rows: int) -> Array:
        parts = zip(columns, decode(start, rows), strict=True)
        return functools.reduce(jnp.add, (_dot(c, w, ((1,), (1,))) for c, w in parts))

    tiles, rows = _tiling(x.shape[0], n, k)
    _, y = lax.scan(lambda _, i: (None, rows_of_y(i * rows, rows)), None, jnp.arange(tiles))
    y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], tiles * rows)
    if tiles * rows < n:
        y = jnp.concatenate([y, rows_of_y(tiles * rows, n - tiles * rows)], axis=1)
    return y


def contract_rows(
    x: Float[Array, "m n"], decode: Decode, n: int, k: int, stride: int = 1
) -> Float[Array, "m k"]:
    """Computes `x @ W` for `W` of shape (n, k)."""

    def add(acc: list[Array], start: Array | int, rows: int) -> list[Array]:
        part = lax.dynamic_slice_in_dim(x, start, rows, axis=1)
        tile = decode(start, rows)
        return [a + _dot(part, w, ((1,), (0,))) for a, w in zip(acc, tile, strict=True)]

    tiles, rows = _tiling(x.shape[0], n, k)
    widths = [len(range(i, k, stride)) for i in range(stride)]
    acc = [jnp.zeros_like(x, shape=(x.shape[0], width)) for width in widths]
    if is_spread((x,)):  # sharded over explicit axes of a mesh: rows keep their sharding
        acc = [jax.sharding.reshard(a, jax.P(jax.typeof(x).sharding.spec[0], None)) for a in acc]
    acc, _ = lax.scan(lambda a, i: (add(a, i * rows, rows), None), acc, jnp.arange(tiles))
    if tiles * rows < n:
        acc = add(acc, tiles * rows, n - tiles * rows)
    acc = [jnp.pad(a, ((0, 0), (0, widths[0] - a.shape[1]))) for a in acc]
    return jnp.stack(acc, axis=-1).reshape(x.shape[0], widths[0] * stride)[:, :k]


def as_weights(values: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Rounds `values` to the precision of a floating `dtype`, as a cast to it would."""
    info = jnp.finfo(dtype)
    # A pair of casts would be elided by XLA.
    return values if info.bits >= 32 else lax.reduce_precision(values, info.nexp, info.nmant)


def _dot(x: Array, w: Array, contract: tuple[tuple[int], tuple[int]]) -> Array:
    return lax.dot_general(x, w, (contract, ((), ())), precision=lax.Precision.HIGHEST)


def _tiling(m: Any, n: int, k: int) -> tuple[int, int]:
    """The number of tiles, and of the rows of each, which is even; the remainder is less than a tile."""
    # A large weight is never decoded at once: XLA would keep it from the forward to the backward pass.
    many = min(_TILE_MANY, max(_TILE_FEW, n * k // 4))
    few = isinstance(m, int) and m <= _FEW_ROWS_OF_X  # a symbolic dimension of `jax.export` is no int
    weights = _TILE_FEW if few else many
    tiles = -(-n // max(2, weights // max(k, 1)))
    return (tiles, n) if tiles < 2 else (tiles, n // tiles // 2 * 2)
