"""Sizes and tilings for block-sparse products using `mma.sync`."""

import dataclasses
from typing import Any, Literal, NamedTuple

THREADS = 128  # in a thread block
_LARGEST_TILE = 128
DEPTH = 32  # features or tokens contracted per step
# All GPUs have enough shared memory for two ring buffers of this size per multiprocessor.
_RING, _MOST_STAGES = 48 * 1024, 8
_MULTIPROCESSORS = 108  # on an A100
_LEAST = 4 * 16 * 16  # the minimum elements per tile, such that each of four warps has at least 16 by 16


class SparseProblem(NamedTuple):
    """A product's kind, and the shapes of its operands when flattened to two dimensions.

    **Attributes:**

    - `kind`: one of `"forward"`, `"transposed"` or `"sampled"`.
    - `left`, `right`: the shapes of `x` and the stacked blocks, or of `y` and `x` for the sampled product.
    - `indexed`: the index's shape, by block columns for `"transposed"` and otherwise by block rows.
    - `out`: the shape of the result.
    - `block_size`: the number of rows (and columns) in a block.
    - `slots`: the number of slots per block row.
    - `absent`: index entries at least this large denote slots without a block.
    - `dtype`: either bfloat16 or float16, for both operands and the result.
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

    @property
    def steps(self) -> int:
        """The number of steps, each multiplying a pair of tiles."""
        contracted = self.left[0] if self.kind == "sampled" else self.indexed[1] * self.block_size
        return -(-contracted // DEPTH)

    def blocks(self, tiling: "SparseTiling") -> int:
        """Returns the number of thread blocks to launch."""
        return -(-self.out[0] // tiling.height) * (self.out[1] // tiling.width)


@dataclasses.dataclass(frozen=True)
class SparseTiling:
    """The result tile computed by a thread block.

    **Attributes:**

    - `height`, `width`: the tile's size. Both must be powers of two.
    - `rows_are_contracted`: whether the contracted axis is the rows, for the left and right operands.
    """

    height: int
    width: int
    rows_are_contracted: tuple[bool, bool]

    @property
    def left(self) -> tuple[int, int, bool]:
        """The left operand's tile: its rows, its columns, and whether its rows are contracted."""
        return self._tile(self.height, self.rows_are_contracted[0])

    @property
    def right(self) -> tuple[int, int, bool]:
        return self._tile(self.width, self.rows_are_contracted[1])

    def _tile(self, free: int, contracted: bool) -> tuple[int, int, bool]:
        return (DEPTH, free, True) if contracted else (free, DEPTH, False)

    @property
    def warps(self) -> tuple[int, int]:
        """The number of warps along rows and columns, giving each warp a nearly square tile."""
        shapes = [(rows, 4 // rows) for rows in (1, 2, 4)]

        def fits(warps: Any) -> Any:
            return self.height >= 16 * warps[0] and self.width >= 16 * warps[1]

        return min(filter(fits, shapes), key=lambda warps: self.height // warps[0] + self.width // warps[1])

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.height // self.warps[0], self.width // self.warps[1]

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """The bytes per stage for each operand's tile, padded so that all threads copy equally much."""

        def whole(tile: Any) -> Any:
            return -(-tile[0] * tile[1] * 2 // (16 * THREADS)) * 16 * THREADS

        return whole(self.left), whole(self.right)

    @property
    def stages(self) -> int:
        """The number of tile pairs kept in shared memory at a time."""
        return min(_MOST_STAGES, _RING // sum(self.operand_bytes))

    @property
    def out_stride(self) -> int:
        """The stride in bytes between the result's rows in shared memory, padded to avoid bank conflicts."""
        return 2 * self.width + 16

    @property
    def shared_words(self) -> int:
        """The shared memory size in words, first for the ring buffer and then for the result."""
        return max(self.stages * sum(self.operand_bytes), self.height * self.out_stride) // 4


def tiling_for(p: SparseProblem) -> SparseTiling:
    """Returns the largest possible tile, or a smaller one for few tokens or to occupy all multiprocessors."""
    largest = min(_LARGEST_TILE, p.block_size & -p.block_size)
    tokens = 1 << (p.out[0] - 1).bit_length()
    height = largest if p.kind == "sampled" else min(_LARGEST_TILE, max(tokens, 16, _LEAST // largest))
    contracted = {"forward": (False, False), "transposed": (False, True), "sampled": (True, True)}[p.kind]
    tiling = SparseTiling(height, largest, contracted)
    while p.blocks(tiling) < _MULTIPROCESSORS and tiling.width > 32 and height * tiling.width > _LEAST:
        tiling = dataclasses.replace(tiling, width=tiling.width // 2)
    return tiling
