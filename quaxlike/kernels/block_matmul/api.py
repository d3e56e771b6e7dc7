"""The primitive for matmuls with weights in a block format, which picks its backend."""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.interpreters import ad
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ..backends import Backend, Choice, bind, first_choice, kernel_primitive
from ..multilinear import map_rows, nonzero
from ..nf4_matmul import gpu, tpu
from ..product import Product
from .gpu import chunked
from .reference import tiled, whole

# Up to this many rows of activations, XLA may fuse decoding into the product.
FUSED_ROWS = 64


@runtime_checkable
class Decode(Protocol):
    """Decodes arrays to the rows of a weight; hashable."""

    def __call__(self, leaves: Any, /) -> list[Array]:
        """Decodes rows of the leaves to float32 rows of `W`, in `s` planes: columns 0, s, …; columns 1,
        s + 1, …; and so on."""
        ...

    def stored(self, product: Product, *, decoded: bool) -> Product | None:
        """The product with the details of the codes that kernels need; None if no kernel supports them.

        `decoded`: whether to make scales and zero points float32, for kernels that take no others.
        """
        ...

    def operands(self, leaves: Any, *, decoded: bool) -> tuple[Array, Array, Array, Array | None]:
        """Codes, scales, the table of values, and zero points if there are any, as `stored` describes."""
        ...


def block_matmul(
    x: Float[Array, "*batch contracted"],
    leaves: PyTree[Array],
    decode: Decode,
    *,
    shape: tuple[int, int],
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch free"]:
    """Computes `x @ W.T` for a weight `W` that `decode` decodes row by row; `x @ W` if `transpose`.

    It makes no dense copy of `W` on a CPU, nor of a large `W` on a GPU. Differentiable in `x`, and in
    everything in which `decode` is.

    **Arguments:**

    - `x`: `(..., K)`, or `(..., N)` if `transpose`.
    - `leaves`: arrays of `N` rows each: codes, scales, minima.
    - `decode`: decodes rows of `leaves` to rows of `W`; describes the storage of codes to kernels.
    - `shape`: `(N, K)`.
    - `transpose`: whether to contract over `N` instead of `K`.
    - `out_dtype`: the dtype of the result; that of `x` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the shapes of the operands are inconsistent.
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
    product = Product((n, k), max(k, 1), transpose, out_dtype)
    return bind(block_matmul_p, x, leaves, decode=decode, product=product)


def _choose(
    platform: str,
    x: Any,
    leaves: Any,
    *,
    decode: Decode,
    product: Product,
    backend: Backend | None = None,
    partitioned: bool = False,
) -> Choice:
    def kernel(name: Backend, platform: str, *operands: Any, **params: Any) -> Choice:
        stored = decode.stored(product, decoded=name == "tpu")
        choose = {"gpu": gpu.choose_fused, "tpu": tpu.choose}[name]
        no_kernel = "the kernel does not take codes of this format"
        choice = no_kernel if stored is None else choose(platform, x, product=stored, partitioned=partitioned)
        if isinstance(choice, str):
            many = math.prod(x.shape[:-1]) > FUSED_ROWS
            if name == "gpu" and many and not partitioned:
                return Choice(name, f"decoded in chunks for the library's product: {choice}", chunked)
            return Choice(name, f"decoded in the expression of the library's product: {choice}", whole)
        return choice._replace(run=functools.partial(_run, choice.run, name == "tpu"))

    kernels = {name: functools.partial(kernel, name) for name in ("gpu", "tpu")}
    reference = tiled if backend or platform == "cpu" else whole
    return first_choice(platform, backend, reference, kernels, x, leaves, partitioned=partitioned)


def _run(
    run: Callable[..., Array], decoded: bool, x: Array, leaves: Any, *, decode: Decode, product: Product
) -> Array:
    stored = decode.stored(product, decoded=decoded)
    codes, scales, table, zeros = decode.operands(leaves, decoded=decoded)
    return run(x, codes, scales, table, product=stored, zeros=zeros)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    if nonzero(tangents[1]):
        return NotImplemented  # tangents of scales are derived from the reference
    return block_matmul_p(tangents[0], primals[1], **params) if nonzero(tangents[0]) else None


def _transpose(ct: Any, x: Any, leaves: Any, *, product: Product, **params: Any) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented
    product = product.transposed(np.dtype(x.aval.dtype))
    return block_matmul_p(ct, leaves, product=product, **params), jax.tree.map(lambda _: None, leaves)


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    return map_rows(block_matmul_p, size, operands, dims, params, rows=(0,))


block_matmul_p = kernel_primitive(
    "block_matmul", _choose, whole, jvp=_jvp, transpose=_transpose, batching=_batching
)
