"""The product of a few rows with a dense weight, which XLA's CPU compiler makes slowly."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jaxtyping import Array, Float

from ..core import compat
from ..primitives import define_primitive
from .backends import is_partitioned, requested
from .multilinear import is_spread, map_rows, sum_tangents, vary_alike
from .native.library import Library, library

# Up to this many rows, the native product is faster than XLA's.
_MOST_ROWS = {"float32": 16, "bfloat16": 8}


def dense_matmul(x: Float[Array, "... k"], w: Float[Array, "n k"]) -> Float[Array, "... n"]:
    """`x @ w.T`, differentiable in both.

    On CPUs, a few rows are multiplied by native code where it is compiled, which reads a weight once, as fast
    as the memory gives it. Without it, one row in bfloat16 is multiplied and added as the weight is read, in
    float32, since XLA would convert the whole weight first. As a primitive the product sees all rows when it
    is lowered, also those of a batch. Other dtypes and platforms get XLA's product.
    """
    usual = x.dtype == w.dtype and x.dtype.name in _MOST_ROWS
    if not usual or is_spread((x, w)) or jax.config.jax_default_matmul_precision is not None:
        return _plain(x, w)
    return dense_matmul_p(*vary_alike((x, w)))


def dot_general(x: Array, y: Array, dimension_numbers: Any, **params: Any) -> Array:
    """`lax.dot_general`, by `dense_matmul` if the larger operand is a matrix whose rows are contracted."""
    axes, batch = dimension_numbers
    usual = x.dtype == y.dtype and all(value in (None, x.dtype) for value in params.values())
    last = tuple(map(tuple, axes)) == ((x.ndim - 1,), (y.ndim - 1,)) and not any(map(len, batch))
    if usual and last and max(x, y, key=jnp.size).ndim == 2:
        return dense_matmul(x, y) if y.size >= x.size else jnp.moveaxis(dense_matmul(y, x), -1, 0)
    return lax.dot_general(x, y, dimension_numbers, **params)


def _plain(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


def _on_cpu(x: Array, w: Array) -> Array:
    rows = math.prod(x.shape[:-1])
    if x.dtype != jnp.bfloat16 or not isinstance(rows, int) or rows != 1:
        return _plain(x, w)
    y = jnp.sum(w.astype(jnp.float32) * x.reshape(1, -1).astype(jnp.float32), axis=1)
    return y.astype(x.dtype).reshape(*x.shape[:-1], len(w))


def _native(x: Array, w: Array) -> Array:
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or not 0 < rows <= _MOST_ROWS[x.dtype.name] or not w.size:
        return _on_cpu(x, w)
    out = jax.ShapeDtypeStruct((rows, len(w)), x.dtype)
    y = jax.ffi.ffi_call("quaxlike_multiply_dense", out)(x.reshape(rows, -1), w)
    return y.reshape(*x.shape[:-1], len(w))


def _lower_on_cpu(context: mlir.LoweringRuleContext, *operands: Any) -> Any:
    # Other machines, to which a program is exported, may lack the library; XLA cannot divide a call of it.
    elsewhere = context.module_context.lowering_parameters.for_export or is_partitioned(context)
    native = requested() != "reference" and not elsewhere and isinstance(library(), Library)
    rule = mlir.lower_fun(_native if native else _on_cpu, multiple_results=False)
    return compat.lower_unvaried(rule, context, *operands)


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


dense_matmul_p = define_primitive("dense_matmul", _plain, jvp=_jvp, transpose=_transpose, batching=_batching)
mlir.register_lowering(dense_matmul_p, _lower_on_cpu, platform="cpu")
