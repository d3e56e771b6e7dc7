"""The products that the fused kernels compute, and how blocks of threads share them."""

import dataclasses
from typing import NamedTuple

from .product import Product

BLOCK = 64  # columns that a scale is applied to at once, and that a warp takes


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a block of threads shares its part of `W`.

    **Attributes:**

    - `row_tiles`: tiles of 16 features of a warp; 4 for `x @ W`.
    - `row_warps`: warps beside each other along the features.
    - `k_warps`: warps that share what is contracted for the same features.
    - `unroll`: blocks of 64 columns (for `x @ W`, of 16 rows) that a warp takes at a time.
    - `splits`: blocks of threads that do so, each with a sum of its own.
    """

    row_tiles: int
    row_warps: int
    k_warps: int
    unroll: int
    splits: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps


class Problem(NamedTuple):
    """The sizes and dtypes of a product.

    **Attributes:**

    - `product`: the shape of `W`, and how it is stored.
    - `m`: tokens; more than `group_size` are dealt with in groups, by different blocks of threads.
    - `dtype`: of the activations, bfloat16 or float16.
    - `out_dtype`: of the terms of the result.
    - `adapters`, `rank`: of the low-rank term; the rank is a multiple of 16. 0 if there is none.
    - `scales`, `zeros`: how scales and zero points are stored, as `decode.SIZES` has it.
    """

    product: Product
    m: int
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    adapters: int = 0
    rank: int = 0
    scales: str = "float32"
    zeros: str = "float32"

    @property
    def group_size(self) -> int:
        # The features of a thread are four times as many for `x @ W`, and so are its accumulators.
        return 32 if self.product.transpose else 64

    @property
    def groups(self) -> int:
        return -(-self.m // self.group_size)

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens of a group."""
        return -(-self.m // (8 * self.groups))

    @property
    def exact(self) -> bool:
        """Whether values are scaled one by one, in float32."""
        p = self.product
        return p.transpose or p.zeros is not None or p.block_size % BLOCK != 0

    @property
    def depth(self) -> int:
        """How much a warp contracts at a time."""
        return 16 if self.product.transpose else BLOCK


# The fastest of those that were measured on an H200, with weights of 14336×4096, 4096×14336 and 4096²;
# `python -m benchmarks.gpu --tune` measures them.
_TILINGS = (
    # up to so many tiles of tokens, from so many rows of W on
    (2, 8192, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=2)),
    (8, 8192, Tiling(row_tiles=2, row_warps=4, k_warps=2, unroll=1)),
    (1, 1, Tiling(row_tiles=1, row_warps=1, k_warps=8, unroll=2)),
    (2, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=2)),
    (8, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=1)),
)
# Blocks of threads for `x @ W`, which are as many columns wide and share the rows.
_TRANSPOSED = Tiling(row_tiles=4, row_warps=2, k_warps=4, unroll=1)
_ENOUGH_BLOCKS, _MOST_SPLITS = 256, 8


def tiling_for(p: Problem) -> Tiling:
    """The tiling for a problem, from the table."""
    n = p.product.shape[0]
    if p.product.transpose:
        most = min(_MOST_SPLITS, _ENOUGH_BLOCKS // blocks(p, _TRANSPOSED), n // 256)
        return dataclasses.replace(_TRANSPOSED, splits=1 << max(most, 1).bit_length() - 1)
    tiling = next(tiling for tiles, rows, tiling in _TILINGS if p.token_tiles <= tiles and n >= rows)
    # Wider codes take more shared memory.
    return dataclasses.replace(tiling, unroll=1) if p.product.bits == 8 else tiling


def blocks(p: Problem, tiling: Tiling) -> int:
    """How many blocks of threads the program is for."""
    return -(-p.product.free // tiling.rows) * p.groups * tiling.splits
