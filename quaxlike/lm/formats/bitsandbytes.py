"""bitsandbytes, i.e. 4-bit weights (NF4 and FP4), and 8-bit weights with one scale per row (LLM.int8).

A 4-bit weight `X` is stored as packed codes under the name `X`, with tensors `X.absmax`, `X.quant_map` and,
if doubly quantised, `X.nested_absmax` and `X.nested_quant_map`. Static information is stored as the bytes of
a JSON object, in `X.quant_state.bitsandbytes__nf4` (or `__fp4`).

Source: Dettmers et al., LLM.int8(), <https://arxiv.org/abs/2208.07339>, and QLoRA,
<https://arxiv.org/abs/2305.14314>.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np

from ...arrays.quantized import AbstractCodebookArray, FP4Array, Int8Array, NestedScales, NF4Array
from ...core.values import is_value
from ...files.errors import CheckpointError, file_error
from ...files.tensors import Tensors, are_sizes, as_jax, read_json
from ...kernels import blockwise
from ...sharding.reading import RowReader
from .format import INT8, UINT8, Format, StoredLayer, StoredWeight, dense_rows, layers, weights_of

TYPES: dict[str, type[AbstractCodebookArray]] = {"nf4": NF4Array, "fp4": FP4Array}
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))}
_STATE = ".quant_state.bitsandbytes__"
COMPANIONS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class Storage(NamedTuple):
    """The dtype and shape of a weight's packed codes in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_states(tensors: Tensors) -> dict[str, tuple[str, str]]:
    """Maps each quantised weight to the name of its quantisation state, and its type."""
    states: dict[str, tuple[str, str]] = {}
    for key in tensors:
        name, found, kind = key.partition(_STATE)
        if not found:
            continue
        if kind not in TYPES:
            raise tensors.error(key, f"unknown type {kind!r}; there are {', '.join(TYPES)}")
        if name in states:
            raise tensors.error(key, f"the weight has another one, {states[name][0]!r}")
        for needed in (name, name + ".absmax", name + ".quant_map"):
            if needed not in tensors:
                raise tensors.error(needed, f"is missing beside {key!r}")
        states[name] = key, kind
    return states


def check_no_orphans(tensors: Tensors, states: Mapping[str, Any], plain: Iterable[str]) -> None:
    for key in sorted(tensors.unlisted):
        if key.partition(_STATE)[0] in tensors:
            raise tensors.error(key, "is in the files, and the index leaves it out")
    for key in plain:
        for suffix in COMPANIONS:
            name = key.removesuffix(suffix)
            if name != key and name in tensors and name not in states:
                needed = f"{name}{_STATE}nf4"
                raise tensors.error(needed, f"is missing (or __fp4) beside {key!r}")


class _State(NamedTuple):
    block_size: int
    dtype: np.dtype
    shape: tuple[int, ...]
    nested_offset: float | None

    def to_json(self, kind: str) -> bytes:
        name = next(name for name, dtype in _DTYPES.items() if dtype == self.dtype)
        out = {"quant_type": kind, "blocksize": self.block_size, "dtype": name, "shape": list(self.shape)}
        if self.nested_offset is not None:
            out |= {
                "nested_blocksize": blockwise.NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": self.nested_offset,
            }
        return json.dumps(out).encode()


_PLAIN_FIELDS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_FIELDS = {"nested_blocksize", "nested_dtype", "nested_offset"}


def _read_state(tensors: Tensors, key: str, kind: str) -> _State:
    raw = tensors[key]

    def damaged(problem: str) -> CheckpointError:
        return tensors.error(key, problem)

    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise damaged(f"must be bytes, found {raw.dtype} of shape {raw.shape}")
    fields = read_json(tensors.path, raw.tobytes(), f"{key!r}")
    nested = bool(_NESTED_FIELDS & set(fields))
    expected = _PLAIN_FIELDS | (_NESTED_FIELDS if nested else set())
    if set(fields) != expected:
        differing = ", ".join(sorted(expected ^ set(fields)))
        raise damaged(f"expected the fields {', '.join(sorted(expected))}; missing or unknown: {differing}")
    if fields["quant_type"] != kind:
        raise damaged(f"quant_type must be {kind!r}, found {fields['quant_type']!r}")
    block_size, shape, offset = fields["blocksize"], fields["shape"], fields.get("nested_offset")
    if type(block_size) is not int:
        raise damaged(f"blocksize must be an integer, found {block_size!r}")
    try:
        blockwise.check_block_size(block_size)
    except ValueError as error:
        raise damaged(str(error)) from None
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in _DTYPES:
        raise damaged(f"dtype must be one of {', '.join(_DTYPES)}, found {fields['dtype']!r}")
    if not are_sizes(shape) or not shape or 0 in shape:
        raise damaged(f"shape must be a list of positive sizes, found {shape!r}")
    if nested:
        if fields["nested_blocksize"] != blockwise.NESTED_BLOCK or fields["nested_dtype"] != "float32":
            raise damaged(
                f"scales nested in blocks of {blockwise.NESTED_BLOCK} float32 are supported, found "
                f"{fields['nested_blocksize']!r} of {fields['nested_dtype']!r}"
            )
        if (
            offset is None
            or type(offset) not in (int, float)
            or not abs(offset) < float(np.finfo(np.float32).max)
        ):
            raise damaged(f"nested_offset must be a finite number, found {offset!r}")
    return _State(block_size, _DTYPES[fields["dtype"]], tuple(shape), offset)


def rows_of(tensors: Tensors, name: str, key: str, kind: str) -> RowReader:
    """Creates a row reader. Reading parts requires rows of whole blocks, and scales that aren't nested."""
    state = _read_state(tensors, key, kind)

    def read(*rows: Any) -> Any:
        return read_weight(tensors, name, key, kind, rows or None)

    count, *rest = state.shape
    free = state.nested_offset is None and rest and math.prod(rest) % state.block_size == 0
    return RowReader(count if free else None, read)


def read_weight(
    tensors: Tensors, name: str, key: str, kind: str, rows: tuple[int, int] | None = None
) -> AbstractCodebookArray:
    """Reads a weight, or just some of its rows if `rows_of` supports this."""
    state = _read_state(tensors, key, kind)
    cls = TYPES[kind]
    size, shape = math.prod(state.shape), state.shape
    blocks = -(-size // state.block_size)
    read = tensors.mapped if rows else tensors.__getitem__

    def companion(suffix: str, dtype: type, wanted: tuple[int, ...]) -> np.ndarray:
        if name + suffix not in tensors:
            raise tensors.error(name + suffix, f"is missing beside {key!r}")
        info = tensors.info[name + suffix]
        if info.dtype != dtype or info.shape != wanted:
            raise tensors.error(
                name + suffix,
                f"expected {np.dtype(dtype)} of shape {wanted} for a weight of shape {state.shape} in blocks "
                f"of {state.block_size}, found {info.dtype} of shape {info.shape}",
            )
        return read(name + suffix)

    info = tensors.info[name]
    if info.nbytes != (size + 1) // 2 or math.prod(info.shape) != max(info.shape, default=1):
        raise tensors.error(
            name,
            f"expected {(size + 1) // 2:,} bytes in a row or a column for a weight of shape {state.shape}, "
            f"found {info.nbytes:,} in shape {info.shape}",
        )
    if not np.array_equal(companion(".quant_map", np.float32, (16,)), cls.codebook):
        raise tensors.error(name + ".quant_map", f"is not the table of {kind}")
    codes = read(name).reshape(-1).view(np.uint8)
    if state.nested_offset is None:
        for suffix in (".nested_absmax", ".nested_quant_map"):
            if name + suffix in tensors:
                raise tensors.error(name + suffix, f"has no counterpart in {key!r}")
        scale = companion(".absmax", np.float32, (blocks,))
        if rows:
            row = size // shape[0]
            codes = codes[rows[0] * row // 2 : rows[1] * row // 2]
            scale = scale[rows[0] * row // state.block_size : rows[1] * row // state.block_size]
            shape = (rows[1] - rows[0], *shape[1:])
        scale = jnp.asarray(scale)
    else:
        nested_blocks = -(-blocks // blockwise.NESTED_BLOCK)
        quant_map = companion(".nested_quant_map", np.float32, (256,))
        usual = np.array_equal(quant_map, blockwise.dynamic_map())
        scale = NestedScales(
            jnp.asarray(companion(".absmax", np.uint8, (blocks,))),
            jnp.asarray(companion(".nested_absmax", np.float32, (nested_blocks,))),
            jnp.float32(state.nested_offset),
            None if usual else tuple(quant_map.tolist()),
        )
    return cls.from_flat(
        jnp.asarray(codes), scale, shape=shape, block_size=state.block_size, dtype=state.dtype
    )


def weight_tensors(
    path: Path, name: str, w: AbstractCodebookArray, storage: Storage
) -> dict[str, np.ndarray]:
    kind = next(kind for kind, cls in TYPES.items() if cls is type(w))
    flat = w.flattened()
    if flat is None:
        raise file_error(
            path,
            name,
            "the format stores one row-major matrix; transposed views and stacks of weights "
            "quantised separately have to be saved one by one",
        )
    if w.dtype not in _DTYPES.values():
        raise file_error(path, name, f"the format has no dtype {w.dtype} for quantised weights")
    codes = np.asarray(flat.codes).view(storage.dtype).reshape(storage.shape)
    out = {name: codes, name + ".quant_map": type(w).codebook}
    offset = None
    if isinstance(flat.scale, NestedScales):
        offset = float(flat.scale.offset)
        out[name + ".absmax"] = np.asarray(flat.scale.codes)
        out[name + ".nested_absmax"] = np.asarray(flat.scale.absmax)
        out[name + ".nested_quant_map"] = flat.scale.table
    else:
        out[name + ".absmax"] = np.asarray(flat.scale)
    state = _State(w.block, w.dtype, w.shape, offset).to_json(kind)
    out[f"{name}{_STATE}{kind}"] = np.frombuffer(state, np.uint8)
    return out


def storage_for(
    path: Path, name: str, w: AbstractCodebookArray, loaded: Storage | None, quant_storage: Any
) -> Storage:
    nbytes = w.codes.size
    if quant_storage is None and loaded is not None and loaded.nbytes == nbytes:
        return loaded
    dtype = np.dtype(np.uint8 if quant_storage is None else jnp.dtype(quant_storage))
    if nbytes % dtype.itemsize:
        raise file_error(path, name, f"{nbytes:,} bytes of codes cannot be viewed as {dtype}")
    return Storage(dtype, (nbytes // dtype.itemsize, 1))


class Checkpoint(Mapping[str, Any]):
    """A mapping from names to the weights in a 4-bit checkpoint. Looking up a weight reads it.

    **Attributes:**

    - `storage`: how the file stores the codes of each quantised weight, for `save` to store them in the same
        way.
    - `metadata`: the string-valued entries of the header.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.states = find_states(tensors)
        companions = {name + suffix for name in self.states for suffix in COMPANIONS} | {
            key for key, _ in self.states.values()
        }
        # An ordered set.
        self._names = {name: None for name in tensors if name not in companions}
        self.storage = {
            name: Storage(tensors.info[name].dtype, tensors.info[name].shape) for name in self.states
        }
        self.metadata = tensors.metadata
        check_no_orphans(tensors, self.states, self._names)

    def __getitem__(self, name: str) -> Any:
        if name in self.states:
            return read_weight(self._tensors, name, *self.states[name])
        if name not in self._names:
            raise KeyError(name)
        return as_jax(self._tensors[name])

    def rows(self, name: str) -> RowReader:
        """Returns a reader for a single weight. This can read individual rows if the blocks allow it."""
        if name in self.states:
            return rows_of(self._tensors, name, *self.states[name])
        return dense_rows(self._tensors, name)

    def __contains__(self, name: object) -> bool:  # the default implementation would read the weight
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensors_of(path: Path, mapping: Mapping[str, Any], quant_storage: Any = None) -> dict[str, np.ndarray]:
    storage = getattr(mapping, "storage", {})
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, array: np.ndarray) -> None:
        if name in tensors:
            raise file_error(path, name, "two entries would have this name")
        tensors[name] = array

    for name, value in mapping.items():
        if isinstance(value, NF4Array | FP4Array):
            view = storage_for(path, name, value, storage.get(name), quant_storage)
            for key, array in weight_tensors(path, name, value, view).items():
                put(key, array)
        elif is_value(value):
            raise file_error(
                path, name, f"the format has no place for {type(value).__name__}; materialise it"
            )
        else:
            put(name, np.asarray(value))
    return tensors


def settings_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `quantization_config` for these weights. This is empty if none are 4-bit."""
    first = next((x for x in mapping.values() if isinstance(x, NF4Array | FP4Array)), None)
    if first is None:
        return {}
    layers = (name.removesuffix(".weight") for name, x in mapping.items() if np.ndim(x) == 2)
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4" if isinstance(first, NF4Array) else "fp4",
        "bnb_4bit_use_double_quant": len(jtu.tree_leaves(first)) > 2,
        "bnb_4bit_compute_dtype": str(first.dtype), "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": sorted(x for x in layers if not is_value(mapping.get(f"{x}.weight"))),
    }  # fmt: skip


def weights(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Finds the 4-bit and 8-bit weights in a checkpoint, keyed by name."""
    held = Checkpoint(tensors)
    out: dict[str, StoredWeight] = {}
    for name, (key, _) in held.states.items():
        companions = (name + suffix for suffix in COMPANIONS if name + suffix in tensors)
        read, rows = (lambda name=name: held[name]), (lambda name=name: held.rows(name))
        out[name] = StoredWeight((name, key, *companions), read, rows)
    # Not every int8 tensor is a quantised weight: the settings or other tensors must indicate this.
    is_used = settings or layers(tensors, *_INT8_PARTS)
    found = layers(tensors, *_INT8_PARTS, dtypes=[INT8]) if is_used else ()
    return out | weights_of(found, ("weight", *_INT8_PARTS), _read_int8)


_INT8_PARTS = ("SCB", "weight_format")


def _read_int8(layer: StoredLayer) -> Any:
    n, k = layer.shape("weight", 2)
    if "weight_format" in layer:
        found = layer.get("weight_format", [UINT8], (), (1,))
        if found != 0:
            raise layer.error("weight_format", f"must be 0, row-major; found {found}. Save it again on a CPU")
    scale = layer.scales("SCB", (n,))
    codes = layer.get("weight", [INT8], (n, k))
    rows = (scale / np.float32(127)).astype(np.float32)[:, None]
    return Int8Array(jnp.asarray(codes), jnp.asarray(rows), block_size=None)


FORMAT = Format(
    ("bitsandbytes",), weights, codes=(".SCB", ".weight_format"), by_rows=True,
    detect=lambda tensors: bool(weights(tensors, {})),
    write=lambda path, mapping: (tensors_of(path, mapping), settings_of(mapping)),
    types=(NF4Array, FP4Array),
    # Each weight's tensors already hold everything needed.
    without_effect=(
        "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold",
        "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    ),
)  # fmt: skip
