"""Stages codes, scales and zero points in shared memory, using asynchronous copies issued ahead of time.

On a multiprocessor, copying 4 bytes takes nearly as long as copying 16 bytes. (We measured this on an H200.)
With few tokens, a product is limited by the number of copies. So all threads in a warp copy its weight tile
together using the widest possible instructions, and afterwards each thread reads what it decodes.

The layout is swizzled to avoid bank conflicts. Copies and reads must use the same swizzle: otherwise a thread
would decode a different row's codes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import lanes
from ..lanes import MemoryRegion, Reg
from .lookup import STREAMS, Numbers
from .tilings import BLOCK, Problem, Tiling

_CHUNK = 16  # bytes of codes per copy


class Field(NamedTuple):
    """The part of a tile holding one array of scales or zero points, as words in row-major order.

    **Attributes:**

    - `divisor`: how many scales or zero points share an array element.
    - `size`: an element's size in bytes.
    - `words`: how many words each row has.
    - `at_once`: how many words a thread copies with one instruction.
    - `regular`: whether every row's first word starts with the tile's first element.
    """

    divisor: int
    size: int
    words: int
    at_once: int
    regular: bool

    @classmethod
    def of(cls, p: Problem, rows: int, columns: int, divisor: int, size: int) -> "Field":
        block, row_blocks = p.product.block_size, p.product.row_blocks
        whole = columns % block == 0 or block % columns == 0
        # Without alignment, a tile can also overlap with another block at either end.
        count = max(columns // block, 1) if whole else (columns - 1) // block + 2
        if divisor > 1:
            regular = count == 1 or (whole and row_blocks % count == 0 == divisor % count)
            return cls(divisor, size, 1 if regular else 2, 1, regular)
        row_bytes, span = row_blocks * size, count * size
        regular = count == 1 or (whole and row_bytes % 4 == 0 == span % 4)
        # An unaligned span can start up to three bytes into its first word.
        words = -(-span // 4) if regular else (span + 6) // 4

        def fits(v: Any) -> Any:
            return (
                regular
                and count > 1
                and words % v == 0
                and row_bytes % (4 * v) == 0
                and rows * words % (32 * v) == 0
            )

        return cls(divisor, size, words, next((v for v in (4, 2) if fits(v)), 1), regular)

    def bytes(self, rows: int) -> int:
        """Returns how many bytes a tile takes, rounded up so that each thread has a slot to copy to."""
        return 4 * 32 * -(-rows * self.words // 32)


class TileLayout:
    """The layout of a warp's tile in shared memory, with codes, scales and zero points."""

    def __init__(self, p: Problem, tiling: Tiling) -> None:
        self.p, bits = p, p.product.bits
        self.rows = 16 * (tiling.unroll if p.product.transpose else tiling.row_tiles)
        self.columns = BLOCK * (1 if p.product.transpose else tiling.unroll)
        self.row_bytes = self.columns * bits // 8
        self.chunks = self.row_bytes // _CHUNK
        # The number of chunks in a row read together by a group of threads.
        self.span = 2 if p.product.transpose else bits // 2
        kinds = [p.scales, *([] if p.product.zeros is None else [p.zeros])]
        self.fields = [[Field.of(p, self.rows, self.columns, *s) for s in STREAMS[kind]] for kind in kinds]

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes + sum(f.bytes(self.rows) for fields in self.fields for f in fields)

    def starts(self, base: Reg) -> list[list[Reg]]:
        """Returns each field's offset in a tile."""
        at, out = self.rows * self.row_bytes, []
        for fields in self.fields:
            out.append([])
            for field in fields:
                out[-1].append(base + at)
                at += field.bytes(self.rows)
        return out

    def swizzle(self, place: Reg) -> Reg:
        """Returns the number to XOR a row's chunk indices with, to avoid bank conflicts between rows."""
        line = place * self.row_bytes // 128 if self.row_bytes < 128 else place
        return line * self.span % self.chunks

    def row(self, place: Reg) -> Reg:
        """Returns the row stored at a position. Rows read together are made adjacent."""
        return place // 16 * 16 + place % 4 * 4 + place // 4 % 4 if self.p.product.transpose else place


class StagedTiles:
    """Copies a warp's tiles to shared memory, then reads back the parts needed by each thread."""

    def __init__(
        self,
        layout: TileLayout,
        codes: MemoryRegion,
        numbers: Sequence[Numbers],
        shared: MemoryRegion,
        lane: Reg,
    ) -> None:
        self.layout, self.codes, self.numbers, self.shared, self.lane = layout, codes, numbers, shared, lane

    def fetch(self, base: Reg, row: Reg, column: Reg) -> None:
        """Starts copying the tile at this row and column in the weight, padding with zeros past the end."""
        layout, product = self.layout, self.layout.p.product
        n, k = product.shape
        per_chunk = _CHUNK * 8 // product.bits
        for i in range(0, layout.rows * layout.chunks, 32):
            at = self.lane + i
            place, chunk = at // layout.chunks, at % layout.chunks
            # Up to a statically known offset, rows are arranged in the same way in every iteration.
            swizzle = layout.swizzle(self.lane // layout.chunks % 8 + i // layout.chunks % 8)
            of_row, of_chunk = row + layout.row(place), column + chunk * per_chunk
            here = (of_row < n) & (of_chunk < k)
            source = lanes.minimum(of_row, n - 1) * product.row_bytes + of_chunk * product.bits // 8
            slot = base + place * layout.row_bytes + (chunk ^ swizzle) * _CHUNK
            self.codes.copy_to(source, self.shared, slot, _CHUNK, here)
        for numbers, fields, starts in zip(self.numbers, layout.fields, layout.starts(base), strict=True):
            for memory, field, start in zip(numbers.arrays, fields, starts, strict=True):
                self._fetch(memory, field, start, row, column)
        lanes.commit_copies()

    def _fetch(self, memory: MemoryRegion, field: Field, start: Reg, row: Reg, column: Reg) -> None:
        layout, product = self.layout, self.layout.p.product
        n, k = product.shape
        most = -(-math.prod((n, product.row_blocks)) // field.divisor)
        last = -(-most * field.size // 4) - field.at_once
        across = field.words // field.at_once
        for i in range(0, layout.rows * across, 32):
            at = self.lane + i
            place = at // across
            of_row = row + layout.row(place)
            here = (of_row < n) & (column < k)
            if layout.rows * across % 32:  # The last iteration has more threads than words in this case.
                here = here & (place < layout.rows)
            word = self._word(of_row, column, field) + at % across * field.at_once
            # Clamp this, because wide copies must never read beyond the end of the array.
            source = lanes.minimum(word, last) * 4
            memory.copy_to(source, self.shared, start + at * (4 * field.at_once), 4 * field.at_once, here)

    def _index(self, row: Reg, column: Reg) -> Reg:
        product = self.layout.p.product
        return row * product.row_blocks + column // product.block_size

    def _word(self, row: Reg, column: Reg, field: Field) -> Reg:
        """Returns the index of the word holding the scale or zero point of this row and column."""
        index = self._index(row, column)
        return index // field.divisor * field.size // 4

    def words(self, base: Reg, place: Reg, chunk: Reg, inner: Reg, count: int) -> list[Reg]:
        """Reads `count` code words, starting from byte `inner` in a (swizzled) chunk."""
        at = base + place * self.layout.row_bytes + chunk * _CHUNK + inner
        return self.shared.load(at, "u32", count)

    def number(self, which: int, base: Reg, place: Reg, row: Reg, tile_column: Reg, offset: Reg) -> Reg:
        """Returns a row's scale (if `which` is 0) or zero point (if 1), `offset` columns into the tile."""
        layout, numbers = self.layout, self.numbers[which]
        block = layout.p.product.block_size
        words = []
        for field, start in zip(layout.fields[which], layout.starts(base)[which], strict=True):
            column = tile_column + offset
            if field.words == 1:
                within: Reg | int = 0
            elif field.regular:
                within = offset // block * field.size // 4
            else:
                within = self._word(row, column, field) - self._word(row, tile_column, field)
            words += self.shared.load(start + (place * field.words + within) * 4, "u32")
        return numbers.read(words, self._index(row, tile_column + offset))
