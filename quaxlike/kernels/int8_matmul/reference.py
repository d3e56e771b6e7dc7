"""The matmul with int8 weights in plain JAX."""

import math

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from ..blockwise import dequantize_int
from ..multilinear import accumulator_dtype, precision_for
from ..tiles import as_weights, contract_columns, contract_rows


def tiled(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """Decodes some rows of `W` at a time, to the precision of `x`, and accumulates in float32 or wider."""
    n, k = codes.shape
    batch, dtype = x.shape[:-1], x.dtype
    x = x.reshape(math.prod(batch), x.shape[-1]).astype(accumulator_dtype(dtype))

    def decode(start: Array | int, rows: int) -> list[Array]:
        tile = [lax.dynamic_slice_in_dim(leaf, start, rows) for leaf in (codes, scale)]
        return [as_weights(dequantize_int(*tile, block_size=block_size), dtype).astype(x.dtype)]

    y = (contract_rows if transpose else contract_columns)(x, decode, n, k)
    return y.reshape(*batch, y.shape[-1]).astype(out_dtype)


def whole(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """One expression, for compilers that fuse the cast of the codes into the dot.

    One scale a row stays outside of the dot: integers of 8 bits are exact in every dtype of `x`, and only a
    cast is fused; a product with scales would be written to memory as a dense weight. Scales of blocks within
    rows differ along the contraction, and meet the weight, which is rounded to the dtype of `x`.
    """
    if not is_scaled_outside(x, scale, transpose=transpose):
        return times(x, codes, scale, block_size=block_size, transpose=transpose, out_dtype=out_dtype)
    dtype = accumulator_dtype(x.dtype)
    scale = scale.reshape(*[1] * (x.ndim - 1), codes.shape[0]).astype(dtype)
    if transpose:
        x = (x.astype(dtype) * scale).astype(x.dtype)
        return _dot(x, codes.astype(x.dtype), transpose).astype(out_dtype)
    return (_dot(x, codes.astype(x.dtype), transpose) * scale).astype(out_dtype)


def is_scaled_outside(x: Array, scale: Array, *, transpose: bool) -> bool:
    """Whether scales meet `x` or the result instead of the weight: one a row, but not those of rows that
    float16 is contracted over, whose exponents do not hold the products of small cotangents and scales."""
    return scale.shape[1] == 1 and not (transpose and x.dtype == np.float16)


def times(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """The product with the weight, decoded."""
    w = dequantize_int(codes, scale, block_size=block_size, dtype=x.dtype)
    return _dot(x, w, transpose).astype(out_dtype)


def _dot(x: Array, w: Array, transpose: bool) -> Array:
    contract = (((x.ndim - 1,), (0 if transpose else 1,)), ((), ()))
    params = {"precision": precision_for(x.dtype), "preferred_element_type": accumulator_dtype(x.dtype)}
    return lax.dot_general(x, w, contract, **params)
