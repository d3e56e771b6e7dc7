"""The block-sparse matmul on GPUs with compute capability 8.0 and later."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal
from .mma_tiling import THREADS, SparseProblem, tiling_for

# The program computes offsets in 32 bits.
_ADDRESSED = 2**31  # bytes


def choose(
    platform: str, x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, *, transpose: bool, **params: Any
) -> Choice | str:
    """Returns how to run the product on these GPUs, or why this is not supported."""
    b, index = blocks.shape[-1], transposed_idx if transpose else col_idx
    sizes = x.size, blocks.size, index.size, math.prod(x.shape[:-1]) * index.shape[0] * b
    refusal = _refusal(platform, x, blocks, b, sizes, **params)
    return Choice("gpu", _HOW, matmul) if refusal is None else refusal


def choose_sampled(
    platform: str, y: Any, x: Any, col_idx: Any, *index: Any, block_size: int, **params: Any
) -> Choice | str:
    """Returns how to run the sampled product on these GPUs, or why this is not supported."""
    sizes = x.size, y.size, col_idx.size * block_size**2
    refusal = _refusal(platform, x, y, block_size, sizes, **params)
    return Choice("gpu", _HOW, sampled) if refusal is None else refusal


_HOW = "a Mosaic GPU kernel, by mma.sync"


def _refusal(
    platform: str,
    x: Any,
    other: Any,
    b: int,
    sizes: tuple[int, ...],
    *,
    partitioned: bool,
    out_dtype: Any,
    **params: Any,
) -> str | None:
    if partitioned:
        return PARTITIONED
    if b == 0 or b % 32:
        return f"the GPU kernel takes blocks of a multiple of 32, not {b}"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or other.dtype != x.dtype:
        return f"the GPU kernel takes bfloat16 or float16, not {x.dtype} and {other.dtype}"
    if out_dtype != x.dtype:
        return f"the GPU kernel's result is of the dtype of x, not {out_dtype}"
    if 0 in sizes:
        return "the GPU kernel takes at least one row of x and one slot"
    if 2 * max(sizes) >= _ADDRESSED:
        return "the GPU kernel addresses up to 2 GiB of each operand and of the result"
    return mosaic_gpu_refusal(platform, lowest=(8, 0))


def matmul(
    x: Array,
    blocks: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    transpose: bool,
    out_dtype: np.dtype,
) -> Array:
    """Computes the product using the kernel. The transposed contraction uses a different index and tiles."""
    del out_dtype  # always the dtype of `x`
    lead, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    p = matmul_problem(x, blocks, col_idx, transposed_idx, transpose=transpose)
    y = _kernel(p)(x, blocks.reshape(p.right), transposed_idx if transpose else col_idx)
    return y.reshape(*lead, p.out[1])


def matmul_problem(
    x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, *, transpose: bool
) -> SparseProblem:
    """Returns the problem for `matmul`, given a two-dimensional `x`."""
    rows, slots, b, _ = blocks.shape
    index = transposed_idx if transpose else col_idx
    return SparseProblem(
        "transposed" if transpose else "forward",
        left=x.shape,
        right=(rows * slots * b, b),
        indexed=index.shape,
        out=(x.shape[0], index.shape[0] * b),
        block_size=b,
        slots=slots,
        absent=rows * slots if transpose else transposed_idx.shape[0],
        dtype=str(x.dtype),
    )


def sampled(
    y: Array, x: Array, col_idx: Array, transposed_idx: Array, *, block_size: int, out_dtype: np.dtype
) -> Array:
    """Computes the blocks of `y.T @ x` at `col_idx`, reducing over all tokens."""
    del out_dtype  # always the dtype of `x`
    y, x = (z.reshape(-1, z.shape[-1]) for z in (y, x))
    p = sampled_problem(y, x, col_idx, transposed_idx, block_size)
    return _kernel(p)(y, x, col_idx).reshape(*col_idx.shape, block_size, block_size)


def sampled_problem(y: Any, x: Any, col_idx: Any, transposed_idx: Any, block_size: int) -> SparseProblem:
    """Returns the problem for `sampled`, given two-dimensional `y` and `x`."""
    return SparseProblem(
        "sampled",
        left=y.shape,
        right=x.shape,
        indexed=col_idx.shape,
        out=(math.prod(col_idx.shape) * block_size, block_size),
        block_size=block_size,
        slots=col_idx.shape[1],
        absent=transposed_idx.shape[0],
        dtype=str(x.dtype),
    )


def _kernel(p: SparseProblem) -> Callable[..., Array]:
    """Returns the kernel for a problem, as a function of both operands and the index."""
    from .. import lanes
    from . import mma_program

    tiling = tiling_for(p)
    return lanes.kernel(
        functools.partial(mma_program.emit, p=p, tiling=tiling),
        name="block_sparse_product",
        out=jax.ShapeDtypeStruct(p.out, p.dtype),
        shared_words=tiling.shared_words,
        blocks=p.blocks(tiling),
        threads=THREADS,
    )
