"""The matmul with 4-bit weights and a low-rank term on GPUs."""

from typing import Any

import numpy as np
from jaxtyping import Array

from quaxlike.kernels.backends import Choice
from quaxlike.kernels.multilinear import accumulator_dtype
from quaxlike.kernels.nf4_matmul import gpu as nf4
from quaxlike.kernels.nf4_matmul.scales import NestedScales

from .reference import low_rank


def choose(platform: str, x: Any, **params: Any) -> Choice:
    """How the operation runs on a GPU."""
    refusal = nf4.fused_refusal(platform, x, **params)
    if refusal is None:
        return Choice("gpu", "one fused kernel", nf4.fused)
    return Choice("gpu", f"decoded in chunks for the library's matmul: {refusal}", chunked)


def chunked(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    t: Array,
    b: Array,
    *,
    shape: tuple[int, int],
    block_size: int,
    out_dtype: np.dtype,
) -> Array:
    """The product with `W` by chunks, and the low-rank term by the library."""
    accumulator = accumulator_dtype(x.dtype)
    y = nf4.chunked(
        x,
        packed,
        absmax,
        codebook,
        shape=shape,
        block_size=block_size,
        transpose=False,
        out_dtype=accumulator,
    )
    return (y + low_rank(t, b, accumulator)).astype(out_dtype)
