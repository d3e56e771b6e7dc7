"""The writer of GGUF: floats, and arrays of the codecs q4_0, q8_0 and mxfp4."""

import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import ml_dtypes
import numpy as np

from ..._files import replacing
from ...arrays.quantized import CODECS, AbstractQuantizedArray, BlockArray
from ...core.quaxify import quaxify
from ...core.values import is_value
from ...files.errors import file_error
from ..families import Family
from .blocks import write_blocks
from .metadata import MAGIC, as_python, encode_text, encode_value
from .names import expert_slices, family_of, gate_and_up, llama_cpp_name, row_order

_ALIGNMENT = 32


class _Kind(NamedTuple):
    """A type of tensors: its number, that of files that are mostly of it, and the elements and bytes of a
    block."""

    number: int
    file_type: int
    elements: int
    nbytes: int
    dtype: np.dtype = np.dtype(np.float32)


_KINDS = {
    "f32": _Kind(0, 0, 1, 4),
    "f16": _Kind(1, 1, 1, 2, np.dtype(np.float16)),
    "bf16": _Kind(30, 32, 1, 2, np.dtype(ml_dtypes.bfloat16)),
    "q8_0": _Kind(8, 7, 32, 34),
    "q4_0": _Kind(2, 2, 32, 18),
    "mxfp4": _Kind(39, 38, 32, 17),
}
#: The types that weights can be converted to.
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
# The codecs whose codes and scales are those of a type, and the dtype of the scales.
_CODECS = {
    "q8_0": (("q8_0",), np.float16),
    "q4_0": (("q4_0",), np.float16),
    "mxfp4": (("mxfp4", "mxfp4_gguf"), np.uint8),
}
_FLOATS = {kind.dtype: name for name, kind in _KINDS.items() if kind.elements == 1}
# Tensors that llama.cpp computes with in float32, and those of the output, which 4 bits harm most.
_ALWAYS_F32 = re.compile(r"blk\.\d+\.(ffn_gate_inp(_shexp)?\.weight|ffn_\w+_exps\.bias)")
_OUTPUT = "output.weight"
_EMBEDDING = "token_embd.weight"


class _WrittenTensor(NamedTuple):
    """A tensor to write: its type and shape, and a function that returns its bytes."""

    kind: str
    shape: tuple[int, ...]
    bytes: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        kind = _KINDS[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // kind.elements * kind.nbytes


def write(
    path: Path, mapping: Mapping[str, Any], metadata: Mapping[str, Any], quantize: str | None = None
) -> None:
    """Writes a file: metadata, and tensors by llama.cpp's names, one after the other.

    `quantize` is one of `TYPES`, for the weights. As in llama.cpp, vectors and routers are of float32, rows
    that no whole blocks make up of float16, and the output of q8_0 if others are of q4_0. By default, arrays
    are written as they are. Raises `CheckpointError` for what the file cannot hold.
    """
    metadata = {"general.architecture": "llama", **metadata}
    known = as_python(metadata)
    tensors: dict[str, _WrittenTensor] = {}
    outputs = {_OUTPUT} if {_OUTPUT, "lm_head.weight"} & mapping.keys() else {_EMBEDDING}
    for name, value in mapping.items():
        for out, part in _parts(name, value, family_of(known)):
            if out in tensors:
                raise file_error(path, name, f"two entries would be called {out!r}")
            tensors[out] = _tensor(path, name, out, value, part, known, quantize, outputs)
    keys = {k: v for k, v in metadata.items() if not k.startswith("split.")}
    keys["general.alignment"] = _ALIGNMENT
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    if sizes:
        keys["general.file_type"] = _KINDS[sizes.most_common(1)[0][0]].file_type
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for key, value in keys.items():
        try:
            head.append(encode_text(key) + encode_value(value, key))
        except (TypeError, ValueError, OverflowError) as error:
            raise file_error(path, key, f"cannot be written: {error}") from None
    offset = 0
    for name, tensor in tensors.items():
        head.append(encode_text(name) + struct.pack("<I", len(tensor.shape)))
        number = _KINDS[tensor.kind].number
        head.append(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape[::-1], number, offset))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(_padded(b"".join(head)))
        for tensor in tensors.values():
            file.write(_padded(tensor.bytes().tobytes()))


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNMENT)


def _parts(name: str, value: Any, family: Family | None) -> Iterator[tuple[str, Callable[[Any], Any] | None]]:
    """The tensors that an array is stored in, and functions that cut them out of it."""
    cuts = expert_slices(name, len(value.shape), family.interleaved) if family else ()
    names = gate_and_up(name) if len(cuts) == 2 else None
    yield from zip(names or [llama_cpp_name(name, family)], cuts or [None], strict=True)


def _tensor(
    path: Path,
    name: str,
    out: str,
    value: Any,
    part: Callable[[Any], Any] | None,
    metadata: Mapping[str, Any],
    quantize: str | None,
    outputs: Collection[str],
) -> _WrittenTensor:
    stored = value if part is None else eqx.filter_eval_shape(quaxify(part), value)
    shape = tuple(stored.shape)
    if not 1 <= len(shape) <= 4:
        raise file_error(path, name, f"GGUF has tensors of one to four axes; found the shape {shape}")
    order = row_order(path, out, shape, metadata)
    rows = slice(None) if order is None else np.argsort(order)  # for each row of the file, transformers'
    family = family_of(metadata)
    offset = family.norm_offset if family and out.endswith("norm.weight") else 0
    kind = _kind(path, name, out, stored, quantize, outputs)

    def read() -> np.ndarray:
        w = value if part is None else quaxify(part)(value)
        if _KINDS[kind].elements > 1:
            return _blocks(path, name, w, kind)[..., rows, :]
        return _floats(path, name, w, kind, offset)[rows]

    return _WrittenTensor(kind, shape, read)


def _kind(path: Path, name: str, out: str, value: Any, quantize: str | None, outputs: Collection[str]) -> str:
    own = next((kind for kind in _KINDS if _is_stored(value, kind)), None)
    if is_value(value) and own is None and not (quantize and isinstance(value, AbstractQuantizedArray)):
        raise file_error(
            path,
            name,
            f"{type(value).__name__} has no place in the file: merge adapters, and quantise to 'q8_0' or "
            "'q4_0' along a last axis that blocks of 32 divide, or materialise it",
        )
    if own is None and value.dtype not in _FLOATS:
        raise file_error(path, name, f"float32, float16 and bfloat16 can be written; found {value.dtype}")
    if len(value.shape) == 1 or _ALWAYS_F32.fullmatch(out) or (quantize and not out.endswith(".weight")):
        return "f32"
    if quantize is None:
        return own or _FLOATS[np.dtype(value.dtype)]
    if _KINDS[quantize].elements > 1 and value.shape[-1] % _KINDS[quantize].elements:
        return "f16"
    return "q8_0" if quantize == "q4_0" and out in outputs else quantize


def _is_stored(value: Any, kind: str) -> bool:
    """Whether the codes and scales of an array are those of a quantised type."""
    names, dtype = _CODECS.get(kind, ((), None))
    is_codec = isinstance(value, BlockArray) and value.codec in [CODECS[name] for name in names]
    if not is_codec or value.order is not None:
        return False
    whole = len(value.inner_shape) == 1 and value.inner_shape[0] % 32 == 0 and value.block == 32
    return whole and not value.axes and value.scale.scale.dtype == dtype


def _blocks(path: Path, name: str, value: Any, kind: str) -> np.ndarray:
    if not _is_stored(value, kind):
        value = BlockArray.quantize(_dense(value).astype(np.float32), codec=kind)
    if not np.all(np.isfinite(np.asarray(value.scale.scale))):
        raise file_error(path, name, f"has numbers that {kind} has no place for; choose 'bf16' or 'f32'")
    return write_blocks(value, kind.upper())


def _floats(path: Path, name: str, value: Any, kind: str, offset: float | int) -> np.ndarray:
    given = _dense(value)
    dtype = _KINDS[kind].dtype
    wide = given if given.dtype == dtype and not offset else given.astype(np.float32)
    with np.errstate(over="ignore"):
        out = (wide + np.float32(offset) if offset else wide).astype(dtype)
    if kind == "f16" and np.any(np.isinf(out) & np.isfinite(wide)):
        raise file_error(path, name, "has numbers that float16 has no place for; choose 'bf16' or 'f32'")
    return out


def _dense(value: Any) -> np.ndarray:
    return np.asarray(value.materialise() if is_value(value) else value)
