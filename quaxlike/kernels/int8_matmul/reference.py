"""The matmul with int8 weights in plain JAX."""

import math

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from ..blockwise import dequantize_int
from ..multilinear import accumulator_dtype
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
    """Decodes `W` to the dtype of `x` in one expression, for compilers that fuse it into the dot."""
    w = dequantize_int(codes, scale, block_size=block_size, dtype=x.dtype)
    contract = ((x.ndim - 1,), (0 if transpose else 1,))
    y = lax.dot_general(x, w, (contract, ((), ())), preferred_element_type=accumulator_dtype(x.dtype))
    return y.astype(out_dtype)
