"""The matmul with 4-bit weights on GPUs: fused for few rows of activations, by chunks for many."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal
from ..blockwise import dequantize_codebook
from ..multilinear import accumulator_dtype, precision_for
from .scales import NestedScales, dense_scales

# Rows of activations up to which reading the codes again for every 64 of them is cheaper than
# decoding the weight for the library's matmul.
FUSED_ROWS = 128
# Rows of activations up to which `x @ W` is a reduction: it decodes the weight anew for each of them.
REDUCED_ROWS = 2
# Weights decoded at a time, for up to so many rows of activations: 32 MiB of bfloat16, which the L2 cache of
# an H100 holds; else 128 MiB, as joining the results of many rows costs more than the cache gains.
_CHUNKS = (1024, 1 << 24), (math.inf, 1 << 26)


def choose(platform: str, x: Any, **params: Any) -> Choice:
    """How the operation runs on a GPU."""
    refusal = fused_refusal(platform, x, **params)
    if refusal is None:
        return Choice("gpu", "one fused kernel", fused)
    if _is_reduced(x, **params):
        return Choice("gpu", "one fused reduction over the rows of W", reduced)
    return Choice("gpu", f"decoded in chunks for the library's matmul: {refusal}", chunked)


def fused_refusal(
    platform: str,
    x: Any,
    *,
    shape: tuple[int, int],
    block_size: int,
    transpose: bool = False,
    partitioned: bool,
    low_rank: Any = None,
    **params: Any,
) -> str | None:
    """Why the fused kernel does not take an operation; None if it does. `low_rank`: `b` of all adapters."""
    n, k = shape
    rows = math.prod(x.shape[:-1])
    if partitioned:
        return PARTITIONED
    if transpose:
        return "the fused kernel contracts over the columns of W"
    if not 0 < rows <= FUSED_ROWS:
        return f"the fused kernel takes 1 to {FUSED_ROWS} rows of x, not {rows}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the fused kernel takes bfloat16 and float16, not {x.dtype}"
    if block_size % 64 or k % block_size:
        return f"the fused kernel takes blocks of a multiple of 64 codes within rows, not {block_size}"
    if n == 0 or n * k // 2 >= 2**31:
        return "the fused kernel addresses up to 2 GiB of codes"
    if low_rank is not None and math.prod(low_rank.shape) * 2 >= 2**31:
        return f"the fused kernel addresses up to 2 GiB of adapters, not those of shape {low_rank.shape}"
    return mosaic_gpu_refusal(platform, lowest=(8, 0))


def fused(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    *low_rank: Array,
    shape: tuple[int, int],
    block_size: int,
    out_dtype: np.dtype,
    transpose: bool = False,
) -> Array:
    """One kernel; `low_rank` is nothing, or `t` and `b` as in `lora_matmul_reference`."""
    from .mosaic import Problem, tiling_for

    n, k = shape
    lead, x = x.shape[:-1], x.reshape(-1, k)
    if low_rank:
        t, b = map(_padded, low_rank)
        low_rank = t.reshape(x.shape[0], -1), b
    problem = Problem(
        m=x.shape[0],
        n=n,
        k=k,
        block_size=block_size,
        adapters=low_rank[1].shape[0] if low_rank else 0,
        rank=low_rank[1].shape[2] if low_rank else 0,
        nested=isinstance(absmax, NestedScales),
        dtype=str(x.dtype),
        out_dtype=str(out_dtype),
    )
    tiling = tiling_for(problem)
    if tiling.splits > 1:
        problem = problem._replace(out_dtype="float32")
    scales = absmax if isinstance(absmax, NestedScales) else (absmax.reshape(-1),)
    kernel = pallas_kernel(problem, tiling)
    y = kernel(x, packed.reshape(-1), *scales, codebook, *low_rank)
    return functools.reduce(operator.add, y).astype(out_dtype).reshape(*lead, n)


def pallas_kernel(problem: Any, tiling: Any) -> Callable[..., Array]:
    """The fused kernel for a problem: a function of the arrays in `mosaic.emit`'s order to the terms of the
    product, (splits, m, n)."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from . import mosaic

    def nf4_matmul(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def program(context: Any, *refs: Any) -> None:
            mosaic.emit(refs, problem, tiling)

        program(*refs)

    return plgpu.kernel(
        nf4_matmul,
        out_type=jax.ShapeDtypeStruct((tiling.splits, problem.m, problem.n), problem.out_dtype),
        scratch_types=[plgpu.SMEM((mosaic.shared_words(problem, tiling),), jnp.uint32)],
        grid=(mosaic.blocks(problem, tiling),),
        grid_names=("block",),
        num_threads=tiling.threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _is_reduced(
    x: Any, *, shape: tuple[int, int], block_size: int, transpose: bool = False, **params: Any
) -> bool:
    few = 0 < math.prod(x.shape[:-1]) <= REDUCED_ROWS
    return transpose and few and shape[1] % block_size == 0


def reduced(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    *,
    shape: tuple[int, int],
    block_size: int,
    out_dtype: np.dtype,
    transpose: bool,
) -> Array:
    """`x @ W` for a row or two of `x`, as sums over the rows of `W` that XLA fuses the decoding into."""
    n, k = shape
    lead = x.shape[:-1]
    dtype = accumulator_dtype(x.dtype)
    packed = packed.reshape(n, k // 2)
    scales = jnp.repeat(dense_scales(absmax).reshape(n, -1), block_size // 2, axis=1).astype(dtype)
    # Even and odd columns.
    halves = [codebook[codes].astype(dtype) * scales for codes in (packed >> 4, packed & 15)]
    rows = x.reshape(-1, n).astype(dtype)
    sums = [[jnp.sum(row[:, None] * half, axis=0) for half in halves] for row in rows]
    y = jnp.stack([jnp.stack(of_row, axis=-1).reshape(k) for of_row in sums])
    return y.astype(out_dtype).reshape(*lead, k)


def chunked(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    *low_rank: Array,
    shape: tuple[int, int],
    block_size: int,
    out_dtype: np.dtype,
    transpose: bool = False,
) -> Array:
    """Decodes some rows of `W` to the dtype of `x`, multiplies them by the library, and so on.

    Each weight is rounded once, from its exact float32 value. `low_rank` is nothing, or `t` and `b`
    as in `lora_matmul_reference`: more columns of `x` and of `W`.
    """
    n, k = shape
    rows = _rows_per_chunk(n, k, block_size, math.prod(x.shape[:-1]))
    packed, scales = packed.reshape(-1), dense_scales(absmax).reshape(-1)
    b = None
    if low_rank:
        t, b = map(_padded, low_rank)
        x = jnp.concatenate([x, t.reshape(*x.shape[:-1], -1)], axis=-1)
        b = jnp.moveaxis(b, 0, 1).reshape(n, -1)
    # Sums over chunks are rounded once; what is not summed, by the library.
    part_dtype = accumulator_dtype(x.dtype) if transpose and rows < n else out_dtype
    parts = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        if parts:  # one chunk after the other, in the same memory
            packed, parts[-1] = lax.optimization_barrier((packed, parts[-1]))
        w = dequantize_codebook(
            packed[start * k // 2 : (stop * k + 1) // 2],
            scales[start * k // block_size : -(-stop * k // block_size)],
            codebook,
            n=(stop - start) * k,
            block_size=block_size,
            dtype=x.dtype,
        ).reshape(stop - start, k)
        if b is not None:
            w = jnp.concatenate([w, b[start:stop]], axis=1)
        operand = x[..., start:stop] if transpose else x
        contract = ((x.ndim - 1,), (0 if transpose else 1,))
        params = {"precision": precision_for(x.dtype), "preferred_element_type": part_dtype}
        parts.append(lax.dot_general(operand, w, (contract, ((), ())), **params))
    y = functools.reduce(operator.add, parts) if transpose else jnp.concatenate(parts, axis=-1)
    return y.astype(out_dtype)


def _padded(z: Array) -> Array:
    """Zeros after the last columns: the kernel takes 16 at a time, the library's prefer as many."""
    return jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 16)])


def _rows_per_chunk(n: int, k: int, block_size: int, m: int) -> int:
    """Rows that begin and end where blocks do, and therefore bytes; chunks of one size."""
    aligned = block_size // math.gcd(block_size, k)
    most = max(1, next(weights for rows, weights in _CHUNKS if m <= rows) // k // aligned) * aligned
    chunks = -(-n // most)
    return -(-n // (chunks * aligned)) * aligned
