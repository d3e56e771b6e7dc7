"""Codes with 2 to 8 bits as a little-endian stream: code `j` occupies bits `b·j … b·j + b - 1`."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def stride_of(bits: int) -> int:
    """Returns the smallest number of codes that fills whole bytes: 2 for 4 bits, 8 for 3 bits."""
    return math.lcm(8, bits) // bits


def num_bytes(codes: int, bits: int) -> int:
    """Returns how many bytes this many codes take."""
    return -(-codes * bits // 8)


def planes(packed: Any, bits: int) -> list[Any]:
    """Unpacks the last axis into `stride` planes: codes 0, stride, …; codes 1, stride + 1, …

    Planes avoid interleaving the codes, which costs as much as unpacking them.

    **Arguments:**

    - `packed`: `(..., bytes)` uint8, a NumPy or JAX array.
    - `bits`: the number of bits per code, 1 to 8.

    **Returns:** each plane's uint8 codes. The last `stride` codes are padded with zeros.
    """
    if bits == 8:
        return [packed]
    stride = stride_of(bits)
    unit = stride * bits // 8
    if missing := -packed.shape[-1] % unit:
        xp: Any = np if isinstance(packed, np.ndarray) else jnp
        packed = xp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    parts = [packed[..., i::unit] for i in range(unit)] if unit > 1 else [packed]
    mask, out = np.uint8(2**bits - 1), []
    for j in range(stride):
        i, shift = divmod(j * bits, 8)
        code = parts[i] >> np.uint8(shift) if shift else parts[i]
        if shift + bits > 8:
            code = code | parts[i + 1] << np.uint8(8 - shift)
        out.append(code & mask)
    return out


def unpack(packed: Any, bits: int, count: int) -> Any:
    """Unpacks the first `count` codes in the last axis as uint8, a NumPy or JAX array like `packed`."""
    xp: Any = np if isinstance(packed, np.ndarray) else jnp
    parts = planes(packed, bits)
    width = len(parts) * parts[0].shape[-1]
    codes = parts[0] if len(parts) == 1 else xp.stack(parts, axis=-1).reshape(*packed.shape[:-1], width)
    return codes[..., :count]


def pack(codes: Any, bits: int) -> Any:
    """Packs uint8 codes along the last axis into bytes, padding the last byte with zeros."""
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
        low = code << np.uint8(shift)
        out[i] = low if out[i] is None else out[i] | low
        if shift + bits > 8:
            out[i + 1] = code >> np.uint8(8 - shift)
    width = unit * out[0].shape[-1]
    packed = out[0] if unit == 1 else xp.stack(out, axis=-1).reshape(*codes.shape[:-1], width)
    return packed[..., : num_bytes(count, bits)]
