"""The matmul with weights in a block format as a primitive that knows its derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ...primitives import define_primitive
from ..multilinear import map_rows, nonzero, vary_alike
from .reference import tiled, whole

Decode = Callable[[Any], list[Array]]
"""Rows of the leaves to rows of `W`, float32, in planes: columns 0, s, 2s, …; columns 1, s + 1, …; and so on
for as many planes as there are, `s`."""


def block_matmul(
    x: Float[Array, "*batch contracted"],
    leaves: PyTree[Array],
    decode: Decode,
    *,
    shape: tuple[int, int],
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch free"]:
    """`x @ W.T` for a weight `W` that `decode` makes of some arrays, row by row; `x @ W` if transposed.

    On a CPU no dense copy of `W` is made. Differentiable in `x`, and in what `decode` is differentiable in.

    **Arguments:**

    - `x`: `(..., K)`, or `(..., N)` if `transpose`.
    - `leaves`: arrays of `N` rows each: codes, scales, minima.
    - `decode`: takes some rows of `leaves`, and gives those of `W`; hashable.
    - `shape`: `(N, K)`.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: dtype of the result; that of `x` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` where the operands do not fit each other.
    """
    n, k = shape
    if any(leaf.shape[0] != n for leaf in jax.tree.leaves(leaves)):
        found = [leaf.shape for leaf in jax.tree.leaves(leaves)]
        raise ValueError(f"block_matmul: a weight of shape {shape} takes leaves of {n} rows, got {found}")
    if x.ndim == 0 or x.shape[-1] != (n if transpose else k):
        raise ValueError(
            f"block_matmul: the last axis of x must be {'N' if transpose else 'K'} of the weight's shape "
            f"{shape}{' (transposed)' if transpose else ''}, got x of shape {x.shape}"
        )
    out_dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    params = {"decode": decode, "shape": shape, "transpose": transpose, "out_dtype": out_dtype}
    return block_matmul_p(*vary_alike((x, leaves)), **params)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    if nonzero(tangents[1]):
        return NotImplemented  # the scales: derived from the reference
    return block_matmul_p(tangents[0], primals[1], **params) if nonzero(tangents[0]) else None


def _transpose(ct: Any, x: Any, leaves: Any, *, transpose: bool, **params: Any) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented
    params["out_dtype"] = np.dtype(x.aval.dtype)
    nothing = jax.tree.map(lambda _: None, leaves)
    return block_matmul_p(ct, leaves, transpose=not transpose, **params), nothing


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    return map_rows(block_matmul_p, size, operands, dims, params, rows=(0,))


block_matmul_p = define_primitive(
    "block_matmul", whole, cpu=tiled, jvp=_jvp, transpose=_transpose, batching=_batching
)
