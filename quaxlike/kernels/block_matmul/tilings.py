"""The products computed by fused kernels, and how these are divided between thread blocks."""

import dataclasses
from typing import NamedTuple

from .product import Product

BLOCK = 64  # the number of columns processed (and possibly scaled) together by a warp


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a thread block divides its share of `W` between warps.

    **Attributes:**

    - `row_tiles`: how many tiles (of 16 features each) a warp has. Always 4 for `x @ W`.
    - `row_warps`: how many warps are adjacent along the features.
    - `k_warps`: how many warps the contraction for the same features is split between.
    - `unroll`: how many blocks of 64 columns (or 16 rows for `x @ W`) a warp processes per step.
    - `splits`: how many thread blocks the contraction is split between. Each writes a separate sum.
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
    """A product's sizes and dtypes.

    **Attributes:**

    - `product`: `W`'s shape, and how it is stored.
    - `m`: the number of tokens. If there are more than `group_size`, these are divided into groups, handled
        by different thread blocks.
    - `dtype`: the activations' dtype, either bfloat16 or float16.
    - `out_dtype`: the dtype in which to store the result's terms.
    - `adapters`, `rank`: the low-rank term's sizes, if any. The rank is a multiple of 16.
    - `scales`, `zeros`: how scales and zero points are stored, as keys of `lookup.SIZES`.
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
        # For `x @ W`, each thread has four times as many features per token, and so also four times as many
        # accumulators. So fewer tokens fit into its registers.
        return 32 if self.product.transpose else 64

    @property
    def groups(self) -> int:
        return -(-self.m // self.group_size)

    @property
    def token_tiles(self) -> int:
        """The number of tiles (of 8 tokens each) in a group."""
        return -(-self.m // (8 * self.groups))

    @property
    def exact(self) -> bool:
        """Whether values are scaled individually in float32, rather than scaling the accumulator."""
        p = self.product
        return p.transpose or p.zeros is not None or p.block_size % BLOCK != 0

    @property
    def depth(self) -> int:
        """The number of elements contracted at a time by a warp."""
        return 16 if self.product.transpose else BLOCK


# The fastest tilings found on an H200, for weights of shapes 14336×4096, 4096×14336 and 4096². Tune them
# again using `python -m benchmarks.gpu --tune`.
_TILINGS = (
    # maximum number of token tiles, minimum number of rows of W
    (2, 8192, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=2)),
    (8, 8192, Tiling(row_tiles=2, row_warps=4, k_warps=2, unroll=1)),
    (1, 1, Tiling(row_tiles=1, row_warps=1, k_warps=8, unroll=2)),
    (2, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=2)),
    (8, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=1)),
)
# For `x @ W`, each thread block has this many columns. Rows are then split until there are enough thread
# blocks.
_TRANSPOSED = Tiling(row_tiles=4, row_warps=2, k_warps=4, unroll=1)
_ENOUGH_BLOCKS, _MOST_SPLITS = 256, 8


def tiling_for(p: Problem) -> Tiling:
    """Returns the tiling to use for a problem."""
    n = p.product.shape[0]
    if p.product.transpose:
        most = min(_MOST_SPLITS, _ENOUGH_BLOCKS // blocks(p, _TRANSPOSED), n // 256)
        return dataclasses.replace(_TRANSPOSED, splits=1 << max(most, 1).bit_length() - 1)
    tiling = next(tiling for tiles, rows, tiling in _TILINGS if p.token_tiles <= tiles and n >= rows)
    # Don't unroll for 8-bit codes, which need more shared memory per step.
    return dataclasses.replace(tiling, unroll=1) if p.product.bits == 8 else tiling


def blocks(p: Problem, tiling: Tiling) -> int:
    """Returns how many thread blocks to launch."""
    return -(-p.product.free // tiling.rows) * p.groups * tiling.splits
