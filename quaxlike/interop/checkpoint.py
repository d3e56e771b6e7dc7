"""`load` and `open_checkpoint`: checkpoints of every known format, which is found by itself."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checked import checked
from ..arrays.quantized import BlockArray, Int8Array
from ..sharding.reading import Rows, read_onto, usual_rule
from ..sharding.specs import Rule as SpecRule
from ..sharding.specs import by_name
from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, llm_int8, mlx, mxfp4, torchao
from .blocks import Weight
from .blocks import settings as subsettings
from .errors import complain
from .file_pair import Pair
from .gguf import holds_gguf, open_gguf
from .gguf_tokenizer import tokenizer_of
from .json_text import read_json, read_json_file
from .rows import BY_ROWS, dense_rows, rows_of_weight
from .safetensors import open_values
from .tensors import Tensors, as_jax, open_tensors

_Reader = Callable[[Tensors, Mapping[str, Any]], dict[str, Weight]]

# By the `quant_method` of a configuration.
_READERS: dict[str, _Reader] = {
    "gptq": gptq.weights,
    "awq": awq.weights,
    "compressed-tensors": compressed_tensors.weights,
    "fp8": float8.weights,
    "fbgemm_fp8": float8.weights,
    "mxfp8": float8.weights,
    "modelopt": float8.weights,
    "mxfp4": mxfp4.weights,
    "mlx": mlx.weights,
    "hqq": hqq.weights,
    "torchao": torchao.weights,
}
# What concerns activations and caches, and is of no use to weights alone.
_SKIPPED = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale"),
    *(".activation_scale", ".output_scale", ".k_scale", ".v_scale"),
)


class Checkpoint(Mapping[str, Any]):
    """The weights of a checkpoint by the names that it has unquantised; each look-up reads one of them.

    **Attributes:**

    - `config`: what `config.json` says, if there is one; the metadata of a GGUF file says the same.
    - `metadata`: the free text entries of a safetensors header; the keys and values of a GGUF file.
    - `format`: the format that was found: "gptq", "gguf", … or "safetensors".
    """

    def __init__(
        self,
        weights: Mapping[str, Callable[[], Any]],
        *,
        format: str,
        config: Mapping[str, Any],
        metadata: Mapping[str, Any],
        dtype: DTypeLike | None,
        rows: Mapping[str, Callable[[], Rows]] | None = None,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._rows = rows or {}
        self.format = format
        self.config = config
        self.metadata = metadata

    def __getitem__(self, name: str) -> Any:
        return self._as_asked(self._weights[name]())

    def rows(self, name: str) -> Rows:
        """The weight of this name, to be read in part where its format allows it."""
        if name not in self._rows:
            return Rows(None, lambda: self[name])
        rows = self._rows[name]()
        return dataclasses.replace(rows, read=lambda *part: self._as_asked(rows.read(*part)))

    def _as_asked(self, value: Any) -> Any:
        if self._dtype is None or not isinstance(value, BlockArray | Int8Array):
            return value
        return dataclasses.replace(value, logical_dtype=jnp.dtype(self._dtype))

    def standing_for(self, dtype: DTypeLike) -> "Checkpoint":
        """The same weights; block arrays among them stand for this dtype."""
        out = copy.copy(self)
        out._dtype = dtype
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@checked
def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    sharding: SpecRule | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint of any known format: GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes,
    HQQ, torchao, MLX, GGUF, or plain safetensors.

    **Arguments:**

    - `path`: a folder with `config.json` and safetensors, or with a GGUF file; or a file.
    - `dtype`: the dtype that block arrays stand for. Default: float32, in which their values are exact.
        bitsandbytes says in the file what its 4-bit weights stand for.
    - `mesh`: of devices, of one process or of many. Weights are read onto it one by one, and a process keeps
        what its own devices store. Of plain tensors, and of formats that go by rows (bitsandbytes without
        nested scales, int8, FP8, MXFP4, MLX), it reads those rows alone. Default: the default device.
    - `sharding`: how weights are spread over the mesh, as `rule` of [`quaxlike.sharding.specs_for`][]: specs
        by regular expressions, or a rule such as those of [`quaxlike.sharding.fsdp`][] and
        [`quaxlike.sharding.tensor_parallel`][]. Default: along an axis of the mesh that is called `"model"`,
        `"tensor"` or `"tp"` as `tensor_parallel` says of the names, along others as `fsdp`.

    **Returns:** arrays and quantised arrays by the names of the unquantised checkpoint
    ("….q_proj.weight"), of shape (out, in). Codes and scales are those of the file.

    **Raises:** `FileNotFoundError` if there is nothing at `path`; `CheckpointError` if it is damaged,
    inconsistent, or of a format that cannot be read, with file, entry, expected and found; `ValueError` for a
    `sharding` that a weight cannot follow, or without a mesh.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike import interop

        w = ql.BlockArray.quantize(jax.random.normal(jax.random.key(0), (32, 128)), codec="fp8")
        interop.save("linear.safetensors", {"weight": w}, format="safetensors")
        weights = interop.load("linear.safetensors")
        ```
    """
    if mesh is None:
        if sharding is not None:
            raise ValueError("`sharding` says how weights are spread over a mesh: give `mesh`, too.")
        return dict(open_checkpoint(path, dtype=dtype))
    checkpoint = open_checkpoint(path, dtype=dtype)
    rule = usual_rule(mesh) if sharding is None else by_name(sharding, checkpoint)
    return {name: read_onto(name, checkpoint.rows(name), mesh, rule) for name in checkpoint}


@checked
def open_checkpoint(path: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Checkpoint:
    """The same as `load`, but reads each weight when it is looked up.

    **Arguments:** as of `load`.

    **Returns:** a mapping from names, with `config`, `metadata` and `format`.

    **Raises:** as `load`; what is wrong with a single weight, when that is looked up.
    """
    path = Path(path)
    config, methods = _configs(path)
    if holds_gguf(path):
        gguf = open_gguf(path)
        thunks = {name: lambda name=name: gguf[name] for name in gguf}
        config = config or gguf.config
        return Checkpoint(thunks, format="gguf", config=config, metadata=gguf.metadata, dtype=dtype)
    tensors = open_tensors(path)
    method, settings = methods
    if method is None and "quantization_config" in tensors.metadata:
        text = tensors.metadata["quantization_config"]
        settings = read_json(tensors.path, text, "the quantisation config in the header")
        method = settings.get("quant_method")
        method = method if method is None else str(method)
    weights: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Callable[[], Rows]] = {}
    taken: set[str] = set()
    reader = _READERS.get(method or "", lambda tensors, _: llm_int8.weights(tensors))
    if method in (None, "bitsandbytes", *_READERS):
        found = reader(tensors, settings)
    else:
        known = ", ".join([*_READERS, "bitsandbytes"])
        raise complain(tensors.path, "quant_method", f"{known} can be read; found {method!r}")
    for name, entry in found.items():
        if name in tensors and name not in entry.tensors:
            raise complain(tensors.path, name, f"is there twice: as it is, and as {', '.join(entry.tensors)}")
        weights[name] = entry.read
        taken.update(entry.tensors)
        if (method if method in _READERS else "int8") in BY_ROWS:
            rows[name] = lambda name=name, entry=entry: rows_of_weight(
                tensors, name, entry.tensors, entry.read, reader, settings
            )
    values, used = open_values(tensors)
    weights |= values
    taken |= used
    rest: Mapping[str, Any] = tensors
    if method in (None, "bitsandbytes"):
        rest = bitsandbytes.Checkpoint(tensors)
        method = method or ("safetensors" if not found and not rest.storage else "bitsandbytes")
    for name in rest:
        if name in taken or (method != "safetensors" and name.endswith(_SKIPPED)):
            continue
        if method in _READERS and name.endswith(_CODES):
            raise complain(tensors.path, name, f"belongs to no weight of the format {method!r}")
        weights[name] = lambda name=name: rest[name] if rest is not tensors else as_jax(tensors[name])
        rows[name] = lambda name=name: (
            rest.rows(name) if isinstance(rest, bitsandbytes.Checkpoint) else dense_rows(tensors, name)
        )
    return Checkpoint(
        weights, format=str(method), config=config, metadata=tensors.metadata, dtype=dtype, rows=rows
    )


@checked
def read_tokenizer(path: str | os.PathLike[str]) -> str:
    """The tokeniser of a checkpoint, for `tokenizers.Tokenizer.from_str`.

    **Arguments:**

    - `path`: a folder with `tokenizer.json`; or a GGUF file, whose vocabulary is written in this form.

    **Returns:** the text of `tokenizer.json`.

    **Raises:** `FileNotFoundError` if there is none; `CheckpointError` for a file that is no text, or a
    vocabulary of GGUF that cannot be read.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise complain(file, None, f"is no text in UTF-8: {error}") from None
    if not holds_gguf(path):
        raise FileNotFoundError(f"There is no {file}: text becomes tokens as that file says.")
    gguf = open_gguf(path)
    return json.dumps(tokenizer_of(gguf.path, gguf.metadata))


# Of no use on its own: a file that has it beside no weight is damaged, or of another format.
_CODES = (
    *(".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_zero_point"),
    *("_blocks", "_scales", ".W_q", ".SCB"),
)


def _configs(path: Path) -> tuple[dict[str, Any], tuple[str | None, dict[str, Any]]]:
    """The configuration beside a checkpoint; the method of quantisation that it names, and its settings."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in _USUAL and not path.name.startswith("model-"):
        return {}, (None, {})
    read = lambda name: (
        read_json_file(folder / name, "the configuration") if (folder / name).is_file() else {}
    )
    config = read(Pair(folder).config_path().name)
    settings: Any = config.get("quantization_config")
    if not isinstance(settings, dict | None):
        raise complain(folder / "config.json", "quantization_config", f"is no object: {settings!r}")
    if isinstance(config.get("quantization"), dict) and "quant_method" not in (settings or {}):
        return config, ("mlx", config["quantization"])
    if settings is None and (other := read("quantize_config.json")):
        settings = {"quant_method": "gptq", **other}
    if settings is None and (other := read("hf_quant_config.json")):
        own = subsettings(other, "quantization", folder / "hf_quant_config.json")
        settings = {"quant_method": "modelopt", **own}
    if settings is None:
        return config, (None, {})
    if not isinstance(settings.get("quant_method"), str):
        raise complain(folder / "config.json", "quantization_config", "must name its quant_method")
    return config, (settings["quant_method"], settings)


_USUAL = ("model.safetensors", "model.safetensors.index.json")
