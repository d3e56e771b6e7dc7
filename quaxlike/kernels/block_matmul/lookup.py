"""Decodes a weight's bytes to values on GPU threads.

No other part of the kernels depends on formats.

A table in shared memory holds the value (or values) for each of the 256 possible bytes. It is replicated
across all 32 banks. This takes more memory, but lookups by different threads never conflict.
"""

import functools
from typing import Any

from .. import lanes
from ..lanes import MemoryRegion, Reg
from .product import Product
from .tilings import Problem

TABLE_BYTES = 256 * 32 * 4

#: The size in bytes of a scale or zero point, for each way of storing them.
SIZES = {
    **{"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1},
    **{"e4m3": 1, "e8m0": 1, "e8m0_half": 1, "nested": 1},
}

#: For each array of scales or zero points: how many of them share an element, and an element's size in bytes.
STREAMS = {kind: [(1, size)] for kind, size in SIZES.items()} | {"nested": [(1, 1), (256, 4)]}


class Table:
    """A lookup table for code values.

    If `exact`, entries are float32, to be scaled individually (using `scaled`). Otherwise entries are rounded
    to the activations' dtype, and returned two per register (using `pairs`).
    """

    def __init__(self, memory: MemoryRegion, lane: Reg, product: Product, dtype: str, *, exact: bool) -> None:
        self.memory, self.lane, self.dtype, self.exact = memory, lane, dtype, exact
        self.bits, self.low_first = product.bits, product.low_first

    def fill(self, values: MemoryRegion, thread: Reg, threads: int) -> None:
        """Writes the table to shared memory. Each thread stores four words at a time."""
        for i in range(0, 256 * 8, threads):
            at = thread + i
            self.memory.store(at * 16, *self._entry(values, at // 8))

    def _entry(self, values: MemoryRegion, byte: Reg) -> list[Reg]:
        codes = [byte] if self.bits == 8 else [byte // 16, byte % 16]
        numbers = [values.load(code * 4, "float32")[0] for code in (codes[::-1] if self.low_first else codes)]
        if self.exact:
            return (numbers * 4)[:4]
        halves = [lanes.widen(lanes.round_to(v, self.dtype)) for v in numbers]
        return [halves[0] if self.bits == 8 else halves[0] | halves[1] << 16] * 4

    def pairs(self, words: list[Reg]) -> list[Reg]:
        """Returns the values for adjacent codes, rounded to 16 bits and packed two per register."""
        entries = self._entries(words)
        if self.bits == 4:
            return entries
        return [low | high << 16 for low, high in zip(entries[::2], entries[1::2], strict=True)]

    def scaled(self, words: list[Reg], scale: Reg, shift: Reg | None) -> list[Reg]:
        """Returns the float32 values for all codes, multiplied by `scale` and with `shift` added."""
        return [v * scale if shift is None else lanes.fma(v, scale, shift) for v in self._values(words)]

    def _entries(self, words: list[Reg]) -> list[Reg]:
        return [self.memory.load(at * 128 + self.lane * 4, "u32")[0] for at in _bytes(words)]

    def _values(self, words: list[Reg]) -> list[Reg]:
        if self.bits == 8:
            at = [byte * 128 + self.lane * 4 for byte in _bytes(words)]
            return [self.memory.load(a, "float32")[0] for a in at]
        # Both values of a byte are loaded together, so 16 replicas are enough to fill all 32 banks.
        at = [byte * 128 + self.lane % 16 * 8 for byte in _bytes(words)]
        return [value for a in at for value in self.memory.load(a, "float32", 2)]


def _bytes(words: list[Reg]) -> list[Reg]:
    return [(word >> shift) & 255 for word in words for shift in (0, 8, 16, 24)]


class Numbers:
    """Scales or zero points in global memory. Each thread only copies the words it needs."""

    def __init__(self, kind: str, refs: list[MemoryRegion], shared: MemoryRegion) -> None:
        self.kind, self.size = kind, SIZES[kind]
        self.memory, *nested = refs
        self.nested: Any = None
        if kind == "nested":
            self.absmax, offset, self.map = nested
            self.nested = offset.load(lanes.number(0, "u32"), "float32")[0]
        self.shared = shared

    @property
    def arrays(self) -> list[MemoryRegion]:
        """The arrays to be copied, in the same order as `STREAMS`."""
        return [self.memory] if self.kind != "nested" else [self.memory, self.absmax]

    def fill(self, thread: Reg, threads: int) -> None:
        """Writes the 256-entry map for nested scales (if any) to shared memory."""
        for i in range(0, 256 if self.kind == "nested" else 0, threads):
            at = lanes.minimum(thread + i, 255) * 4
            (value,) = self.map.load(at, "float32")
            lanes.when(thread + i < 256, functools.partial(self.shared.store, at + TABLE_BYTES, value))

    def read(self, words: list[Reg], index: Reg) -> Reg:
        """Extracts the scale or zero point with this index from the copied words."""
        word = words[0]
        if self.kind == "float32":
            return lanes.as_float32(word)
        # A word can contain several elements, so shift down the one needed.
        word = word >> index % (4 // self.size) * (8 * self.size)
        if self.kind == "bfloat16":
            return lanes.as_float32(word << 16)
        if self.kind == "float16":
            return lanes.from_float16(word)
        byte = word & 255
        if self.kind == "uint8":
            return lanes.to_float32(byte)
        if self.kind == "e4m3":
            return _from_e4m3(byte)
        if self.kind != "nested":
            return _power_of_two(byte, int(self.kind == "e8m0_half"))
        mapped = self.shared.load(byte * 4 + TABLE_BYTES, "float32")[0]
        return lanes.fma(mapped, lanes.as_float32(words[1]), self.nested)


def numbers_of(
    p: Problem, operands: list[MemoryRegion], shared: MemoryRegion
) -> tuple[Numbers, Numbers | None, list[MemoryRegion]]:
    """Returns the scales, the zero points (if any), and the remaining operands."""
    count = 4 if p.scales == "nested" else 1
    scales, rest = Numbers(p.scales, operands[:count], shared), operands[count:]
    if p.product.zeros is None:
        return scales, None, rest
    return scales, Numbers(p.zeros, rest[:1], shared), rest[1:]


def shift_of(product: Product, scale: Reg, zero: Reg) -> Reg:
    """Returns the term to add to scaled values, applying a zero point or minimum."""
    factor = {"points": lambda: scale * -1.0, "minus": lambda: -1.0, "plus": lambda: 1.0}
    return zero * factor[product.zeros or ""]()


def _from_e4m3(byte: Reg) -> Reg:
    # Reinterpreting the shifted bits as a float16 gives an exponent that's too small by 8. Multiplying by 256
    # makes up for this.
    magnitude = byte & 127
    value = lanes.from_float16((byte >> 7 << 15) | magnitude << 7) * 256.0
    # e4m3fn doesn't have any infinities, and just one NaN (for each sign).
    return lanes.select(magnitude < 127, value, float("nan"))


def _power_of_two(byte: Reg, halved: int) -> Reg:
    # If the result is below the smallest normal number, set a bit of the mantissa rather than the exponent.
    below = lanes.number(0x400000, "u32") >> (lanes.minimum(byte, halved) ^ halved)
    bits = lanes.select(byte < 1 + halved, below, (byte - halved) << 23)
    return lanes.as_float32(bits if halved else lanes.select(byte < 255, bits, 0x7FC00000))
