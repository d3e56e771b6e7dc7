"""The matmul with int8 weights in plain JAX."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from quaxlike.kernels.blockwise import dequantize_int
from quaxlike.kernels.tiles import contract_columns, contract_rows


def tiled(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """Decodes some rows of `W` at a time, exactly, and accumulates in float32 or wider."""
    n, k = codes.shape
    batch = x.shape[:-1]
    x = x.reshape(math.prod(batch), x.shape[-1])
    x = x if jnp.finfo(x.dtype).bits > 32 else x.astype(jnp.float32)

    def decode(start: Array | int, rows: int) -> list[Array]:
        tile = [lax.dynamic_slice_in_dim(leaf, start, rows) for leaf in (codes, scale)]
        return [dequantize_int(*tile, block_size=block_size).astype(x.dtype)]

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
    y = lax.dot_general(x, w, (contract, ((), ())), preferred_element_type=jnp.float32)
    return y.astype(out_dtype)
