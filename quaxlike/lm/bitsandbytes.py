"""4-bit checkpoints in the format of bitsandbytes and transformers."""

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
    """The weights of a 4-bit checkpoint in memory, by name. It also remembers how the file stored them.

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
    """Reads a checkpoint. 4-bit weights stay packed.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json`, or a folder with either.

    **Returns:** a dict from the names in the file to `jax.Array`, `NF4Array` or `FP4Array`. 64-bit arrays
    stay NumPy arrays unless `jax_enable_x64` is set.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if it is damaged or
    incomplete. The message names the file and the entry.

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
    """Opens a checkpoint, and reads each weight when it is accessed.

    **Arguments:**

    - `path`: as for `load`.

    **Returns:** a mapping from the names in the file to arrays.

    **Raises:** as for `load`. Errors about a single weight are raised when it is accessed.
    """
    return Checkpoint(open_tensors(path))


@checked
def save(path: str | os.PathLike[str], mapping: Mapping[str, Any], *, quant_storage: Any = None) -> None:
    """Writes a checkpoint for bitsandbytes and transformers.

    The result of `load` is written back byte for byte. The file only appears once it is complete.

    **Arguments:**

    - `path`: the file to write.
    - `mapping`: arrays, `NF4Array`s and `FP4Array`s by name.
    - `quant_storage`: the dtype of packed codes in the file. Default: as in the file that `mapping` was
        loaded from, else uint8.

    **Raises:** `CheckpointError` for a value that cannot be stored. No file is written in this case.
    """
    path = Path(path)
    tensors = tensors_of(path, mapping, quant_storage)
    write_tensors(path, tensors, getattr(mapping, "metadata", {"format": "pt"}))
