"""Products with weights stored as codes, with or without adapters."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

from ..._checked import checked
from .nested_scales import NestedScales
from .primitive import block_matmul, check_x, to_ranks
from .product import INTEGERS, NIBBLES


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
    """Computes `x @ W.T` (`x @ W` if `transpose`) for a weight of 4-bit codes with block scales.

    Every backend reads bitsandbytes' codes as they are stored. No dense copy of `W` is made, except for many
    rows of `x` on a GPU, where up to 128 MiB are decoded at a time. Products are accumulated in float32. This
    is differentiable in `x`, `absmax` and `codebook`; the gradient of `x` is the transposed contraction on
    the same bytes.

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
    - `packed`: the codes of `W`, flattened row-major, two per byte, high nibble first: `(N·K + 1) // 2`
        bytes. If blocks do not cross rows, also `(N, K / 2)`, so devices can share rows or columns.
    - `absmax`: one float32 scale per block of `block_size` consecutive codes; blocks may cross rows. `(N, K /
        block_size)` for rows of codes. [`NestedScales`][quaxlike.kernels.NestedScales] if the scales are
        quantised, too.
    - `codebook`: the 16 values of the codes.
    - `shape`: `(N, K)`.
    - `block_size`: an even number.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: the result's dtype; `x.dtype` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the operands do not fit `shape` and `block_size`.
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
    """Computes `x @ W.T + scaling · (x @ a.T) @ b.T` for a 4-bit weight `W` and adapters `a`, `b`.

    The low-rank term is added to the product's float32 accumulator: it costs as much as a few more columns of
    `W`, without another pass over the result. This is differentiable in everything but the codes.

    With several adapters, `adapter_index` selects one for each row of `x`. All rows are computed together,
    whatever the mixture.

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

    - `x`: `(..., in)`.
    - `packed`, `absmax`, `codebook`, `shape`, `block_size`: the weight with shape `(out, in)`, as in
        [`nf4_matmul`][quaxlike.kernels.block_matmul.api.nf4_matmul].
    - `a`: `(rank, in)`, or `(adapters, rank, in)` with `adapter_index`. Converted to the dtype of `x`,
        like `b`.
    - `b`: `(out, rank)`, or `(adapters, out, rank)`.
    - `scaling`: the factor for the low-rank term.
    - `adapter_index`: each row's adapter, with the leading shape of `x`; a negative index means none.
    - `out_dtype`: the result's dtype; `x.dtype` if None.

    **Returns:** `(..., out)`.

    **Raises:** `ValueError` if the shapes of the operands are inconsistent.
    """
    codebook = jnp.asarray(codebook, jnp.float32)
    _check_weight("lora_matmul", packed, absmax, codebook, shape, block_size)
    check_x("lora_matmul", x, shape, transpose=False)
    _check_adapters(x, a, b, shape, adapter_index)
    # Mixed dtypes would make each backend promote in its own way.
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    if adapter_index is None:
        a, b = a[None], b[None]
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
    """Computes `x @ W.T` (`x @ W` if `transpose`) for a weight stored as int8 with scales.

    No dense copy of `W` is made, except for parts of it on GPUs if the scales belong to blocks. This is
    differentiable in `x` and `scale`; the gradient of `x` is the transposed contraction on the same integers.

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
    - `block_size`: how many of a row's integers share a scale; None for all.
    - `transpose`: contracts over `N` instead of `K`.
    - `out_dtype`: the result's dtype; `x.dtype` if None.

    **Returns:** `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the operands do not fit each other.
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
    params: dict[str, Any] = {"block_size": block_size, "transpose": transpose, "out_dtype": out_dtype}
    return block_matmul(x, (codes, scale), INTEGERS, shape=(n, k), **params)


def _check_weight(
    op: str, packed: Any, absmax: Any, codebook: Any, shape: tuple[int, int], block_size: int
) -> None:
    """Raises a `ValueError` unless codes and scales fit a weight with this shape."""
    size = math.prod(shape)
    if block_size <= 0 or block_size % 2:
        raise ValueError(f"{op}: block_size must be a positive even number, got {block_size}")
    blocks = -(-size // block_size)
    expected: dict[str, tuple[Any, tuple[int, ...]]]
    bytes_, scales = ((size + 1) // 2,), (blocks,)
    # Rows of codes exist only if rows consist of whole blocks. Nested scales always cross rows.
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
