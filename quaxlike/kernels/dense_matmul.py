"""Products of a few rows with dense arrays, for which XLA's CPU compiler generates slow code.

This uses a primitive, to decide how to compute a product when lowering. Only then is the total number of rows
known, because `jax.vmap` may add further rows. The results match XLA's up to rounding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jaxtyping import Array, Float, Num

from ..core import compat
from ..primitives import define_primitive
from .backends import is_partitioned, requested
from .multilinear import is_spread, map_rows, sum_tangents, vary_alike
from .native.library import Library, library

# Up to this many rows, the native product (using all cores) is faster than XLA's.
_MOST_ROWS = {"float32": 16, "bfloat16": 8}
# Up to this many rows, the transposed product `w @ x.T` is faster with XLA's CPU compiler.
_MOST_TRANSPOSED = 64


def dense_matmul(
    x: Float[Array, "... k"], w: Float[Array, "n k"], *, weight_first: bool = False
) -> Float[Array, "... n"]:
    """Computes `x @ w.T`, differentiable with respect to both operands.

    On CPUs, products of a few rows use the native library if available, reading the weight just once and at
    memory bandwidth. Without it, a single bfloat16 row converts the weight to float32 whilst reading it: XLA
    would convert it all beforehand. Other dtypes and platforms simply use `lax.dot_general`.

    **Arguments:**

    - `weight_first`: whether this was originally `w` times `x`. This doesn't affect the result, but matters
        to interpreters depending on operand order.
    """
    usual = x.dtype == w.dtype and x.dtype.name in _MOST_ROWS
    # With sharded operands or a requested precision, leave the product to XLA.
    if not usual or is_spread((x, w)) or jax.config.jax_default_matmul_precision is not None:
        return _plain(x, w, weight_first=weight_first)
    return dense_matmul_p(*vary_alike((x, w)), weight_first=weight_first, transposed=False)


def dot_general(x: Array, y: Array, dimension_numbers: Any, **params: Any) -> Array:
    """As `lax.dot_general`, but uses `dense_matmul` if the larger operand is a matrix of contracted rows."""
    axes, batch = dimension_numbers
    usual = x.dtype == y.dtype and all(value in (None, x.dtype) for value in params.values())
    last = tuple(map(tuple, axes)) == ((x.ndim - 1,), (y.ndim - 1,)) and not any(map(len, batch))
    if usual and last and _is_weight(y, x):
        return dense_matmul(x, y)
    if usual and last and _is_weight(x, y):
        return jnp.moveaxis(dense_matmul(y, x, weight_first=True), -1, 0)
    return lax.dot_general(x, y, dimension_numbers, **params)


def _is_weight(w: Array, x: Array) -> bool:
    """Returns whether `w` is a matrix at least as large as `x`. Any symbolic `x` counts as smaller."""
    return w.ndim == 2 and isinstance(w.size, int) and (not isinstance(x.size, int) or w.size >= x.size)


def stacked_matmul(x: Num[Array, "stack m k"], w: Num[Array, "stack k n"]) -> Float[Array, "stack m n"]:
    """Computes `x @ w` for stacks of matrices, such as the queries and keys for every head.

    The result is in float32 and is differentiable with respect to both operands. On CPUs, the native library
    (if available) multiplies whilst reading each matrix's rows.
    """
    return stacked_matmul_p(*vary_alike((x, w)))


def _plain(
    x: Array, w: Array, *, weight_first: bool = False, transposed: bool = False, dtype: Any = None
) -> Array:
    """Computes `x @ w.T`, or `x @ w` if `transposed`, as in the gradient with respect to `x`."""
    if weight_first:
        return jnp.moveaxis(lax.dot_general(w, x, (((1,), (x.ndim - 1,)), ((), ()))), 0, -1)
    axes = ((x.ndim - 1,), (0 if transposed else 1,))
    return lax.dot_general(x, w, (axes, ((), ())), preferred_element_type=dtype)


def _on_cpu(x: Array, w: Array, *, weight_first: bool = False, transposed: bool = False) -> Array:
    # Older versions of XLA only have fast products of bfloat16 operands if the result is in float32.
    plain = functools.partial(_plain, dtype=jnp.float32)
    rows = math.prod(x.shape[:-1])
    if transposed or not isinstance(rows, int) or not 0 < rows <= _MOST_TRANSPOSED:
        return plain(x, w, transposed=transposed).astype(x.dtype)
    if rows > 1:  # Without this barrier, XLA would rewrite this to `x @ w.T`.
        y = lax.optimization_barrier(plain(w, x.reshape(rows, -1)).astype(x.dtype)).T
    elif x.dtype == jnp.bfloat16:
        y = jnp.sum(w.astype(jnp.float32) * x.reshape(1, -1).astype(jnp.float32), axis=1).astype(x.dtype)
    else:
        return _plain(x, w)
    return y.reshape(*x.shape[:-1], len(w))


def _native(x: Array, w: Array, *, weight_first: bool = False, transposed: bool = False) -> Array:
    rows = math.prod(x.shape[:-1])
    few = isinstance(rows, int) and 0 < rows <= _MOST_ROWS[x.dtype.name]
    if transposed or not few or not w.size:
        return _on_cpu(x, w, transposed=transposed)
    out = jax.ShapeDtypeStruct((rows, len(w)), x.dtype)
    y = jax.ffi.ffi_call("quaxlike_multiply_dense", out)(x.reshape(rows, -1), w)
    return y.reshape(*x.shape[:-1], len(w))


def _lower_on_cpu(
    native: Callable[..., Array], otherwise: Callable[..., Array], context: Any, *operands: Any, **params: Any
) -> Any:
    # An exported program may run on a machine without the library. In a partitioned program, XLA can't
    # partition a call to it.
    elsewhere = context.module_context.lowering_parameters.for_export or is_partitioned(context)
    usable = requested() != "reference" and not elsewhere and isinstance(library(), Library)
    rule = mlir.lower_fun(native if usable else otherwise, multiple_results=False)
    params = context.primitive.plain_params(params)
    return compat.lower_unvaried(rule, context, *operands, **params)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    return sum_tangents(dense_matmul_p, primals, tangents, params)


def _transpose(ct: Any, x: Any, w: Any, *, transposed: bool, **params: Any) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented
    if ct.dtype != jnp.bfloat16 or is_spread((ct, w)):
        return _plain(ct, w, transposed=not transposed), None
    return dense_matmul_p(*vary_alike((ct, w)), weight_first=False, transposed=not transposed), None


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    if dims[1] is not None:  # The weights are batched, so this is no longer a product with one matrix.
        return NotImplemented
    return map_rows(dense_matmul_p, size, operands, dims, params, rows=(0,))


dense_matmul_p = define_primitive("dense_matmul", _plain, jvp=_jvp, transpose=_transpose, batching=_batching)
mlir.register_lowering(dense_matmul_p, functools.partial(_lower_on_cpu, _native, _on_cpu), platform="cpu")


def _stacked(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _stacked_on_cpu(x: Array, w: Array) -> Array:
    return jnp.sum(x[..., None].astype(jnp.float32) * w[:, None].astype(jnp.float32), axis=2)


def _stacked_native(x: Array, w: Array) -> Array:
    (stack, m, k), n = x.shape, w.shape[2]
    known = all(isinstance(size, int) for size in (stack, m, n))
    if not known or not stack * m * n or not {x.dtype.name, w.dtype.name} <= {*_MOST_ROWS}:
        return _stacked_on_cpu(x, w)
    out = jax.ShapeDtypeStruct((stack * m, n), jnp.float32)
    y = jax.ffi.ffi_call("quaxlike_multiply_stacked", out)(x.reshape(stack * m, k), w)
    return y.reshape(stack, m, n)


def _stacked_batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...]) -> Any:
    def stacked(x: Array, dim: int | None) -> Array:
        x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    y = stacked_matmul_p(*map(stacked, operands, dims))
    return y.reshape(size, y.shape[0] // size, *y.shape[1:]), 0


stacked_matmul_p = define_primitive("stacked_matmul", _stacked, batching=_stacked_batching)
mlir.register_lowering(
    stacked_matmul_p, functools.partial(_lower_on_cpu, _stacked_native, _stacked_on_cpu), platform="cpu"
)
