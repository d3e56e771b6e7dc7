"""GGUF, the format of llama.cpp: metadata, tokenizer and tensors in one file, or in several.

Source: the specification, <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import complain
from .gguf_blocks import BLOCK_TYPES, read_blocks
from .gguf_metadata import MAGIC, Cursor, read_value
from .tensors import as_jax

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

# Names of transformers for those of llama.cpp.
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Architectures whose rows of q and k stand in the order of llama.cpp's rotary embedding.
_PERMUTED = ("llama", "mistral")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class _Tensor(NamedTuple):
    file: Path
    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Gguf(Mapping[str, Any]):
    """The tensors of a GGUF file, by the names of transformers where the architecture has them; each look-up
    reads one.

    **Attributes:**

    - `metadata`: the keys and values of the file, among them the tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        found: dict[str, _Tensor] = {}
        for i, part in enumerate(_parts(path)):
            metadata, tensors = _read_header(part)
            if i == 0:
                self.metadata = metadata
            for name, tensor in tensors.items():
                if name in found:
                    raise complain(part, name, "is in another part of the checkpoint, too")
                found[name] = tensor
        total = self.metadata.get("split.tensors.count", len(found))
        if total != len(found):
            raise complain(path, "split.tensors.count", f"is {total}; the parts hold {len(found)} tensors")
        self._tensors = {name_of(name): (name, tensor) for name, tensor in found.items()}
        if len(self._tensors) < len(found):
            raise complain(path, None, "two tensors have the same name")

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: str) -> Any:
        name, tensor = self._tensors[key]
        with open(tensor.file, "rb") as file:
            file.seek(tensor.start)
            data = np.frombuffer(file.read(tensor.nbytes), np.uint8)
        if data.nbytes != tensor.nbytes:
            raise complain(tensor.file, name, "the file has been cut short since its header was read")
        rows = row_order(tensor.file, name, tensor.shape, self.metadata)
        if tensor.kind in _PLAIN:
            plain = data.view(_PLAIN[tensor.kind]).reshape(tensor.shape)
            return as_jax(plain if rows is None else plain[rows])
        return read_blocks(BLOCK_TYPES[tensor.kind][1], data, tensor.shape, rows)


def row_order(
    path: Path, name: str, shape: tuple[int, ...], metadata: Mapping[str, Any]
) -> np.ndarray | None:
    """For each row of q and k as transformers has them, the row of the file; None where they agree."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    architecture = metadata.get("general.architecture")
    if found is None or architecture not in _PERMUTED:
        return None
    heads = metadata.get(f"{architecture}.attention.head_count")
    if found[1] == "k":
        heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    n = math.prod(shape[-2:-1] if found[2] == "weight" else shape[-1:])
    if type(heads) is not int or heads < 1 or n % heads or n // heads % 2:
        raise complain(path, name, f"{heads!r} heads do not divide its {n} rows into pairs")
    return np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def stored_row_order(
    path: Path, name: str, shape: tuple[int, ...], metadata: Mapping[str, Any]
) -> np.ndarray | None:
    """The inverse of `row_order`: for each row of the file, the row of transformers."""
    order = row_order(path, name, shape, metadata)
    return None if order is None else np.argsort(order)


def name_of(name: str) -> str:
    """The name that transformers has for a tensor of llama.cpp; the same name where it has none."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found and found[2] in _IN_BLOCK:
        return f"model.layers.{found[1]}.{_IN_BLOCK[found[2]]}.{kind}"
    return name


def original_name(name: str) -> str:
    """The inverse of `name_of`."""
    stem, _, kind = name.rpartition(".")
    top = {hf: gguf for gguf, hf in _TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    inner = {hf: gguf for gguf, hf in _IN_BLOCK.items()}
    return f"blk.{found[1]}.{inner[found[2]]}.{kind}" if found and found[2] in inner else name


def is_gguf(path: Path) -> bool:
    """Whether there is a GGUF file at `path`."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


def _parts(path: Path) -> list[Path]:
    """The files of a checkpoint, of which `path` is one."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    parts = [path.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise complain(path, None, f"the part {part.name!r} is missing")
    return parts


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        cursor = Cursor(path, file, size)
        if cursor.take(4) != MAGIC:
            raise complain(path, None, "is no GGUF file: it does not begin with GGUF")
        version = cursor.number("<u4")
        if version not in (2, 3):
            swapped = int.from_bytes(int(version).to_bytes(4, "big"), "little")
            hint = "it is big-endian" if swapped in (1, 2, 3) else "convert it with llama.cpp"
            raise complain(path, None, f"version 2 or 3 can be read; found {version}: {hint}")
        count, keys = cursor.number("<u8"), cursor.number("<u8")
        metadata: dict[str, Any] = {}
        cursor.expect(keys, 12, "keys")
        for _ in range(keys):
            key = cursor.text()
            if key in metadata:
                raise complain(path, key, "stands there twice")
            metadata[key] = read_value(cursor)
        cursor.expect(count, 24, "tensors")
        infos = [_read_info(cursor) for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise complain(path, "general.alignment", f"must be a power of two; found {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
    return metadata, _place(path, infos, start, alignment, size)


def _read_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    ndim = cursor.number("<u4")
    if not 1 <= ndim <= 4:
        raise complain(cursor.path, name, f"must have one to four axes; found {ndim}")
    shape = tuple(cursor.number("<u8") for _ in range(ndim))[::-1]  # the fastest axis is written first
    return name, shape, cursor.number("<u4"), cursor.number("<u8")


def _place(
    path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, _Tensor]:
    """Where tensors are; they lie within the file, and apart."""
    out: dict[str, _Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in out:
            raise complain(path, name, "stands there twice")
        if kind not in _PLAIN and kind not in BLOCK_TYPES:
            known = ", ".join(label for label, _ in BLOCK_TYPES.values())
            raise complain(path, name, f"is of type {kind}; F32, F16, BF16, {known} can be read")
        if kind in BLOCK_TYPES:
            block = BLOCK_TYPES[kind][1]
            if shape[-1] % block.elements:
                raise complain(path, name, f"blocks of {block.elements} do not divide rows of {shape[-1]}")
            nbytes = math.prod(shape) // block.elements * block.nbytes
        else:
            nbytes = math.prod(shape) * _PLAIN[kind].itemsize
        if offset % alignment or start + offset + nbytes > size:
            raise complain(
                path,
                name,
                f"{nbytes:,} bytes at {offset:,} are not in the file, or not aligned to {alignment}",
            )
        out[name] = _Tensor(path, kind, shape, start + offset, nbytes)
    end = 0
    for name, tensor in sorted(out.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise complain(path, name, "overlaps with another tensor")
        end = tensor.start + tensor.nbytes
    return out


def open_gguf(path: Path) -> Gguf:
    """A file by its name, or the one in a folder."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        firsts = [p for p in found if not (m := _SPLIT.fullmatch(p.name)) or int(m[2]) == 1]
        if len(firsts) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise FileNotFoundError(f"{path} must hold one GGUF checkpoint; found {names}.")
        path = firsts[0]
    return Gguf(path)
