"""The block-sparse matmul on GPUs from compute capability 8.0 on: shapes, tilings and calls.

`mma_program` has the program.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal

THREADS = 128  # of a block
_LARGEST_TILE = 128
DEPTH = 32  # features or tokens contracted at a time
# Every GPU has room for two such rings on each multiprocessor.
_RING, _MOST_STAGES = 48 * 1024, 8
_MULTIPROCESSORS = 108  # of an A100
_LEAST = 4 * 16 * 16  # numbers in a tile: each warp has a tile of 16 by 16
_ADDRESSED = 2**31  # bytes
# For 12.0 Mosaic GPU (JAX 0.11.2) writes PTX for sm_120a and has it assembled for sm_120, which is an error.
_NEWEST = 10


class Problem(NamedTuple):
    """A product, and the shapes of its operands in two dimensions.

    **Attributes:**

    - `kind`: `"forward"`, `"transposed"` or `"sampled"`.
    - `left`, `right`: x and the blocks, one below the other; for the sampled product `y` and `x`.
    - `indexed`: the shape of the index, by block columns for `"transposed"` and else by block rows.
    - `out`: the result.
    - `slots`: of a block row.
    - `absent`: the entry of the index, or the least one, of a slot without a block.
    - `dtype`: bfloat16 or float16, of both operands and the result.
    """

    kind: Literal["forward", "transposed", "sampled"]
    left: tuple[int, int]
    right: tuple[int, int]
    indexed: tuple[int, int]
    out: tuple[int, int]
    block_size: int
    slots: int
    absent: int
    dtype: str

    def steps(self, tiling: "Tiling") -> int:
        """How many tiles of either operand are multiplied."""
        contracted = self.left[0] if self.kind == "sampled" else self.indexed[1] * self.block_size
        return -(-contracted // DEPTH)

    def blocks(self, tiling: "Tiling") -> int:
        """How many blocks of threads the program is for."""
        return -(-self.out[0] // tiling.height) * (self.out[1] // tiling.width)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A tile of the result, of a block of threads.

    **Attributes:**

    - `height`, `width`: of the tile, powers of two.
    - `rows_are_contracted`: whether what is contracted lies along the rows of the left operand, and of the
        right one.
    """

    height: int
    width: int
    rows_are_contracted: tuple[bool, bool]

    @property
    def left(self) -> tuple[int, int, bool]:
        """Rows and columns of the left operand's tile, and whether its rows are contracted."""
        return self._tile(self.height, self.rows_are_contracted[0])

    @property
    def right(self) -> tuple[int, int, bool]:
        return self._tile(self.width, self.rows_are_contracted[1])

    def _tile(self, free: int, contracted: bool) -> tuple[int, int, bool]:
        return (DEPTH, free, True) if contracted else (free, DEPTH, False)

    @property
    def warps(self) -> tuple[int, int]:
        """Warps below and beside each other, such that their own tiles are as square as may be."""
        shapes = [(rows, 4 // rows) for rows in (1, 2, 4)]
        fits = lambda warps: self.height >= 16 * warps[0] and self.width >= 16 * warps[1]
        return min(filter(fits, shapes), key=lambda warps: self.height // warps[0] + self.width // warps[1])

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.height // self.warps[0], self.width // self.warps[1]

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """Of the operands' tiles in a stage; each thread copies as many pieces of 16 bytes."""
        whole = lambda tile: -(-tile[0] * tile[1] * 2 // (16 * THREADS)) * 16 * THREADS
        return whole(self.left), whole(self.right)

    @property
    def stages(self) -> int:
        """How many pairs of tiles are in shared memory at a time."""
        return min(_MOST_STAGES, _RING // sum(self.operand_bytes))

    @property
    def out_stride(self) -> int:
        """Bytes of a row of the result in shared memory, of which eight begin in different banks."""
        return 2 * self.width + 16

    @property
    def shared_words(self) -> int:
        """Words of shared memory: for the ring, and afterwards for the result."""
        return max(self.stages * sum(self.operand_bytes), self.height * self.out_stride) // 4


def tiling_for(p: Problem) -> Tiling:
    """Large tiles, but for few tokens, and where these leave multiprocessors without work."""
    largest = min(_LARGEST_TILE, p.block_size & -p.block_size)
    tokens = 1 << (p.out[0] - 1).bit_length()
    height = largest if p.kind == "sampled" else min(_LARGEST_TILE, max(tokens, 16, _LEAST // largest))
    contracted = {"forward": (False, False), "transposed": (False, True), "sampled": (True, True)}[p.kind]
    tiling = Tiling(height, largest, contracted)
    while p.blocks(tiling) < _MULTIPROCESSORS and tiling.width > 32 and height * tiling.width > _LEAST:
        tiling = dataclasses.replace(tiling, width=tiling.width // 2)
    return tiling


def choose(
    platform: str, x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, *, transpose: bool, **params: Any
) -> Choice | str:
    """How the product runs on such a GPU, or why it does not."""
    b, index = blocks.shape[-1], transposed_idx if transpose else col_idx
    sizes = x.size, blocks.size, index.size, math.prod(x.shape[:-1]) * index.shape[0] * b
    refusal = _refusal(platform, x, blocks, b, sizes, **params)
    return Choice("gpu", _HOW, matmul) if refusal is None else refusal


def choose_sampled(
    platform: str, y: Any, x: Any, col_idx: Any, *index: Any, block_size: int, **params: Any
) -> Choice | str:
    """How the sampled product runs on such a GPU, or why it does not."""
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
    return mosaic_gpu_refusal(platform, lowest=(8, 0), newest=_NEWEST)


def matmul(
    x: Array,
    blocks: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    transpose: bool,
    out_dtype: np.dtype,
) -> Array:
    """The kernel. The contractions read different indices, and tiles of blocks as they are or transposed."""
    del out_dtype  # that of x
    lead, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    p = matmul_problem(x, blocks, col_idx, transposed_idx, transpose=transpose)
    y = _kernel(p)(x, blocks.reshape(p.right), transposed_idx if transpose else col_idx)
    return y.reshape(*lead, p.out[1])


def matmul_problem(x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, *, transpose: bool) -> Problem:
    """Of `x` of two dimensions."""
    rows, slots, b, _ = blocks.shape
    index = transposed_idx if transpose else col_idx
    return Problem(
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
    """The blocks at `col_idx` of `y.T @ x`, each summed over all tokens."""
    del out_dtype  # that of x
    y, x = (z.reshape(-1, z.shape[-1]) for z in (y, x))
    p = sampled_problem(y, x, col_idx, transposed_idx, block_size)
    return _kernel(p)(y, x, col_idx).reshape(*col_idx.shape, block_size, block_size)


def sampled_problem(y: Any, x: Any, col_idx: Any, transposed_idx: Any, block_size: int) -> Problem:
    """Of `y` and `x` of two dimensions."""
    return Problem(
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


def _kernel(p: Problem) -> Callable[..., Array]:
    """The kernel for a problem: a function of both operands and the index to the result."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from . import mma_program

    tiling = tiling_for(p)

    def block_sparse_product(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def program(context: Any, *refs: Any) -> None:
            mma_program.emit(refs, p, tiling)

        program(*refs)

    return plgpu.kernel(
        block_sparse_product,
        out_type=jax.ShapeDtypeStruct(p.out, p.dtype),
        scratch_types=[plgpu.SMEM((tiling.shared_words,), jnp.uint32)],
        grid=(p.blocks(tiling),),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
