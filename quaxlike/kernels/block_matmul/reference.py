"""The matmul with weights in a block format in plain JAX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ..multilinear import accumulator_dtype, precision_for
from ..product import Product
from ..tiles import as_weights, contract_columns, contract_rows


def tiled(
    x: Float[Array, "*batch contracted"],
    leaves: PyTree[Array],
    *,
    decode: Callable[[Any], list[Array]],
    product: Product,
) -> Float[Array, "*batch free"]:
    """Decodes some rows of `W` at a time, to the precision of `x`, and accumulates in float32 or wider."""
    n, k = product.shape
    batch, dtype = x.shape[:-1], x.dtype
    x = x.reshape(math.prod(batch), x.shape[-1]).astype(accumulator_dtype(dtype))

    def rows_of_w(start: Array | int, rows: int) -> list[Array]:
        tile = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, rows), leaves)
        return [as_weights(part, dtype).astype(x.dtype) for part in decode(tile)]

    planes = len(jax.eval_shape(decode, leaves))
    y = (contract_rows if product.transpose else contract_columns)(x, rows_of_w, n, k, stride=planes)
    return y.reshape(*batch, y.shape[-1]).astype(product.out_dtype)


def whole(
    x: Float[Array, "*batch contracted"],
    leaves: PyTree[Array],
    *,
    decode: Callable[[Any], list[Array]],
    product: Product,
) -> Float[Array, "*batch free"]:
    """Decodes `W` to the dtype of `x` in one expression, for compilers that fuse it into the dot."""
    return times(x, join(decode(leaves), product.shape[1]), product)


def times(x: Float[Array, "*batch contracted"], w: Float[Array, "n k"], product: Product) -> Array:
    """Multiplies `x` by `W`, or by some of its rows or columns."""
    contract = ((x.ndim - 1,), (0 if product.transpose else 1,))
    params = {"precision": precision_for(x.dtype), "preferred_element_type": accumulator_dtype(x.dtype)}
    return lax.dot_general(x, w.astype(x.dtype), (contract, ((), ())), **params).astype(product.out_dtype)


def join(planes: list[Array], count: int) -> Array:
    """Interleaves the planes of a matrix, and returns its first `count` columns."""
    if len(planes) == 1:
        return planes[0]
    width = planes[0].shape[-1]
    full = [jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, width - p.shape[-1])]) for p in planes]
    return jnp.stack(full, axis=-1).reshape(*planes[0].shape[:-1], -1)[..., :count]
