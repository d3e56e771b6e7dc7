"""The matmul with 4-bit weights as a primitive that knows its derivatives and picks its backend."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from ..._checked import checked
from ...primitives import Partitioning
from ..backends import Backend, Choice, bind, first_choice, kernel_primitive
from ..multilinear import map_rows, nonzero, sum_tangents
from ..product import Product
from . import gpu, tpu
from .reference import matmul_reference
from .scales import NestedScales, dense_scales


@checked
def nf4_matmul(
    x: Float[Array, "... contracted"],
    packed: UInt8[Array, " bytes"] | UInt8[Array, "n bytes"],
    absmax: Float32[Array, " blocks"] | Float32[Array, "n blocks"] | NestedScales,
    codebook: ArrayLike,
    *,
    shape: tuple[int, int],
    block_size: int,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "... free"]:
    """`x @ W.T` for a weight `W` stored as 4-bit codes with block scales; `x @ W` if transposed.

    The codes are those of bitsandbytes and are read as they are stored, by every backend, and no
    dense copy of `W` is made. Products are accumulated in float32. Differentiable in `x`,
    `absmax` and `codebook`; the gradient of `x` is the transposed contraction on the same bytes.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.kernels import nf4_matmul
        from quaxlike.kernels.blockwise import NF4, quantize_codebook

        w = jax.random.normal(jax.random.key(0), (32, 128))
        packed, absmax = quantize_codebook(w, NF4, block_size=64)
        y = nf4_matmul(
            jnp.ones((4, 128)), packed, absmax, NF4, shape=w.shape, block_size=64
        )
        ```

    **Arguments:**

    - `x`: `(..., K)`, or `(..., N)` if `transpose`.
    - `packed`: the codes of `W`, flattened row-major, two to a byte, high nibble first:
        `(N·K + 1) // 2` bytes. Where blocks do not cross rows, also `(N, K / 2)`: so devices can share rows
        or columns.
    - `absmax`: float32 scale of each block of `block_size` consecutive codes; blocks may cross
        rows. `(N, K / block_size)` for rows of codes.
        [`NestedScales`][quaxlike.kernels.NestedScales] if scales are quantised in turn.
    - `codebook`: the 16 values that codes stand for.
    - `shape`: `(N, K)`.
    - `block_size`: an even number.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: dtype of the result; that of `x` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` where the operands do not fit `shape` and `block_size`.
    """
    codebook = jnp.asarray(codebook, jnp.float32)
    check_weight("nf4_matmul", packed, absmax, codebook, shape, block_size)
    check_x("nf4_matmul", x, shape, transpose)
    out_dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    product = Product((shape[0], shape[1]), block_size, transpose, out_dtype)
    return bind(nf4_matmul_p, x, packed, absmax, codebook, product=product)


def check_weight(
    op: str, packed: Any, absmax: Any, codebook: Any, shape: tuple[int, int], block_size: int
) -> None:
    """Raises `ValueError` unless codes and scales are those of a weight of this shape."""
    size = math.prod(shape)
    if block_size <= 0 or block_size % 2:
        raise ValueError(f"{op}: block_size must be a positive even number, got {block_size}")
    blocks = -(-size // block_size)
    expected: dict[str, tuple[Any, tuple[int, ...]]]
    bytes_, scales = ((size + 1) // 2,), (blocks,)
    if packed.ndim == 2 and shape[1] % block_size == 0 and not isinstance(absmax, NestedScales):
        bytes_, scales = (shape[0], shape[1] // 2), (shape[0], shape[1] // block_size)
    expected = {"packed": (packed, bytes_), "codebook": (codebook, (16,))}
    if isinstance(absmax, NestedScales):
        shapes = (blocks,), (-(-blocks // 256),), (), (256,)
        for field, array, want in zip(absmax._fields, absmax, shapes, strict=True):
            expected[f"absmax.{field}"] = (array, want)
    else:
        expected["absmax"] = (absmax, scales)
    for name, (array, want) in expected.items():
        if array.shape != want:
            raise ValueError(
                f"{op}: {name} of a weight of shape {shape} in blocks of {block_size} must have "
                f"shape {want}, got {array.shape}"
            )


def local_shape(x: Any, packed: Any, *operands: Any, product: Product, **params: Any) -> dict[str, Any]:
    """The parameters for parts of the weight: rows of codes say of which shape it is."""
    if packed.ndim == 2:
        product = dataclasses.replace(product, shape=(packed.shape[0], 2 * packed.shape[1]))
    return params | {"product": product}


def dimensions(x: Any, packed: Any, absmax: Any, *, transpose: bool) -> tuple[list[str], str, str]:
    """The names of the dimensions of `x`, of the weight's leaves, and of the result, for `Partitioning`."""
    rows = [f"rows{i}" for i in range(x.ndim - 1)]
    contracted, free = ("n", "k") if transpose else ("k", "n")
    if packed.ndim == 2:
        weight = "n k, n k, codebook"
    elif isinstance(absmax, NestedScales):
        weight = "bytes, blocks, nested, , map, codebook"
    else:
        weight = "bytes, blocks, codebook"
    return rows, f"{' '.join([*rows, contracted])}, {weight}", " ".join([*rows, free])


def _partitioning(
    x: Any, packed: Any, absmax: Any, codebook: Any, *, product: Product, **params: Any
) -> Partitioning:
    transpose = product.transpose
    rows, operands, result = dimensions(x, packed, absmax, transpose=transpose)
    sums = () if packed.ndim == 1 else ("n",) if transpose else ("k",)
    # What weights are spread over comes after the rows of `x`: with both over the same devices they are
    # gathered, as codes.
    return Partitioning(f"{operands} -> {result}", sums, first=(*rows, "n", "k"))


def check_x(op: str, x: Any, shape: tuple[int, int], transpose: bool) -> None:
    """Raises `ValueError` unless the last axis of `x` is the one that is contracted."""
    contracted = shape[0] if transpose else shape[1]
    if x.ndim == 0 or x.shape[-1] != contracted:
        raise ValueError(
            f"{op}: the last axis of x must be {'N' if transpose else 'K'} = {contracted} of the "
            f"weight's shape {shape}{' (transposed)' if transpose else ''}, got x of shape "
            f"{x.shape}"
        )


def _reference(
    x: Array, packed: Array, absmax: Array | NestedScales, codebook: Array, *, product: Product
) -> Array:
    params = {name: getattr(product, name) for name in ("shape", "block_size", "transpose", "out_dtype")}
    return matmul_reference(x, packed, dense_scales(absmax), codebook, **params)


def _choose(
    platform: str,
    x: Any,
    *weight: Any,
    backend: Backend | None = None,
    partitioned: bool = False,
    **params: Any,
) -> Choice:
    kernels = {"gpu": gpu.choose, "tpu": tpu.choose}
    return first_choice(platform, backend, _reference, kernels, x, partitioned=partitioned, **params)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    # Linear in x, in absmax and in codebook, one at a time; the codes are integers.
    if isinstance(primals[2], NestedScales) and nonzero(tangents[2]):
        return NotImplemented
    return sum_tangents(nf4_matmul_p, primals, tangents, params)


def _transpose(
    ct: Any, x: Any, packed: Any, absmax: Any, codebook: Any, *, product: Product, **params: Any
) -> Any:
    if not ad.is_undefined_primal(x):
        return NotImplemented  # the scales or the codebook: derived from the reference
    product = product.transposed(np.dtype(x.aval.dtype))
    ct_x = nf4_matmul_p(ct, packed, absmax, codebook, product=product, **params)
    return ct_x, None, None, None


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    return map_rows(nf4_matmul_p, size, operands, dims, params, rows=(0,))


nf4_matmul_p = kernel_primitive(
    "nf4_matmul",
    _choose,
    _reference,
    partitioning=_partitioning,
    local=local_shape,
    jvp=_jvp,
    transpose=_transpose,
    batching=_batching,
)
