"""The fused matmul with 4-bit weights for few rows of activations, thread by thread.

A warp multiplies one or two tiles of 16 rows of `W` (features) by up to 64 rows of `x` (tokens), over
some of the blocks of 64 columns; `mma.sync` contracts 16 columns at a time.

- *Codes are read as they are stored.* A sum does not depend on the order of its terms: within a
  block of 64 columns, thread `quad` of a group of four takes columns 16·quad … 16·quad + 15 of `W`
  and the same of `x`, wherever the instruction believes them to be. These are 8 consecutive bytes of
  codes and 32 consecutive bytes of activations.
- *A byte is decoded by one lookup.* It holds two neighbouring columns of one row: just what a
  register of the instruction's first operand holds. A table in shared memory has that register for
  each of the 256 bytes, once for each of the 32 banks, so that threads never wait for one another.
- *Scales meet the accumulator.* The product with a block of 64 codes is summed apart and scaled as
  it is added to the accumulator: one multiplication for 64 weights, and exact float32 scales. What
  is rounded is the codebook alone, which costs less than rounding every weight.
- *Bytes are in flight while others are multiplied.* Each step loads the codes of the next one.

Warps that share rows of `W` add their sums through shared memory. Where there are too few rows of `W` to keep
all of a GPU busy, blocks of threads share their columns, too: each writes its sum in float32, and these are
added afterwards, always in the same order.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import lanes
from ..lanes import Memory, Reg

BLOCK = 64  # columns that a scale is applied to at once; a divisor of the quantisation block
_CODE_TABLE = 256 * 32 * 4  # bytes


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a block of threads shares its part of `W`.

    **Attributes:**

    - `row_tiles`: tiles of 16 rows of a warp.
    - `row_warps`: warps beside each other along the rows.
    - `k_warps`: warps that share the columns of the same rows.
    - `unroll`: blocks of 64 columns that a warp takes at a time.
    - `splits`: blocks of threads that share the columns of the same rows, each with a sum of its own.
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
    """The sizes of a product.

    **Attributes:**

    - `m`: tokens; more than 64 are dealt with in groups, by different blocks of threads.
    - `n`, `k`: the shape of `W`.
    - `block_size`: codes that share a scale; a multiple of 64, and a divisor of `k`.
    - `adapters`, `rank`: of the low-rank term; the rank is a multiple of 16. 0 if there is none.
    - `nested`: whether scales are quantised in turn.
    - `dtype`, `out_dtype`: of the activations (bfloat16 or float16) and of the result.
    """

    m: int
    n: int
    k: int
    block_size: int
    adapters: int
    rank: int
    nested: bool
    dtype: str
    out_dtype: str

    @property
    def groups(self) -> int:
        return -(-self.m // 64)

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens of a group."""
        return -(-self.m // (8 * self.groups))


# Chosen by registers, waves of blocks and traffic of activations, not measured: docs/performance.md
# has the figures. `python -m benchmarks.gpu --tune` measures tilings on a device.
_TILINGS = (
    # up to so many tiles of tokens, from so many rows and columns of W on
    (2, 8192, 1, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=1)),
    (8, 8192, 1, Tiling(row_tiles=2, row_warps=4, k_warps=2, unroll=1)),
    (2, 1, 1, Tiling(row_tiles=2, row_warps=1, k_warps=16, unroll=1)),
    (4, 1, 8192, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=1, splits=2)),
    (8, 1, 8192, Tiling(row_tiles=1, row_warps=4, k_warps=4, unroll=1, splits=2)),
    (4, 1, 1, Tiling(row_tiles=2, row_warps=2, k_warps=4, unroll=1)),
    (8, 1, 1, Tiling(row_tiles=1, row_warps=4, k_warps=4, unroll=1)),
)


def tiling_for(p: Problem) -> Tiling:
    """The tiling for a problem, from the table."""
    return next(t for tiles, n, k, t in _TILINGS if p.token_tiles <= tiles and p.n >= n and p.k >= k)


def blocks(p: Problem, tiling: Tiling) -> int:
    """How many blocks of threads the program is for."""
    return -(-p.n // tiling.rows) * p.groups * tiling.splits


def shared_words(p: Problem, tiling: Tiling) -> int:
    """Words of shared memory: for the tables, and when these have been read, for the partial sums.

    Sums are ordered by warp, token and row, padded so that the threads that store them meet
    different banks.
    """
    tables = _CODE_TABLE + (256 * 4 if p.nested else 0)
    return max(tables // 4, tiling.k_warps * 8 * p.token_tiles * _stride(tiling))


def _stride(tiling: Tiling) -> int:
    return tiling.rows + 4


class _Operands:
    """The arrays in global memory, by name."""

    def __init__(self, refs: Sequence[Memory], p: Problem) -> None:
        self.x, self.packed, *refs = refs
        if p.nested:
            self.scale_codes, self.absmax, self.offset, self.scale_map, *refs = refs
        else:
            self.absmax, *refs = refs
        self.codebook, *refs = refs
        if p.adapters:
            self.t, self.b = refs


def emit(refs: Sequence[Any], p: Problem, tiling: Tiling) -> None:
    """Emits the program: `out = x @ W.T`, plus `t @ b.T` of each adapter; in `tiling.splits` terms.

    **Arguments:**

    - `refs`: in global memory `x`, `packed`, the scales (`absmax`, or if nested its codes, their
        absmax, the offset and the map), `codebook`, if there are adapters `t` and `b`, and `out`; in
        shared memory `shared_words` words.
    """
    *operands, out, shared = map(Memory, refs)
    warp = _Warp(_Operands(operands, p), shared, p, tiling)
    acc = [lanes.number(0.0, "float32")] * (tiling.row_tiles * p.token_tiles * 4)

    if p.nested:
        warp.fill_scale_table()
        lanes.barrier()
    first = warp.load(lanes.number(0, "u32"))
    warp.fill_code_table()
    lanes.barrier()

    def step(i: Reg, carry: list[Reg]) -> list[Reg]:
        held, acc = carry[: len(first)], carry[len(first) :]
        following = warp.load(i + 1)
        return following + warp.multiply(i, held, acc)

    steps = -(-p.k // (BLOCK * tiling.unroll * tiling.k_warps * tiling.splits))
    acc = lanes.loop(steps, first + acc, step)[len(first) :]
    if p.adapters:
        acc = warp.add_low_rank(acc)
    lanes.barrier()
    _reduce(acc, warp, shared, out)


class _Warp:
    """The place of one thread, and the work of its warp."""

    def __init__(self, memory: _Operands, table: Memory, p: Problem, tiling: Tiling) -> None:
        self.memory, self.table, self.p, self.tiling = memory, table, p, tiling
        self.thread = lanes.thread_index()
        self.lane = self.thread % 32
        self.group, self.quad = self.lane // 4, self.lane % 4
        warp = self.thread // 32
        self.k_warp = warp // tiling.row_warps
        self.first_share = lanes.block_index() % tiling.splits * tiling.k_warps + self.k_warp
        self.row_in_block = warp % tiling.row_warps * (16 * tiling.row_tiles)
        # Groups of tokens that share rows of `W` are neighbours, so that L2 serves all but one.
        place = lanes.block_index() // tiling.splits
        self.first_row = place // p.groups * tiling.rows
        self.first_token = place % p.groups * (8 * p.token_tiles)
        # Past the end the last row is read again; what comes of it is not stored.
        self.rows = [
            lanes.minimum(self.first_row + self.row_in_block + self.group + 8 * i, p.n - 1)
            for i in range(2 * tiling.row_tiles)
        ]
        self.tokens = [
            lanes.minimum(self.first_token + self.group + 8 * i, p.m - 1) for i in range(p.token_tiles)
        ]

    def fill_scale_table(self) -> None:
        """Writes the 256 values that the codes of nested scales stand for."""
        for i in range(0, 256, self.tiling.threads):
            at = lanes.minimum(self.thread + i, 255) * 4
            (value,) = self.memory.scale_map.load(at, "float32")
            store = functools.partial(self.table.store, at + _CODE_TABLE, value)
            lanes.when(self.thread + i < 256, store)

    def fill_code_table(self) -> None:
        """Writes, for each byte, its two values as a register: 32 times, four of them at once."""
        for i in range(0, 256 * 8, self.tiling.threads):
            at = self.thread + i
            byte = at // 8
            values = [self.memory.codebook.load(code * 4, "float32")[0] for code in (byte // 16, byte % 16)]
            even, odd = (lanes.widen(lanes.round_to(v, self.p.dtype)) for v in values)
            self.table.store(at * 16, *[even | odd << 16] * 4)

    def _block(self, step: Reg, i: int) -> tuple[Reg, Reg]:
        """The `i`-th block of a step, and whether there is one; if not, the last one."""
        block = self._share(step) * self.tiling.unroll + i
        blocks = self.p.k // BLOCK
        return lanes.minimum(block, blocks - 1), block < blocks

    def _share(self, step: Reg) -> Reg:
        """The number of a warp's step among those of all warps that share rows of `W`."""
        return step * (self.tiling.splits * self.tiling.k_warps) + self.first_share

    def load(self, step: Reg) -> list[Reg]:
        """Codes (two words) and scale of each of the thread's rows, for each block of a step."""
        p, regs = self.p, []
        for i in range(self.tiling.unroll):
            block, present = self._block(step, i)
            for row in self.rows:
                at = row * (p.k // 2) + block * (BLOCK // 2) + self.quad * 8
                codes = self.memory.packed.stream(at, 2)
                at = row * (p.k // p.block_size) + block // (p.block_size // BLOCK)
                regs += [*codes, lanes.select(present, self._scale(at), 0.0)]
        return regs

    def _scale(self, at: Reg) -> Reg:
        if not self.p.nested:
            return self.memory.absmax.load(at * 4, "float32")[0]
        code = lanes.widen(self.memory.scale_codes.load(at, "u8")[0])
        mapped = self.table.load(code * 4 + _CODE_TABLE, "float32")[0]
        absmax = self.memory.absmax.load(at // 256 * 4, "float32")[0]
        offset = self.memory.offset.load(lanes.number(0, "u32"), "float32")[0]
        return lanes.fma(mapped, absmax, offset)

    def multiply(self, step: Reg, held: list[Reg], acc: list[Reg]) -> list[Reg]:
        """Adds the products with the blocks of a step, whose codes and scales are held."""
        acc, rows = list(acc), 2 * self.tiling.row_tiles
        for i in range(self.tiling.unroll):
            block, _ = self._block(step, i)
            regs = held[3 * rows * i : 3 * rows * (i + 1)]
            weights = [self._decode(regs[3 * r : 3 * r + 2]) for r in range(rows)]
            scales = regs[2::3]
            for j, token in enumerate(self.tokens):
                x = self._activations(token, block)
                for tile in range(self.tiling.row_tiles):
                    upper, lower = weights[2 * tile : 2 * tile + 2]
                    product = [lanes.number(0.0, "float32")] * 4
                    for q in range(0, 8, 2):
                        a = upper[q], lower[q], upper[q + 1], lower[q + 1]
                        product = lanes.mma(product, a, x[q : q + 2], self.p.dtype)
                    at = 4 * (j * self.tiling.row_tiles + tile)
                    for e in range(4):
                        acc[at + e] = lanes.fma(product[e], scales[2 * tile + e // 2], acc[at + e])
        return acc

    def _decode(self, words: list[Reg]) -> list[Reg]:
        """The values of 8 bytes, two to a register."""
        return [
            self.table.load(((word >> shift) & 255) * 128 + self.lane * 4, "u32")[0]
            for word in words
            for shift in (0, 8, 16, 24)
        ]

    def _activations(self, token: Reg, block: Reg) -> list[Reg]:
        """The thread's 16 columns of a block, two to a register."""
        at = (token * self.p.k + block * BLOCK + self.quad * 16) * 2
        return [r for half in (0, 16) for r in self.memory.x.load(at + half, "u32", 4)]

    def add_low_rank(self, acc: list[Reg]) -> list[Reg]:
        """Adds `t @ b.T` of all adapters; thread `quad` takes columns 4·quad … 4·quad + 3 of 16 of both."""
        of_adapter = self.p.rank // 16
        tiles, t, b = self.p.adapters * of_adapter, self.memory.t, self.memory.b

        def step(i: Reg, acc: list[Reg]) -> list[Reg]:
            tile = self._share(i)
            present, tile = tile < tiles, lanes.minimum(tile, tiles - 1)
            adapter, column = tile // of_adapter, tile % of_adapter * 16 + self.quad * 4
            t_at = lambda token: (token * (16 * tiles) + tile * 16 + self.quad * 4) * 2
            b_at = lambda row: ((adapter * self.p.n + row) * self.p.rank + column) * 2
            rows = [b.load(b_at(row), "u32", 2) for row in self.rows]
            rows = [[lanes.select(present, r, 0) for r in pair] for pair in rows]
            out: list[Reg] = []
            for token in self.tokens:
                of_token = t.load(t_at(token), "u32", 2)
                for upper, lower in zip(rows[::2], rows[1::2], strict=True):
                    a = upper[0], lower[0], upper[1], lower[1]
                    out += lanes.mma(acc[len(out) : len(out) + 4], a, of_token, self.p.dtype)
            return out

        return lanes.loop(-(-tiles // (self.tiling.k_warps * self.tiling.splits)), acc, step)


def _reduce(acc: list[Reg], warp: _Warp, sums: Memory, out: Memory) -> None:
    """Adds the sums of the warps that share rows, and stores them."""
    p, tiling = warp.p, warp.tiling
    tokens, stride = 8 * p.token_tiles, _stride(tiling)
    for j in range(p.token_tiles):
        for tile in range(tiling.row_tiles):
            for e in range(4):
                token = warp.k_warp * tokens + warp.quad * 2 + (8 * j + e % 2)
                row = warp.row_in_block + warp.group + (16 * tile + 8 * (e // 2))
                value = acc[4 * (j * tiling.row_tiles + tile) + e]
                sums.store((token * stride + row) * 4, value)
    lanes.barrier()
    for i in range(0, tiling.rows * tokens, tiling.threads):
        token, row = (warp.thread + i) // tiling.rows, (warp.thread + i) % tiling.rows
        held = lanes.minimum(token, tokens - 1)
        total = lanes.number(0.0, "float32")
        for k_warp in range(tiling.k_warps):
            at = ((held + k_warp * tokens) * stride + row) * 4
            total = total + sums.load(at, "float32")[0]
        global_token, global_row = warp.first_token + token, warp.first_row + row
        inside = (token < tokens) & (global_token < p.m) & (global_row < p.n)
        size = 4 if p.out_dtype == "float32" else 2
        split = lanes.block_index() % tiling.splits
        at = ((split * p.m + global_token) * p.n + global_row) * size
        result = lanes.round_to(total, p.out_dtype)
        lanes.when(inside, functools.partial(out.store, at, result))
