"""The reference implementation for products with a stored weight, in plain JAX, which kernels must match.

XLA does not fuse decoding into a dot on CPUs. So just a few rows are decoded at a time, as a tile that stays
in cache, and the dense weight is never materialised.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Num

from ..multilinear import accumulator_dtype, dot_general, is_spread, precision_for
from .product import Decode, Product, Tiles

# How many weights to decode at a time. With few rows of `x` this is 1 MiB of float32, to fit into a core's L2
# cache. With many rows, larger tiles provide every step with enough work for all cores, and require fewer
# passes over the activations and the accumulator.
_TILE_FEW, _TILE_MANY = 2**18, 2**20
_FEW_ROWS_OF_X, _MANY_ROWS_OF_X = 4, 64


_UNIT = 32


def in_eight_bits(x: Float[Array, "*batch k"]) -> Float32[Array, "*batch k"]:
    """Rounds `x` to 8 bits, in blocks of 32. This is llama.cpp's Q8_0, but with scales in float32.

    The derivative is that of the identity. If any number in a block is infinite or NaN, the whole block
    becomes NaN.
    """
    x, k = x.astype(jnp.float32), x.shape[-1]
    blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -k % _UNIT)]).reshape(*x.shape[:-1], -1, _UNIT)
    blocks = lax.stop_gradient(blocks)
    most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    some = most >= 1e-30  # the reciprocals of smaller numbers may be infinite
    codes = jnp.where(some, jnp.round(blocks * (127 / jnp.where(some, most, 1))), 0)
    rounded = jnp.where(jnp.isfinite(most), codes * (most / 127), jnp.nan)
    return rounded.reshape(*x.shape[:-1], -1)[..., :k] + (x - lax.stop_gradient(x))


def with_low_rank(product_of: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps a product to also add the adapters' `t @ b.T` (if any), before rounding the result."""

    @functools.wraps(product_of)
    def both(x: Array, leaves: Sequence[Any], *low_rank: Array, decode: Decode, product: Product) -> Array:
        if not low_rank:
            return product_of(x, leaves, decode=decode, product=product)
        accumulator = accumulator_dtype(x.dtype)
        y = product_of(x, leaves, decode=decode, product=product.of_dtype(accumulator))
        t, b = low_rank
        return (y + times_adapters(t, b, accumulator)).astype(product.out_dtype)

    return both


@with_low_rank
def tiled(
    x: Float[Array, "*batch contracted"], leaves: Sequence[Any], *, decode: Decode, product: Product
) -> Float[Array, "*batch free"]:
    """Decodes `W` a few rows at a time, to `x`'s precision, and accumulates in at least float32."""
    n, k = product.shape
    batch, dtype = x.shape[:-1], x.dtype
    x = x.reshape(math.prod(batch), x.shape[-1])
    # Many rows are faster to multiply in bfloat16 than in float32 on processors with bfloat16 instructions,
    # and about as fast on others.
    many = isinstance(x.shape[0], int) and x.shape[0] >= _MANY_ROWS_OF_X
    if not (dtype == jnp.bfloat16 and many):
        x = x.astype(accumulator_dtype(dtype))
    of_leaves = decode.tiles(leaves, product)

    def tile(start: Array | int, rows: int) -> list[Array]:
        return [as_weights(part, dtype).astype(x.dtype) for part in of_leaves(start, rows)]

    contract = contract_rows if product.transpose else contract_columns
    y = contract(x, tile, n, k, stride=decode.stride(product))
    return y.reshape(*batch, y.shape[-1]).astype(product.out_dtype)


@with_low_rank
def whole(
    x: Float[Array, "*batch contracted"], leaves: Sequence[Any], *, decode: Decode, product: Product
) -> Float[Array, "*batch free"]:
    """Decodes `W` to `x`'s dtype in a single expression, which some compilers fuse into the dot."""
    if (parts := scaled_outside(x, leaves, decode, product)) is None:
        return times(x, decode.matrix(leaves, product), product)
    return times_scaled(x, *parts, product)


def scaled_outside(
    x: Array, leaves: Sequence[Any], decode: Decode, product: Product
) -> tuple[Array, Array] | None:
    """Returns values and row scales, if `x` or the result can be scaled rather than the weight.

    XLA can fuse a cast into the dot, but not a multiplication by scales, for which it would write out the
    dense weight. Not for float16 when contracting over rows, where multiplying a small cotangent by a scale
    can underflow.
    """
    return None if product.transpose and x.dtype == np.float16 else decode.scaled_rows(leaves)


def times_scaled(
    x: Float[Array, "*batch contracted"], values: Array, scale: Float[Array, "n 1"], product: Product
) -> Float[Array, "*batch free"]:
    """Multiplies `x` by a weight given as values and row scales, applying the scales outside the dot."""
    dtype = accumulator_dtype(x.dtype)
    scale = scale.reshape(*[1] * (x.ndim - 1), values.shape[0]).astype(dtype)
    if product.transpose:
        return times((x.astype(dtype) * scale).astype(x.dtype), values, product)
    return (times(x, values, product.of_dtype(dtype)) * scale).astype(product.out_dtype)


def times(
    x: Float[Array, "*batch contracted"], w: Num[Array, "n k"], product: Product, dtype: Any = None
) -> Float[Array, "*batch free"]:
    """Multiplies `x` by `W` (or by some rows or columns), with the result in `dtype`.

    If `dtype` is `None`, accumulates in at least float32 and then rounds to the product's dtype.
    """
    contract = ((x.ndim - 1,), (0 if product.transpose else 1,))
    params = {"precision": precision_for(x.dtype), "preferred_element_type": dtype}
    if dtype is not None:
        return lax.dot_general(x, w.astype(x.dtype), (contract, ((), ())), **params)
    return times(x, w, product, accumulator_dtype(x.dtype)).astype(product.out_dtype)


def to_ranks(
    x: Float[Array, "*batch features"],
    a: Float[Array, "adapters rank features"],
    scaling: Any,
    index: Int[Array, "*batch"] | None = None,
) -> Float[Array, "*batch adapters rank"]:
    """Computes `scaling · x @ a.T` for each adapter, or zeros for adapters not used by a row."""
    params = {"precision": precision_for(x.dtype), "preferred_element_type": x.dtype}
    t = dot_general(x, a, (((x.ndim - 1,), (2,)), ((), ())), **params)
    if index is not None:
        t = t * jax.nn.one_hot(index, a.shape[0], dtype=x.dtype)[..., None]
    return t * jnp.asarray(scaling, x.dtype)


def times_adapters(
    t: Float[Array, "*batch adapters rank"], b: Float[Array, "adapters free rank"], dtype: np.dtype
) -> Float[Array, "*batch free"]:
    """Computes `t @ b.T`, contracting over both adapters and ranks, and accumulating in `dtype`."""
    contract = ((t.ndim - 2, t.ndim - 1), (0, 2))
    params = {"precision": precision_for(t.dtype), "preferred_element_type": dtype}
    return lax.dot_general(t, b, (contract, ((), ())), **params)


def contract_columns(
    x: Float[Array, "m k"], tile: Tiles, n: int, k: int, stride: int, at_once: int = 0
) -> Float[Array, "m n"]:
    """Computes `x @ W.T` for an (n, k) weight, using a single tile if it has at most `at_once` elements."""
    columns = [x[:, i::stride] for i in range(stride)]

    def rows_of_y(start: Array | int, rows: int) -> Array:
        parts = zip(columns, tile(start, rows), strict=True)
        return functools.reduce(jnp.add, (_dot(c, w, ((1,), (1,))) for c, w in parts))

    tiles, rows = _tiling(x.shape[0], n, k, at_once)
    if tiles < 2:
        return rows_of_y(0, n)
    _, y = lax.scan(lambda _, i: (None, rows_of_y(i * rows, rows)), None, jnp.arange(tiles))
    y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], tiles * rows)
    if tiles * rows < n:
        y = jnp.concatenate([y, rows_of_y(tiles * rows, n - tiles * rows)], axis=1)
    return y


def contract_rows(
    x: Float[Array, "m n"], tile: Tiles, n: int, k: int, stride: int, at_once: int = 0
) -> Float[Array, "m k"]:
    """Computes `x @ W` for an (n, k) weight, using a single tile if it has at most `at_once` elements."""
    tiles, rows = _tiling(x.shape[0], n, k, at_once)
    if tiles < 2 and stride == 1:
        (w,) = tile(0, n)
        return _dot(x, w, ((1,), (0,)))

    def add(acc: list[Array], start: Array | int, rows: int) -> list[Array]:
        part = lax.dynamic_slice_in_dim(x, start, rows, axis=1)
        return [a + _dot(part, w, ((1,), (0,))) for a, w in zip(acc, tile(start, rows), strict=True)]

    widths = [len(range(i, k, stride)) for i in range(stride)]
    dtype = accumulator_dtype(x.dtype)
    # Accumulate each plane separately, to only interleave them once at the end.
    acc = [jnp.zeros_like(x, dtype, shape=(x.shape[0], width)) for width in widths]
    if is_spread((x,)):  # with explicit mesh axes, the rows of the result inherit the sharding of x's rows
        acc = [jax.sharding.reshard(a, jax.P(jax.typeof(x).sharding.spec[0], None)) for a in acc]
    acc, _ = lax.scan(lambda a, i: (add(a, i * rows, rows), None), acc, jnp.arange(tiles))
    if tiles * rows < n:
        acc = add(acc, tiles * rows, n - tiles * rows)
    acc = [jnp.pad(a, ((0, 0), (0, widths[0] - a.shape[1]))) for a in acc]
    return jnp.stack(acc, axis=-1).reshape(x.shape[0], widths[0] * stride)[:, :k]


def as_weights(values: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Rounds `values` to a floating `dtype`'s precision, without changing their dtype."""
    info = jnp.finfo(dtype)
    # Not `values.astype(dtype).astype(values.dtype)`, because XLA would elide the pair of casts.
    return values if info.bits >= 32 else lax.reduce_precision(values, info.nexp, info.nmant)


def _dot(x: Array, w: Array, contract: tuple[tuple[int], tuple[int]]) -> Array:
    params = {"precision": lax.Precision.HIGHEST, "preferred_element_type": accumulator_dtype(x.dtype)}
    return lax.dot_general(x, w, (contract, ((), ())), **params)


def _tiling(m: Any, n: int, k: int, at_once: int) -> tuple[int, int]:
    """Returns the number of tiles and the (even) row count per tile. Any rest is less than a tile."""
    if n * k <= at_once:
        return 1, n
    # Never decode a large weight in one go: XLA would then keep it alive until the backward pass.
    many = min(_TILE_MANY, max(_TILE_FEW, n * k // 4))
    few = isinstance(m, int) and m <= _FEW_ROWS_OF_X  # a symbolic dimension is not an int
    weights = _TILE_FEW if few else many
    tiles = -(-n // max(2, weights // max(k, 1)))
    return (tiles, n) if tiles < 2 else (tiles, n // tiles // 2 * 2)
