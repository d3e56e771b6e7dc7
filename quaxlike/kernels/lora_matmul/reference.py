"""The matmul with 4-bit weights and a low-rank term in plain JAX."""

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

from ..multilinear import accumulator_dtype, precision_for
from ..nf4_matmul.reference import matmul_reference
from ..nf4_matmul.scales import NestedScales, dense_scales
from ..product import Product


def lora_matmul_reference(
    x: Float[Array, "*batch contracted"],
    packed: UInt8[Array, "*bytes"],
    absmax: Float32[Array, "*blocks"] | NestedScales,
    codebook: Float32[Array, "16"],
    t: Float[Array, "*batch adapters rank"],
    b: Float[Array, "adapters free rank"],
    *,
    product: Product,
) -> Float[Array, "*batch free"]:
    """`x @ W.T` plus `t @ b.T` for each adapter, rounded once."""
    accumulator = accumulator_dtype(x.dtype)
    y = matmul_reference(
        x,
        packed,
        dense_scales(absmax),
        codebook,
        shape=product.shape,
        block_size=product.block_size,
        out_dtype=accumulator,
    )
    return (y + low_rank(t, b, accumulator)).astype(product.out_dtype)


def low_rank(t: Array, b: Array, dtype: np.dtype) -> Array:
    """`t @ b.T`, summed over adapters, accumulated in `dtype`."""
    contract = ((t.ndim - 2, t.ndim - 1), (0, 2))
    params = {"precision": precision_for(t.dtype), "preferred_element_type": dtype}
    return lax.dot_general(t, b, (contract, ((), ())), **params)
