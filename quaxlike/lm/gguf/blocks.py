"""Conversion between GGUF's block formats and codes, scales and minima.

The layouts follow `ggml-quants.c` in ggml, <https://github.com/ggml-org/ggml>. Both directions are exact, so
reading and then writing blocks reproduces the same bytes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...arrays.quantized import CODECS, BlockArray, BlockScales, Codec
from ...kernels import bits as bitstream

# The codes, scales, outer scales, zeros and outer zeros of some blocks, each of shape (blocks, n), or None if
# a format doesn't have it.
Parts = tuple[Any, Any, Any, Any, Any]


# From raw bytes of shape (blocks, bytes) to these parts, and back.
_Read = Callable[[np.ndarray], Parts]
_Write = Callable[..., list[np.ndarray]]


class BlockType(NamedTuple):
    """The layout of a quantised type: its block size, its codec, and functions reading and writing blocks.

    `write` returns each field of a block separately, in the file's order.
    """

    elements: int
    nbytes: int
    codec: Codec
    read: _Read
    write: _Write


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2")


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """Unpacks nibbles.

    Adjacent codes aren't in the same byte: the low nibbles hold the first half, and the high nibbles the
    second.
    """
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _as_nibbles(codes: np.ndarray) -> np.ndarray:
    low, high = np.split(codes & 15, 2, axis=-1)
    return low | high << np.uint8(4)


def _fifth_bits(raw: np.ndarray, at: int) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(raw[:, at : at + 4]), axis=-1, bitorder="little") << np.uint8(4)


def _as_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs bit planes of shape (..., planes, bytes) into bytes, with the first plane in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(codes << shifts, axis=-2)


def _of_32(*, minimum: bool = False, fifth_bits: bool = False) -> tuple[_Read, _Write]:
    """Returns functions reading and writing 32-code blocks.

    Each block has a scale, then a minimum and each code's fifth bit (both optional), then nibbles.
    """
    start = 4 if minimum else 2

    def read(raw: np.ndarray) -> Parts:
        codes = _nibbles(raw[:, start + 4 if fifth_bits else start :])
        if fifth_bits:
            codes = codes | _fifth_bits(raw, start)
        return codes, _half(raw, 0), None, _half(raw, 2) if minimum else None, None

    def write(codes: np.ndarray, scale: Any, outer: None, zero: Any, outer_zero: None) -> list[np.ndarray]:
        fifth = [np.packbits(codes >> 4, axis=-1, bitorder="little")] if fifth_bits else []
        return [scale, *([zero] if minimum else []), *fifth, _as_nibbles(codes)]

    return read, write


def _q8_0(raw: np.ndarray) -> Parts:
    return raw[:, 2:] ^ np.uint8(128), _half(raw, 0), None, None, None


def _as_q8_0(codes: np.ndarray, scale: np.ndarray, *_: None) -> list[np.ndarray]:
    return [scale, codes ^ np.uint8(128)]


def _planes_of_2(qs: np.ndarray) -> np.ndarray:
    """Unpacks 2-bit codes into (blocks, 256). Every 32 bytes store four bit planes with 32 codes each."""
    halves = qs.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves & 3).reshape(-1, 256)


def _as_planes_of_2(codes: np.ndarray) -> np.ndarray:
    return _as_planes(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)


def _q2_k(raw: np.ndarray) -> Parts:
    return _planes_of_2(raw[:, 16:80]), raw[:, :16], _half(raw, 80), None, _half(raw, 82)


def _as_q2_k(codes: Any, scale: Any, outer: Any, zero: None, outer_zero: Any) -> list[np.ndarray]:
    return [scale, _as_planes_of_2(codes), outer, outer_zero]


def _q3_k(raw: np.ndarray) -> Parts:
    mask = raw[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # plane j holds bit j
    codes = _planes_of_2(raw[:, 32:96]) | mask.reshape(-1, 256) << np.uint8(2)
    packed = raw[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scale = (low | high.reshape(-1, 16) << np.uint8(4)).astype(np.int8) - np.int8(32)
    return codes, scale, _half(raw, 108), None, None


def _as_q3_k(codes: Any, scale: Any, outer: Any, *_: None) -> list[np.ndarray]:
    mask = _as_planes((codes >> 2).reshape(-1, 8, 32), 1)
    scale = (scale + np.int8(32)).view(np.uint8)
    high = _as_planes((scale >> 4).reshape(-1, 4, 4), 2)
    return [mask, _as_planes_of_2(codes & 3), _as_nibbles(scale), high, outer]


def _scales_of_6(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks eight 6-bit scales and eight 6-bit minima from 12 bytes."""
    low, high, last = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = np.concatenate([low & 63, last & 15 | low >> 6 << 4], axis=1)
    minimum = np.concatenate([high & 63, last >> 4 | high >> 6 << 4], axis=1)
    return scale, minimum


def _as_scales_of_6(scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    (low, high), (least, most) = np.split(scale, 2, axis=1), np.split(minimum, 2, axis=1)
    parts = low | high >> 4 << 6, least | most >> 4 << 6, high & 15 | (most & 15) << 4
    return np.concatenate(parts, axis=1)


def _q4_k(raw: np.ndarray) -> Parts:
    codes = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    scale, minimum = _scales_of_6(raw[:, 4:16])
    return codes, scale, _half(raw, 0), minimum, _half(raw, 2)


def _as_q4_k(codes: Any, scale: Any, outer: Any, zero: Any, outer_zero: Any) -> list[np.ndarray]:
    low = _as_nibbles(codes.reshape(-1, 4, 64)).reshape(-1, 128)
    return [outer, outer_zero, _as_scales_of_6(scale, zero), low]


def _q5_k(raw: np.ndarray) -> Parts:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | fifth.reshape(-1, 256) << np.uint8(4)
    scale, minimum = _scales_of_6(raw[:, 4:16])
    return codes, scale, _half(raw, 0), minimum, _half(raw, 2)


def _as_q5_k(codes: Any, *scales: Any) -> list[np.ndarray]:
    *head, low = _as_q4_k(codes, *scales)
    return [*head, _as_planes((codes >> 4).reshape(-1, 8, 32), 1), low]


def _q6_k(raw: np.ndarray) -> Parts:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = low | _planes_of_2(raw[:, 128:192]) << np.uint8(4)
    return codes, raw[:, 192:208].view(np.int8), _half(raw, 208), None, None


def _as_q6_k(codes: Any, scale: Any, outer: Any, *_: None) -> list[np.ndarray]:
    low = _as_nibbles(codes.reshape(-1, 2, 128)).reshape(-1, 128)
    return [low, _as_planes_of_2(codes >> 4), scale, outer]


def _iq4_xs(raw: np.ndarray) -> Parts:
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scale = (low | high.astype(np.uint8) << np.uint8(4)).astype(np.int8) - np.int8(32)
    return _nibbles(raw[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256), scale, _half(raw, 0), None, None


def _as_iq4_xs(codes: Any, scale: Any, outer: Any, *_: None) -> list[np.ndarray]:
    scale = (scale + np.int8(32)).view(np.uint8)
    low = scale[:, ::2] & 15 | (scale[:, 1::2] & 15) << 4
    high = _as_planes((scale >> 4).reshape(-1, 2, 4, 1), 2).reshape(-1, 2)
    return [outer, high, low, _as_nibbles(codes.reshape(-1, 8, 32)).reshape(-1, 128)]


def _mxfp4(raw: np.ndarray) -> Parts:
    return _nibbles(raw[:, 1:]), raw[:, :1], None, None, None


def _as_mxfp4(codes: np.ndarray, scale: np.ndarray, *_: None) -> list[np.ndarray]:
    return [scale, _as_nibbles(codes)]


#: Maps type numbers in files to names and layouts.
BLOCK_TYPES: dict[int, tuple[str, BlockType]] = {
    2: ("Q4_0", BlockType(32, 18, CODECS["q4_0"], *_of_32())),
    3: ("Q4_1", BlockType(32, 20, CODECS["q4_1"], *_of_32(minimum=True))),
    6: ("Q5_0", BlockType(32, 22, CODECS["q5_0"], *_of_32(fifth_bits=True))),
    7: ("Q5_1", BlockType(32, 24, CODECS["q5_1"], *_of_32(minimum=True, fifth_bits=True))),
    8: ("Q8_0", BlockType(32, 34, CODECS["q8_0"], _q8_0, _as_q8_0)),
    10: ("Q2_K", BlockType(256, 84, CODECS["q2_k"], _q2_k, _as_q2_k)),
    11: ("Q3_K", BlockType(256, 110, CODECS["q3_k"], _q3_k, _as_q3_k)),
    12: ("Q4_K", BlockType(256, 144, CODECS["q4_k"], _q4_k, _as_q4_k)),
    13: ("Q5_K", BlockType(256, 176, CODECS["q5_k"], _q5_k, _as_q5_k)),
    14: ("Q6_K", BlockType(256, 210, CODECS["q6_k"], _q6_k, _as_q6_k)),
    20: ("IQ4_NL", BlockType(32, 18, CODECS["iq4_nl"], *_of_32())),
    23: ("IQ4_XS", BlockType(256, 136, CODECS["iq4_xs"], _iq4_xs, _as_iq4_xs)),
    39: ("MXFP4", BlockType(32, 17, CODECS["mxfp4_gguf"], _mxfp4, _as_mxfp4)),
}


def read_blocks(
    kind: BlockType, data: np.ndarray, shape: tuple[int, ...], rows: Any = None, columns: Any = None
) -> BlockArray:
    """Decodes an array of the given shape from its blocks' raw bytes (uint8).

    If given, `rows` and `columns` permute the stored array. No block spans several rows, so permuting rows
    just moves their bytes. Columns are permuted in the same way if this splits no block. Otherwise, the bytes
    stay as they are, and the array gets an `order`.
    """
    lead = shape[:-1]
    per_row = shape[-1] // kind.elements
    data = data.reshape(*lead, per_row * kind.nbytes)
    if rows is not None:
        data = data[..., rows, :]
    order = None
    if columns is not None:
        if (whole := _whole_blocks(columns, kind.elements)) is None:
            order = np.argsort(columns).astype(np.int32)
        else:
            data = data.reshape(*lead, per_row, kind.nbytes)[..., whole, :]
    parts = kind.read(np.ascontiguousarray(data).reshape(-1, kind.nbytes))
    shaped: list[Any] = [None if part is None else part.reshape(*lead, -1) for part in parts]
    scales = BlockScales(*shaped[1:])
    return BlockArray.from_codes(
        shaped[0], scales, codec=kind.codec, block_size=kind.codec.block, order=order
    )


def _whole_blocks(columns: np.ndarray, elements: int) -> np.ndarray | None:
    """Returns the block order for a column order, or None if this splits any block."""
    blocks = columns.reshape(-1, elements)
    order = blocks[:, 0] // elements
    return order if np.array_equal(blocks, order[:, None] * elements + np.arange(elements)) else None


def block_order(w: BlockArray, elements: int, columns: np.ndarray | None = None) -> Any:
    """Returns an index into each row's stored blocks, giving these columns of `w`.

    Returns None if this isn't possible, e.g. because one block's columns come from several stored blocks.
    """
    if w.order is None and columns is None:
        return slice(None)
    if len(w.codes.shape) > 2 or (w.order is not None and len(w.codes.shape) > 1):
        return None
    count = w.matrix[1]
    stored = np.arange(count) if w.order is None else np.argsort(np.asarray(w.order))
    return _whole_blocks(stored if columns is None else stored[columns], elements)


def write_blocks(w: BlockArray, kind: BlockType, columns: np.ndarray | None = None) -> np.ndarray:
    """Writes these columns of an array as bytes, with shape (..., bytes).

    This must not split any block: check this with `block_order` first.
    """
    rows, count = w.matrix
    codes, scale = np.asarray(w.codes), w.scale.parts()
    if w.order is not None:
        codes, *scale = (None if x is None else np.asarray(x).reshape(rows, -1) for x in (codes, *scale))
    codes = bitstream.unpack(codes, w.codec.bits, count)
    lead, blocks = codes.shape[:-1], codes.size // kind.elements
    parts = [None if x is None else _little_endian(x).reshape(blocks, -1) for x in scale]
    fields = kind.write(codes.reshape(blocks, kind.elements), *parts)
    raw = np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields], axis=1)
    order = block_order(w, kind.elements, columns)
    return raw.reshape(*lead, -1, kind.nbytes)[..., order, :].reshape(*lead, -1)


def _little_endian(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(x.dtype.newbyteorder("<"), copy=False)
