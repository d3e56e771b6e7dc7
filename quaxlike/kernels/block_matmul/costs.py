"""A model of the time that products with many rows of activations take on an H100, which chooses among them.

It counts cycles, from the limits of the hardware and from the instructions of the compiled kernel; `_LOST`
and `_DECODED` fit it to what was measured on an H200 (docs/performance.md).
"""

import functools
import math
from typing import NamedTuple

from .product import Product

_SMS = 132
_L2 = 23.7  # bytes a cycle that each multiprocessor gets from the L2 cache, of 5.5 TB/s in all
_MACS = 2048  # multiplications of 16-bit numbers a cycle, by the tensor cores of one multiprocessor
_LAUNCH = 3500  # from the end of one kernel to the start of the next: 2 µs
_BLOCK = 8000  # until a block of threads has its first bytes and its tables, and to store its sums
_LOST = 2.2  # factor for waits: for barriers, copies and the first products
# The share of the tensor cores' rate that XLA's products reach, and the cycles for each element of a weight
# that is decoded to memory and read again: 60 µs for 14336×4096.
_LIBRARY, _DECODED = 0.7, 1.8e-3
_MARGIN = 1.05  # the kernel must be faster by this factor
_MOST_ROWS = 1024  # above, decoding the weight is a small part of the time, smaller than the model's errors

#: The most tokens of a block of threads, by tiles of a warpgroup. The instruction takes 256; two tiles leave
#: registers for 160.
MOST_TOKENS = {1: 256, 2: 160}
_MOST_SPLITS, _LEAST_STEPS = 8, 8
_MOST_BYTES_OF_TERMS = 2**25  # the library's product takes as much for a part of the weight


class Plan(NamedTuple):
    """How blocks of threads share a product.

    **Attributes:**

    - `tokens`: the most tokens of a block.
    - `row_tiles`: tiles of 64 features for each warpgroup.
    - `splits`: blocks of threads that share the contracted axis.
    - `cycles`: of the product, including XLA's operations before and after.
    """

    tokens: int
    row_tiles: int
    splits: int
    cycles: float


def in_fixed_point(product: Product, dtype: str) -> bool:
    """Whether values are looked up in half of the bytes of float32, which rounding to bfloat16 hides."""
    return product.bits == 4 and dtype == "bfloat16"


@functools.lru_cache(maxsize=1024)
def plan(product: Product, m: int, dtype: str) -> Plan:
    """The fastest plan for `m` rows of activations."""
    fits = lambda splits: 4 * m * product.free * splits <= _MOST_BYTES_OF_TERMS
    more = range(2, _MOST_SPLITS + 1)
    splits = [1, *(s for s in more if fits(s) and _steps(product, s) >= _LEAST_STEPS)]
    # All threads of a block copy the same number of tokens.
    shapes = [(t, tiles) for tiles, most in MOST_TOKENS.items() for t in range(32, most + 1, 32)]
    plans = [Plan(*shape, s, _kernel(product, m, dtype, *shape, s)) for shape in shapes for s in splits]
    return min(plans, key=lambda plan: plan.cycles)


def library(product: Product, m: int) -> float:
    """The cycles of decoding the weight for the library's product."""
    weights = product.shape[0] * product.shape[1]
    return m * weights / (_SMS * _MACS * _LIBRARY) + weights * _DECODED + 2 * _LAUNCH


def step_limits(bits: int, tokens: int, row_tiles: int, *, fixed: bool) -> dict[str, float]:
    """The cycles that each unit needs for a step of a block of threads, 64 columns of its operands."""
    features = 128 * row_tiles
    numbers = 8  # bytes of a scale, or of a sector of them, for 64 columns
    return {
        "tensor cores": features * tokens * 64 / _MACS,
        # Each of four schedulers issues one instruction a cycle, for 8 warps.
        "instructions": 2 * (70 + (90 + 64 * fixed + 9 * bits) * row_tiles + tokens / 8),
        # 128 bytes a cycle: activations are written, and read for each 64 features; values of 2 or 4 bytes
        # are looked up; codes, and a word of scales for each 16 of them, are written and read.
        "shared memory": tokens + tokens * features / 64 + (2 - fixed) * features + features * (bits + 2) / 8,
        "L2": (128 * tokens + features * (8 * bits + numbers)) / _L2,
    }


def _steps(product: Product, splits: int) -> int:
    return -(-product.contracted // (64 * splits))


def _kernel(product: Product, m: int, dtype: str, most: int, row_tiles: int, splits: int) -> float:
    groups = -(-m // most)
    tokens = -(-m // (32 * groups)) * 32
    waves = -(-(-(-product.free // (128 * row_tiles)) * groups * splits) // _SMS)
    limits = step_limits(product.bits, tokens, row_tiles, fixed=in_fixed_point(product, dtype))
    step = _LOST * max(limits.values())
    through_l2 = 4 * m * product.contracted  # activations, put in order
    launches = 2
    if splits > 1:
        through_l2 += 2 * 4 * m * product.free * splits
        launches = 3
    return waves * (_steps(product, splits) * step + _BLOCK) + through_l2 / (_SMS * _L2) + launches * _LAUNCH


def is_faster(product: Product, m: int, dtype: str) -> bool:
    """Whether the kernel is clearly faster than the library's product with a decoded weight."""
    if m > _MOST_ROWS or math.prod(product.shape) == 0:
        return False
    return _MARGIN * plan(product, m, dtype).cycles < library(product, m)
