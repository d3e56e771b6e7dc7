"""The product of one row with a dense weight in bfloat16, which XLA's CPU compiler makes slowly."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jaxtyping import Array, Float

from ..primitives import define_primitive
from .multilinear import is_spread, map_rows, sum_tangents, vary_alike


def dense_matmul(x: Float[Array, "... k"], w: Float[Array, "n k"]) -> Float[Array, "... n"]:
    """`x @ w.T`, differentiable in both.

    On CPUs, XLA converts a whole weight in bfloat16 to float32 for a product with one row. Instead, each
    weight is multiplied and added as it is read, in float32: ten times as fast. As a primitive the product
    sees all rows when it is lowered, also those of a batch. Other dtypes and platforms get XLA's product.
    """
    if not w.dtype == x.dtype == jnp.bfloat16 or is_spread((x, w)):
        return _plain(x, w)
    return dense_matmul_p(*vary_alike((x, w)))


def dot_general(x: Array, y: Array, dimension_numbers: Any, **params: Any) -> Array:
    """`lax.dot_general`, by `dense_matmul` in bfloat16 if the larger operand is a matrix whose rows are
    contracted."""
    axes, batch = dimension_numbers
    usual = x.dtype == y.dtype == jnp.bfloat16 and all(value in (None, x.dtype) for value in params.values())
    last = tuple(map(tuple, axes)) == ((x.ndim - 1,), (y.ndim - 1,)) and not any(map(len, batch))
    if usual and last and max(x, y, key=jnp.size).ndim == 2:
        return dense_matmul(x, y) if y.size >= x.size else jnp.moveaxis(dense_matmul(y, x), -1, 0)
    return lax.dot_general(x, y, dimension_numbers, **params)


def _plain(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


def _on_cpu(x: Array, w: Array) -> Array:
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or rows != 1:
        return _plain(x, w)
    y = jnp.sum(w.astype(jnp.float32) * x.reshape(1, -1).astype(jnp.float32), axis=1)
    return y.astype(x.dtype).reshape(*x.shape[:-1], len(w))


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    return sum_tangents(dense_matmul_p, primals, tangents, {})


def _transpose(ct: Any, x: Any, w: Any) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented
    return lax.dot_general(ct, w, (((ct.ndim - 1,), (0,)), ((), ()))), None


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...]) -> Any:
    if dims[1] is not None:  # a batch of weights
        return NotImplemented
    return map_rows(dense_matmul_p, size, operands, dims, {}, rows=(0,))


dense_matmul_p = define_primitive(
    "dense_matmul", _plain, cpu=_on_cpu, jvp=_jvp, transpose=_transpose, batching=_batching
)
