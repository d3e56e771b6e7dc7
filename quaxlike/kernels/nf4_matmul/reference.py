"""The matmul with 4-bit weights in plain JAX: runs everywhere, and is what kernels are held to.

A byte is looked up in two 256-entry tables, one for each of its codes. The two values are neighbours within
a row, and interleaving them would cost as much as the lookup: the even and the odd columns are multiplied
apart instead.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Float32, UInt8

from ..multilinear import accumulator_dtype
from ..tiles import as_weights, contract_columns, contract_rows


def matmul_reference(
    x: Float[Array, "*batch contracted"],
    packed: UInt8[Array, "*bytes"],
    absmax: Float32[Array, "*blocks"],
    codebook: Float32[ArrayLike, "16"],
    *,
    shape: tuple[int, int],
    block_size: int,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch free"]:
    """`x @ W.T` for a weight `W` of shape `(N, K)` stored as 4-bit codes; `x @ W` if transposed.

    Weights are decoded exactly and rounded to the dtype of `x`, as `dequantize_codebook` does it; products
    are accumulated in float32, or in the dtype of `x` if that is wider.

    **Arguments:**

    - `x`: `(..., K)`, or `(..., N)` if `transpose`; any floating dtype.
    - `packed`: the codes of `W`, flattened row-major, two to a byte, high nibble first.
    - `absmax`: the scale of each block of `block_size` consecutive codes; blocks may cross rows.
    - `codebook`: the 16 values that codes stand for.
    - `shape`: `(N, K)`.
    - `block_size`: an even number.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: dtype of the result; that of `x` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.
    """
    n, k = shape
    out_dtype = x.dtype if out_dtype is None else out_dtype
    batch, dtype = x.shape[:-1], x.dtype
    x = x.reshape(math.prod(batch), x.shape[-1]).astype(accumulator_dtype(dtype))
    packed, absmax = packed.reshape(-1), absmax.reshape(-1)
    code = jnp.arange(256)
    tables = [jnp.asarray(codebook)[c] for c in (code >> 4, code & 15)]

    def look_up(pairs: Array, scale: Array) -> list[Array]:
        return [as_weights(table[pairs] * scale, dtype).astype(x.dtype) for table in tables]

    def paired(start: Array | int, rows: int) -> list[Array]:
        """Rows of `W` as its even and its odd columns, each (rows, K / 2)."""
        pairs = lax.dynamic_slice_in_dim(packed.reshape(n, k // 2), start, rows)
        span = math.gcd(k, block_size)  # the longest run that divides rows and blocks alike
        runs = start * (k // span) + jnp.arange(rows * (k // span))
        scale = absmax[runs // (block_size // span)].reshape(rows, k // span)
        scale = jnp.repeat(scale, span // 2, axis=1)
        return look_up(pairs, scale)

    def unaligned(start: Array | int, rows: int) -> list[Array]:
        """Rows of `W` where rows begin in the middle of bytes; `start` is even."""
        first, count = start * k // 2, (rows * k + 1) // 2
        pairs = lax.dynamic_slice_in_dim(packed, first, count)
        scale = absmax[(first + jnp.arange(count)) // (block_size // 2)]
        values = jnp.stack(look_up(pairs, scale), axis=-1).reshape(-1)[: rows * k].reshape(rows, k)
        return [values[:, 0::2], values[:, 1::2]]

    contract = contract_rows if transpose else contract_columns
    y = contract(x, unaligned if k % 2 else paired, n, k, stride=2)
    return y.reshape(*batch, y.shape[-1]).astype(out_dtype)
