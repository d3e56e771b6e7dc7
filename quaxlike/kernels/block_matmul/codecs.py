"""The table of block formats: their code values, and how they store scales and minima.

Decoded values must be bitwise identical to those of the program that published the format, including the
rounding of subnormal scales. Otherwise checkpoints would decode to different weights.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int

from .. import bits as bitstream
from .. import blockwise

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_FLOAT8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
# These scales are powers of two. To obtain the exponent field of a float32, subtract this from the byte.
E8M0 = {"e8m0": 0, "e8m0_half": 1}
_LARGEST_FLOAT8 = {"e4m3": 448.0, "e5m2": 57344.0}


def scaled(values: Array, scale: Any, zero: Array | None = None, *, zeros: str | None) -> Array:
    """Applies scales, and zero points or minima (if any) according to `zeros`, as in `Codec`."""
    if zero is None:
        return values * scale
    if zeros == "points":
        return (values - zero) * scale
    return values * scale + zero if zeros == "plus" else values * scale - zero


@dataclasses.dataclass(frozen=True)
class Codec:
    """A block format: rows of codes (as little-endian bit streams), with a scale per block.

        value = scale · (code - zero)      zeros = "points"
        value = scale · code ± zero        zeros = "plus", "minus"
        scale = outer · inner              two levels: `group`

    **Attributes:**

    - `bits`: bits per code, from 2 to 8.
    - `codes`: one of `"integer"` (unsigned, minus `bias`), `"signed"` (int8 without -128), `"e4m3"`, `"e5m2"`
        or `"table"`.
    - `bias`: the offset subtracted from integer codes.
    - `table`: each code's value, for `codes="table"`.
    - `block`: how many codes share a scale by default, or `None` for a whole row.
    - `scales`: one of `"float"` (any floating dtype); `"e4m3"`, `"e8m0"` or `"e8m0_half"` (half the value of
        `"e8m0"`), stored as bytes; `"integer"` (multiples of an outer scale); or `"nibbles"`, for bytes with
        the scale in the low nibble and the minimum in the high nibble.
    - `group`: how many blocks share an outer scale, with 0 for a whole row. `None` if scales have only one
        level.
    - `over`: whether to divide the inner scale by the outer scale, rather than multiply them.
    - `zeros`: one of `None`, `"points"` (zero points), or for minima either `"plus"` or `"minus"`.
    - `dtype`: the dtype of floating-point scales produced by `quantize`.
    - `limits`: the smallest and largest integer scale.
    - `high_first`: whether a byte's first 4-bit code is in its high nibble.
    - `flat`: whether products expect rows of codes without gaps, so that blocks can cross matrix rows.
    - `all_values`: the values for codes 0, 1, …
    """

    bits: int
    codes: str = "integer"
    bias: int = 0
    table: tuple[float | int, ...] | None = None
    block: int | None = None
    scales: str = "float"
    group: int | None = None
    over: bool = False
    zeros: str | None = None
    dtype: str = "float32"
    limits: tuple[int, int] = (0, 0)
    high_first: bool = False
    flat: bool = False
    all_values: Float32[np.ndarray, " codes"] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        codes = np.arange(2**self.bits, dtype=np.uint8)
        if self.codes == "integer":
            values = codes.astype(np.float32) - self.bias
        elif self.table is not None:
            values = np.asarray(self.table, np.float32)
        else:
            values = codes.view(np.int8 if self.codes == "signed" else _FLOAT8[self.codes]).astype(np.float32)
        # Precomputed, because it's used whenever a product is traced. (The dataclass is frozen.)
        object.__setattr__(self, "all_values", values)

    @property
    def name(self) -> str:
        """This codec's key in `CODECS`, or its bit count if it isn't registered there."""
        return next((name for name, codec in CODECS.items() if codec == self), f"{self.bits}-bit")

    def values(self, codes: Array) -> Float32[Array, "..."]:
        """Returns the values for codes unpacked to 8 bits."""
        if self.codes == "signed":
            return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
        if self.codes == "integer":
            values = codes.astype(jnp.float32)
            return values - self.bias if self.bias else values
        if self.table is not None:
            return jnp.asarray(self.table, jnp.float32)[codes]
        return lax.bitcast_convert_type(codes, _FLOAT8[self.codes]).astype(jnp.float32)

    def range(self) -> tuple[float | int, float | int]:
        """Returns the smallest and largest representable value."""
        if self.codes == "signed":
            return -127, 127
        if self.codes == "integer":
            return -self.bias, 2**self.bits - 1 - self.bias
        largest = max(self.table) if self.table is not None else _LARGEST_FLOAT8[self.codes]
        return (min(self.table) if self.table is not None else -largest), largest

    def nearest(self, values: Float32[Array, "..."]) -> Array:
        """Returns the uint8 codes for the nearest values.

        Ties are broken towards the even integer or, if the codes aren't integers, towards the lower value.
        """
        low, high = self.range()
        if self.codes == "integer":
            return (jnp.clip(jnp.round(values), low, high) + self.bias).astype(jnp.uint8)
        if self.codes == "signed":
            whole = jnp.clip(jnp.round(values), low, high).astype(jnp.int8)
            return lax.bitcast_convert_type(whole, jnp.uint8)
        if self.table is None:
            narrow = jnp.clip(values, low, high).astype(_FLOAT8[self.codes])
            return lax.bitcast_convert_type(narrow, jnp.uint8)
        # Tables don't need to be sorted. For example, the negative values in `E2M1` come last.
        order = np.argsort(self.table, kind="stable")
        ordered = np.asarray(self.table, np.float32)[order]
        places = jnp.searchsorted((ordered[:-1] + ordered[1:]) / 2, values)
        return jnp.asarray(order.astype(np.uint8))[places]

    def beside(self, codes: Array, up: Any) -> Array:
        """Returns the codes with the next larger value where `up` is set, and elsewhere the next smaller."""
        low, high = self.range()
        with np.errstate(invalid="ignore"):  # The NaNs in float8 compare as out of range, which is fine.
            ordered = np.unique(self.all_values[(self.all_values >= low) & (self.all_values <= high)])
        at = jnp.searchsorted(ordered, self.values(codes)) + jnp.where(up, 1, -1)
        return self.nearest(jnp.asarray(ordered)[jnp.clip(at, 0, len(ordered) - 1)])

    def at_random(self, values: Float32[Array, "..."], random: Float32[Array, "..."]) -> Array:
        """Stochastically rounds to an adjacent value, without bias.

        `random` should be uniformly distributed on [0, 1]. Returns uint8 codes.
        """
        low, high = self.range()
        if self.codes in ("integer", "signed"):
            return self.nearest(jnp.floor(jnp.clip(values, low, high) + random))
        with np.errstate(invalid="ignore"):  # The NaNs in float8 compare as out of range, which is fine.
            inside = (self.all_values >= low) & (self.all_values <= high)
        ordered = np.unique(self.all_values[inside])
        below = jnp.clip(jnp.searchsorted(ordered, values, side="right") - 1, 0, len(ordered) - 2)
        first, second = jnp.asarray(ordered)[below], jnp.asarray(ordered)[below + 1]
        return self.nearest(jnp.where(random * (second - first) < values - first, second, first))

    def sizes(self, count: int, block: int) -> tuple[int, int, int, int, int]:
        """Returns how many bytes, scales, outer scales, zeros and outer zeros a row has."""
        blocks = -(-count // max(block, 1))
        groups = -(-blocks // self.group) if self.group else min(blocks, 1)
        return bitstream.num_bytes(count, self.bits), blocks, groups, blocks, groups

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (instances stay alive, but there are only a few)
    def cuts(self, count: int, block: int) -> bool:
        """Returns whether rows can be split into (or concatenated from) parts with this many codes.

        The parts must not split a byte, a block, or a group of blocks sharing an outer scale.
        """
        whole = count % max(block, 1) == 0 and count * self.bits % 8 == 0
        if self.group is None or not whole:
            return whole
        return self.group > 0 and count // max(block, 1) % self.group == 0

    def pack(self, codes: Any) -> Any:
        """Packs rows of codes, given as one code per byte."""
        packed = self._turned(bitstream.pack(codes, self.bits))
        return packed.view(np.int8) if self.codes == "signed" else packed

    def _turned(self, packed: Any) -> Any:
        """Swaps each byte's nibbles if they are not stored in bit-stream order."""
        return packed >> np.uint8(4) | packed << np.uint8(4) if self.high_first else packed

    def scales_and_zeros(
        self, scale: Array, outer: Array | None, zero: Array | None, outer_zero: Array | None
    ) -> tuple[Float32[Array, "*lead blocks"], Float32[Array, "*lead blocks"] | None]:
        """Returns each block's float32 scale, and its zero point or minimum (if any)."""
        if self.scales == "nibbles":
            scale, zero = scale & np.uint8(15), scale >> np.uint8(4)
        blocks = scale.shape[-1]
        inner = self._inner(scale)
        if outer is not None:
            outer = self._spread(outer, blocks)

            # Without this barrier, XLA would replace division by a scalar with multiplication by its
            # reciprocal, which rounds differently.
            def each(outer: Any) -> Any:
                return lax.optimization_barrier(jnp.broadcast_to(outer, inner.shape))

            inner = inner / each(outer) if self.over else outer * inner
        if zero is None:
            return inner, None
        zero = zero.astype(jnp.float32)
        return inner, zero if outer_zero is None else self._spread(outer_zero, blocks) * zero

    def stride(self, count: int, block: int) -> int:
        """Returns the number of planes, which is 1 unless they split every block's codes evenly."""
        stride = bitstream.stride_of(self.bits)
        return stride if block % stride == 0 or -(-count // max(block, 1)) == 1 else 1

    def planes(self, count: int, block: int, parts: Sequence[Any]) -> list[Float32[Array, "*lead width"]]:
        """Decodes rows with `count` codes to planes (see `bits.planes`).

        **Arguments:**

        - `parts`: the codes, of shape `(*lead, bytes)`, then scale, outer scale, zero and outer zero, as in
            `BlockScales`.
        """
        packed, *scales = parts
        scale, zero = self.scales_and_zeros(*scales)
        shrunk = self._shrunk(scales[0])
        packed = self._turned(packed)
        stride, single = self.stride(count, block), scale.shape[-1] == 1
        interleaved = stride < bitstream.stride_of(self.bits)
        unpack = (lambda x, bits: [bitstream.unpack(x, bits, count)]) if interleaved else bitstream.planes
        codes = unpack(packed, self.bits)
        out = []
        for i, plane in enumerate(codes):
            width = len(range(i, count, stride))

            def along(x: Any, width: int = width) -> Any:
                return x if x is None or single else jnp.repeat(x, block // stride, axis=-1)[..., :width]

            out.append(self._value(plane[..., :width], along(scale), along(zero), along(shrunk)))
        return out

    def at(self, index: Int[Array, "*shape"], block: int, parts: Sequence[Any]) -> Float32[Array, "*shape"]:
        """Decodes the codes at the given indices into a single row. See `planes` for `parts`."""
        packed, *scales = parts
        packed = self._turned(packed)
        stride = bitstream.stride_of(self.bits)
        first, shift = index // stride * (stride * self.bits // 8), index % stride * self.bits
        code = packed[first + shift // 8] >> (shift % 8).astype(packed.dtype)
        if 8 % self.bits:  # Codes can straddle two bytes in this case.
            rest = packed[jnp.minimum(first + shift // 8 + 1, packed.shape[-1] - 1)]
            left = 8 - shift % 8
            code |= jnp.where(left < self.bits, rest << left.astype(packed.dtype), 0).astype(packed.dtype)
        if self.bits < 8:
            code &= np.uint8(2**self.bits - 1)

        def along(x: Any) -> Any:
            return None if x is None else x[index // max(block, 1)]

        return self._value(code, *map(along, (*self.scales_and_zeros(*scales), self._shrunk(scales[0]))))

    def _value(self, codes: Array, scale: Any, zero: Array | None, shrunk: Array | None) -> Array:
        values = self.values(codes)
        return scaled(values if shrunk is None else values * shrunk, scale, zero, zeros=self.zeros)

    def _inner(self, scale: Array) -> Array:
        if self.scales in E8M0:  # Construct the bits, because not all devices exponentiate exactly.
            wide = jnp.maximum(scale.astype(jnp.uint32), np.uint32(1 + E8M0[self.scales]))
            raw = (wide - np.uint32(E8M0[self.scales])) << np.uint32(23)
            if self.scales == "e8m0":
                raw = jnp.where(scale == 255, np.uint32(0x7FC00000), raw)
            return lax.bitcast_convert_type(raw, jnp.float32)
        if self.scales == "e4m3":
            return lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32)
        return scale.astype(jnp.float32)

    def _shrunk(self, scale: Array) -> Array | None:
        """Returns the factor that makes up for clamping scales to 2**-126, the smallest normal number.

        This applies to the code values, rather than to the scales: some devices flush subnormal scales to
        zero, even though their products with the codes may be normal numbers.
        """
        if self.scales not in E8M0:
            return None
        below = np.int32(1 + E8M0[self.scales]) - scale.astype(jnp.int32)
        return jnp.where(below == 2, np.float32(0.25), jnp.where(below == 1, np.float32(0.5), np.float32(1)))

    def _spread(self, outer: Array, blocks: int) -> Array:
        outer = outer.astype(jnp.float32)
        return jnp.repeat(outer, self.group, axis=-1)[..., :blocks] if self.group else outer


def _integer(bits: Any, **options: Any) -> Any:
    return Codec(bits, bias=2 ** (bits - 1), **options)


_unsigned = functools.partial(Codec, zeros="points")
_gguf = functools.partial(Codec, dtype="float16")


def _nibbles(values: Any) -> Any:
    return Codec(4, "table", table=tuple(values.tolist()), block=64, high_first=True, flat=True)


#: The named formats for `BlockArray.quantize` and `quaxlike.quantize`.
CODECS: dict[str, Codec] = {
    **{f"int{n}_block": _integer(n, block=128 if n < 8 else None) for n in (2, 3, 4, 5, 6, 8)},
    **{f"uint{n}_block": _unsigned(n, block=128 if n < 8 else None) for n in (2, 3, 4, 5, 6, 8)},
    "fp8": Codec(8, "e4m3"),
    "fp8_e5m2": Codec(8, "e5m2"),
    "fp8_block": Codec(8, "e4m3", block=128),
    "mxfp4": Codec(4, "table", table=E2M1, block=32, scales="e8m0"),
    "mxfp8": Codec(8, "e4m3", block=32, scales="e8m0"),
    "nvfp4": Codec(4, "table", table=E2M1, block=16, scales="e4m3", group=0),
    "q4_0": _gguf(4, bias=8, block=32),
    "q4_1": _gguf(4, block=32, zeros="plus"),
    "q5_0": _gguf(5, bias=16, block=32),
    "q5_1": _gguf(5, block=32, zeros="plus"),
    "q8_0": _gguf(8, bias=128, block=32),
    "q2_k": _gguf(2, block=16, scales="nibbles", group=16, zeros="minus", limits=(0, 15)),
    "q3_k": _gguf(3, bias=4, block=16, scales="integer", group=16, limits=(-32, 31)),
    "q4_k": _gguf(4, block=32, scales="integer", group=8, zeros="minus", limits=(0, 63)),
    "q5_k": _gguf(5, block=32, scales="integer", group=8, zeros="minus", limits=(0, 63)),
    "q6_k": _gguf(6, bias=32, block=16, scales="integer", group=16, limits=(-128, 127)),
    "mxfp4_gguf": Codec(4, "table", table=tuple(2 * x for x in E2M1), block=32, scales="e8m0_half"),
    "iq4_nl": _gguf(4, "table", table=IQ4_NL, block=32),
    "iq4_xs": _gguf(4, "table", table=IQ4_NL, block=32, scales="integer", group=8, limits=(-32, 31)),
    # Used by NF4Array, FP4Array, Int4Array and Int8Array.
    "nf4": _nibbles(blockwise.NF4),
    "fp4": _nibbles(blockwise.FP4),
    "int4": _nibbles(blockwise.INT4),
    "int8": Codec(8, "signed"),
}
