"""4-bit checkpoints, in the format used by bitsandbytes and transformers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.tree_util as jtu

from .._checked import checked
from ..files.tensors import open_tensors, write_tensors
from .formats.bitsandbytes import Checkpoint, Storage, tensors_of

__all__ = ["Checkpoint", "Weights", "load", "open_checkpoint", "save"]


@jtu.register_pytree_with_keys_class
class Weights(dict[str, Any]):
    """A 4-bit checkpoint's weights, by name. This also records how each was stored in the file.

    **Attributes:** `storage` and `metadata`, both as in `Checkpoint`.
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
    """Reads a checkpoint into memory. 4-bit weights are left packed.

    **Arguments:**

    - `path`: either a `.safetensors` file, a `.safetensors.index.json`, or a folder with one of these.

    **Returns:** a dictionary from the names in the file to `jax.Array`, `NF4Array` or `FP4Array`. Arrays with
    64-bit dtypes are returned as NumPy arrays, unless you have set `jax_enable_x64`.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` (naming the file and the
    entry) if it is corrupt or incomplete.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike.lm import bitsandbytes

        w = ql.NF4Array.quantize(jax.random.normal(jax.random.key(0), (32, 128)))
        bitsandbytes.save("linear.safetensors", {"weight": w})
        weights = bitsandbytes.load("linear.safetensors")
        ```
    """
    checkpoint = open_checkpoint(path)
    return Weights(checkpoint, checkpoint.storage, checkpoint.metadata)


@checked
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint lazily: each weight is only read once you access it.

    **Arguments:**

    - `path`: as in `load`.

    **Returns:** a mapping from names in the file to arrays.

    **Raises:** as in `load`, except that errors about a single weight are only raised once you access it.
    """
    return Checkpoint(open_tensors(path))


@checked
def save(path: str | os.PathLike[str], mapping: Mapping[str, Any], *, quant_storage: Any = None) -> None:
    """Writes a checkpoint for use with bitsandbytes and transformers.

    If `mapping` comes from `load`, then the file is the same byte for byte. It only appears under its name
    once it is complete.

    **Arguments:**

    - `path`: the file to write.
    - `mapping`: arrays, `NF4Array`s and `FP4Array`s by name.
    - `quant_storage`: the file's dtype for packed codes. Default: the same as in the file `mapping` was
        loaded from, or uint8 if it wasn't loaded.

    **Raises:** `CheckpointError` if a value can't be stored. No file is written in this case.
    """
    path = Path(path)
    tensors = tensors_of(path, mapping, quant_storage)
    write_tensors(path, tensors, getattr(mapping, "metadata", {"format": "pt"}))
