"""The keys and values of a GGUF file, read with bounds checked before anything is allocated, and written."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import complain

MAGIC = b"GGUF"
_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_STRING, _ARRAY = 8, 9


class Cursor:
    """A reading position in a file of known size."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.at = 0
        self._file = file
        self._size = size

    def take(self, count: int) -> bytes:
        """Reads the next bytes. Raises if the file is too short."""
        if count > self._size - self.at:
            left = self._size - self.at
            raise complain(self.path, None, f"expected {count:,} bytes at byte {self.at:,}; found {left:,}")
        self.at += count
        return self._file.read(count)

    def expect(self, count: int, each: int, what: str) -> None:
        """Raises unless the rest of the file has room for `count` items of at least `each` bytes."""
        if count * each > self._size - self.at:
            raise complain(self.path, None, f"claims {count:,} {what}, which the file has no room for")

    def number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def text(self) -> str:
        raw = self.take(self.number("<u8"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise complain(self.path, None, f"a name at byte {self.at:,} is not UTF-8: {error}") from None


def read_value(cursor: Cursor, depth: int = 0) -> Any:
    """Reads a type, and a value of it."""
    return _value(cursor, cursor.number("<u4"), depth)


def _value(cursor: Cursor, kind: int, depth: int) -> Any:
    if kind == _STRING:
        raw = cursor.take(cursor.number("<u8"))
        return raw.decode(errors="replace")  # tokens may be parts of characters
    if kind == _ARRAY:
        if depth > 3:
            raise complain(cursor.path, None, "arrays are nested more than four deep")
        inner, count = cursor.number("<u4"), cursor.number("<u8")
        dtype = _dtype(cursor, inner)
        if dtype is None:
            cursor.expect(count, 8, "elements of an array")
            return [_value(cursor, inner, depth + 1) for _ in range(count)]
        cursor.expect(count, dtype.itemsize, "elements of an array")
        return np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()
    dtype = _dtype(cursor, kind)
    assert dtype is not None
    return cursor.number(dtype.str)


def _dtype(cursor: Cursor, kind: int) -> np.dtype | None:
    if kind >= len(_NUMBERS):
        raise complain(cursor.path, None, f"unknown value type {kind} at byte {cursor.at:,}")
    name = _NUMBERS[kind]
    return None if name is None else np.dtype(name)


def encode_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: Any) -> bytes:
    """A value, preceded by its type.

    **Raises:** `TypeError` for a value that the format has no type for.
    """
    kind, raw = _encode(value)
    return struct.pack("<I", kind) + raw


def _encode(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, str):
        return _STRING, encode_text(value)
    if isinstance(value, int):
        kind, code = (4, "<I") if 0 <= value < 2**32 else (11, "<q")
        return kind, struct.pack(code, value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, list | tuple) and value:
        parts = [_encode(x) for x in value]
        kinds = {kind for kind, _ in parts}
        if len(kinds) > 1:
            raise TypeError(f"the elements of an array must be of one type; found the types {sorted(kinds)}")
        return _ARRAY, struct.pack("<IQ", kinds.pop(), len(parts)) + b"".join(raw for _, raw in parts)
    raise TypeError(f"GGUF has no type for {value!r}")
