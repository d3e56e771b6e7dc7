"""`read` and `open_checkpoint`, for reading checkpoints in any format."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from ml_dtypes import float8_e4m3fn, float8_e5m2, float8_e8m0fnu

from ..._checked import checked
from ...arrays.quantized import BlockArray, Int8Array
from ...files.errors import file_error, quoted
from ...files.json_text import read_json, read_json_file
from ...files.safetensors import open_values
from ...files.tensors import Tensors, as_jax, open_tensors
from ...sharding.placing import Rule as SpecRule
from ...sharding.placing import by_name
from ...sharding.reading import RowReader, read_onto
from ..folders.entries import warn_of_unknown
from ..folders.file_pair import Pair, consistent
from ..formats import FORMATS
from ..formats.format import OF_ALL, Format, dense_rows, rows_of_weight
from ..gguf.container import GgufFile, holds_gguf, open_gguf
from ..sharding import usual_rule

# Tensors about activations and caches only, not needed to read the weights.
_SKIPPED = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale"),
    *(".activation_scale", ".output_scale", ".k_scale", ".v_scale"),
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Checkpoint(Mapping[str, Any]):
    """The weights of a checkpoint, by their unquantised names. Looking up a weight reads it.

    **Attributes:**

    - `config`: the contents of `config.json`, if there is one. Otherwise, for GGUF files, this is converted
        from the metadata.
    - `metadata`: the strings in a safetensors file's header, or the key-value pairs in a GGUF file. Numbers
        without a Python type are NumPy scalars.
    - `format`: the detected format, e.g. "gptq", "gguf" or "safetensors".
    - `quantises_embeddings`: whether embeddings are quantised as well. If so, the dtype of activations can't
        be inferred from any weight.
    - `longest_axis`: the size of the longest axis amongst all stored tensors. Codes can be packed, so an axis
        of a weight can be up to 32 times as long as this.
    """

    weights: Mapping[str, Callable[[], Any]]
    _: dataclasses.KW_ONLY
    format: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    dtype: DTypeLike | None
    longest_axis: int
    readers: Mapping[str, Callable[[], RowReader]] = dataclasses.field(
        default_factory=dict[str, Callable[[], RowReader]]
    )
    quantises_embeddings: bool = False

    def __getitem__(self, name: str) -> Any:
        return self._as_asked(self.weights[name]())

    def rows(self, name: str) -> RowReader:
        """Returns a reader for a single weight. For some formats this can read individual rows."""
        if name not in self.readers:
            return RowReader(None, lambda: self[name])
        rows = self.readers[name]()
        return dataclasses.replace(rows, read=lambda *part: self._as_asked(rows.read(*part)))

    def _as_asked(self, value: Any) -> Any:
        if self.dtype is None or not isinstance(value, BlockArray | Int8Array):
            return value
        return dataclasses.replace(value, logical_dtype=jnp.dtype(self.dtype))

    def standing_for(self, dtype: DTypeLike) -> "Checkpoint":
        """Returns a copy of this checkpoint with another dtype for block arrays."""
        return dataclasses.replace(self, dtype=dtype)

    def __contains__(self, name: object) -> bool:  # the default would read the weight
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@checked
def read(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    sharding: SpecRule | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint in any supported format.

    These are GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes, HQQ, torchao, MLX, GGUF, and
    plain safetensors. The format is detected automatically.

    **Arguments:**

    - `path`: either a single file, or a folder with a GGUF file or with `config.json` and safetensors files.
    - `dtype`: the dtype of block arrays. Default: float32, which can represent their values exactly. (For
        4-bit weights, files from bitsandbytes specify the dtype themselves.)
    - `mesh`: a mesh over one or many processes. Weights are read one at a time, and each process only keeps
        the shards for its own devices. It also only reads the rows it needs, for plain tensors and for
        formats storing rows (bitsandbytes without nested scales, int8, FP8, MXFP4, MLX). Default: the default
        device.
    - `sharding`: how to shard the weights over `mesh`. This is a rule as in
        [`quaxlike.sharding.specs_for`][], i.e. a dictionary of regular expressions, or a function, e.g. from
        [`quaxlike.sharding.fsdp`][] or [`quaxlike.lm.tensor_parallel`][]. Default: `tensor_parallel` over any
        axis named `"model"`, `"tensor"` or `"tp"`, and `fsdp` over all other axes.

    **Returns:** a dictionary from the names in the unquantised checkpoint (e.g. "….q_proj.weight") to arrays
    and quantised arrays. All of these have shape (out, in). Codes and scales are exactly as in the file.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if it is corrupt,
    inconsistent, or in an unsupported format; the message names the file and the entry. `ValueError` if
    `sharding` isn't compatible with a weight, or is passed without a mesh.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike import lm

        w = ql.BlockArray.quantize(
            jax.random.normal(jax.random.key(0), (32, 128)), codec="fp8"
        )
        lm.write("linear.safetensors", {"weight": w}, format="safetensors")
        weights = lm.read("linear.safetensors")
        ```
    """
    if mesh is None:
        if sharding is not None:
            raise ValueError("`sharding` says how weights are spread over a mesh: pass `mesh` too.")
        return dict(open_checkpoint(path, dtype=dtype))
    checkpoint = open_checkpoint(path, dtype=dtype)
    rule = usual_rule(mesh) if sharding is None else by_name(sharding, checkpoint)
    return {name: read_onto(name, checkpoint.rows(name), mesh, rule) for name in checkpoint}


@checked
def open_checkpoint(path: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Checkpoint:
    """Opens a checkpoint without reading its weights. Accessing a weight reads it.

    Use this rather than [`quaxlike.lm.read`][] if you don't need all weights, or if they don't fit into
    memory.

    **Arguments:** as in `read`.

    **Returns:** a mapping from names to arrays. It also has attributes `config`, `metadata` and `format`.

    **Raises:** as in `read`, except that errors about a single weight are only raised on access.
    """
    path = Path(path)
    opened, (config, settings) = consistent(lambda: _opened(path), lambda: _configs(path), path)
    if isinstance(opened, GgufFile):
        gguf = opened
        thunks = {name: lambda name=name: gguf[name] for name in gguf}
        config = config or gguf.config
        return Checkpoint(
            thunks, format="gguf", config=config, metadata=gguf.metadata, dtype=dtype,
            longest_axis=_longest(gguf.shapes), quantises_embeddings=True,
        )  # fmt: skip
    return _checkpoint_in_tensors(opened, config, settings, dtype)


def _longest(shapes: Iterable[tuple[int, ...]]) -> int:
    # Don't count empty tensors: even in a small file, their other axes may be arbitrarily long.
    return max((max(shape, default=1) for shape in shapes if 0 not in shape), default=0)


def _checkpoint_in_tensors(
    tensors: Tensors, config: Mapping[str, Any], settings: Mapping[str, Any], dtype: DTypeLike | None
) -> Checkpoint:
    format, settings = _format_of(tensors, settings)
    found = format.weights(tensors, settings) if format is not None else {}
    if format is not None:
        layers = {name.rpartition(".")[0] for name in tensors}  # MLX has additional settings for each layer
        entries = {name: x for name, x in settings.items() if name not in layers}
        warn_of_unknown(
            f"The quantisation config of {tensors.path}", entries,
            (*OF_ALL, *format.used, *format.without_effect),
        )  # fmt: skip
    values, used = open_values(tensors)
    weights: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Callable[[], RowReader]] = {}
    taken = {*used, *itertools.chain.from_iterable(entry.tensors for entry in found.values())}
    for name, entry in found.items():
        if name in tensors and name not in entry.tensors:
            raise tensors.error(name, f"is stored twice: plain, and as {', '.join(entry.tensors)}")
        weights[name] = entry.read
        if entry.rows is not None:
            rows[name] = entry.rows
        elif format is not None and format.by_rows:
            rows[name] = partial(rows_of_weight, tensors, name, entry, format.weights, settings)
    weights |= values
    for name in tensors:
        if name in taken or (format is not None and name.endswith(_SKIPPED)):
            continue
        if format is not None:
            _check_plain(tensors, name, format)
        weights[name] = lambda name=name: as_jax(tensors[name])
        rows[name] = partial(dense_rows, tensors, name)
    return Checkpoint(
        weights, format="safetensors" if format is None else str(settings.get("quant_method", format.name)),
        config=config, metadata=tensors.metadata, dtype=dtype, readers=rows,
        longest_axis=_longest(info.shape for info in tensors.info.values()),
        quantises_embeddings=format is not None and format.quantises_embeddings,
    )  # fmt: skip


def _format_of(tensors: Tensors, settings: Mapping[str, Any]) -> tuple[Format | None, Mapping[str, Any]]:
    """Returns the format (None if nothing is quantised) and its settings, which can also be in the header."""
    if not settings and "quantization_config" in tensors.metadata:
        text = tensors.metadata["quantization_config"]
        settings = read_json(tensors.path, text, "the quantisation config in the header")
    method = settings.get("quant_method")
    if method is None:
        return next((format for format in FORMATS if format.detect(tensors)), None), settings
    format = next((format for format in FORMATS if method in format.methods), None)
    if format is None:
        known = ", ".join(itertools.chain.from_iterable(format.methods for format in FORMATS))
        raise tensors.error("quant_method", f"{known} can be read; found {quoted(method)}")
    return format, settings


def _check_plain(tensors: Tensors, name: str, format: Format) -> None:
    """Raises an error if a tensor outside all quantised weights doesn't look like a plain one either.

    For example, these may be the codes of a weight with missing scales.
    """
    if name.endswith(tuple(itertools.chain.from_iterable(format.codes for format in FORMATS))):
        raise tensors.error(name, f"belongs to no weight of the format {format.name!r}")
    dtype = tensors.info[name].dtype
    if dtype in _FLOATS_OF_8 or (name.endswith(".weight") and np.issubdtype(dtype, np.integer)):
        problem = f"holds {dtype}: codes of a weight whose scales are missing"
        raise tensors.error(name, problem)


_FLOATS_OF_8 = tuple(map(np.dtype, (float8_e4m3fn, float8_e5m2, float8_e8m0fnu)))


def _opened(path: Path) -> GgufFile | Tensors:
    return open_gguf(path) if holds_gguf(path) else open_tensors(path)


def _configs(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Reads a checkpoint's `config.json`, and its quantisation settings."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in _USUAL and not path.name.startswith("model-"):
        return {}, {}
    file = Pair(folder).config_path()
    config = read_json_file(file, "the configuration") if file.is_file() else {}
    settings: Any = config.get("quantization_config")
    if not isinstance(settings, dict | None):
        raise file_error(
            folder / "config.json", "quantization_config", f"is not an object: {quoted(settings)}"
        )
    elsewhere = (format.settings(config, folder) for format in FORMATS)
    settings = next((found for found in elsewhere if found is not None), settings)
    if settings is not None and not isinstance(settings.get("quant_method"), str):
        raise file_error(folder / "config.json", "quantization_config", "must name its quant_method")
    return config, settings or {}


_USUAL = ("model.safetensors", "model.safetensors.index.json")
