"""The product with a stored weight in plain JAX: runs everywhere, and is what kernels are held to."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..multilinear import accumulator_dtype, precision_for
from ..product import Product
from ..tiles import as_weights, contract_columns, contract_rows
from .formats import Decode


def with_low_rank(product_of: Callable[..., Array]) -> Callable[..., Array]:
    """A product to which `t @ b.T` of adapters is added before it is rounded, if there are any."""

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
    """Decodes some rows of `W` at a time, to the precision of `x`, and accumulates in float32 or wider."""
    n, k = product.shape
    batch, dtype = x.shape[:-1], x.dtype
    x = x.reshape(math.prod(batch), x.shape[-1]).astype(accumulator_dtype(dtype))
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
    """Decodes `W` to the dtype of `x` in one expression, for compilers that fuse it into the dot."""
    if (parts := scaled_outside(x, leaves, decode, product)) is None:
        return times(x, decode.matrix(leaves, product), product)
    return times_scaled(x, *parts, product)


def scaled_outside(
    x: Array, leaves: Sequence[Any], decode: Decode, product: Product
) -> tuple[Array, Array] | None:
    """Values and scales of rows that meet `x` or the result instead of the weight, if these are all scales.

    Only a cast of the values is fused into the dot; a product with scales would be written to memory as a
    dense weight. Not for rows that float16 is contracted over, whose exponents do not hold the products of
    small cotangents and scales.
    """
    return None if product.transpose and x.dtype == np.float16 else decode.scaled_rows(leaves)


def times_scaled(
    x: Float[Array, "*batch contracted"], values: Array, scale: Float[Array, "n 1"], product: Product
) -> Float[Array, "*batch free"]:
    """Multiplies `x` by values whose rows have scales, which stay outside of the dot."""
    dtype = accumulator_dtype(x.dtype)
    scale = scale.reshape(*[1] * (x.ndim - 1), values.shape[0]).astype(dtype)
    if product.transpose:
        return times((x.astype(dtype) * scale).astype(x.dtype), values, product)
    return (times(x, values, product.of_dtype(dtype)) * scale).astype(product.out_dtype)


def times(
    x: Float[Array, "*batch contracted"], w: Float[Array, "n k"], product: Product, dtype: Any = None
) -> Float[Array, "*batch free"]:
    """Multiplies `x` by `W`, or by some of its rows or columns, to this dtype. If None, it accumulates in
    float32 or wider, and rounds to the dtype of the product."""
    contract = ((x.ndim - 1,), (0 if product.transpose else 1,))
    params = {"precision": precision_for(x.dtype), "preferred_element_type": dtype}
    if dtype is not None:
        return lax.dot_general(x, w.astype(x.dtype), (contract, ((), ())), **params)
    return times(x, w, product, accumulator_dtype(x.dtype)).astype(product.out_dtype)


def times_adapters(
    t: Float[Array, "*batch adapters rank"], b: Float[Array, "adapters free rank"], dtype: np.dtype
) -> Float[Array, "*batch free"]:
    """`t @ b.T`, summed over adapters, accumulated in `dtype`."""
    contract = ((t.ndim - 2, t.ndim - 1), (0, 2))
    params = {"precision": precision_for(t.dtype), "preferred_element_type": dtype}
    return lax.dot_general(t, b, (contract, ((), ())), **params)
