"""The matmul with 4-bit weights on GPUs."""

import functools
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from quaxlike.kernels.backends import Choice
from quaxlike.kernels.blockwise import dequantize_codebook
from quaxlike.kernels.multilinear import accumulator_dtype

# Weights decoded at a time, unless that were more than _MAX_CHUNKS times: 16 MiB of bfloat16, so
# that the library's matmul finds them in the L2 cache.
_CHUNK_WEIGHTS = 1 << 23
_MAX_CHUNKS = 16


def choose(platform: str, x: Any, **params: Any) -> Choice:
    """How the operation runs on a GPU."""
    return Choice("gpu", "decoded in chunks for the library's matmul", chunked)


def chunked(
    x: Array,
    packed: Array,
    absmax: Array,
    codebook: Array,
    *,
    shape: tuple[int, int],
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Array:
    """Decodes some rows of `W` to the dtype of `x`, multiplies them by the library, and so on.

    Each weight is rounded once, from its exact float32 value.
    """
    n, k = shape
    rows = _rows_per_chunk(n, k, block_size)
    parts = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        w = dequantize_codebook(
            packed[start * k // 2 : (stop * k + 1) // 2],
            absmax[start * k // block_size : -(-stop * k // block_size)],
            codebook,
            n=(stop - start) * k,
            block_size=block_size,
            dtype=x.dtype,
        ).reshape(stop - start, k)
        operand = x[..., start:stop] if transpose else x
        contract = ((x.ndim - 1,), (0 if transpose else 1,))
        parts.append(
            lax.dot_general(
                operand, w, (contract, ((), ())), preferred_element_type=accumulator_dtype(x.dtype)
            )
        )
    y = functools.reduce(operator.add, parts) if transpose else jnp.concatenate(parts, axis=-1)
    return y.astype(out_dtype)


def _rows_per_chunk(n: int, k: int, block_size: int) -> int:
    """Rows that begin and end where blocks do, and therefore bytes."""
    aligned = block_size // math.gcd(block_size, k)
    rows = max(_CHUNK_WEIGHTS // k, -(-n // _MAX_CHUNKS))
    return max(1, rows // aligned) * aligned
