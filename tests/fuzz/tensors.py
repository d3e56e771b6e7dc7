"""The tensors of a file, taken apart and written again, consistent, with one missing or reshaped."""

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from quaxlike.lm.gguf.metadata import MAGIC, Cursor, encode_text, read_value


class Entry(NamedTuple):
    """A tensor: its type as its file writes it, its shape, slowest axis first, and its bytes."""

    kind: Any
    shape: tuple[int, ...]
    data: bytes


class Stored(NamedTuple):
    """A file taken apart: its metadata as it stands in the file, and its tensors by name."""

    metadata: bytes
    tensors: dict[str, Entry]
    alignment: int = 1


def read(path: Path) -> Stored:
    """Takes a safetensors or a GGUF file apart."""
    return _read_gguf(path) if path.suffix == ".gguf" else _read_safetensors(path.read_bytes())


def write(path: Path, stored: Stored) -> None:
    """The inverse of `read`; the file is consistent whatever its tensors are."""
    path.write_bytes(_gguf(stored) if path.suffix == ".gguf" else _safetensors(stored))


def _read_safetensors(raw: bytes) -> Stored:
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = json.dumps(header.pop("__metadata__", {})).encode()
    cut = lambda begin, end: raw[start + begin : start + end]
    return Stored(
        metadata,
        {k: Entry(x["dtype"], tuple(x["shape"]), cut(*x["data_offsets"])) for k, x in header.items()},
    )


def _safetensors(stored: Stored) -> bytes:
    header: dict[str, Any] = {"__metadata__": json.loads(stored.metadata)}
    at = 0
    for name, entry in stored.tensors.items():
        end = at + len(entry.data)
        header[name] = {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(x.data for x in stored.tensors.values())


def _read_gguf(path: Path) -> Stored:
    raw = path.read_bytes()
    with open(path, "rb") as file:
        cursor = Cursor(path, file, len(raw))
        cursor.take(8)
        count, begin, keys = cursor.number("<u8"), cursor.at, cursor.number("<u8")
        metadata = {cursor.text(): read_value(cursor) for _ in range(keys)}
        end, infos = cursor.at, []
        for _ in range(count):
            name = cursor.text()
            shape = tuple(cursor.number("<u8") for _ in range(cursor.number("<u4")))[::-1]
            infos.append((name, shape, cursor.number("<u4"), cursor.number("<u8")))
    alignment = metadata.get("general.alignment", 32)
    data = raw[-(-cursor.at // alignment) * alignment :]
    offsets = sorted(offset for *_, offset in infos)
    ends = dict(zip(offsets, [*offsets[1:], len(data)], strict=True))
    tensors = {name: Entry(kind, shape, data[at : ends[at]]) for name, shape, kind, at in infos}
    return Stored(raw[begin:end], tensors, alignment)


def _gguf(stored: Stored) -> bytes:
    padded = lambda raw: raw + bytes(-len(raw) % stored.alignment)
    infos, at = [], 0
    for name, (kind, shape, data) in stored.tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos.append(encode_text(name) + sizes + struct.pack("<IQ", kind, at))
        at += len(padded(data))
    head = MAGIC + struct.pack("<IQ", 3, len(infos)) + stored.metadata + b"".join(infos)
    return padded(head) + b"".join(padded(x.data) for x in stored.tensors.values())


def other_shapes(entry: Entry) -> dict[str, Entry]:
    """The tensor with other shapes, by what was done: of the same bytes, or with a row less."""
    shape, data = entry.shape, entry.data
    count = math.prod(shape)
    shapes = {"flat": (count,), "a row": (1, count), "a column": (count, 1), "turned": shape[::-1]}
    shapes |= {"one more axis": (1, *shape), "one less axis": shape[1:] if shape[:1] == (1,) else shape}
    if len(shape) > 1 and shape[0] % 2 == 0:
        shapes["wider"] = (shape[0] // 2, *shape[1:-1], shape[-1] * 2)
    if len(shape) > 1 and shape[-1] % 2 == 0:
        shapes["taller"] = (shape[0] * 2, *shape[1:-1], shape[-1] // 2)
    out = {what: entry._replace(shape=new) for what, new in shapes.items() if new != shape}
    if shape and shape[0] > 1:
        kept = len(data) // shape[0] * (shape[0] - 1)
        out["a row less"] = entry._replace(shape=(shape[0] - 1, *shape[1:]), data=data[:kept])
    if shape and count:
        out["empty"] = entry._replace(shape=(0, *shape[1:]), data=b"")
    return out
