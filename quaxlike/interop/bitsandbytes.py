"""4-bit checkpoints in the format of bitsandbytes and transformers.

A weight `X` is stored as packed codes under its name, with companions `X.absmax`, `X.quant_map`, for
double quantisation `X.nested_absmax` and `X.nested_quant_map`, and
`X.quant_state.bitsandbytes__nf4` (or `__fp4`), the bytes of a JSON object with the statics.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._checked import a_or_an, checked
from ..arrays.quantized import FP4Array, NF4Array
from ..core.values import is_value
from ..sharding.reading import Rows
from . import llm_int8
from .blocks import Weight
from .errors import complain
from .format import Format
from .quant_state import (
    COMPANIONS,
    Storage,
    check_no_orphans,
    find_states,
    read_weight,
    rows_of,
    storage_for,
    weight_tensors,
)
from .rows import dense_rows
from .tensors import Tensors, as_jax, open_tensors, write_tensors

__all__ = ["Checkpoint", "Weights", "load", "open_checkpoint", "save"]


class Checkpoint(Mapping[str, Any]):
    """The weights of a 4-bit checkpoint by name; each look-up reads one weight.

    **Attributes:**

    - `storage`: how the file stores the codes of each quantised weight; `save` stores them the same way.
    - `metadata`: the free text entries of the header.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.states = find_states(tensors)
        companions = {name + suffix for name in self.states for suffix in COMPANIONS} | {
            key for key, _ in self.states.values()
        }
        self._names = {name: None for name in tensors if name not in companions}  # an ordered set
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

    def rows(self, name: str) -> Rows:
        """The weight of this name, which can be read by rows if its blocks allow it."""
        if name in self.states:
            return rows_of(self._tensors, name, *self.states[name])
        return dense_rows(self._tensors, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@jtu.register_pytree_with_keys_class
class Weights(dict[str, Any]):
    """The weights of a 4-bit checkpoint by name, in memory: a dict that remembers how the file stored them.

    **Attributes:** `storage` and `metadata`, as for `Checkpoint`.
    """

    def __init__(
        self, items: Mapping[str, Any], storage: Mapping[str, Storage], metadata: Mapping[str, str]
    ) -> None:
        super().__init__(items)
        self.storage = storage
        self.metadata = metadata

    def tree_flatten_with_keys(self) -> Any:
        names = sorted(self)
        statics = tuple(names), tuple(self.storage.items()), tuple(self.metadata.items())
        return [(jtu.DictKey(name), self[name]) for name in names], statics

    @classmethod
    def tree_unflatten(cls, statics: Any, children: Any) -> "Weights":
        names, storage, metadata = statics
        return cls(dict(zip(names, children, strict=True)), dict(storage), dict(metadata))


@checked
def load(path: str | os.PathLike[str]) -> Weights:
    """Reads a checkpoint, and leaves 4-bit weights packed.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json` of several, or a folder that holds one.

    **Returns:** a dict from the names in the file to `jax.Array`, `NF4Array` or `FP4Array`. 64-bit arrays
    stay NumPy arrays unless `jax_enable_x64` is set.

    **Raises:** `FileNotFoundError` if there is nothing at `path`; `CheckpointError` if it is damaged or
    incomplete, with file, entry, expected and found.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike.interop import bitsandbytes

        w = ql.NF4Array.quantize(jax.random.normal(jax.random.key(0), (32, 128)))
        bitsandbytes.save("linear.safetensors", {"weight": w})
        weights = bitsandbytes.load("linear.safetensors")
        ```
    """
    checkpoint = open_checkpoint(path)
    return Weights(checkpoint, checkpoint.storage, checkpoint.metadata)


@checked
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint like `load`, but reads each weight when it is looked up.

    **Arguments:**

    - `path`: as for `load`.

    **Returns:** a mapping from the names in the file.

    **Raises:** as for `load`; errors about a single weight when that is looked up.
    """
    return Checkpoint(open_tensors(path))


@checked
def save(
    path: str | os.PathLike[str],
    mapping: Mapping[str, Any],
    *,
    quant_storage: Any = None,
) -> None:
    """Writes a checkpoint that bitsandbytes and transformers load.

    The result of `load` is written byte for byte as it was read. The file appears only once it is complete.

    **Arguments:**

    - `path`: the file to write.
    - `mapping`: arrays, `NF4Array`s and `FP4Array`s by name.
    - `quant_storage`: the dtype that packed codes are viewed as. Default: the dtype in the file that
        `mapping` was loaded from, else uint8.

    **Raises:** `CheckpointError` for a value that the format cannot hold; no file is written then.
    """
    path = Path(path)
    tensors = tensors_of(path, mapping, quant_storage)
    write_tensors(path, tensors, getattr(mapping, "metadata", {"format": "pt"}))


def tensors_of(path: Path, mapping: Mapping[str, Any], quant_storage: Any = None) -> dict[str, np.ndarray]:
    """The tensors that `save` writes to `path`."""
    storage = getattr(mapping, "storage", {})
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, array: np.ndarray) -> None:
        if name in tensors:
            raise complain(path, name, "two entries would have this name")
        tensors[name] = array

    for name, value in mapping.items():
        if isinstance(value, NF4Array | FP4Array):
            view = storage_for(path, name, value, storage.get(name), quant_storage)
            for key, array in weight_tensors(path, name, value, view).items():
                put(key, array)
        elif is_value(value):
            raise complain(path, name, f"the format has no place for {a_or_an(type(value))}; materialise it")
        else:
            put(name, np.asarray(value))
    return tensors


def settings_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of these weights; nothing if none is in 4 bits."""
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


def weights(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Weight]:
    """The quantised weights of a checkpoint, in 4 bits or in 8 bits, by name."""
    held = Checkpoint(tensors)
    out: dict[str, Weight] = {}
    for name, (key, _) in held.states.items():
        companions = (name + suffix for suffix in COMPANIONS if name + suffix in tensors)
        read, rows = (lambda name=name: held[name]), (lambda name=name: held.rows(name))
        out[name] = Weight((name, key, *companions), read, rows)
    return out | llm_int8.weights(tensors, settings)


FORMAT = Format(
    ("bitsandbytes",), weights, codes=(".SCB", ".weight_format"), by_rows=True,
    is_in=lambda tensors: bool(weights(tensors, {})),
    written=lambda path, mapping: (tensors_of(path, mapping), settings_of(mapping)),
    takes=lambda value: isinstance(value, NF4Array | FP4Array),
)  # fmt: skip
