"""The matmul with int8 weights as a primitive that knows its derivatives."""

from typing import Any

import numpy as np
from jax.interpreters import ad
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

from ..._checked import checked
from ...primitives import Partitioning, define_primitive
from ...primitives.partitioning import is_spread
from ..multilinear import map_rows, sum_tangents, vary_alike
from .gpu import chunked
from .reference import tiled, whole


@checked
def int8_matmul(
    x: Float[Array, "*batch contracted"],
    codes: Int8[Array, "n k"],
    scale: Float32[Array, "n blocks"],
    *,
    block_size: int | None = None,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch free"]:
    """`x @ W.T` for a weight `W` stored as int8 with scales; `x @ W` if transposed.

    On CPUs and GPUs no dense copy of `W` is made. Differentiable in `x` and `scale`; the gradient of `x` is
    the transposed contraction on the same integers.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.kernels import int8_matmul
        from quaxlike.kernels.blockwise import quantize_int

        w = jax.random.normal(jax.random.key(0), (32, 128))
        codes, scale = quantize_int(w, largest=127, block_size=None)
        y = int8_matmul(jnp.ones((4, 128)), codes, scale)
        ```

    **Arguments:**

    - `x`: `(..., K)`, or `(..., N)` if `transpose`.
    - `codes`: `(N, K)`.
    - `scale`: `(N, ceil(K / block_size))`: value = integer · scale.
    - `block_size`: how many integers of a row share a scale; None for all of them.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: dtype of the result; that of `x` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` where the operands do not fit each other.
    """
    n, k = codes.shape
    block_size = max(k, 1) if block_size is None else block_size
    if block_size < 1:
        raise ValueError(f"int8_matmul: block_size must be at least 1, or None; got {block_size!r}")
    if scale.shape != (n, -(-k // block_size)):
        raise ValueError(
            f"int8_matmul: scale of a weight of shape {(n, k)} in blocks of {block_size} must have shape "
            f"{(n, -(-k // block_size))}, got {scale.shape}"
        )
    if x.ndim == 0 or x.shape[-1] != (n if transpose else k):
        raise ValueError(
            f"int8_matmul: the last axis of x must be {'N' if transpose else 'K'} of the weight's shape "
            f"{(n, k)}{' (transposed)' if transpose else ''}, got x of shape {x.shape}"
        )
    out_dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    params = {"block_size": block_size, "transpose": transpose, "out_dtype": out_dtype}
    bind = lambda *operands: int8_matmul_p(*vary_alike(operands), **params)
    if not is_spread((x, codes, scale)):
        return bind(x, codes, scale)
    rule = _partitioning(x, codes, scale, **params)
    return rule.apply_to_types(lambda *parts: [bind(*parts)])(x, codes, scale)[0]


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    return sum_tangents(int8_matmul_p, primals, tangents, params)


def _transpose(ct: Any, x: Any, codes: Any, scale: Any, *, transpose: bool, **params: Any) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented
    params["out_dtype"] = np.dtype(x.aval.dtype)
    return int8_matmul_p(ct, codes, scale, transpose=not transpose, **params), None, None


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    return map_rows(int8_matmul_p, size, operands, dims, params, rows=(0,))


def _partitioning(x: Any, codes: Any, scale: Any, *, block_size: int, transpose: bool, **params: Any) -> Any:
    rows = [f"rows{i}" for i in range(x.ndim - 1)]
    # A partial block at the end of rows keeps columns together; one scale a row goes with all of them.
    whole = codes.shape[1] % block_size == 0
    k = "k" if whole else "kept"
    weight = f"n {k}, n {'k' if whole and scale.shape[1] != 1 else 'blocks'}"
    x_dim, out = ("n", "k") if transpose else ("k", "n")
    rule = f"{' '.join([*rows, x_dim])}, {weight} -> {' '.join([*rows, out])}"
    sums = ("n",) if transpose else ("k",) if whole else ()
    return Partitioning(rule, sums, first=(*rows, "n", "k"))


int8_matmul_p = define_primitive(
    "int8_matmul",
    whole,
    cpu=tiled,
    gpu=chunked,
    jvp=_jvp,
    transpose=_transpose,
    batching=_batching,
    partitioning=_partitioning,
)
