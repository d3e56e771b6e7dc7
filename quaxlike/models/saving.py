"""Writes a model as a checkpoint directory of transformers."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._files import replacing
from ..arrays.quantized import AbstractQuantizedArray, FP4Array, Int8Array, NF4Array
from ..core.quaxify import quaxify
from ..core.values import is_value
from ..interop import CheckpointError, bitsandbytes, open_checkpoint
from ..interop import save as save_weights
from ..interop.json_text import read_json_file
from ..interop.pairs import Pair
from ..surgery.trees import named_arrays
from .families import FAMILIES
from .loading import sources_of


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
    family = next((FAMILIES[name] for name in config.get("architectures") or () if name in FAMILIES), None)
    arrays = named_arrays(model)
    names = list(open_checkpoint(source))
    if "lm_head.weight" in arrays and "lm_head.weight" not in names:
        names.append("lm_head.weight")
        config["tie_word_embeddings"] = False
    tensors: dict[str, Any] = {}
    for name, files in sources_of(model, names, source, family).items():
        tensors |= zip(files, _apart(arrays[name], len(files)), strict=True)
    if odd := [name for name, x in tensors.items() if is_value(x) and not isinstance(x, _KNOWN)]:
        raise CheckpointError(
            f"{directory}: {odd[0]} is a {type(tensors[odd[0]]).__name__}; a checkpoint holds plain arrays, "
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
                _copy(template, directory / file.name)
        elif file.suffix in (".json", ".jinja", ".txt", ".model") and not _of_weights(file.name):
            _copy(file, directory)
    kinds = {type(x) for x in tensors.values() if is_value(x)}
    if kinds <= {Int8Array} and kinds:
        save_weights(directory, tensors, "compressed-tensors", config=config)
        return
    if kinds:
        config["quantization_config"] = _bitsandbytes(tensors, config[entry])
    files = Pair(directory)
    stored = bitsandbytes.tensors_of(directory / files.tensors, tensors)
    files.write(stored, json.dumps(config, indent=2).encode())


def _copy(file: Path, folder: Path) -> None:
    target = folder / file.name
    if target.exists() and target.samefile(file):
        return
    with open(file, "rb") as source, replacing(target) as written:
        shutil.copyfileobj(source, written)


_KNOWN = (NF4Array, FP4Array, Int8Array)


def _of_weights(name: str) -> bool:
    return name == "config.json" or name.endswith(".index.json")


def _apart(leaf: Any, count: int) -> list[Any]:
    """The tensors that make up an array: itself, or the matrices of its experts, one or two for each."""
    if count == 1:
        return [leaf]
    each, rows = count // leaf.shape[0], leaf.shape[1]
    cut = quaxify(lambda x, i, at: x[i, at : at + rows // each])
    return [cut(leaf, i, at) for i in range(leaf.shape[0]) for at in range(0, rows, rows // each)]


def _bitsandbytes(tensors: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The entry of `config.json` for 4 bits."""
    first = next(x for x in tensors.values() if isinstance(x, AbstractQuantizedArray))
    linear = {name.removesuffix(".weight") for name, x in tensors.items() if np.ndim(x) == 2}
    dense = sorted(name for name in linear if not is_value(tensors[f"{name}.weight"]))
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4" if isinstance(first, NF4Array) else "fp4",
        "bnb_4bit_use_double_quant": len(jax.tree.leaves(first)) > 2, "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": dense,
    }  # fmt: skip
