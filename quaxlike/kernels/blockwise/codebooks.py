"""The tables of values of block-wise quantisation, and their decision thresholds.

Everything here is computed once, in NumPy. XLA sees only constants, so no compiler pass can
reassociate or contract the arithmetic that decides a code.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt8

FloatArray = Float32[np.ndarray, "_"]


def _frozen(values: object) -> FloatArray:
    array = np.asarray(values, np.float32)
    array.flags.writeable = False
    return array


NF4: FloatArray = _frozen(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
"""The 16 values of 4-bit NormalFloat: quantiles of a normal distribution, with an exact zero.

Source: Dettmers et al., QLoRA, <https://arxiv.org/abs/2305.14314>.
"""

FP4: FloatArray = _frozen(
    np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / 12
)
"""The 16 values of 4-bit floating point (1 sign, 2 exponent, 1 mantissa bit), scaled to [-1, 1].

Code 8 is a second zero, as in bitsandbytes.
"""

INT4: FloatArray = _frozen(np.arange(16) - 8)
"""Code `i` stands for the integer `i - 8`; quantising yields only -7 to 7."""


@functools.cache
def nearest_bounds(codebook: tuple[float, ...]) -> tuple[FloatArray, UInt8[np.ndarray, "_"]]:
    """Thresholds and codes such that the nearest entry to `v` is `codes[(v > bounds).sum()]`.

    Ties go to the smaller value; of equal entries (the two zeros of FP4) the first takes values
    up to and including itself, the second those above it.
    """
    values = np.asarray(codebook, np.float32)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    return _frozen((ordered[:-1] + ordered[1:]) / np.float32(2)), order.astype(np.uint8)


@functools.cache
def dynamic_map() -> FloatArray:
    """The 256 values of the signed 8-bit dynamic data type, ascending.

    Seven decades, each with a linear fraction of twice as many steps as the one below.
    Source: Dettmers et al., <https://arxiv.org/abs/1511.04561> and
    <https://arxiv.org/abs/2110.02861>.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace(np.float32(0.1), np.float32(1), 2**decade + 1)
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade - 6)) * means
        values += [*scaled, *-scaled]
    return _frozen(sorted(values))


def _linspace(start: np.float32, stop: np.float32, n: int) -> FloatArray:
    """`torch.linspace` in float32, which made the published table.

    Each half is counted from its own end by a fused multiply-add; in float64 the product is exact.
    """
    step = np.float64((stop - start) / np.float32(n - 1))
    i = np.arange(n)
    return np.where(i < n // 2, start + step * i, stop - step * (n - 1 - i)).astype(np.float32)


@functools.cache
def dynamic_bounds() -> FloatArray:
    """Thresholds such that the dynamic code of `v` in [-1, 1] is `(v >= bounds).sum()`.

    bitsandbytes finds the code through a table of 65,536 equal bins, so close to zero, where a
    bin spans several codes, this is not the nearest one. The composition bin ∘ table is monotone,
    hence a list of thresholds, which needs neither the table nor the arithmetic of the bin.
    """
    bins = 65536
    midpoints = np.float32(0.5) * (dynamic_map()[:-1] + dynamic_map()[1:])
    centres = np.float32(-1) + np.float32(2) * np.arange(bins, dtype=np.float32) / np.float32(bins - 1)
    # The first bin whose code is at least c, for c = 1 … 255.
    first_bins = np.searchsorted(centres, midpoints, side="right")

    def bin_of(v: FloatArray) -> Int[np.ndarray, "_"]:
        half = (v + np.float32(1)) * np.float32(0.5)
        return (half * np.float32(bins - 1) + np.float32(0.5)).astype(np.int64)

    return _frozen(_first_float(lambda v: bin_of(v) >= first_bins, len(first_bins)))


def _first_float(predicate: Callable[[FloatArray], Bool[np.ndarray, "_"]], n: int) -> FloatArray:
    """For each of `n` monotone predicates, the smallest float32 in (-1, 1] that satisfies it."""

    def to_float(key: Int[np.ndarray, "_"]) -> FloatArray:
        # Integers in the order of the floats: the bits of the magnitude, with a sign.
        return np.copysign(np.abs(key).astype(np.int32).view(np.float32), key).astype(np.float32)

    one = np.int64(np.float32(1).view(np.int32))
    low, high = np.full(n, -one), np.full(n, one)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        satisfied = predicate(to_float(middle))
        low, high = np.where(satisfied, low, middle), np.where(satisfied, middle, high)
    return to_float(high)
