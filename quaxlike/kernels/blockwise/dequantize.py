"""Dequantisation of codes and block scales, by tables and therefore exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Float32, Int8, UInt8

from .blocks import NESTED_BLOCK, pad_to_blocks
from .codebooks import dynamic_map


def unpack_codes(packed: UInt8[ArrayLike, " bytes"]) -> UInt8[Array, " codes"]:
    """Unpacks the two 4-bit codes of each byte, high nibble first."""
    packed = jnp.asarray(packed)
    return jnp.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)


@functools.partial(jax.jit, static_argnames=("n", "block_size", "dtype"), inline=True)
def dequantize_codebook(
    packed: UInt8[ArrayLike, " bytes"],
    absmax: Float32[ArrayLike, " blocks"],
    codebook: Float32[ArrayLike, "16"],
    *,
    n: int,
    block_size: int,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, " n"]:
    """Dequantises `n` values of `quantize_codebook`: table value times scale in float32, then cast."""
    values = pad_to_blocks(jnp.asarray(codebook)[unpack_codes(packed)][:n], block_size)
    return (values * jnp.asarray(absmax)[:, None]).reshape(-1)[:n].astype(dtype)


@functools.partial(jax.jit, inline=True)
def dequantize_scales(
    codes: UInt8[ArrayLike, " blocks"],
    nested: Float32[ArrayLike, " nested"],
    offset: Float32[ArrayLike, ""],
    *,
    quant_map: Float32[ArrayLike, "256"] | None = None,
) -> Float32[Array, " blocks"]:
    """Dequantises block scales of `quantize_scales`: map · scale + offset, rounded twice.

    **Arguments:**

    - `quant_map`: the 256 values of the codes; the dynamic map if None.
    """
    codes = jnp.asarray(codes)
    table = jnp.asarray(dynamic_map() if quant_map is None else quant_map)
    blocks = pad_to_blocks(table[codes], NESTED_BLOCK)
    scaled = blocks * jnp.asarray(nested)[:, None]
    # The clamp changes no finite value; it keeps LLVM from contracting the product and the sum
    # into a fused multiply-add, whose single rounding differs from the reference.
    largest = np.finfo(np.float32).max
    scaled = lax.clamp(-largest, scaled, largest)
    return scaled.reshape(-1)[: codes.size] + offset


@functools.partial(jax.jit, static_argnames=("block_size", "dtype"), inline=True)
def dequantize_int(
    integers: Int8[ArrayLike, "... n"],
    scale: Float32[ArrayLike, "... blocks"],
    *,
    block_size: int | None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... n"]:
    """Dequantises the integers of `quantize_int`: integer times scale in float32, then cast."""
    values, scale = jnp.asarray(integers, jnp.float32), jnp.asarray(scale)
    n = values.shape[-1]
    if scale.shape[-1] > 1:
        scale = jnp.repeat(scale, n if block_size is None else block_size, axis=-1)[..., :n]
    return (values * scale).astype(dtype)
