"""GGUF, llama.cpp's file format for metadata, the tokeniser and tensors, in one or more files.

This follows the specification: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...core.quaxify import quaxify
from ...core.values import is_value
from ...files.errors import file_error
from ...files.open_file import OpenFile, foreign
from ...files.tensors import are_sizes, as_jax
from .blocks import BLOCK_TYPES, read_blocks
from .config import blocks_beside, config_of
from .layouts import FUNCTIONS, layout_of, order_of, orders
from .metadata import MAGIC, Cursor, as_python, read_value
from .names import family_of, joined_by, joined_tensors, stack_experts, transformers_name

_PLAIN: dict[int, np.dtype] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    24: np.dtype("i1"),
    25: np.dtype("<i2"),
    26: np.dtype("<i4"),
    27: np.dtype("<i8"),
    28: np.dtype("<f8"),
    30: np.dtype(ml_dtypes.bfloat16),
}

#: Unsupported tensor types, keyed by their number in the file.
_UNREAD = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"},
}
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class _Tensor(NamedTuple):
    file: OpenFile
    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile(Mapping[str, Any]):
    """A mapping over the tensors in a GGUF file. Looking up a tensor reads it from disk.

    Keys are transformers' names if the architecture is known, and llama.cpp's names otherwise.

    **Attributes:**

    - `metadata`: the key-value pairs in the file, including the tokeniser. Numbers are kept as NumPy scalars
        if writing them would otherwise change their type.
    - `config`: the equivalent of transformers' `config.json`, if the architecture is supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        found: dict[str, _Tensor] = {}
        self._files = [OpenFile(part) for part in _parts(path)]
        for i, file in enumerate(self._files):
            metadata, tensors = _read_header(file)
            if i == 0:
                self.metadata = metadata
            for name, tensor in tensors.items():
                if name in found:
                    raise file_error(file.path, name, "is also in another part of the checkpoint")
                found[name] = tensor
        total = self.metadata.get("split.tensors.count", len(found))
        if total != len(found):
            raise file_error(path, "split.tensors.count", f"is {total}; the parts hold {len(found)} tensors")
        self._tensors = found
        self._plain = as_python(self.metadata)
        self._family = family_of(self._plain)
        beside = blocks_beside(path, self._plain, found)
        own = {name: tensor for name, tensor in found.items() if name not in beside}
        joined = joined_tensors(own, self._family)
        parts = {part for tensors in joined.values() for part in tensors}
        self._sources = {
            transformers_name(name, self._family): (name,) for name in own if name not in parts
        } | joined
        if self._family is not None and self._family.gguf is not None:
            self._sources |= {f"{self._family.gguf.predictors}.{name}": (name,) for name in beside}
        if len(self._sources) < len(found) - len(parts) + len(joined):
            raise file_error(path, None, "two tensors have the same name")
        shapes = {name: tensor.shape for name, tensor in found.items()}
        self.config = config_of(path, self._plain, shapes, lambda name: np.asarray(self._read(name)))

    def is_current(self) -> bool:
        """Returns whether the files on disk are still the opened ones."""
        return all(file.is_current() for file in self._files)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in self._tensors.values()]

    def __contains__(self, name: object) -> bool:  # without reading the tensor
        return name in self._sources

    def __iter__(self) -> Any:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, key: str) -> Any:
        parts = [self._read(name) for name in self._sources[key]]
        order = joined_by(key, self._family) if len(parts) > 1 else ""
        if order:
            return self._joined(key, parts, order)
        interleaved = self._family is not None and self._family.interleaved
        return stack_experts(self.path, key, parts, interleaved)

    def _joined(self, key: str, parts: Sequence[Any], order: str) -> Any:
        """Joins the rows of several tensors into a single array, in transformers' order.

        If the tensors are quantised in different ways, this array becomes dense, with a warning.
        """
        found = orders(self.path, key, order, sum(part.shape[0] for part in parts), self._plain)
        if [len(rows) for rows in found] != [part.shape[0] for part in parts]:
            names = " and ".join(self._sources[key])
            raise file_error(self.path, key, f"the sizes of its heads do not fit {names}")
        order_of_all = np.argsort(np.concatenate(found))
        if len({getattr(part, "codec", None) for part in parts}) > 1:
            kind = re.sub(r"\.\d+\.", ".*.", key)  # one warning for all layers
            warnings.warn(
                f"{self.path}: {kind} is stored as tensors of several types; it becomes dense.", stacklevel=2
            )
            parts = [part.materialise() if is_value(part) else part for part in parts]
        dtype = np.promote_types(*(part.dtype for part in parts))

        def whole(parts: Sequence[Any]) -> Any:
            # Add an axis at the front, so this is a stack of matrices, and quantised arrays remain quantised.
            # Otherwise it looks like indexing an embedding, which decodes its rows.
            return jnp.concatenate([part.astype(dtype) for part in parts])[None][:, order_of_all][0]

        return quaxify(whole)(list(parts))

    def _read(self, name: str) -> Any:
        tensor = self._tensors[name]
        path = tensor.file.path
        shape, layout = tensor.shape, layout_of(name, self._family)
        ends = (layout.rows, shape[0]), (layout.columns, shape[-1])
        data = np.frombuffer(tensor.file.read(tensor.start, tensor.nbytes, name), np.uint8)
        if (layout.rows or layout.columns) and len(shape) > 2:
            raise file_error(path, name, f"must be a matrix or a vector; found the shape {shape}")
        rows, columns = (
            None if (order := order_of(path, name, axis, size, self._plain)) is None else np.argsort(order)
            for axis, size in ends
        )
        if tensor.kind not in _PLAIN:
            if layout.numbers or (layout.is_row and len(shape) == 1):  # llama.cpp never quantises these
                raise file_error(path, name, "must be made of floats; found quantised blocks")
            if rows is not None and len(shape) == 1:
                raise file_error(path, name, f"must be a matrix; found the shape {shape}")
            out = read_blocks(BLOCK_TYPES[tensor.kind][1], data, shape, rows, columns)
            return quaxify(_with_axis)(out) if layout.squeezed else out
        x = data.view(_PLAIN[tensor.kind]).reshape(shape)
        if layout.numbers:
            read = FUNCTIONS[layout.numbers].read(x, self._family.norm_offset if self._family else 0)
            if np.any(np.isnan(read) & ~np.isnan(x)):
                raise file_error(path, name, "must not have positive numbers")
            x = read
        x = x if rows is None else x[rows]
        x = x if columns is None else x[..., columns]
        x = x[None] if layout.is_row and x.ndim == 1 else x
        return as_jax(_with_axis(x) if layout.squeezed else x)


def _with_axis(x: Any) -> Any:
    return x[:, None]


def holds_gguf(path: Path) -> bool:
    """Returns whether `path` is a GGUF file, or a folder containing GGUF files but no safetensors files."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors*"))
    if not path.is_file() or path.suffix == ".gguf":
        return path.is_file()
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


def _parts(path: Path) -> list[Path]:
    """Lists the files in a split checkpoint."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    parts = [path.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise file_error(path, None, f"the part {part.name!r} is missing")
    return parts


def _read_header(file: OpenFile) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    path = file.path
    cursor = Cursor(path, file.file, file.size)
    if cursor.take(4) != MAGIC:
        raise foreign(file, "GGUF")
    version = cursor.number("<u4")
    if version not in (2, 3):
        swapped = int.from_bytes(int(version).to_bytes(4, "big"), "little")
        hint = "it is big-endian" if swapped in (1, 2, 3) else "convert it with llama.cpp"
        raise file_error(path, None, f"version 2 or 3 can be read; found {version}: {hint}")
    count, keys = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    cursor.expect(keys, 12, "keys")
    for _ in range(keys):
        key = cursor.text()
        if key in metadata:
            raise file_error(path, key, "appears twice")
        metadata[key] = read_value(cursor)
    cursor.expect(count, 24, "tensors")
    infos = [_read_info(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise file_error(path, "general.alignment", f"must be a power of two; found {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return metadata, _place(file, infos, start, alignment)


def _read_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    ndim = cursor.number("<u4")
    if not 1 <= ndim <= 4:
        raise file_error(cursor.path, name, f"must have one to four axes; found {ndim}")
    shape = tuple(cursor.number("<u8") for _ in range(ndim))[::-1]  # fastest axis first
    if not are_sizes(list(shape)):
        raise file_error(cursor.path, name, f"has more elements than an array can have: {shape}")
    return name, shape, cursor.number("<u4"), cursor.number("<u8")


def _place(
    file: OpenFile, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
) -> dict[str, _Tensor]:
    """Locates each tensor, raising an error if any overlap or extend past the end of the file."""
    path = file.path
    out: dict[str, _Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in out:
            raise file_error(path, name, "appears twice")
        if kind not in _PLAIN and kind not in BLOCK_TYPES:
            known = ", ".join(label for label, _ in BLOCK_TYPES.values())
            label = _UNREAD.get(kind, f"number {kind}, which is not known")
            raise file_error(
                path,
                name,
                f"is of type {label}; F32, F16, BF16, {known} can be read. `llama-quantize "
                "--allow-requantize` of llama.cpp converts it, to Q4_K say",
            )
        if kind in BLOCK_TYPES:
            block = BLOCK_TYPES[kind][1]
            if 0 in shape or shape[-1] % block.elements:
                raise file_error(
                    path, name, f"is not made of blocks of {block.elements}: its shape is {shape}"
                )
            nbytes = math.prod(shape) // block.elements * block.nbytes
        else:
            nbytes = math.prod(shape) * _PLAIN[kind].itemsize
        if offset % alignment or start + offset + nbytes > file.size:
            problem = f"{nbytes:,} bytes at {offset:,} are not in the file, or not aligned to {alignment}"
            raise file_error(path, name, problem)
        out[name] = _Tensor(file, kind, shape, start + offset, nbytes)
    end = 0
    for name, tensor in sorted(out.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise file_error(path, name, "overlaps with another tensor")
        end = tensor.start + tensor.nbytes
    return out


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file, or a folder containing exactly one GGUF checkpoint."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        firsts = [p for p in found if not (m := _SPLIT.fullmatch(p.name)) or int(m[2]) == 1]
        if len(firsts) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise FileNotFoundError(f"{path} must hold one GGUF checkpoint; found {names}.")
        path = firsts[0]
    return GgufFile(path)
