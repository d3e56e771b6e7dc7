"""`read` and `open_checkpoint`, which read a checkpoint after detecting its format."""

import copy
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

# Tensors that only concern activations and caches, and so aren't needed to read weights.
_SKIPPED = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale"),
    *(".activation_scale", ".output_scale", ".k_scale", ".v_scale"),
)


class Checkpoint(Mapping[str, Any]):
    """A checkpoint's weights, by their unquantised names. Weights are only read when they are looked up.

    **Attributes:**

    - `config`: the contents of `config.json`, if there is one. For GGUF files, derived from the metadata.
    - `metadata`: the string entries of a safetensors header, or the key-value pairs of a GGUF file. Numbers
        that have no corresponding Python type are NumPy scalars.
    - `format`: the format that was detected, e.g. "gptq", "gguf" or "safetensors".
    - `quantises_embeddings`: whether embeddings are quantised too, in which case no weight determines
        activations' dtype.
    - `longest_axis`: the size of the longest axis of any stored tensor. Since codes can be packed, the axes
        of weights are at most 32 times as long.
    """

    def __init__(
        self,
        weights: Mapping[str, Callable[[], Any]],
        *,
        format: str,
        config: Mapping[str, Any],
        metadata: Mapping[str, Any],
        dtype: DTypeLike | None,
        shapes: Iterable[tuple[int, ...]],
        rows: Mapping[str, Callable[[], RowReader]] | None = None,
        quantises_embeddings: bool = False,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._rows = rows or {}
        self.format = format
        self.quantises_embeddings = quantises_embeddings
        self.config = config
        self.metadata = metadata
        # Ignore empty tensors, since even in a small file these can have arbitrarily long axes.
        self.longest_axis = max((max(shape, default=1) for shape in shapes if 0 not in shape), default=0)

    def __getitem__(self, name: str) -> Any:
        return self._as_asked(self._weights[name]())

    def rows(self, name: str) -> RowReader:
        """Returns a reader for a single weight, which reads individual rows if the format supports this."""
        if name not in self._rows:
            return RowReader(None, lambda: self[name])
        rows = self._rows[name]()
        return dataclasses.replace(rows, read=lambda *part: self._as_asked(rows.read(*part)))

    def _as_asked(self, value: Any) -> Any:
        if self._dtype is None or not isinstance(value, BlockArray | Int8Array):
            return value
        return dataclasses.replace(value, logical_dtype=jnp.dtype(self._dtype))

    def standing_for(self, dtype: DTypeLike) -> "Checkpoint":
        """Returns a copy of this checkpoint that uses another dtype for block arrays."""
        out = copy.copy(self)
        out._dtype = dtype
        return out

    def __contains__(self, name: object) -> bool:  # avoids reading the weight
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@checked
def read(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    sharding: SpecRule | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint in any of the supported formats.

    That is, in GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes, HQQ, torchao, MLX, GGUF, or
    plain safetensors.

    **Arguments:**

    - `path`: either a single file, or a folder with a GGUF file or with `config.json` and safetensors files.
    - `dtype`: the dtype of block arrays. Default: float32, which represents their values exactly. (Except
        that bitsandbytes' files specify the dtype of 4-bit weights.)
    - `mesh`: a mesh over one or many processes. Weights are read one at a time, with each process keeping
        only the shards belonging to its own devices. For plain tensors and formats that store rows
        (bitsandbytes without nested scales, int8, FP8, MXFP4, MLX), it only reads the rows it needs. Default:
        the default device.
    - `sharding`: a rule for sharding the weights, as in [`quaxlike.sharding.specs_for`][]. That is, either a
        dictionary of regular expressions, or a rule such as [`quaxlike.sharding.fsdp`][] or
        [`quaxlike.lm.tensor_parallel`][]. Default: `tensor_parallel` over any axis named `"model"`,
        `"tensor"` or `"tp"`, and `fsdp` over all others.

    **Returns:** a dictionary mapping the names used by the unquantised checkpoint (e.g. "….q_proj.weight") to
    arrays and quantised arrays, with shape (out, in). Codes and scales are exactly those in the file.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if it is corrupt,
    inconsistent, or in an unsupported format; the message includes the file and the entry. `ValueError` if
    `sharding` isn't compatible with a weight, or is given without a mesh.

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
    """Opens a checkpoint, such that weights are only read when accessed.

    Use this rather than [`quaxlike.lm.read`][] if you only need some weights, or if they don't fit into
    memory.

    **Arguments:** as in `read`.

    **Returns:** a mapping from names to arrays, with attributes `config`, `metadata` and `format`.

    **Raises:** as in `read`, except that errors about an individual weight are only raised when accessing it.
    """
    path = Path(path)
    opened, (config, settings) = consistent(lambda: _opened(path), lambda: _configs(path), path)
    if isinstance(opened, GgufFile):
        gguf = opened
        thunks = {name: lambda name=name: gguf[name] for name in gguf}
        config = config or gguf.config
        return Checkpoint(
            thunks, format="gguf", config=config, metadata=gguf.metadata, dtype=dtype, shapes=gguf.shapes,
            quantises_embeddings=True,
        )  # fmt: skip
    return _of_tensors(opened, config, settings, dtype)


def _of_tensors(
    tensors: Tensors, config: Mapping[str, Any], settings: Mapping[str, Any], dtype: DTypeLike | None
) -> Checkpoint:
    format, settings = _format_of(tensors, settings)
    found = format.weights(tensors, settings) if format is not None else {}
    if format is not None:
        layers = {name.rpartition(".")[0] for name in tensors}  # MLX specifies settings per layer
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
        config=config, metadata=tensors.metadata, dtype=dtype, rows=rows,
        shapes=(info.shape for info in tensors.info.values()),
        quantises_embeddings=format is not None and format.quantises_embeddings,
    )  # fmt: skip


def _format_of(tensors: Tensors, settings: Mapping[str, Any]) -> tuple[Format | None, Mapping[str, Any]]:
    """Returns the format (None for a plain checkpoint), and its settings, which might be in the header."""
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
    """Raises an error unless a tensor that isn't part of a quantised weight is a plain weight or buffer."""
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
    """Reads the `config.json` alongside a checkpoint, and its quantisation settings."""
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
