"""The matmul with weights in a block format on GPUs, if there is no fused kernel for it."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, PyTree

from .. import chunks
from ..multilinear import accumulator_dtype
from ..product import Product
from .reference import join, times


def chunked(
    x: Float[Array, "*batch contracted"],
    leaves: PyTree[Array],
    *,
    decode: Callable[[Any], list[Array]],
    product: Product,
) -> Float[Array, "*batch free"]:
    """Decodes `W` in chunks of rows or columns, in the dtype of `x`, and multiplies each by the library."""
    (n, k), m = product.shape, math.prod(x.shape[:-1])

    def rows_of_w(leaves: PyTree[Array], start: int, stop: int) -> Array:
        return join(decode(jax.tree.map(lambda leaf: leaf[start:stop], leaves)), k)

    def terms(leaves: PyTree[Array], start: int, stop: int) -> Array:
        w = rows_of_w(leaves, start, stop)
        return times(x[..., start:stop], w, product.of_dtype(accumulator_dtype(x.dtype)))

    def columns(leaves: PyTree[Array], start: int, stop: int) -> Array:
        if product.transpose:  # the compiler decodes only these columns
            return times(x, join(decode(leaves), k)[:, start:stop], product)
        return times(x, rows_of_w(leaves, start, stop), product)

    if product.transpose and m <= chunks.FEW_ROWS:
        return chunks.add(terms, leaves, n, chunks.chunk_size(n, k, m)).astype(product.out_dtype)
    step = chunks.chunk_size(product.free, product.contracted, m)
    return chunks.join(columns, leaves, product.free, step)
