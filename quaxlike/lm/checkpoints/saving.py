"""`write` and `save_like`, for writing weights to checkpoints readable by other programs."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._checked import checked
from ...core.values import is_value
from ...files import safetensors
from ...files.errors import CheckpointError
from ...files.tensors import write_tensors
from ..folders.companions import companion_files, module_folders, remove_others, stage_copies
from ..folders.file_pair import Pair
from ..formats import FORMATS
from ..gguf import config as gguf_config
from ..gguf import writer


@checked
def write(
    path: str | os.PathLike[str],
    mapping: Mapping[str, Any],
    format: str = "safetensors",
    *,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights to a checkpoint, so that [`quaxlike.lm.read`][] restores them bit for bit.

    Use this for weights that don't belong to one of our models. For models from [`quaxlike.lm.load`][], use
    [`quaxlike.lm.save`][] instead.

    **Arguments:**

    - `path`: the file to write. For bitsandbytes, compressed-tensors and mxfp4 this can also be a folder, for
        `model.safetensors` and `config.json`.
    - `mapping`: arrays and quantised arrays, by their names in transformers.
    - `format`: plain arrays are always written as they are. For quantised arrays, `"gguf"` supports
        llama.cpp's codecs; `"bitsandbytes"` supports `NF4Array` and `FP4Array`;
        `"compressed-tensors"` (vLLM) supports `Int8Array`, and arrays with `fp8` or with integers and
        floating-point scales; `"mxfp4"` (GPT-OSS) supports arrays with this codec; and `"safetensors"`
        supports every type in quaxlike.
    - `config`: the model's `config.json`. This is written to the folder, or converted to GGUF metadata.
    - `metadata`: only for GGUF, any additional key-value pairs, e.g. describing a tokeniser, or copied from
        another file. Known keys always have the same type. Other keys keep the dtype of NumPy scalars and
        arrays.

    **Raises:** `ValueError` if the format is unknown. `CheckpointError` if the format doesn't support a
    value. In this case nothing is written.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike import lm

        w = jax.random.normal(jax.random.key(0), (32, 128))
        mapping = {"lm_head.weight": ql.BlockArray.quantize(w, codec="q8_0")}
        lm.write("head.gguf", mapping, format="gguf")
        lm.read("head.gguf")["lm_head.weight"]
        ```
    """
    path, writers = Path(path), _writers()
    if format not in (known := ("gguf", *writers, "safetensors")):
        raise ValueError(f"The formats that can be written are {', '.join(known)}; found {format!r}.")
    if format == "safetensors":
        safetensors.save(path, dict(mapping))
    elif format == "gguf":
        keys = gguf_config.metadata_of(config) if config is not None else {}
        factors = gguf_config.rope_tensors(config) if config is not None else {}
        writer.write(path, {**factors, **mapping}, {**keys, **(metadata or {})})
    else:
        _write_folder(path, *writers[format](path, mapping), config or {})


def _writers() -> dict[str, Callable[..., tuple[dict[str, np.ndarray], dict[str, Any]]]]:
    return {format.name: format.write for format in FORMATS if format.write is not None}


def _write_folder(
    path: Path,
    tensors: dict[str, np.ndarray],
    settings: dict[str, Any],
    config: Mapping[str, Any],
    header: Mapping[str, str] = {"format": "pt"},
    last: Callable[[], None] = lambda: None,
) -> None:
    if path.suffix == ".safetensors":  # a single file has no config.json, so put the settings in its header
        metadata = {"quantization_config": json.dumps(settings)} if settings else {}
        write_tensors(path, tensors, {**header, **metadata})
        return
    path.mkdir(parents=True, exist_ok=True)
    config = dict(config)
    before = config.pop("quantization_config", None) or {}
    config.pop("quantization", None)  # MLX reads this
    if settings:
        same = before.get("quant_method") == settings["quant_method"]
        config["quantization_config"] = {**before, **settings} if same else settings
    Pair(path).write(tensors, json.dumps(config, indent=1).encode(), header, last=last)


def save_like(
    source: Path, directory: Path, mapping: Mapping[str, Any], config: Mapping[str, Any], own: bool = False
) -> None:
    """Writes weights to a folder, along with the other files of the checkpoint `source`.

    These are the tokeniser, chat templates, generation settings, and modules of sentence-transformers.
    Existing files of this kind are replaced or removed: one model's weights must never end up next to
    another's tokeniser.

    The types of the weights determine the format. If `own` is set, this is instead our own format, which
    supports every type.

    **Raises:** `CheckpointError` if no format supports one of the types, or if a file to copy isn't a regular
    file inside the folder. In both cases nothing is written.
    """
    formats = set() if own else {_format_of(directory, name, x) for name, x in mapping.items() if is_value(x)}
    if len(formats) > 1:
        raise CheckpointError(
            f"{directory}: the weights are in several formats, {', '.join(sorted(formats))}; a checkpoint of "
            "transformers is in one of them. Materialise the others, or write them with format='quaxlike'."
        )
    header = {"format": "pt"}
    if own:
        tensors, manifest = safetensors.stored(directory, mapping.items())
        written, header = (tensors, {}), header | manifest
    else:
        written = _writers()[next(iter(formats), "bitsandbytes")](directory, mapping)
    copies, modules = companion_files(source), module_folders(source)
    directory.mkdir(parents=True, exist_ok=True)
    for module in modules:  # a module needs a folder, even without any files
        (directory / module).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stage_copies(copies, directory, stack)
        _write_folder(directory, *written, config, header, last=lambda: remove_others(directory, copies))


def is_published(mapping: Mapping[str, Any]) -> bool:
    """Returns whether transformers can read these weights, all in one of its formats."""
    values = [x for x in mapping.values() if is_value(x)]
    found = set(map(_accepting_format, values))
    return len(found) < 2 and None not in found


def _accepting_format(value: Any) -> str | None:
    return next((format.name for format in FORMATS if format.accepts(value)), None)


def _format_of(directory: Path, name: str, value: Any) -> str:
    found = _accepting_format(value)
    if found is None:
        known = dict.fromkeys(kind.__name__ for format in FORMATS for kind in format.types)
        raise CheckpointError(
            f"{directory}: {name} is of type {type(value).__name__}; a checkpoint holds plain arrays, "
            f"{', '.join(known)}. Merge adapters, and materialise the others, or write them with "
            "format='quaxlike'."
        )
    return found
