"""The sizes and tilings of block-sparse products with `mma.sync`."""

import dataclasses
from typing import Any, Literal, NamedTuple

THREADS = 128  # per block
_LARGEST_TILE = 128
DEPTH = 32  # features or tokens contracted per step
# Every GPU has room for two such rings on each multiprocessor.
_RING, _MOST_STAGES = 48 * 1024, 8
_MULTIPROCESSORS = 108  # on an A100
_LEAST = 4 * 16 * 16  # numbers per tile: each warp has at least 16 by 16


class SparseProblem(NamedTuple):
    """A product, and its operands' two-dimensional shapes.

    **Attributes:**

    - `kind`: `"forward"`, `"transposed"` or `"sampled"`.
    - `left`, `right`: the shapes of `x` and of the stacked blocks; of `y` and `x` for the sampled product.
    - `indexed`: the index's shape, by block columns for `"transposed"` and else by block rows.
    - `out`: the result's shape.
    - `slots`: the number of slots per block row.
    - `absent`: the least index entry that marks a slot without a block.
    - `dtype`: bfloat16 or float16, for both operands and the result.
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
        """How many pairs of tiles are multiplied."""
        contracted = self.left[0] if self.kind == "sampled" else self.indexed[1] * self.block_size
        return -(-contracted // DEPTH)

    def blocks(self, tiling: "SparseTiling") -> int:
        """Returns how many thread blocks the program launches."""
        return -(-self.out[0] // tiling.height) * (self.out[1] // tiling.width)


@dataclasses.dataclass(frozen=True)
class SparseTiling:
    """The tile of the result that a thread block computes.

    **Attributes:**

    - `height`, `width`: powers of two.
    - `rows_are_contracted`: for the left and the right operand, whether the contracted axis is its rows.
    """

    height: int
    width: int
    rows_are_contracted: tuple[bool, bool]

    @property
    def left(self) -> tuple[int, int, bool]:
        """The left operand's tile: rows, columns, and whether rows are contracted."""
        return self._tile(self.height, self.rows_are_contracted[0])

    @property
    def right(self) -> tuple[int, int, bool]:
        return self._tile(self.width, self.rows_are_contracted[1])

    def _tile(self, free: int, contracted: bool) -> tuple[int, int, bool]:
        return (DEPTH, free, True) if contracted else (free, DEPTH, False)

    @property
    def warps(self) -> tuple[int, int]:
        """How many warps share rows and columns, chosen to make their own tiles as square as possible."""
        shapes = [(rows, 4 // rows) for rows in (1, 2, 4)]

        def fits(warps: Any) -> Any:
            return self.height >= 16 * warps[0] and self.width >= 16 * warps[1]

        return min(filter(fits, shapes), key=lambda warps: self.height // warps[0] + self.width // warps[1])

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.height // self.warps[0], self.width // self.warps[1]

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """The bytes of each operand's tile per stage. All threads copy equally many pieces."""

        def whole(tile: Any) -> Any:
            return -(-tile[0] * tile[1] * 2 // (16 * THREADS)) * 16 * THREADS

        return whole(self.left), whole(self.right)

    @property
    def stages(self) -> int:
        """How many pairs of tiles are in shared memory at a time."""
        return min(_MOST_STAGES, _RING // sum(self.operand_bytes))

    @property
    def out_stride(self) -> int:
        """The row stride of the result in shared memory, in bytes. Eight rows begin in different banks."""
        return 2 * self.width + 16

    @property
    def shared_words(self) -> int:
        """Words of shared memory: for the ring, and afterwards for the result."""
        return max(self.stages * sum(self.operand_bytes), self.height * self.out_stride) // 4


def tiling_for(p: SparseProblem) -> SparseTiling:
    """Chooses a large tile, unless there are few tokens, or multiprocessors would be idle."""
    largest = min(_LARGEST_TILE, p.block_size & -p.block_size)
    tokens = 1 << (p.out[0] - 1).bit_length()
    height = largest if p.kind == "sampled" else min(_LARGEST_TILE, max(tokens, 16, _LEAST // largest))
    contracted = {"forward": (False, False), "transposed": (False, True), "sampled": (True, True)}[p.kind]
    tiling = SparseTiling(height, largest, contracted)
    while p.blocks(tiling) < _MULTIPROCESSORS and tiling.width > 32 and height * tiling.width > _LEAST:
        tiling = dataclasses.replace(tiling, width=tiling.width // 2)
    return tiling
