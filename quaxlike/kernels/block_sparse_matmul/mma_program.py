"""The block-sparse products on GPUs with compute capability 8.0 and later, written as a per-thread program.

Each thread block computes a result tile. In every step it multiplies one tile from each operand on the tensor
cores (using `mma.sync`).

- *Tiles are copied in their stored layout* (using `cp.async`), from the positions given by the index into a
    ring buffer in shared memory. The index is read one step before starting the copies. Missing blocks and
    rows are never read, but filled with zeros.
- *Fragments are loaded using `ldmatrix`*, which transposes them if rows are contracted. 16-byte pieces are
    permuted within 128-byte lines, avoiding bank conflicts for both the copies and `ldmatrix`. Both must use
    the same permutation (`_permuted`).
- *The result is written via shared memory*, coalescing stores by adjacent threads.

Only import this module whilst tracing a kernel.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .. import lanes
from ..lanes import MemoryRegion, Reg
from .mma_tiling import DEPTH, THREADS, SparseProblem, SparseTiling

_PIECE = 16  # the bytes per copy, and per row of the matrices that `ldmatrix` loads
_NUMBERS = 8  # the elements per piece


def emit(refs: Sequence[Any], p: SparseProblem, tiling: SparseTiling) -> None:
    """Emits the program.

    **Arguments:**

    - `refs`: in global memory both operands, the index and the result, all two-dimensional; then
        `tiling.shared_words` words of shared memory.
    """
    left, right, index, out = map(MemoryRegion, refs[:-1])
    shared = _Shared(refs[-1])
    work = (_sampled if p.kind == "sampled" else _matmul)(p, tiling, index)
    warp, warps, (height, width) = lanes.thread_index() // 32, tiling.warps[1], tiling.warp_tile
    row, column = warp // warps * height, warp % warps * width
    sizes, steps, ahead = tiling.operand_bytes, p.steps, tiling.stages - 1
    lefts = _Operand(left, shared, p.left, tiling.left, 0, is_left=True)
    rights = _Operand(right, shared, p.right, tiling.right, sizes[0], is_left=False)

    def number(step: Reg) -> Reg:
        # Clamp this: the index is also read for steps past the end, even though their copies are then
        # skipped.
        return work.number(lanes.minimum(step, steps - 1))

    def stage(step: Reg) -> Reg:
        return step % tiling.stages * sum(sizes)

    def fetch(step: Reg, number: Reg) -> None:
        present = (number < p.absent) & (step < steps)
        lefts.fetch(work.left_at(step, number), present, stage(step))
        rights.fetch(work.right_at(step, number), present, stage(step))
        lanes.commit_copies()

    def multiply(stage: Reg, acc: list[Reg]) -> list[Reg]:
        for k in range(DEPTH // 16):
            x = [lefts.fragment(stage, row + i, k) for i in range(0, height, 16)]
            w = [rights.fragment(stage, column + i, k) for i in range(0, width, 16)]
            halves = [fragment[i : i + 2] for fragment in w for i in (0, 2)]
            pairs = list(itertools.product(x, halves))
            sums = [lanes.mma(acc[4 * i : 4 * i + 4], *pair, p.dtype) for i, pair in enumerate(pairs)]
            acc = list(itertools.chain(*sums))
        return acc

    def step(i: Reg, carry: list[Reg]) -> list[Reg]:
        next_number, *acc = carry
        lanes.wait_for_copies(ahead - 1)
        # All threads have now finished the previous step, so its stage can be overwritten.
        lanes.barrier()
        fetch(i + ahead, next_number)
        return [number(i + tiling.stages), *multiply(stage(i), acc)]

    first = [lanes.number(i, "u32") for i in range(tiling.stages)]
    for i in first[:-1]:
        fetch(i, number(i))
    zeros = [lanes.number(0.0, "float32")] * (tiling.height * tiling.width // THREADS)
    _, *acc = lanes.loop(steps, [number(first[-1]), *zeros], step)
    lanes.wait_for_copies(0)
    lanes.barrier()
    _store(acc, shared, out, (row, column), work, p, tiling)


class _Work(NamedTuple):
    """The work of a thread block.

    **Attributes:**

    - `number`: maps a step to its entry in the index, which determines the tile positions.
    - `left_at`, `right_at`: maps a step and its index entry to a tile's first row and column.
    - `row`, `column`: the first row and column of the result's tile.
    """

    number: Callable[[Reg], Reg]
    left_at: Callable[[Reg, Reg], tuple[Reg, Reg]]
    right_at: Callable[[Reg, Reg], tuple[Reg, Reg]]
    row: Reg
    column: Reg


def _matmul(p: SparseProblem, tiling: SparseTiling, index: MemoryRegion) -> _Work:
    b, slots = p.block_size, p.slots
    # Thread blocks with the same tokens are adjacent, so that all but one of them hit L2.
    feature_tiles, parts = p.indexed[0] * b // tiling.width, b // tiling.width
    feature_tile = lanes.block_index() % feature_tiles
    token = lanes.block_index() // feature_tiles * tiling.height
    feature_block, feature = feature_tile // parts, feature_tile % parts * tiling.width
    of_block = b // DEPTH

    def depth(step: Any) -> Any:
        return step % of_block * DEPTH

    def number(step: Any) -> Any:
        return index.load((feature_block * p.indexed[1] + step // of_block) * 4, "u32")[0]

    if p.kind == "transposed":

        def left_at(step: Any, number: Any) -> Any:
            return (token, number // slots * b + depth(step))

        def right_at(step: Any, number: Any) -> Any:
            return (number * b + depth(step), feature)
    else:

        def left_at(step: Any, number: Any) -> Any:
            return (token, number * b + depth(step))

        def first(step: Any) -> Any:
            return (feature_block * slots + step // of_block) * b

        def right_at(step: Any, number: Any) -> Any:
            return (first(step) + feature, depth(step))

    return _Work(number, left_at, right_at, token, feature_tile * tiling.width)


def _sampled(p: SparseProblem, tiling: SparseTiling, index: MemoryRegion) -> _Work:
    b, parts = p.block_size, (p.block_size // tiling.height, p.block_size // tiling.width)
    block, part = (f(lanes.block_index(), parts[0] * parts[1]) for f in (Reg.__floordiv__, Reg.__mod__))
    row, column = part // parts[1] * tiling.height, part % parts[1] * tiling.width
    (stored,) = index.load(block * 4, "u32")

    def left_at(step: Any, _: Any) -> Any:
        return (step * DEPTH, block // p.slots * b + row)

    def right_at(step: Any, number: Any) -> Any:
        return (step * DEPTH, number * b + column)

    return _Work(lambda step: stored, left_at, right_at, block * b + row, column)


class _Shared(MemoryRegion):
    def load_matrices(self, offset: Reg, *, transposed: bool) -> list[Reg]:
        """Loads four 8 by 8 matrices with 16-bit elements. Each lane provides a row's address.

        Each lane obtains elements (group, 2·quad) and (group, 2·quad + 1) of every (transposed) matrix.
        """
        u32 = ir.IntegerType.get_signless(32)
        ptx = "ldmatrix.sync.aligned.m8n8.x4" + ".trans" * transposed + ".shared.b16 {$0, $1, $2, $3}, [$4];"
        struct, address = llvm.StructType.get_literal([u32] * 4), self.address(offset).value
        # Marked as having side effects: the compiler doesn't know that it reads from memory, and could
        # otherwise move it across a barrier.
        out = llvm.inline_asm(struct, [address], ptx, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
        return [Reg(llvm.extractvalue(u32, out, [i])) for i in range(4)]


class _Operand:
    """One operand for a single thread: its array in global memory, and its tiles in shared memory."""

    def __init__(
        self,
        memory: MemoryRegion,
        shared: "_Shared",
        shape: tuple[int, int],
        tile: tuple[int, int, bool],
        start: int,
        *,
        is_left: bool,
    ) -> None:
        self.memory, self.shared, self.shape, self.start = memory, shared, shape, start
        self.rows, columns, self.transposed = tile
        self.pieces = columns // _NUMBERS  # per row
        # `ldmatrix` obtains the rows of its four matrices from the four groups of eight lanes.
        lane = lanes.thread_index() % 32
        low, high = lane // 8 % 2 * 8, lane // 16 * 8
        self.free, self.contracted = (low, high) if is_left else (high, low)
        self.line = lane % 8

    def _permuted(self, piece: Reg, row: Reg) -> Reg:
        """Returns the position of a piece in its row, so that eight adjacent rows use different banks."""
        width = min(8, self.pieces)
        return piece ^ row // (8 // width) % width

    def fetch(self, place: tuple[Reg, Reg], present: Reg, stage: Reg) -> None:
        """Starts copying the tile at this row and column. Fills it with zeros instead if not `present`."""
        row, column = place
        for i in range(-(-self.rows * self.pieces // THREADS)):
            at = lanes.thread_index() + i * THREADS
            own, piece = at // self.pieces, at % self.pieces
            inside = present & (row + own < self.shape[0])
            if self.rows * self.pieces % THREADS:  # The last iteration has more threads than pieces.
                inside = inside & (own < self.rows)
            offset = ((row + own) * self.shape[1] + column + piece * _NUMBERS) * 2
            to = (own * self.pieces + self._permuted(piece, own)) * _PIECE + stage + self.start
            self.memory.copy_to(lanes.select(inside, offset, 0), self.shared, to, _PIECE, inside)

    def fragment(self, stage: Reg, first: Reg, k: int) -> list[Reg]:
        """Returns the fragment for `lanes.mma` at contraction step `k`, with 16 free indices from `first`.

        This is either a single (16, 16) left operand, or two (16, 8) right operands.
        """
        free, contracted = first + self.free, self.contracted + 16 * k
        row, column = (contracted, free) if self.transposed else (free, contracted)
        # Apart from `line`, all row offsets are multiples of 8, which don't change the permutation.
        piece = self._permuted(column // _NUMBERS, self.line)
        at = ((row + self.line) * self.pieces + piece) * _PIECE + stage + self.start
        return self.shared.load_matrices(at, transposed=self.transposed)


def _store(
    acc: list[Reg],
    shared: MemoryRegion,
    out: MemoryRegion,
    place: tuple[Reg, Reg],
    work: _Work,
    p: SparseProblem,
    tiling: SparseTiling,
) -> None:
    """Rounds a warp's sums, and stores those in bounds. `place` is relative to the block's tile."""
    thread, across = lanes.thread_index(), tiling.warp_tile[1] // 8
    row, column = place[0] + thread % 32 // 4, place[1] + thread % 4 * 2
    for i in range(len(acc) // 2):
        down = i // (2 * across) * 16 + i % 2 * 8
        at = (row + down) * tiling.out_stride + (column + i // 2 % across * 8) * 2
        shared.store(at, lanes.pack(acc[2 * i], acc[2 * i + 1], p.dtype))
    lanes.barrier()
    pieces = tiling.width // _NUMBERS
    for i in range(0, tiling.height * pieces, THREADS):
        own, piece = (thread + i) // pieces, (thread + i) % pieces
        held = shared.load(own * tiling.out_stride + piece * _PIECE, "u32", 4)
        offset = ((work.row + own) * p.out[1] + work.column + piece * _NUMBERS) * 2
        lanes.when(work.row + own < p.out[0], functools.partial(out.store, offset, *held))
