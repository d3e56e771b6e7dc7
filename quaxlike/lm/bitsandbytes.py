"""4-bit checkpoints in the format used by bitsandbytes and transformers."""

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
    """The weights of a 4-bit checkpoint as a dict, along with how they were stored in the file.

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
    """Loads a checkpoint. 4-bit weights remain packed.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json` file, or a folder containing either of these.

    **Returns:** a dict from names in the file to `jax.Array`, `NF4Array` or `FP4Array`. 64-bit arrays are
    returned as NumPy arrays unless `jax_enable_x64` is set.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if the checkpoint is damaged
    or incomplete. The error message includes the file and the entry.

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
    """Opens a checkpoint for lazy loading, in which each weight is only read when it is accessed.

    **Arguments:**

    - `path`: as for `load`.

    **Returns:** a mapping from names in the file to arrays.

    **Raises:** as for `load`, except that errors for an individual weight are raised when it is accessed.
    """
    return Checkpoint(open_tensors(path))


@checked
def save(path: str | os.PathLike[str], mapping: Mapping[str, Any], *, quant_storage: Any = None) -> None:
    """Saves a checkpoint for use with bitsandbytes and transformers.

    Saving the output of `load` reproduces the original file byte for byte. The file is written atomically.

    **Arguments:**

    - `path`: the file to write.
    - `mapping`: maps names to arrays, including `NF4Array`s and `FP4Array`s.
    - `quant_storage`: the dtype used for the packed codes in the file. Defaults to that of the file that
        `mapping` was loaded from, or otherwise to uint8.

    **Raises:** `CheckpointError` if a value can't be stored, in which case no file is written.
    """
    path = Path(path)
    tensors = tensors_of(path, mapping, quant_storage)
    write_tensors(path, tensors, getattr(mapping, "metadata", {"format": "pt"}))
