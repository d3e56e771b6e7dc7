"""The matmul with int8 weights on GPUs, in parts if one expression would make large copies."""

import math
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float32, Int8

from .. import chunks
from .reference import is_scaled_outside, times, whole


def chunked(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """Computes the product as one expression if that makes no large copy. Otherwise it makes `x` times the
    scales of rows, or the decoded weight, in parts, each for a product of the library."""
    (n, k), lead = codes.shape, x.shape[:-1]
    params: dict[str, Any] = {"block_size": block_size, "transpose": transpose, "out_dtype": out_dtype}
    m = math.prod(lead)
    if not isinstance(m, int):  # a symbolic dimension of `jax.export`
        return whole(x, codes, scale, **params)
    if is_scaled_outside(x, scale, transpose=transpose):
        if not transpose or m == 0:
            return whole(x, codes, scale, **params)
        rows = x.reshape(m, n)
        part = lambda weight, start, stop: whole(rows[start:stop], *weight, **params)
        y = chunks.join(part, (codes, scale), m, chunks.rows_beside(m, n, k), axis=0)
        return y.reshape(*lead, k)

    def columns(weight: tuple[Array, Array], start: int, stop: int) -> Array:
        codes, scale = weight
        if not transpose:
            return times(x, codes[start:stop], scale[start:stop], **params)
        blocks = slice(start // block_size, -(-stop // block_size))
        of_part: dict[str, Any] = params | {"block_size": min(block_size, stop - start)}
        return times(x, codes[:, start:stop], scale[:, blocks], **of_part)

    free, contracted, aligned = (k, n, block_size if block_size < k else 1) if transpose else (n, k, 1)
    step = chunks.chunk_size(free, contracted, m, aligned=aligned)
    return chunks.join(columns, (codes, scale), free, step)
