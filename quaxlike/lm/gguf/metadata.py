"""Encodes and decodes a GGUF file's key-value pairs.

Files are untrusted, so every count is checked against the file size before allocating any memory.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from ...files.errors import CheckpointError, file_error, quoted

MAGIC = b"GGUF"


class ModelKeys(NamedTuple):
    """A file's metadata for its model. These keys start with the architecture's name, left out here."""

    path: Path
    metadata: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        return f"{self.metadata.get('general.architecture')}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self.prefix + key, default)

    def error(self, key: str, problem: str) -> CheckpointError:
        return file_error(self.path, self.prefix + key, problem)


_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_DTYPES = tuple(None if name is None else np.dtype(name) for name in _NUMBERS)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES) if dtype is not None}
_STRING, _ARRAY = 8, 9
# The dtypes for Python numbers: as scalars, and then in lists.
_OF_NUMBERS, _OF_LISTS = (tuple(map(np.dtype, names)) for names in (("<u4", "<f4", "?"), ("<i4", "<f4", "?")))

# The types required by llama.cpp for known keys (see gguf-py/gguf/gguf_writer.py).
_FLOATS = (
    *(r"\w+_epsilon", "freq_base", "freq_base_swa", r"scaling\.factor", r"scaling\.(yarn_)?attn_factor"),
    *(r"scaling\.yarn_\w+", r"\w+_softcapping", r"(\w+_)?scale", "clamp_kqv", "max_alibi_bias"),
)
_WHOLE = (
    *("alignment", "quantization_version", "file_type", "vocab_size", "context_length", "embedding_length"),
    *("block_count", "feed_forward_length", "expert_count", "expert_used_count", "head_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "leading_dense_block_count"),
    *("head_count_kv", "key_length", "value_length", "sliding_window", "dimension_count"),
    *("original_context_length", "token_type_count", r"\w+_token_id"),
)
_TRUTHS = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("causal", "finetuned", "use_parallel_residual", "expert_weights_norm"),
)
_SCALARS = tuple(
    (dtype, re.compile(rf".+\.({'|'.join(names)})"))
    for dtype, names in (("<f4", _FLOATS), ("<u4", _WHOLE), ("?", _TRUTHS))
)
_ARRAYS = {f"tokenizer.ggml.{key}": dtype for key, dtype in
           (("token_type", "<i4"), ("scores", "<f4"), ("suppress_tokens", "<i4"))}  # fmt: skip


class Cursor:
    """A position within a file being read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.at = 0
        self._file = file
        self._size = size

    def take(self, count: int) -> bytes:
        """Reads the next `count` bytes, raising an error if the file is too short."""
        if count > self._size - self.at:
            left = self._size - self.at
            raise file_error(self.path, None, f"expected {count:,} bytes at byte {self.at:,}; found {left:,}")
        self.at += count
        return self._file.read(count)

    def expect(self, count: int, each: int, what: str) -> None:
        """Checks that the rest of the file is large enough for `count` items with at least `each` bytes."""
        if count * each > self._size - self.at:
            raise file_error(self.path, None, f"claims {count:,} {what}, which the file has no room for")

    def number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def text(self) -> str:
        raw = self.take(self.number("<u8"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise file_error(self.path, None, f"a name at byte {self.at:,} is not UTF-8: {error}") from None


def read_value(cursor: Cursor) -> Any:
    """Reads a type followed by a value of this type: a number, string or list.

    Numbers are returned as NumPy scalars if `encode_value` would otherwise change their type.
    """
    return _value(cursor, cursor.number("<u4"))


def _value(cursor: Cursor, kind: int, depth: int = 0) -> Any:
    if kind == _STRING:
        raw = cursor.take(cursor.number("<u8"))
        return raw.decode(errors="replace")  # a token can be part of a multi-byte character
    if kind == _ARRAY:
        if depth > 3:
            raise file_error(cursor.path, None, "arrays are nested more than four deep")
        inner, count = cursor.number("<u4"), cursor.number("<u8")
        dtype = _dtype(cursor, inner)
        if dtype is None:
            cursor.expect(count, 8, "elements of an array")
            texts = [_value(cursor, inner, depth + 1) for _ in range(count)]
            return texts or np.array([], str)
        cursor.expect(count, dtype.itemsize, "elements of an array")
        found = np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
        return found.tolist() if count and dtype in _OF_LISTS else found.copy()
    dtype = _dtype(cursor, kind)
    assert dtype is not None
    found = np.frombuffer(cursor.take(dtype.itemsize), dtype)[0]
    return found.item() if dtype in _OF_NUMBERS else found


def _dtype(cursor: Cursor, kind: int) -> np.dtype | None:
    if kind >= len(_DTYPES):
        raise file_error(cursor.path, None, f"unknown value type {kind} at byte {cursor.at:,}")
    return _DTYPES[kind]


def as_python(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Converts any NumPy scalars and arrays in the metadata to Python numbers and lists."""
    return {k: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for k, v in metadata.items()}


def encode_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: Any, key: str = "") -> bytes:
    """Encodes a value, prefixed by its type.

    Known keys use the type required by llama.cpp. For all other keys, NumPy scalars and arrays keep their
    dtype, Python integers become uint32 (or int32 in a list), and floats become float32, as in llama.cpp's
    own files.

    **Raises:** `TypeError` or `OverflowError` if the format, or the key's required type, can't represent this
    value.
    """
    is_list = isinstance(value, list | tuple) or np.ndim(value) > 0
    known = _ARRAYS.get(key) if is_list else next((t for t, keys in _SCALARS if keys.fullmatch(key)), None)
    if known is not None and np.asarray(value).dtype.kind in ("biu" if known == "?" else "iuf"):
        value = _as_dtype(value, np.dtype(known))
    kind, raw = _encode(value)
    return struct.pack("<I", kind) + raw


def _encode(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return _STRING, encode_text(value)
    if isinstance(value, list | tuple):
        value = _array(value)
    if isinstance(value, list):  # strings or nested arrays; numbers were converted to an array above
        parts = [_encode(x) for x in value]
        return _ARRAY, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(raw for _, raw in parts)
    if type(value) in (bool, int, float):
        own = {bool: "?", float: "<f4"}.get(type(value))
        value = _as_dtype(value, np.dtype(own or _smallest(value, value, "<u4", "<i4", "<i8", "<u8")))
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        raise TypeError(f"GGUF has no type for {value!r}")
    found = np.asarray(value)
    if found.ndim > 1 or (found.ndim and found.size and found.dtype.kind == "U"):
        return _encode(found.tolist() if found.dtype.kind == "U" else list(found))
    kind = _STRING if found.dtype.kind == "U" else _NUMBER_OF.get(found.dtype.newbyteorder("<"))
    if kind is None:
        raise TypeError(f"GGUF has no type for {found.dtype}")
    raw = found.astype(found.dtype.newbyteorder("<")).tobytes()
    return (_ARRAY, struct.pack("<IQ", kind, found.size) + raw) if found.ndim else (kind, raw)


def _array(value: Sequence[Any]) -> Any:
    """Converts a list of numbers to an array. Lists of strings or arrays are left unchanged."""
    kinds = {type(x) for x in value}
    if kinds and (kinds <= {str} or kinds <= {list, tuple, np.ndarray}):
        return list(value)
    if kinds and kinds <= {int, float}:
        whole, least, most = kinds == {int}, min(value), max(value)
        return _as_dtype(value, np.dtype(_smallest(least, most, "<i4", "<i8", "<u8") if whole else "<f4"))
    if kinds == {bool}:
        return np.asarray(value)
    if len({x.dtype for x in value if isinstance(x, np.generic)}) == 1 and len(kinds) == 1:
        return np.asarray(value)
    names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
    raise TypeError(f"the elements of an array must be of one type; found {names}")


def _smallest(least: int, most: int, *dtypes: str) -> str:
    """Returns the first of these integer dtypes to fit the range, falling back to the last."""

    def fits(name: Any) -> Any:
        return np.iinfo(name).min <= least and most <= np.iinfo(name).max

    return next(filter(fits, dtypes), dtypes[-1])


def _as_dtype(value: Any, dtype: np.dtype) -> np.ndarray:
    """Casts to a dtype, raising `OverflowError` if any values don't fit."""
    given = np.asarray(value)
    with np.errstate(over="ignore", invalid="ignore"):
        out = given.astype(dtype)
    fits = np.isfinite(given) == np.isfinite(out) if dtype.kind == "f" else given == out
    if not np.all(fits):
        raise OverflowError(f"{dtype.name} has no place for {quoted(value)}")
    return out
