"""Support for the safetensors format, as either a single file or several files with an index.

Headers are untrusted, so we check every offset against the file's size, and require the tensors to cover the
data exactly. Then no entry can read past the end of the file or alias another tensor.

Source: the format specification, <https://huggingface.co/docs/safetensors>.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import jax
import ml_dtypes
import numpy as np

from .._arrays import from_numpy
from .._files import replacing
from .errors import CheckpointError, file_error, hub_hint, listed
from .json_text import read_json, read_json_of
from .open_file import OpenFile, foreign

__all__ = [
    "TensorInfo",
    "Tensors",
    "are_sizes",
    "as_jax",
    "open_tensors",
    "read_json",
    "write_tensors",
    "write_to",
]

# In the order of the reference implementation, which sorts tensors by decreasing alignment.
_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype) for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I16": np.int16,
        "U16": np.uint16, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32,
        "F32": np.float32, "C64": np.complex64, "F64": np.float64, "I64": np.int64, "U64": np.uint64,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(_DTYPES)}

_METADATA = "__metadata__"  # the only key in a header that isn't a tensor
_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation


class TensorInfo(NamedTuple):
    file: OpenFile
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes, relative to the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tensors(Mapping[str, np.ndarray]):
    """A mapping from names to the tensors in a checkpoint. Only the headers are kept in memory.

    Looking up a tensor reads it from disk.

    **Attributes:**

    - `path`: the opened `.safetensors` file or index.
    - `info`: the dtype, shape and offset of each tensor.
    - `metadata`: the string-valued entries of the header. For sharded checkpoints, this is the first file's.
    - `unlisted`: the names of any tensors missing from the index of a sharded checkpoint.
    - `files`: the underlying files, kept open.
    """

    path: Path
    info: dict[str, TensorInfo]
    metadata: dict[str, str]
    unlisted: Set[str] = frozenset()
    files: Sequence[OpenFile] = ()

    def error(self, name: str | None, problem: str) -> CheckpointError:
        """Creates an error naming this file and a tensor (or some other entry)."""
        return file_error(self.path, name, problem)

    def is_current(self) -> bool:
        """Returns whether the files on disk are still the opened ones."""
        return all(file.is_current() for file in self.files)

    def __getitem__(self, name: str) -> np.ndarray:
        info = self.info[name]
        data = info.file.read(info.offset, info.nbytes, name)
        if info.dtype == np.bool_ and data.strip(b"\0\1"):
            raise file_error(info.file.path, name, "has bytes other than 0 and 1, which are not BOOLs")
        return np.frombuffer(data, info.dtype).reshape(info.shape)

    def mapped(self, name: str) -> np.ndarray:
        """Memory-maps a tensor, so only the parts in use are read from disk."""
        info = self.info[name]
        if info.nbytes == 0 or not info.shape:
            return self[name]
        return info.file.mapped(info.offset, info.dtype, info.shape, name)

    def __contains__(self, name: object) -> bool:  # the default implementation would read the tensor
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """Opens a checkpoint by reading and checking its headers.

    `path` is either a `.safetensors` file, a `.safetensors.index.json` file, or a folder containing
    `model.safetensors.index.json`, `model.safetensors` or exactly one `.safetensors` file.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if the checkpoint is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint at {path}.{hub_hint(path)}")
    file = OpenFile(path)
    if path.suffix == ".json":
        return _open_index(file)
    info, metadata = _read_header(file)
    return Tensors(path, info, metadata, files=[file])


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Atomically writes tensors to a file.

    The output is deterministic, and byte-for-byte identical to the reference implementation's.
    """
    path = Path(path)
    with replacing(path) as file:
        write_to(file, path, tensors, metadata)


def write_to(
    file: BinaryIO, path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes tensors to the open `file`. `path` is only for error messages."""
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise file_error(path, name, f"the format has no dtype {array.dtype}")
        if name == _METADATA:
            raise file_error(path, name, "the format keeps this name for itself")
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    ordered = sorted(tensors, key=lambda name: (-_RANK[_NAMES[tensors[name].dtype]], name))
    offset = 0
    for name in ordered:
        array = tensors[name]
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise file_error(path, None, f"a name or a text of the metadata is not Unicode: {error}") from None
    text += b" " * (-len(text) % 8)

    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in ordered:
        file.write(np.ascontiguousarray(tensors[name]).tobytes())


def as_jax(array: np.ndarray) -> Any:
    """Converts `array` to a JAX array, unless JAX truncates it from 64 to 32 bits."""
    return from_numpy(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        names = listed(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise FileNotFoundError(f"{folder} holds no .safetensors file; found {names}.")
    if len(found) > 1:
        raise FileNotFoundError(
            f"{folder} holds several .safetensors files, and no model.safetensors.index.json that says which "
            f"of them belong together: {listed(p.name for p in found)}. Pass the path of one."
        )
    return found[0]


def _open_index(file: OpenFile) -> Tensors:
    path = file.path
    index = read_json_of(file, "the index")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise file_error(path, "weight_map", "must map the names of tensors to files")
    shards: dict[str, tuple[dict[str, TensorInfo], dict[str, str]]] = {}
    info: dict[str, TensorInfo] = {}
    files = [file]
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise file_error(
                path, name, f"the file must be a plain name beside the index, found {_short(shard)}"
            )
        if shard not in shards:
            try:
                files.append(OpenFile(path.parent / shard))
            except FileNotFoundError:
                raise file_error(path, name, f"the file {shard!r} is missing") from None
            shards[shard] = _read_header(files[-1])
        tensors, _ = shards[shard]
        if name not in tensors:
            raise file_error(path, name, f"is not in the file {shard!r}")
        info[name] = tensors[name]
    held = frozenset(name for tensors, _ in shards.values() for name in tensors)
    return Tensors(path, info, next(iter(shards.values()))[1], held - info.keys(), files)


def _is_plain_name(file: str) -> bool:
    """Returns whether `file` is a filename without folders on every operating system."""
    try:
        is_short = len(file.encode()) <= 255
    except UnicodeEncodeError:  # it contains a lone surrogate
        return False
    return is_short and file not in ("", ".", "..") and not set(file) & set("/\\:\0")


def _read_header(file: OpenFile) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    path, size = file.path, file.size
    prefix = file.read(0, 8, None)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
        if length > _MAX_HEADER or file.read(8, 1, None) != b"{":
            raise foreign(file, "safetensors")
        raise file_error(
            path, None, f"is cut off: its header takes {length:,} bytes, and {size - 8:,} are there"
        )
    text = file.read(8, length, None)
    if not text.startswith(b"{"):
        raise file_error(path, None, "the header is not JSON: it must begin with '{'")
    header = read_json(path, text, "the header")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise file_error(path, _METADATA, "must map names to text")
    try:
        "".join([*header, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:  # it contains a lone surrogate
        raise file_error(path, None, f"the header is not JSON: {error}") from None
    data = size - 8 - length
    info = {name: _read_entry(file, name, entry, 8 + length, data) for name, entry in header.items()}
    _check_coverage(path, info, 8 + length, size)
    return info, metadata


def _read_entry(file: OpenFile, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    path = file.path
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise file_error(path, name, f"expected dtype, shape and data_offsets, found {_short(entry)}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise file_error(path, name, f"unknown dtype {_short(entry['dtype'])}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not are_sizes(shape):
        raise file_error(path, name, f"the shape must be a list of sizes, found {_short(shape)}")
    if not _is_interval(offsets):
        raise file_error(path, name, f"data_offsets must be a first and a last byte; found {_short(offsets)}")
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise file_error(
            path,
            name,
            f"{entry['dtype']} of shape {shape} takes {expected:,} bytes, found {offsets[1] - offsets[0]:,}",
        )
    if offsets[1] > size:
        there = f"{start + size:,} bytes are there"
        raise file_error(
            path, name, f"the file is cut off: this ends at byte {start + offsets[1]:,}, and {there}"
        )
    return TensorInfo(file, dtype, tuple(shape), start + offsets[0])


def _check_coverage(path: Path, info: dict[str, TensorInfo], start: int, end: int) -> None:
    """Checks that tensors cover every byte, and don't overlap."""
    at = start
    for name, tensor in sorted(info.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            raise file_error(path, name, f"begins at byte {tensor.offset:,}, the one before ends at {at:,}")
        at += tensor.nbytes
    if at != end:
        raise file_error(path, None, f"{end - at:,} bytes after the last tensor belong to none")


def are_sizes(x: Any) -> TypeGuard[list[int]]:
    """Returns whether `x` is a valid shape. NumPy supports up to 64 axes and 2**63 elements."""
    if not isinstance(x, list) or len(x) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in x):
        return False
    return math.prod(n for n in x if n) < 2**63  # like NumPy, ignore axes of size 0


def _is_interval(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(type(n) is int for n in x) and 0 <= x[0] <= x[1]


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."
