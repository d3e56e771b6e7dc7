"""Writes GGUF files containing floats and arrays in llama.cpp's quantised formats."""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import ml_dtypes
import numpy as np

from ..._files import replacing
from ...arrays.quantized import CODECS, AbstractQuantizedArray, BlockArray, Codec
from ...core.quaxify import quaxify
from ...core.values import is_value
from ...files.errors import file_error
from .blocks import BLOCK_TYPES, block_order, write_blocks
from .layouts import FUNCTIONS, layout_of, order_of, orders
from .metadata import MAGIC, as_python, encode_text, encode_value
from .names import expert_slices, family_of, joined_by, llama_cpp_name, tensors_of

_ALIGNMENT = 32


class _Kind(NamedTuple):
    """A tensor type.

    This contains its number, the file type's number for files mostly using it, its elements and bytes per
    block, and the codecs or dtype it can store.
    """

    number: int
    file_type: int
    elements: int
    nbytes: int
    dtype: np.dtype = np.dtype(np.float32)
    codecs: tuple[Codec, ...] = ()


_FLOATING = {
    "f32": _Kind(0, 0, 1, 4),
    "f16": _Kind(1, 1, 1, 2, np.dtype(np.float16)),
    "bf16": _Kind(30, 32, 1, 2, np.dtype(ml_dtypes.bfloat16)),
}
#: Maps the type of most weights to the file type. (llama.cpp guesses the same value for mixtures of types.)
_FILE_TYPES = {
    "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17,
    "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "mxfp4": 38,
}  # fmt: skip
_NUMBERS = {name.lower(): number for number, (name, _) in BLOCK_TYPES.items()}


def _quantised(name: str) -> _Kind:
    number = _NUMBERS[name]
    block = BLOCK_TYPES[number][1]
    codecs = tuple(dict.fromkeys((CODECS[name], block.codec)))  # both MXFP4 codecs produce the same bytes
    return _Kind(number, _FILE_TYPES[name], block.elements, block.nbytes, codecs=codecs)


_KINDS = _FLOATING | {name: _quantised(name) for name in _FILE_TYPES}
#: Types to convert weights to.
TYPES = tuple(_KINDS)


def file_type_of(kind: str) -> int:
    """Returns llama.cpp's file type for a file with mostly this type."""
    return _KINDS[kind].file_type


#: Fallback types for rows that are not a multiple of the block size, as in llama.cpp. (Types with blocks of
#: 32 fall back to float16.)
_INSTEAD = {
    "q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
_FLOATS = {kind.dtype: name for name, kind in _FLOATING.items()}
# llama.cpp requires these tensors to be float32, regardless of the type of all other weights.
_ALWAYS_F32 = re.compile(r"blk\.\d+\.((ffn_gate_inp(_shexp)?|ssm_conv1d)\.weight|ffn_\w+_exps\.bias)")
#: This tensor keeps its dtype when all others are rounded, as in llama.cpp.
_NEVER_ROUNDED = "per_layer_model_proj.weight"
_OUTPUT = "output.weight"
_EMBEDDINGS = {"token_embd.weight", "per_layer_token_embd.weight"}


class Mixture(NamedTuple):
    """The type to convert each weight to.

    **Attributes:**

    - `kinds`: maps individual arrays' names to types.
    - `rest`: the type for all other arrays. If None, these aren't converted.
    - `output`: the type for the output layer, unless it appears in `kinds`. If None, it is like any other
        array.
    - `file_type`: llama.cpp's number for the file type. If None, this is the most common type's.
    - `by_tensor`: returns the types for any of llama.cpp's tensors with another type than `rest`, given the
        names of all tensors and the metadata.
    """

    kinds: Mapping[str, str]
    rest: str | None = None
    output: str | None = None
    file_type: int | None = None
    by_tensor: Callable[[Iterable[str], Mapping[str, Any]], Mapping[str, str]] | None = None


class _WrittenTensor(NamedTuple):
    """A tensor to write. Tensors are encoded one at a time, to limit peak memory."""

    kind: str
    shape: tuple[int, ...]
    bytes: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        kind = _KINDS[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // kind.elements * kind.nbytes


def write(
    path: Path, mapping: Mapping[str, Any], metadata: Mapping[str, Any], mixture: Mixture | None = None
) -> None:
    """Writes a GGUF file from metadata, and from arrays keyed by transformers' or llama.cpp's names.

    `mixture` specifies each weight's type; by default, arrays aren't converted. As in llama.cpp, vectors and
    routers are stored in float32, and rows that aren't a multiple of the block size use a fallback type.

    **Raises:** `CheckpointError` if an array or a key can't be stored in a GGUF file.
    """
    metadata = {"general.architecture": "llama", **metadata}
    known = as_python(metadata)
    tensors: dict[str, _WrittenTensor] = {}
    # As in llama.cpp, a tied embedding has the output's type, and so do per-layer embeddings.
    outputs = {_OUTPUT} if {_OUTPUT, "lm_head.weight"} & mapping.keys() else _EMBEDDINGS
    parts = [(name, part) for name, value in mapping.items() for part in parts_of(path, name, value, known)]
    chosen: Mapping[str, str] = {}
    if mixture is not None and mixture.by_tensor is not None:
        chosen = mixture.by_tensor([part.tensor for _, part in parts], known)
    for name, part in parts:
        if part.tensor in tensors:
            raise file_error(path, name, f"two entries would be called {part.tensor!r}")
        kind = None
        if mixture is not None:
            output = mixture.output if part.tensor in outputs else None
            kind = mixture.kinds.get(name) or output or chosen.get(part.tensor) or mixture.rest
        tensors[part.tensor] = _tensor(path, name, mapping[name], part, mixture, kind)
    keys = {k: v for k, v in metadata.items() if not k.startswith("split.")}
    keys["general.alignment"] = _ALIGNMENT
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    if sizes:
        of_most = _KINDS[sizes.most_common(1)[0][0]].file_type
        keys["general.file_type"] = (
            of_most if mixture is None or mixture.file_type is None else mixture.file_type
        )
    if any(_KINDS[kind].codecs for kind in sizes):
        keys["general.quantization_version"] = 2  # the version of the block layouts
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


class TensorPart(NamedTuple):
    """One of llama.cpp's tensors, along with how to compute it from our array.

    **Attributes:**

    - `tensor`: its name.
    - `cut`: a function extracting it from a stack of experts, or None to use the whole array.
    - `rows`, `columns`: the array's rows and columns in this tensor, in order. None means all.
    - `squeezed`: whether to drop the second axis, of size 1.
    - `function`: a function to apply to the numbers, or None.
    """

    tensor: str
    cut: Callable[[Any], Any] | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    squeezed: bool = False
    function: Callable[[np.ndarray], np.ndarray] | None = None


def parts_of(path: Path, name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[TensorPart]:
    """Yields an array's tensors for the file. `path` is only for error messages."""
    family, shape = family_of(metadata), value.shape
    if family is None or not shape:
        yield TensorPart(llama_cpp_name(name, family))
        return
    cuts = expert_slices(name, len(shape), family.interleaved)
    if order := joined_by(name, family):
        rows = orders(path, name, order, shape[0], metadata)
        yield from (TensorPart(x, rows=own) for x, own in zip(tensors_of(name, family), rows, strict=True))
    elif cuts:
        yield from (TensorPart(x, cut) for x, cut in zip(tensors_of(name, family), cuts, strict=True))
    else:
        tensor = llama_cpp_name(name, family)
        layout, offset = layout_of(tensor, family), family.norm_offset
        rows = order_of(path, name, layout.rows, shape[0], metadata)
        columns = order_of(path, name, layout.columns, shape[-1], metadata)
        written = FUNCTIONS[layout.numbers].written
        function = (lambda x: written(x, offset)) if layout.numbers else None
        yield TensorPart(tensor, None, rows, columns, layout.squeezed and len(shape) == 3, function)


def _tensor(
    path: Path,
    name: str,
    value: Any,
    part: TensorPart,
    mixture: Mixture | None,
    wanted: str | None,
) -> _WrittenTensor:
    def of(value: Any) -> Any:
        value = value if part.cut is None else part.cut(value)
        return value[:, 0] if part.squeezed else value

    is_whole = part.cut is None and not part.squeezed
    stored = value if is_whole else eqx.filter_eval_shape(quaxify(of), value)
    shape = tuple(stored.shape)
    if part.rows is not None:
        shape = (len(part.rows), *shape[1:])
    if not 1 <= len(shape) <= 4:
        raise file_error(path, name, f"GGUF has tensors of one to four axes; found the shape {shape}")
    kind = _kind(path, name, stored, part, mixture, wanted)
    rows = slice(None) if part.rows is None else part.rows

    def read() -> np.ndarray:
        w = value if is_whole else quaxify(of)(value)
        if _KINDS[kind].codecs:
            return _blocks(path, name, w, kind, rows, part.columns)
        x = _floats(path, name, w, kind, part.function)[rows]
        return x if part.columns is None else x[..., part.columns]

    return _WrittenTensor(kind, shape, read)


def _kind(
    path: Path, name: str, value: Any, part: TensorPart, mixture: Mixture | None, wanted: str | None
) -> str:
    out = part.tensor
    own = next((kind for kind in _KINDS if _is_stored(value, kind, part.columns)), None)
    if is_value(value) and own is None and not (wanted and isinstance(value, AbstractQuantizedArray)):
        raise file_error(
            path,
            name,
            f"{type(value).__name__} has no place in the file: merge adapters, and quantise to "
            f"{', '.join(_FILE_TYPES)} along a last axis that blocks of 32 or 256 divide, or materialise it",
        )
    if own is None and value.dtype not in _FLOATS:
        raise file_error(path, name, f"float32, float16 and bfloat16 can be written; found {value.dtype}")
    is_weight = out.endswith(".weight") or name in (mixture.kinds if mixture else ())
    if len(value.shape) == 1 or _ALWAYS_F32.fullmatch(out) or (mixture and not is_weight):
        return "f32"
    if wanted is None or (out == _NEVER_ROUNDED and not is_value(value)):
        return own or _FLOATS[np.dtype(value.dtype)]
    while value.shape[-1] % _KINDS[wanted].elements:
        wanted = _INSTEAD.get(wanted, "f16")
    return wanted


def _is_stored(value: Any, kind: str, columns: np.ndarray | None) -> bool:
    """Returns whether the codes and scales for these columns can be written unchanged as this type."""
    if not isinstance(value, BlockArray) or value.codec not in _KINDS[kind].codecs:
        return False
    elements, inner = _KINDS[kind].elements, value.inner_shape
    whole = len(inner) == (1 if value.order is None else 2) and inner[-1] % elements == 0
    if not whole or value.block != value.codec.block or value.axes:
        return False
    scales = [x.dtype for x in value.scale.parts() if x is not None]
    is_plain = all(dtype.itemsize == 1 or dtype == np.float16 for dtype in scales)
    return is_plain and block_order(value, elements, columns) is not None


def _blocks(
    path: Path, name: str, value: Any, kind: str, rows: Any, columns: np.ndarray | None
) -> np.ndarray:
    if not _is_stored(value, kind, columns):
        dense = _dense(value).astype(np.float32)[..., rows, :]
        dense = dense if columns is None else dense[..., columns]
        value, rows, columns = BlockArray.quantize(dense, codec=kind), slice(None), None
    floats = [x for x in value.scale.parts() if x is not None and x.dtype.itemsize > 1]
    if not all(np.all(np.isfinite(np.asarray(x))) for x in floats):
        raise file_error(path, name, f"has numbers that {kind} has no place for; choose 'bf16' or 'f32'")
    return write_blocks(value, BLOCK_TYPES[_KINDS[kind].number][1], columns)[..., rows, :]


def _floats(
    path: Path, name: str, value: Any, kind: str, function: Callable[[np.ndarray], np.ndarray] | None
) -> np.ndarray:
    given = _dense(value)
    dtype = _KINDS[kind].dtype
    wide = given if given.dtype == dtype and function is None else given.astype(np.float32)
    with np.errstate(over="ignore"):
        out = (wide if function is None else function(wide)).astype(dtype)
    if kind == "f16" and np.any(np.isinf(out) & np.isfinite(wide)):
        raise file_error(path, name, "has numbers that float16 has no place for; choose 'bf16' or 'f32'")
    return out


def _dense(value: Any) -> np.ndarray:
    return np.asarray(value.materialise() if is_value(value) else value)
