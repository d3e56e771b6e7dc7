"""Matrix multiplication by quantised weights, optionally with LoRA adapters."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

from ..._checked import checked
from ..multilinear import check_x
from .nested_scales import NestedScales
from .primitive import block_matmul
from .product import INTEGERS, NIBBLES
from .reference import to_ranks


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
    """Computes `x @ W.T` (or `x @ W` if `transpose`) for a 4-bit weight with block scales.

    All backends operate directly on the codes as stored by bitsandbytes, without materialising `W`. (With one
    exception: for many rows of `x` on a GPU, at most 128 MiB are decoded at a time.) Products are accumulated
    in float32. The result is differentiable with respect to `x`, `absmax` and `codebook`. The gradient with
    respect to `x` doesn't need `W` either: it is the transposed contraction with the same bytes.

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

    - `x`: has shape `(..., K)`, or `(..., N)` if `transpose`.
    - `packed`: the codes of `W`, flattened in row-major order. Each byte packs two codes, the first in the
        high nibble, for `(N·K + 1) // 2` bytes in total. If blocks do not cross rows, the shape can also be
        `(N, K / 2)`, for sharding rows or columns across devices.
    - `absmax`: one float32 scale for every `block_size` consecutive codes. These blocks can cross rows. The
        shape must be `(N, K / block_size)` if `packed` is two-dimensional. This can also be a
        [`NestedScales`][quaxlike.kernels.NestedScales], for quantised scales.
    - `codebook`: the 16 values of the codes.
    - `shape`: `W`'s shape `(N, K)`.
    - `block_size`: how many codes share a scale. Must be even.
    - `transpose`: whether to contract over `N` rather than `K`.
    - `out_dtype`: the result's dtype. Defaults to `x.dtype`.

    **Returns:** an array of shape `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the operands are inconsistent with `shape` and `block_size`.
    """
    codebook = jnp.asarray(codebook, jnp.float32)
    _check_weight("nf4_matmul", packed, absmax, codebook, shape, block_size)
    params: dict[str, Any] = {"block_size": block_size, "transpose": transpose, "out_dtype": out_dtype}
    return block_matmul(x, (packed, absmax, codebook), NIBBLES, shape=shape, **params)


@checked
def lora_matmul(
    x: Float[Array, "*batch features"],
    packed: UInt8[Array, " bytes"] | UInt8[Array, "n bytes"],
    absmax: Float32[Array, " blocks"] | Float32[Array, "n blocks"] | NestedScales,
    codebook: ArrayLike,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    block_size: int,
    scaling: float | Float[Array, ""] = 1.0,
    adapter_index: Int[Array, "..."] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch out"]:
    """Computes `x @ W.T + scaling · (x @ a.T) @ b.T` for a 4-bit weight `W` and LoRA adapters `a`, `b`.

    The low-rank term is added directly to the float32 accumulator. So it only costs as much as a few
    additional columns of `W`, without another pass over the result. This function is differentiable with
    respect to everything except the codes.

    With several adapters, `adapter_index` selects one for each row of `x`. This is useful for serving
    requests with different adapters: all rows are still computed together.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.kernels import lora_matmul
        from quaxlike.kernels.blockwise import NF4, quantize_codebook

        w = jax.random.normal(jax.random.key(0), (32, 128))
        packed, absmax = quantize_codebook(w, NF4, block_size=64)
        a, b = jnp.ones((3, 8, 128)), jnp.zeros((3, 32, 8))  # three adapters of rank 8
        y = lora_matmul(
            jnp.ones((4, 128)),
            packed,
            absmax,
            NF4,
            a,
            b,
            shape=w.shape,
            block_size=64,
            scaling=2.0,
            adapter_index=jnp.array([0, 2, 2, 1]),
        )
        ```

    **Arguments:**

    - `x`: has shape `(..., in)`.
    - `packed`, `absmax`, `codebook`, `shape`, `block_size`: the weight of shape `(out, in)`, as in
        [`nf4_matmul`][quaxlike.kernels.block_matmul.api.nf4_matmul].
    - `a`: has shape `(rank, in)`, or `(adapters, rank, in)` if `adapter_index` is passed. Both `a` and `b`
        are cast to `x`'s dtype.
    - `b`: has shape `(out, rank)`, or `(adapters, out, rank)`.
    - `scaling`: the low-rank term's factor.
    - `adapter_index`: each row's adapter index, with the same leading axes as `x`. A negative index applies
        no adapter.
    - `out_dtype`: the result's dtype. Defaults to `x.dtype`.

    **Returns:** an array of shape `(..., out)`.

    **Raises:** `ValueError` if the operands' shapes are inconsistent.
    """
    codebook = jnp.asarray(codebook, jnp.float32)
    _check_weight("lora_matmul", packed, absmax, codebook, shape, block_size)
    check_x("lora_matmul", x, shape, transpose=False)
    _check_adapters(x, a, b, shape, adapter_index)
    # Cast these explicitly: each backend would promote mixed dtypes differently.
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    if adapter_index is None:
        a, b = a[None], b[None]  # Kernels expect a stack of adapters, even if there is just one.
    # The product with the first factor is small, so leave it to XLA. Only the second factor is fused.
    low_rank = to_ranks(x, a, scaling, adapter_index), b
    params: dict[str, Any] = {"block_size": block_size, "low_rank": low_rank, "out_dtype": out_dtype}
    return block_matmul(x, (packed, absmax, codebook), NIBBLES, shape=shape, **params)


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
    """Computes `x @ W.T` (or `x @ W` if `transpose`) for a weight stored as int8 with scales.

    This does not materialise `W`. (With one exception: for block-wise scales on a GPU, one part is decoded at
    a time.) The result is differentiable with respect to `x` and `scale`. The gradient with respect to `x`
    applies the transposed contraction to the same integers.

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

    - `x`: has shape `(..., K)`, or `(..., N)` if `transpose`.
    - `codes`: the integers, of shape `(N, K)`.
    - `scale`: has shape `(N, ceil(K / block_size))`, with value = integer · scale.
    - `block_size`: how many integers in a row share a scale. If `None`, there is one scale per row.
    - `transpose`: whether to contract over `N` rather than `K`.
    - `out_dtype`: the result's dtype. Defaults to `x.dtype`.

    **Returns:** an array of shape `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the operands' shapes are inconsistent.
    """
    n, k = codes.shape
    # This is divided by below, so it must not be zero even for a weight without columns.
    block_size = max(k, 1) if block_size is None else block_size
    if block_size < 1:
        raise ValueError(f"int8_matmul: block_size must be at least 1, or None; got {block_size!r}")
    if scale.shape != (n, -(-k // block_size)):
        raise ValueError(
            f"int8_matmul: scale of a weight of shape {(n, k)} in blocks of {block_size} must have shape "
            f"{(n, -(-k // block_size))}, got {scale.shape}"
        )
    params: dict[str, Any] = {"block_size": block_size, "transpose": transpose, "out_dtype": out_dtype}
    return block_matmul(x, (codes, scale), INTEGERS, shape=(n, k), **params)


def _check_weight(
    op: str, packed: Any, absmax: Any, codebook: Any, shape: tuple[int, int], block_size: int
) -> None:
    """Raises a `ValueError` unless the codes and scales are consistent with a weight of this shape."""
    size = math.prod(shape)
    if block_size <= 0 or block_size % 2:
        raise ValueError(f"{op}: block_size must be a positive even number, got {block_size}")
    blocks = -(-size // block_size)
    expected: dict[str, tuple[Any, tuple[int, ...]]]
    bytes_, scales = ((size + 1) // 2,), (blocks,)
    # Codes can only be stored as rows if no block crosses a row. Nested scales always treat the weight as
    # flat: 256 blocks share an absmax.
    if packed.ndim == 2 and shape[1] % block_size == 0 and not isinstance(absmax, NestedScales):
        bytes_, scales = (shape[0], shape[1] // 2), (shape[0], shape[1] // block_size)
    expected = {"packed": (packed, bytes_), "codebook": (codebook, (16,))}
    if isinstance(absmax, NestedScales):
        shapes = (blocks,), (-(-blocks // 256),), (), (256,)
        names = "codes", "absmax", "offset", "quant_map"
        for name, array, want in zip(names, absmax.operands(), shapes, strict=True):
            expected[f"absmax.{name}"] = (array, want)
    else:
        expected["absmax"] = (absmax, scales)
    for name, (array, want) in expected.items():
        if array.shape != want:
            raise ValueError(
                f"{op}: {name} of a weight of shape {shape} in blocks of {block_size} must have "
                f"shape {want}, got {array.shape}"
            )


def _check_adapters(x: Any, a: Any, b: Any, shape: tuple[int, int], index: Any) -> None:
    n, k = shape
    ndim = 2 if index is None else 3
    if a.ndim != ndim or b.ndim != ndim:
        raise ValueError(
            f"lora_matmul: a and b must have {ndim} axes "
            f"{'without' if index is None else 'with'} adapter_index, got shapes {a.shape}, "
            f"{b.shape}"
        )
    expected = (*a.shape[:-2], n, a.shape[-2])
    if a.shape[-1] != k or b.shape != expected:
        raise ValueError(
            f"lora_matmul: for a weight of shape {shape}, a must be (..., rank, {k}) and b "
            f"(..., {n}, rank), got shapes {a.shape}, {b.shape}"
        )
    if index is not None and index.shape != x.shape[:-1]:
        raise ValueError(
            f"lora_matmul: adapter_index must have the leading shape {x.shape[:-1]} of x, got {index.shape}"
        )
