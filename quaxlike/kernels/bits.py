"""Codes of 2 to 8 bits, packed as a little-endian stream.

That is, code `j` is stored in bits `b·j … b·j + b - 1`, and so can straddle two bytes.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def stride_of(bits: int) -> int:
    """Returns the smallest number of codes filling whole bytes. For 4 bits, this is 2."""
    return math.lcm(8, bits) // bits


def num_bytes(codes: int, bits: int) -> int:
    """Returns the number of bytes occupied by this many codes."""
    return -(-codes * bits // 8)


def planes(packed: Any, bits: int) -> list[Any]:
    """Unpacks the last axis into `stride` planes: codes 0, stride, …; codes 1, stride + 1, …; and so on.

    Interleaving the planes would be as expensive as unpacking the codes themselves, and often isn't needed.
    For example, a matrix product can be computed for each plane separately.

    **Arguments:**

    - `packed`: a uint8 NumPy or JAX array of shape `(..., bytes)`.
    - `bits`: the number of bits per code, from 1 to 8.

    **Returns:** each plane's uint8 codes, padded with zeros to a multiple of `stride` codes overall.
    """
    if bits == 8:
        return [packed]
    stride = stride_of(bits)
    unit = stride * bits // 8
    if missing := -packed.shape[-1] % unit:
        xp: Any = np if isinstance(packed, np.ndarray) else jnp
        packed = xp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    # Byte `i` of every unit contains codes at the same offsets, so shift a whole plane at a time.
    parts = [packed[..., i::unit] for i in range(unit)] if unit > 1 else [packed]
    mask, out = np.uint8(2**bits - 1), []
    for j in range(stride):
        i, shift = divmod(j * bits, 8)
        code = parts[i] >> np.uint8(shift) if shift else parts[i]
        if shift + bits > 8:
            code = code | parts[i + 1] << np.uint8(8 - shift)  # This code straddles two bytes.
        out.append(code & mask)
    return out


def unpack(packed: Any, bits: int, count: int) -> Any:
    """Unpacks the first `count` uint8 codes in the last axis, for either NumPy or JAX arrays."""
    xp: Any = np if isinstance(packed, np.ndarray) else jnp
    parts = planes(packed, bits)
    width = len(parts) * parts[0].shape[-1]
    codes = parts[0] if len(parts) == 1 else xp.stack(parts, axis=-1).reshape(*packed.shape[:-1], width)
    return codes[..., :count]


def pack(codes: Any, bits: int) -> Any:
    """Packs uint8 codes along the last axis into bytes, padding the last byte with zero bits."""
    if bits == 8:
        return codes
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    count, stride = codes.shape[-1], stride_of(bits)
    if missing := -count % stride:
        codes = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    unit = stride * bits // 8
    out: list[Any] = [None] * unit
    for j in range(stride):
        i, shift = divmod(j * bits, 8)
        code = codes[..., j::stride]
        # This discards any bits not fitting into the byte. These are stored in the next byte below.
        low = code << np.uint8(shift)
        out[i] = low if out[i] is None else out[i] | low
        if shift + bits > 8:
            out[i + 1] = code >> np.uint8(8 - shift)
    width = unit * out[0].shape[-1]
    packed = out[0] if unit == 1 else xp.stack(out, axis=-1).reshape(*codes.shape[:-1], width)
    return packed[..., : num_bytes(count, bits)]
