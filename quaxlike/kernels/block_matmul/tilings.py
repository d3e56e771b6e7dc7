"""The products that fused kernels compute, and how thread blocks share them."""

import dataclasses
from typing import NamedTuple

from .product import Product

BLOCK = 64  # columns to which a scale is applied at once, and that a warp takes


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a thread block shares its part of `W`.

    **Attributes:**

    - `row_tiles`: tiles of 16 features per warp; 4 for `x @ W`.
    - `row_warps`: warps next to each other along the features.
    - `k_warps`: warps that split the contraction for the same features.
    - `unroll`: blocks of 64 columns (for `x @ W`, 16 rows) that a warp takes at a time.
    - `splits`: thread blocks that split the contraction, each with its own sum.
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

    - `product`: the shape of `W`, and how it is stored.
    - `m`: the number of tokens. Beyond `group_size`, different thread blocks take groups of them.
    - `dtype`: the activations' dtype, bfloat16 or float16.
    - `out_dtype`: the dtype for the result's terms.
    - `adapters`, `rank`: the low-rank term; the rank is a multiple of 16. 0 if there is none.
    - `scales`, `zeros`: how scales and zero points are stored: a key of `lookup.SIZES`.
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
        # For `x @ W`, a thread has four times as many features, hence accumulators.
        return 32 if self.product.transpose else 64

    @property
    def groups(self) -> int:
        return -(-self.m // self.group_size)

    @property
    def token_tiles(self) -> int:
        """How many tiles of 8 tokens a group has."""
        return -(-self.m // (8 * self.groups))

    @property
    def exact(self) -> bool:
        """Whether values are scaled one by one, in float32."""
        p = self.product
        return p.transpose or p.zeros is not None or p.block_size % BLOCK != 0

    @property
    def depth(self) -> int:
        """How many numbers a warp contracts at a time."""
        return 16 if self.product.transpose else BLOCK


# The fastest tilings measured on an H200, with 14336×4096, 4096×14336 and 4096² weights. Measure them again
# with `python -m benchmarks.gpu --tune`.
_TILINGS = (
    # at most this many tiles of tokens, at least this many rows of W
    (2, 8192, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=2)),
    (8, 8192, Tiling(row_tiles=2, row_warps=4, k_warps=2, unroll=1)),
    (1, 1, Tiling(row_tiles=1, row_warps=1, k_warps=8, unroll=2)),
    (2, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=2)),
    (8, 1, Tiling(row_tiles=2, row_warps=1, k_warps=8, unroll=1)),
)
# For `x @ W`: thread blocks have this many columns, and split the rows.
_TRANSPOSED = Tiling(row_tiles=4, row_warps=2, k_warps=4, unroll=1)
_ENOUGH_BLOCKS, _MOST_SPLITS = 256, 8


def tiling_for(p: Problem) -> Tiling:
    """Looks up the tiling for a problem."""
    n = p.product.shape[0]
    if p.product.transpose:
        most = min(_MOST_SPLITS, _ENOUGH_BLOCKS // blocks(p, _TRANSPOSED), n // 256)
        return dataclasses.replace(_TRANSPOSED, splits=1 << max(most, 1).bit_length() - 1)
    tiling = next(tiling for tiles, rows, tiling in _TILINGS if p.token_tiles <= tiles and n >= rows)
    # Wider codes need more shared memory.
    return dataclasses.replace(tiling, unroll=1) if p.product.bits == 8 else tiling


def blocks(p: Problem, tiling: Tiling) -> int:
    """Returns how many thread blocks the program launches."""
    return -(-p.product.free // tiling.rows) * p.groups * tiling.splits
