"""The writer of GGUF: floats, and arrays of the codecs q4_0 and q8_0."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .._checked import a_or_an
from .._files import replacing
from ..arrays.quantized import CODECS, BlockArray
from ..core.values import is_value
from .errors import complain
from .gguf_blocks import write_blocks
from .gguf_metadata import MAGIC, encode_text, encode_value
from .gguf_models import architecture_of, original_name, row_order

_ALIGNMENT = 32
_FLOATS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 30}
_CODECS = {CODECS["q4_0"]: (2, "Q4_0"), CODECS["q8_0"]: (8, "Q8_0")}


def write(path: Path, mapping: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Writes a file: metadata, and tensors by llama.cpp's names."""
    metadata = {"general.architecture": "llama", **metadata}
    tensors: dict[str, tuple[int, tuple[int, ...], np.ndarray]] = {}
    for name, value in mapping.items():
        out = original_name(name, architecture_of(metadata))
        if out in tensors:
            raise complain(path, name, f"two entries would be called {out!r}")
        tensors[out] = _tensor(path, name, out, value, metadata)
    keys = {k: v for k, v in metadata.items() if not k.startswith("split.")}
    keys["general.alignment"] = _ALIGNMENT
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for key, value in keys.items():
        try:
            head.append(encode_text(key) + encode_value(value))
        except (TypeError, OverflowError, UnicodeEncodeError, struct.error) as error:
            raise complain(path, key, f"cannot be written: {error}") from None
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        head.append(encode_text(name) + struct.pack("<I", len(shape)))
        head.append(struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, offset))
        offset += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    with replacing(path) as file:
        file.write(_padded(b"".join(head)))
        for _, _, data in tensors.values():
            file.write(_padded(data.tobytes()))


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNMENT)


def _tensor(
    path: Path, name: str, out: str, value: Any, metadata: Mapping[str, Any]
) -> tuple[int, tuple[int, ...], np.ndarray]:
    """The type's number, the shape and the bytes of a tensor."""
    shape = tuple(value.shape)
    if not 1 <= len(shape) <= 4:
        raise complain(path, name, f"GGUF has tensors of one to four axes; found the shape {shape}")
    order = row_order(path, out, shape, metadata)
    rows = None if order is None else np.argsort(order)  # for each row of the file, the row in transformers
    if isinstance(value, BlockArray) and value.codec in _CODECS and value.order is None and not value.axes:
        kind, label = _CODECS[value.codec]
        whole = len(value.inner_shape) == 1 and value.inner_shape[0] % 32 == 0 and value.block == 32
        if whole and value.scale.scale.dtype == np.float16:
            data = write_blocks(value, label)
            return kind, shape, data if rows is None else data[..., rows, :]
    if is_value(value):
        raise complain(
            path,
            name,
            f"{a_or_an(type(value))} has no place in the file: merge adapters, and quantise to 'q8_0' or "
            "'q4_0' along a last axis that blocks of 32 divide, or materialise it",
        )
    array = np.asarray(value)
    if array.dtype not in _FLOATS:
        raise complain(path, name, f"float32, float16 and bfloat16 can be written; found {array.dtype}")
    if len(shape) == 1:  # llama.cpp computes with norms and biases in float32
        array = array.astype(np.float32)
    architecture = architecture_of(metadata)
    if architecture and architecture.norm_offset and out.endswith("norm.weight"):
        array = array + array.dtype.type(architecture.norm_offset)
    return _FLOATS[array.dtype], shape, array if rows is None else array[rows]
