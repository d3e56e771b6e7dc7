"""Writes a model as a checkpoint directory of transformers."""

import os
from pathlib import Path

from jaxtyping import PyTree

from .._checked import checked
from .._files import copied
from ..arrays.quantized import FP4Array, Int8Array, NF4Array
from ..core.values import is_value
from ..interop import CheckpointError, open_checkpoint
from ..interop import save as save_weights
from ..interop.json_text import read_json_file
from ..interop.pairs import Pair
from ..interop.pieces import taken_apart
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
        `FP4Array`, which are written as bitsandbytes does; or `Int8Array`, as compressed-tensors does. Merge
        adapters first.
    - `source`: the directory that it was read from.

    **Raises:** `CheckpointError` for weights of other types; then nothing is written.

    !!! example

        ```python
        import quaxlike as ql
        from quaxlike.interop import peft

        def merged(base, adapter, out):
            model, _ = ql.models.load(base)
            ql.models.save(out, ql.merge(peft.load_adapter(adapter, model)), base)
        ```
    """
    directory, source = Path(directory), Path(source)
    path = Pair(source).config_path()
    config = read_json_file(path, "the configuration")
    model = model.unstacked() if hasattr(model, "unstacked") else model
    arrays = named_arrays(model)
    names = list(open_checkpoint(source))
    if "lm_head.weight" in arrays and "lm_head.weight" not in names:
        names.append("lm_head.weight")
        config["tie_word_embeddings"] = False
    tensors = taken_apart(arrays, sources(model, names, source))
    kinds = {type(x): name for name, x in tensors.items() if is_value(x)}
    if odd := [kind for kind in kinds if kind not in _KNOWN]:
        raise CheckpointError(
            f"{directory}: {kinds[odd[0]]} is a {odd[0].__name__}; a checkpoint holds plain arrays, "
            f"{', '.join(kind.__name__ for kind in _KNOWN)}. Merge adapters, and materialise the others."
        )

    config.pop("quantization_config", None)
    entry = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[entry] = str(next(x.dtype for x in arrays.values()))
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_dir() and file.name == "additional_chat_templates":
            (directory / file.name).mkdir(exist_ok=True)
            for template in file.iterdir():
                copied(template, directory / file.name)
        elif file.suffix in (".json", ".jinja", ".txt", ".model") and not _of_weights(file.name):
            copied(file, directory)
    save_weights(directory, tensors, _KNOWN[next(iter(kinds), NF4Array)], config=config)


# The types that a checkpoint may hold, and its format then.
_KNOWN = {NF4Array: "bitsandbytes", FP4Array: "bitsandbytes", Int8Array: "compressed-tensors"}


def _of_weights(name: str) -> bool:
    return name == "config.json" or name.endswith(".index.json")
