"""A per-thread program that decodes a stored weight's rows to 16 bits, for use in a dense matmul.

We could leave this to XLA. However, the code that it generates takes twice as long as just reading the bytes,
because it looks up every value separately, and computes its code and scale indices each time. Here, each
thread instead decodes eight adjacent codes at a time, using the table from `lookup`, and writes them with a
single store.
"""

import functools
from collections.abc import Sequence
from typing import Any

from .. import lanes
from ..lanes import MemoryRegion, Reg
from .lookup import STREAMS, TABLE_BYTES, Numbers, Table, numbers_of, shift_of
from .tilings import Problem

THREADS = 512
# All rows are divided between two thread blocks per multiprocessor, of which an H100 has 132.
BLOCKS = 2 * 132
# The number of codes per thread and step.
_CODES = 8
# Each thread issues this many loads before it decodes the first of them, in order to hide latency.
_AHEAD = 4


def shared_words(p: Problem) -> int:
    return (TABLE_BYTES + (1024 if p.scales == "nested" else 0)) // 4


def emit(refs: Sequence[Any], p: Problem, first: int, rows: int) -> None:
    """Emits a program that decodes `rows` rows of `W`, starting from row `first`.

    **Arguments:**

    - `refs`: the codes, scales, zero points (if any) and code values, as in `mosaic.emit`; then the result;
        then `shared_words` words in shared memory.
    """
    codes, *operands, out, shared = map(MemoryRegion, refs)
    scales, zeros, (values,) = numbers_of(p, operands, shared)
    thread = lanes.thread_index()
    table = Table(shared, thread % 32, p.product, p.dtype, exact=True)
    scales.fill(thread, THREADS)
    table.fill(values, thread, THREADS)
    lanes.barrier()
    k, bits, block = p.product.shape[1], p.product.bits, p.product.block_size
    count = rows * k // _CODES

    def number(numbers: Numbers, index: Reg) -> Reg:
        streams = zip(numbers.arrays, STREAMS[numbers.kind], strict=True)
        words = [
            array.load(index // shared_by * size // 4 * 4, "u32") for array, (shared_by, size) in streams
        ]
        return numbers.read([word for loaded in words for word in loaded], index)

    def step(i: Reg, carry: list[Reg]) -> list[Reg]:
        loaded = []
        for ahead in range(_AHEAD):
            at = (i * (_AHEAD * BLOCKS) + lanes.block_index() + ahead * BLOCKS) * THREADS + thread
            place = lanes.minimum(at, count - 1)
            words = codes.load(place * bits + first * k * bits // 8, "u32", bits // 4)
            index = (place * _CODES + first * k) // block
            loaded.append((at, words, *(None if n is None else number(n, index) for n in (scales, zeros))))
        for at, words, scale, zero in loaded:
            decoded = table.scaled(words, scale, None if zeros is None else shift_of(p.product, scale, zero))
            pairs = [lanes.pack(*pair, p.dtype) for pair in zip(decoded[::2], decoded[1::2], strict=True)]
            lanes.when(at < count, functools.partial(out.store, at * (2 * _CODES), *pairs))
        return carry

    lanes.loop(-(-count // (_AHEAD * BLOCKS * THREADS)), [], step)
