"""Block scales that are quantised in turn."""

from typing import NamedTuple

from jaxtyping import Array, Float32, UInt8

from ..blockwise import dequantize_scales


class NestedScales(NamedTuple):
    """Block scales in 8 bits each: scale `i` is `quant_map[codes[i]] * absmax[i // 256] + offset`.

    In the place of float32 scales they save an eighth of the bytes of a weight; the kernels decode
    them where they are used.

    **Arguments:**

    - `codes`: a byte for each block of weights.
    - `absmax`: float32, for each 256 blocks.
    - `offset`: float32 scalar.
    - `quant_map`: the 256 float32 values that codes stand for.
    """

    codes: UInt8[Array, " blocks"]
    absmax: Float32[Array, " nested"]
    offset: Float32[Array, ""]
    quant_map: Float32[Array, "256"]


def dense_scales(scales: Array | NestedScales) -> Float32[Array, "*blocks"]:
    """The float32 scales, whichever way they are stored; one axis, or those of the rows and their blocks."""
    if not isinstance(scales, NestedScales):
        return scales
    codes, absmax, offset, quant_map = scales
    return dequantize_scales(codes, absmax, offset, quant_map=quant_map)
