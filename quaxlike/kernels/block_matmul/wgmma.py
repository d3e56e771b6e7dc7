"""The fused `x @ W.T` with stored weights for many rows of activations on Hopper, thread by thread.

Warpgroups multiply (`wgmma`) 64 features by up to 256 rows of `x` (tokens), and contract 16 columns at a
time. Weights are the left operand, in the registers that they were decoded to; activations are the right
one, in shared memory.

- *A thread decodes its own bytes*, and copies them to shared memory itself, as in `mosaic`: 16 consecutive
  columns of a block of 64. The instruction believes them to be elsewhere, so the columns of `x` are put in
  its order beforehand (`in_order`).
- *Each weight is scaled in float32 and rounded once*, whatever the format. Its value is looked up in float32,
  or as a fixed-point number where that is as good (`costs.in_fixed_point`). To sum blocks of 64 columns
  apart, as `mosaic` does, would take as many registers as the accumulators do.
- *Tensor cores multiply while threads decode.* A product begins; the wait that follows is for the one before
  it, whose registers the next fragment is decoded to.
- *Activations are shared*, and so there is a barrier in each step. When a thread has passed it, all copies
  for this step are there, and no thread reads what was there two steps before.

Where there are too few blocks of threads, some share what is contracted, as in `mosaic`.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from .. import lanes
from ..lanes import Memory, Reg
from . import costs
from .decode import SIZES
from .mosaic import Warp, ring_end, stages, stride
from .tilings import BLOCK, Problem, Tiling

_TILE = 1024  # bytes that a tile of `wgmma` begins at a multiple of


def of_warpgroups(p: Problem) -> tuple[Problem, Tiling]:
    """The problem as warpgroups are to solve it, and the tiling."""
    plan = costs.plan(p.product, p.m, p.dtype)
    return p._replace(wide=plan.tokens), Tiling(plan.row_tiles, 8, 1, 1, plan.splits)


def in_order(x: Array) -> Array:
    """`x` (tokens, columns) with the columns of each block of 64 in the order in which `wgmma` meets them."""
    m, k = x.shape
    # Of 16 columns of each thread of a group of four: numbers of the instruction, of the half, of the pair.
    blocks = x.reshape(m, k // BLOCK, 4, 4, 2, 2)
    return blocks.transpose(0, 1, 3, 4, 2, 5).reshape(m, k)


def shared_words(p: Problem, tiling: Tiling) -> int:
    """Words of shared memory: for tables and the rings, and when these have been read, for the sums."""
    rings = _activations(p, tiling) + stages(p, tiling) * p.staged
    return max(rings // 4, 8 * p.token_tiles * stride(tiling))


def _activations(p: Problem, tiling: Tiling) -> int:
    """Where the ring of activations begins."""
    return -(-ring_end(p, tiling) // _TILE) * _TILE


def emit(refs: Sequence[Any], p: Problem, tiling: Tiling) -> None:
    """Emits the program: the product, plus `t @ b.T`, in `tiling.splits` terms.

    A warpgroup has one or two tiles of 64 features (`tiling.row_tiles`), and its warps 16 features of each.

    **Arguments:**

    - `refs`: as for `mosaic.emit`, with `x` in order; if there is a low-rank term, `t`, in order, and `b`,
        both of `p.rank` columns, a multiple of 64; `out`, and `shared_words` words of shared memory.
    """
    *operands, out, shared = map(Memory, refs)
    warp = _OfWarpgroup(operands, shared, p, tiling)
    for i in range(warp.ahead):
        warp.fetch(lanes.number(i, "u32"))
    warp.scales.fill(warp.thread, tiling.threads)
    warp.table.fill(warp.values, warp.thread, tiling.threads)
    lanes.barrier()
    acc = lanes.wgmma_fence([lanes.number(0.0, "float32")] * (tiling.row_tiles * p.token_tiles * 4))

    # Fragments are in two sets of registers in turn: of one tile in two steps, or of two tiles. NVIDIA's
    # assembler understands that of a loop; with another step after it, it would wait for each product.
    at_a_time = 2 // tiling.row_tiles

    def turn(i: Reg, acc: list[Reg]) -> list[Reg]:
        for j in range(at_a_time):
            acc = warp.step(i * at_a_time + j, acc)
        return acc

    acc = lanes.loop(-(-p.product.contracted // (BLOCK * tiling.splits * at_a_time)), acc, turn)
    lanes.wait_for_copies(0)
    if p.rank:
        acc = warp.add_low_rank(acc)
    lanes.wgmma_wait(0)
    acc = lanes.wgmma_sums(acc)
    lanes.barrier()
    _store(acc, warp, shared, out)


class _OfWarpgroup(Warp):
    """The place of one thread, and the work of its warpgroup."""

    def __init__(self, operands: list[Memory], shared: Memory, p: Problem, tiling: Tiling) -> None:
        super().__init__(operands, shared, p, tiling)
        self.stages = stages(p, tiling)
        # While a step is copied, one is multiplied, and products of the one before it may not be done.
        self.ahead = self.stages - 2
        self.ring = _activations(p, tiling)
        # A thread copies 16 bytes of every so many tokens.
        self.apart = tiling.threads // 8
        self.own_token = self.thread // 8
        self.own_chunk = lanes.swizzled(self.own_token, self.thread % 8)

    def _stage(self, step: Reg) -> Reg:
        """Where the activations of a step are."""
        return step % self.stages * self.p.staged + self.ring

    def fetch(self, step: Reg) -> None:
        """Begins to copy what the thread decodes in a step, and its share of the activations."""
        part, present = self._part(step, 0)
        self._copy_tokens(self.x, self.p.product.contracted, part, present, self._stage(step))
        super().fetch(step)

    def _copy_tokens(self, x: Memory, columns: int, part: Reg, present: Reg, to: Reg) -> None:
        """Begins to copy the thread's share of 64 columns of the tokens, and zeros past the last one."""
        first = self.first_token + self.own_token
        for i in range(0, 8 * self.p.token_tiles, self.apart):
            at = ((first + i) * columns + part * BLOCK) * 2 + self.thread % 8 * 16
            here = present if self.p.m % (8 * self.p.token_tiles) == 0 else present & (first + i < self.p.m)
            x.copy_to(at, self.shared, to + self.own_chunk + i * 128, 16, here)

    def step(self, step: Reg, acc: list[Reg]) -> list[Reg]:
        """Adds the products with what was copied for a step."""
        lanes.wait_for_copies(self.ahead - 1)
        lanes.publish_copies()
        lanes.warp_barrier()
        out: list[Reg] = []
        size = len(acc) // self.tiling.row_tiles
        for tile in range(self.tiling.row_tiles):
            fragment = lanes.wgmma_fence(self.fragment(step, tile))
            if tile == 0:
                lanes.barrier()
            out += self._multiply(acc[tile * size : (tile + 1) * size], fragment, self._stage(step))
            if tile == 0:
                self.fetch(step + self.ahead)
            lanes.wgmma_wait(1)
        return out

    def fragment(self, step: Reg, tile: int) -> list[Reg]:
        """The thread's part of 64 features and columns, two to a register: operands of four instructions."""
        values = [
            self.table.scaled(*line)
            for line in self._decoded(step, 0, self.lines(0)[2 * tile : 2 * tile + 2])
        ]
        return _interleaved(*(self._packed(v[::2], v[1::2]) for v in values))

    def _multiply(self, acc: list[Reg], fragment: list[Reg], at: Reg) -> list[Reg]:
        """Begins the products of a fragment with the 64 columns of the tokens at some place."""
        tile = lanes.wgmma_tile(self.shared.address(at))
        for i in range(4):
            acc = lanes.wgmma(acc, fragment[4 * i : 4 * i + 4], tile + 2 * i, self.p.dtype)
        lanes.wgmma_commit()
        return acc

    def add_low_rank(self, acc: list[Reg]) -> list[Reg]:
        """Adds `t @ b.T`, in the first of the blocks that share what is contracted."""
        t, b = self.low_rank
        size = len(acc) // self.tiling.row_tiles
        lanes.wgmma_wait(0)
        acc = lanes.wgmma_sums(acc)

        def step(part: Reg, acc: list[Reg]) -> list[Reg]:
            lanes.barrier()
            present = part < self.p.rank // BLOCK
            self._copy_tokens(t, self.p.rank, part, present, lanes.number(self.ring, "u32"))
            lanes.commit_copies()
            fragments = []
            for upper, lower in zip(self.rows[::2], self.rows[1::2], strict=True):
                lines = [self._columns_of(b, row, part) for row in (upper, lower)]
                fragments.append(lanes.wgmma_fence(_interleaved(*lines)))
            lanes.wait_for_copies(0)
            lanes.publish_copies()
            lanes.barrier()
            out: list[Reg] = []
            for i, fragment in enumerate(fragments):
                out += self._multiply(
                    acc[i * size : (i + 1) * size], fragment, lanes.number(self.ring, "u32")
                )
            lanes.wgmma_wait(0)
            return lanes.wgmma_sums(out)

        steps = lanes.number(self.p.rank // BLOCK, "u32")
        return lanes.loop(lanes.select(self.split < 1, steps, 0), acc, step)

    def _columns_of(self, b: Memory, row: Reg, part: Reg) -> list[Reg]:
        """The thread's 16 columns of 64 of a row, two to a register."""
        at = (row * self.p.rank + part * BLOCK + self.quad * 16) * 2
        return [r for half in (0, 16) for r in b.load(at + half, "u32", 4)]

    @property
    def split(self) -> Reg:
        return lanes.block_index() % self.tiling.splits


def _interleaved(upper: list[Reg], lower: list[Reg]) -> list[Reg]:
    """The registers of 16 columns of two rows in the order in which the instructions take them."""
    pairs = zip(upper[::2], lower[::2], upper[1::2], lower[1::2], strict=True)
    return [r for of_instruction in pairs for r in of_instruction]


def _store(acc: list[Reg], warp: Warp, sums: Memory, out: Memory) -> None:
    """Stores the sums, by way of shared memory, so that neighbouring threads store neighbouring features."""
    p, tiling = warp.p, warp.tiling
    tokens, width, features = 8 * p.token_tiles, stride(tiling), p.product.free
    for tile in range(tiling.row_tiles):
        for j in range(p.token_tiles):
            for e in range(4):
                token = warp.quad * 2 + (8 * j + e % 2)
                value = acc[4 * (tile * p.token_tiles + j) + e]
                sums.store((token * width + warp.feature(tile, e)) * 4, value)
    lanes.barrier()
    count = 1 if features % 4 else 4  # features that are stored at once
    across = tiling.rows // count
    split = lanes.block_index() % tiling.splits

    def store(i: Reg, carry: list[Reg]) -> list[Reg]:
        place = warp.thread + i * tiling.threads
        token, row = place // across, place % across * count
        values = sums.load((token * width + row) * 4, "float32", count)
        global_token, feature = warp.first_token + token, warp.first_row + row
        inside = (global_token < p.m) & (feature < features)
        at = ((split * p.m + global_token) * features + feature) * SIZES[p.out_dtype]
        rounded = [lanes.round_to(value, p.out_dtype) for value in values]
        lanes.when(inside, functools.partial(out.store, at, *rounded))
        return carry

    lanes.loop(tokens * across // tiling.threads, [], store)
