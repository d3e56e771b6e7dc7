"""Writes a model as a checkpoint directory of transformers."""

import os
from pathlib import Path

from jaxtyping import PyTree

from .._checked import checked
from ..interop import open_checkpoint
from ..interop.json_text import read_json_file
from ..interop.pairs import Pair
from ..interop.pieces import taken_apart
from ..interop.saving import save_like
from ..surgery.trees import named_arrays
from .loading import sources


@checked
def save(directory: str | os.PathLike[str], model: PyTree, source: str | os.PathLike[str]) -> None:
    """Writes a model to a directory that transformers loads.

    Arrays have the names that they have in the checkpoint that the model was read from, experts one by one
    if they are so there. Its tokeniser, templates and settings of generation are copied.

    **Arguments:**

    - `directory`: is made if it does not exist.
    - `model`: as [`quaxlike.models.load`][] gave it, with other weights: plain arrays; `NF4Array` or
        `FP4Array`, which are written as bitsandbytes does; `BlockArray` of the codec `mxfp4`, as GPT-OSS is
        published; `Int8Array` and other `BlockArray`, as compressed-tensors does. Merge adapters first.
    - `source`: the directory that it was read from.

    **Raises:** `CheckpointError` for weights of other types, or of several formats; then nothing is written.

    !!! example

        ```python
        import quaxlike as ql
        from quaxlike.interop import peft

        def merged(base, adapter, out):
            model, _ = ql.models.load(base)
            ql.models.save(out, ql.merge(peft.load_adapter(adapter, model)), base)
        ```
    """
    source = Path(source)
    config = read_json_file(Pair(source).config_path(), "the configuration")
    model = model.unstacked() if hasattr(model, "unstacked") else model
    arrays, names = named_arrays(model), list(open_checkpoint(source))
    if "lm_head.weight" in arrays and "lm_head.weight" not in names:
        names.append("lm_head.weight")
        config["tie_word_embeddings"] = False
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(next(iter(arrays.values())).dtype)
    save_like(source, Path(directory), taken_apart(arrays, sources(model, names, source)), config)
