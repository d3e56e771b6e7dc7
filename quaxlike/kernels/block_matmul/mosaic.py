"""The fused matmul with stored weights for few activation rows, as a per-thread program.

Each warp multiplies several tiles, each with 16 of the result's features, by up to 64 rows of `x` (called
tokens), over its share of the contraction. A single `mma.sync` instruction contracts 16 elements. The
following makes this fast.

- *Codes are read in their stored order.* Mathematically, a contraction's terms can be summed in any order. So
    for `x @ W.T`, thread `quad` of each group of four reads columns 16·quad … 16·quad + 15 within a block of
    64 columns of both `W` and `x`, regardless of the columns assigned to it by the instruction. For `x @ W`,
    the thread instead reads four adjacent rows of `W`, with eight adjacent columns as features. Both operands
    must be permuted in the same way: otherwise we would multiply elements that don't match.
- *Each byte is decoded with a single lookup*, in a table with 256 entries (see `lookup`).
- *Scales are applied to the accumulator*, if all 64 columns in a block share a scale, and there are no zero
    points. The products with a block's codes are summed separately, then multiplied by the scale when adding
    to the accumulator. This only needs one multiplication for every 64 weights. It is also more accurate:
    scales are exact float32 numbers, and only the codebook is rounded, rather than every weight. In all other
    cases, values are scaled in float32 and then rounded once.
- *Loads overlap with multiplications.* Each warp copies the tiles for its upcoming steps into a ring buffer
    in shared memory (see `staging`), without synchronising with other warps.

Warps with the same features add up their sums via shared memory. With too few features to occupy the GPU, the
contraction is also split between thread blocks. (Adding up their results using atomics wouldn't be
deterministic. Instead each one writes a separate float32 sum, and these are added in a fixed order
afterwards.)
"""

import functools
from collections.abc import Sequence
from typing import Any

from .. import lanes
from ..lanes import MemoryRegion, Reg
from .lookup import SIZES, TABLE_BYTES, Table, numbers_of, shift_of
from .staging import StagedTiles, TileLayout
from .tilings import BLOCK, Problem, Tiling

# All GPUs since compute capability 8.0 have at least this many bytes of shared memory.
_SHARED = 96 * 1024
# The depth of the ring buffer, if it fits.
_STAGES = 4


def shared_words(p: Problem, tiling: Tiling) -> int:
    """Returns how many words of shared memory to use.

    These are first used for tables and the ring buffer, and later for sums. The latter are indexed by warp,
    token and feature, and padded so that stores avoid bank conflicts.
    """
    return max(ring_end(p, tiling) // 4, tiling.k_warps * 8 * p.token_tiles * stride(tiling))


def stages(p: Problem, tiling: Tiling) -> int:
    """Returns the number of stages in the ring buffer, each holding the data for one step."""
    return max(2, min(_STAGES, (_SHARED - _tables(p)) // _stage_bytes(p, tiling)))


def ring_end(p: Problem, tiling: Tiling) -> int:
    """Returns the offset at which the tables and the ring buffer end in shared memory."""
    return _tables(p) + stages(p, tiling) * _stage_bytes(p, tiling)


def _tables(p: Problem) -> int:
    return TABLE_BYTES + (1024 if p.scales == "nested" else 0)


def _stage_bytes(p: Problem, tiling: Tiling) -> int:
    return tiling.threads // 32 * TileLayout(p, tiling).bytes


def stride(tiling: Tiling) -> int:
    """Returns the stride between consecutive tokens' sums, in words."""
    return tiling.rows + 4


def emit(refs: Sequence[Any], p: Problem, tiling: Tiling) -> None:
    """Emits the program for the product plus `t @ b.T` for adapters, as `tiling.splits` terms.

    **Arguments:**

    - `refs`: the following arrays in global memory: `x`; the codes; the scales (if nested, these are codes,
        absmax, offset and map); the zero points (if any); the code values; for adapters, `t` and `b`, as well
        as the adapters used by each group of tokens and their number; and `out`. Then `shared_words` words in
        shared memory.
    """
    *operands, out, shared = map(MemoryRegion, refs)
    warp = (_Transposed if p.product.transpose else Warp)(operands, shared, p, tiling)
    acc = [lanes.number(0.0, "float32")] * (tiling.row_tiles * p.token_tiles * 4)
    ahead = stages(p, tiling) - 1

    # Issue the first copies before filling the tables, so that they overlap.
    for i in range(ahead):
        warp.fetch(lanes.number(i, "u32"))
    warp.scales.fill(warp.thread, tiling.threads)
    warp.table.fill(warp.values, warp.thread, tiling.threads)
    lanes.barrier()

    def step(i: Reg, acc: list[Reg]) -> list[Reg]:
        lanes.wait_for_copies(ahead - 1)
        # After this, the copies of all threads have arrived, and no thread is still reading from the stage
        # about to be overwritten.
        lanes.warp_barrier()
        warp.fetch(i + ahead)
        return warp.multiply(i, acc)

    steps = -(-p.product.contracted // (p.depth * tiling.unroll * tiling.k_warps * tiling.splits))
    acc = lanes.loop(steps, acc, step)
    lanes.wait_for_copies(0)
    if p.adapters:
        acc = warp.add_low_rank(acc)
    lanes.barrier()
    _reduce(acc, warp, shared, out)


class Warp:
    """The position of a single thread, along with its part of its warp's work, for `x @ W.T`."""

    def __init__(
        self, operands: list[MemoryRegion], shared: MemoryRegion, p: Problem, tiling: Tiling
    ) -> None:
        self.x, self.codes, *operands = operands
        self.scales, self.zeros, (self.values, *self.low_rank) = numbers_of(p, operands, shared)
        self.shared, self.p, self.tiling = shared, p, tiling
        self.thread = lanes.thread_index()
        self.lane = self.thread % 32
        self.group, self.quad = self.lane // 4, self.lane % 4
        self.warp = warp = self.thread // 32
        self.k_warp = warp // tiling.row_warps
        self.first_share = lanes.block_index() % tiling.splits * tiling.k_warps + self.k_warp
        self.row_in_block = warp % tiling.row_warps * (16 * tiling.row_tiles)
        # Groups of tokens using the same rows of `W` are adjacent, so that all but one of them hit L2.
        place = lanes.block_index() // tiling.splits
        self.first_row = place // p.groups * tiling.rows
        self.token_group = place % p.groups
        self.first_token = self.token_group * (8 * p.token_tiles)
        self.table = Table(shared, self.lane, p.product, p.dtype, exact=p.exact)
        self.layout = TileLayout(p, tiling)
        numbers = [n for n in (self.scales, self.zeros) if n is not None]
        self.tiles = StagedTiles(self.layout, self.codes, numbers, shared, self.lane)
        self.tokens = [self.first_token + self.group + 8 * i for i in range(p.token_tiles)]
        if p.m % (8 * p.token_tiles):
            # For tokens past the last row of `x`, read the last row again. The result is never stored.
            self.tokens = [lanes.minimum(token, p.m - 1) for token in self.tokens]

    @property
    def rows(self) -> list[Reg]:
        """The rows in `W` decoded by this thread."""
        # As with tokens, clamp to the last row, and don't store any features past the end.
        first, last = self.first_row + self.row_in_block + self.group, self.p.product.shape[0] - 1
        return [lanes.minimum(first + 8 * i, last) for i in range(2 * self.tiling.row_tiles)]

    def feature(self, tile: int, e: int) -> Reg:
        """Returns the feature (relative to the thread block) of element `e` in a tile's accumulator."""
        return self.row_in_block + self.group + (16 * tile + 8 * (e // 2))

    def _share(self, step: Reg) -> Reg:
        """Returns this step's index amongst the steps of all warps with the same features."""
        return step * (self.tiling.splits * self.tiling.k_warps) + self.first_share

    def _part(self, step: Reg, i: int) -> tuple[Reg, Reg]:
        """Returns the (clamped) index of part `i` in a step's contraction, and whether it exists."""
        part = self._share(step) * self.tiling.unroll + i
        parts = self.p.product.contracted // self.p.depth
        return lanes.minimum(part, parts - 1), part < parts

    def tile(self, step: Reg) -> tuple[Reg, Reg]:
        """Returns the first row and column in `W` of a warp's tile for this step."""
        return self.first_row + self.row_in_block, self._share(step) * self.layout.columns

    def base(self, step: Reg) -> Reg:
        """Returns the shared-memory offset for a warp's tile in this step."""
        stage = step % stages(self.p, self.tiling) * _stage_bytes(self.p, self.tiling)
        return stage + self.warp * self.layout.bytes + _tables(self.p)

    def fetch(self, step: Reg) -> None:
        """Starts asynchronously copying the tile for a step."""
        self.tiles.fetch(self.base(step), *self.tile(step))

    def lines(self, i: int) -> list[tuple[Reg, Reg]]:
        """Returns the tile's rows decoded by this thread for part `i`, as (position, row) pairs."""
        return [(self.group + 8 * j, self.group + 8 * j) for j in range(2 * self.tiling.row_tiles)]

    def codes_of(self, base: Reg, place: Reg, i: int) -> list[Reg]:
        """Returns the words containing this thread's codes, in part `i` of a tile's row."""
        bytes_ = 2 * self.p.product.bits  # for 16 columns
        chunk = self.quad * bytes_ // 16 ^ self.layout.swizzle(self.group) ^ self.layout.span * i
        return self.tiles.words(base, place, chunk, self.quad * bytes_ % 16, bytes_ // 4)

    def column_in_tile(self, i: int) -> Reg:
        return self.quad * 16 + BLOCK * i

    def _decoded(self, step: Reg, i: int) -> list[tuple[list[Reg], Reg, Any]]:
        """Returns the code words, the scale and the shift for each line in a part."""
        _, present = self._part(step, i)
        # Use a scale and shift of zero for parts past the end of the contraction, so they don't contribute.
        base, (row, column) = self.base(step), self.tile(step)
        out = []
        for place, own in self.lines(i):

            def at(which: Any, place: Any = place, own: Any = own) -> Any:
                return self.tiles.number(which, base, place, row + own, column, self.column_in_tile(i))

            scale = lanes.select(present, at(0), 0.0)
            shift = None
            if self.zeros is not None:
                shift = lanes.select(present, shift_of(self.p.product, scale, at(1)), 0.0)
            out.append((self.codes_of(base, place, i), scale, shift))
        return out

    def multiply(self, step: Reg, acc: list[Reg]) -> list[Reg]:
        """Multiplies the tile for a step, and adds the products to the accumulator."""
        acc, tiles = list(acc), self.tiling.row_tiles
        for i in range(self.tiling.unroll):
            part, _ = self._part(step, i)
            lines = self._decoded(step, i)
            if self.p.exact:
                values = [self.table.scaled(*line) for line in lines]
                weights = [self._packed(v[::2], v[1::2]) for v in values]
            else:
                weights = [self.table.pairs(words) for words, _, _ in lines]
            for j, token in enumerate(self.tokens):
                x = self._activations(token, part)
                for tile in range(tiles):
                    upper, lower = weights[2 * tile : 2 * tile + 2]
                    own = slice(4 * (j * tiles + tile), 4 * (j * tiles + tile) + 4)
                    total = acc[own] if self.p.exact else [lanes.number(0.0, "float32")] * 4
                    for q in range(0, 8, 2):
                        a = upper[q], lower[q], upper[q + 1], lower[q + 1]
                        total = lanes.mma(total, a, x[q : q + 2], self.p.dtype)
                    if not self.p.exact:
                        scales = [lines[2 * tile + e // 2][1] for e in range(4)]
                        total = [lanes.fma(*terms) for terms in zip(total, scales, acc[own], strict=True)]
                    acc[own] = total
        return acc

    def _packed(self, low: list[Reg], high: list[Reg]) -> list[Reg]:
        return [lanes.pack(a, b, self.p.dtype) for a, b in zip(low, high, strict=True)]

    def _activations(self, token: Reg, part: Reg) -> list[Reg]:
        """Returns this thread's 16 columns in a block of activations, packed two per register."""
        at = (token * self.p.product.contracted + part * BLOCK + self.quad * 16) * 2
        if self.p.token_tiles == 1:
            return [r for half in (0, 16) for r in self.x.load(at + half, "u32", 4)]
        # Eight threads access memory at the same time. Every other token's threads read their two halves in
        # the opposite order, so that those eight threads access all banks of L1 exactly once.
        even, at = self.group % 2 < 1, at + self.group % 2 * 16
        a, b = (self.x.load(place, "u32", 4) for place in (at, at ^ 16))
        return [
            lanes.select(even, *pair) for halves in ((a, b), (b, a)) for pair in zip(*halves, strict=True)
        ]

    def add_low_rank(self, acc: list[Reg]) -> list[Reg]:
        """Adds `t @ b.T` for every adapter used by this token group.

        Thread `quad` reads columns 4·quad … 4·quad + 3 (out of 16) of both operands.
        """
        p, of_adapter = self.p, self.p.rank // 16
        t, b, used, counts = self.low_rank
        (count,) = counts.load(self.token_group * 4, "u32")
        tiles = count * of_adapter
        warps = self.tiling.k_warps * self.tiling.splits

        def step(i: Reg, acc: list[Reg]) -> list[Reg]:
            # Split this between warps in the same way as the contraction: their sums are added up anyway.
            place = self._share(i)
            present = place < tiles
            place = lanes.select(present, place, 0)
            (adapter,) = used.load((self.token_group * p.adapters + place // of_adapter) * 4, "u32")
            column = place % of_adapter * 16 + self.quad * 4

            def t_at(token: Any) -> Any:
                return ((token * p.adapters + adapter) * p.rank + column) * 2

            def b_at(row: Any) -> Any:
                return ((adapter * p.product.shape[0] + row) * p.rank + column) * 2

            rows = [b.load(b_at(row), "u32", 2) for row in self.rows]
            rows = [[lanes.select(present, r, 0) for r in pair] for pair in rows]
            out: list[Reg] = []
            for token in self.tokens:
                of_token = t.load(t_at(token), "u32", 2)
                for upper, lower in zip(rows[::2], rows[1::2], strict=True):
                    a = upper[0], lower[0], upper[1], lower[1]
                    out += lanes.mma(acc[len(out) : len(out) + 4], a, of_token, p.dtype)
            return out

        return lanes.loop((tiles + (warps - 1)) // warps, acc, step)


class _Transposed(Warp):
    """The work for `x @ W`: a warp has 64 columns from `W` as features, and contracts 16 rows at a time.

    Each line has eight columns of a row. Rows have different scales, so we can't scale the accumulator.
    Instead every value is scaled, then rounded together with the value from another row sharing its register.
    """

    def feature(self, tile: int, e: int) -> Reg:
        return self.row_in_block + self.group * 8 + (2 * tile + e // 2)

    def tile(self, step: Reg) -> tuple[Reg, Reg]:
        return self._share(step) * self.layout.rows, self.first_row + self.row_in_block

    def lines(self, i: int) -> list[tuple[Reg, Reg]]:
        return [(self.quad + (16 * i + 4 * r), self.quad * 4 + (16 * i + r)) for r in range(4)]

    def codes_of(self, base: Reg, place: Reg, i: int) -> list[Reg]:
        bits = self.p.product.bits  # also the bytes for 8 columns
        chunk = self.group * bits // 16 ^ self.layout.swizzle(self.quad)
        return self.tiles.words(base, place, chunk, self.group * bits % 16, bits // 4)

    def column_in_tile(self, i: int) -> Reg:
        return self.group * 8

    def multiply(self, step: Reg, acc: list[Reg]) -> list[Reg]:
        acc, tiles = list(acc), self.tiling.row_tiles
        for i in range(self.tiling.unroll):
            part, _ = self._part(step, i)
            first, second, third, fourth = (self.table.scaled(*line) for line in self._decoded(step, i))
            upper, lower = self._packed(first, second), self._packed(third, fourth)
            for j, token in enumerate(self.tokens):
                at = (token * self.p.product.contracted + part * 16 + self.quad * 4) * 2
                x = self.x.load(at, "u32", 2)
                for tile in range(tiles):
                    even, odd = 2 * tile, 2 * tile + 1
                    a = upper[even], upper[odd], lower[even], lower[odd]
                    own = slice(4 * (j * tiles + tile), 4 * (j * tiles + tile) + 4)
                    acc[own] = lanes.mma(acc[own], a, x, self.p.dtype)
        return acc


def _reduce(acc: list[Reg], warp: Warp, sums: MemoryRegion, out: MemoryRegion) -> None:
    """Adds up the sums from all warps with the same features, and stores the result."""
    p, tiling = warp.p, warp.tiling
    tokens, width, features = 8 * p.token_tiles, stride(tiling), p.product.free
    for j in range(p.token_tiles):
        for tile in range(tiling.row_tiles):
            for e in range(4):
                token = warp.k_warp * tokens + warp.quad * 2 + (8 * j + e % 2)
                value = acc[4 * (j * tiling.row_tiles + tile) + e]
                sums.store((token * width + warp.feature(tile, e)) * 4, value)
    lanes.barrier()
    # From here on, consecutive threads have consecutive features, so stores to global memory are coalesced.
    for i in range(0, tiling.rows * tokens, tiling.threads):
        token, row = (warp.thread + i) // tiling.rows, (warp.thread + i) % tiling.rows
        held = lanes.minimum(token, tokens - 1)  # Surplus threads read valid memory, but don't store.
        total = lanes.number(0.0, "float32")
        for k_warp in range(tiling.k_warps):
            at = ((held + k_warp * tokens) * width + row) * 4
            total = total + sums.load(at, "float32")[0]
        global_token, feature = warp.first_token + token, warp.first_row + row
        inside = (token < tokens) & (global_token < p.m) & (feature < features)
        size = SIZES[p.out_dtype]
        split = lanes.block_index() % tiling.splits
        at = ((split * p.m + global_token) * features + feature) * size
        result = lanes.round_to(total, p.out_dtype)
        lanes.when(inside, functools.partial(out.store, at, result))
