"""Reads a checkpoint directory of transformers into a model."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core.quaxify import quaxify
from ..core.values import is_value
from ..interop import Checkpoint, CheckpointError, gguf_models, open_checkpoint
from ..interop.gguf import holds_gguf
from ..interop.json_text import read_json_file
from ..interop.mxfp4 import as_transformers
from ..interop.pairs import Pair
from ..sharding.reading import Rows, read_onto, usual_rule
from ..sharding.specs import Rule as SpecRule
from ..sharding.specs import by_name
from ..surgery.layouts import known, layouts_of
from ..surgery.quantize import quantize_array
from ..surgery.select import select_matrices
from ..surgery.trees import named_arrays, replace
from .bert import Bert, BertConfig, BertForSequenceClassification
from .config import UnsupportedConfigError
from .decoder import Decoder
from .families import FAMILIES, DecoderConfig, Family

# By the architecture that `config.json` names: the configuration and the model.
ARCHITECTURES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "BertModel": (BertConfig, Bert),
    "BertForSequenceClassification": (BertConfig, BertForSequenceClassification),
    **dict.fromkeys(FAMILIES, (DecoderConfig, Decoder)),
}


def load(
    directory: str | os.PathLike[str],
    *,
    quantize: str | Mapping[str, Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    sharding: SpecRule | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Reads a model from a checkpoint directory (`config.json` and `model.safetensors`, or its shards) or a
    GGUF file, whose metadata is the configuration.

    Weights are read one at a time, and keep their dtypes. Those stored in one of the formats that
    [`quaxlike.interop.load`][] knows become quantised arrays, which stand for the `dtype` of the
    configuration. Where embeddings are quantised, too (GGUF, MLX), models compute in float32.

    **Arguments:**

    - `directory`: as `save_pretrained` of transformers writes it; or the GGUF file, a folder with one, or the
        first of several parts.
    - `quantize`: how the weights of linear layers and experts are stored: a scheme of
        [`quaxlike.quantize`][], or its options with the entry `"scheme"`. Each is quantised as it is read, so
        that no more than one of them is dense at a time. Default: as in the file.
    - `mesh`: of devices, of one process or of many. Each gets its part of every weight as it is read, and
        quantised; a process reads the rows alone that its own devices store, where no blocks cross them, and
        at most one weight is whole in its memory. Default: all on one device.
    - `sharding`: how weights are spread over the mesh, as `rule` of [`quaxlike.sharding.specs_for`][]: specs
        by regular expressions, or a rule such as that of [`quaxlike.sharding.fsdp`][]. Default: along an axis
        of the mesh that is called `"model"`, `"tensor"` or `"tp"` as [`quaxlike.sharding.tensor_parallel`][]
        says, along others as [`quaxlike.sharding.fsdp`][].

    **Returns:**

    The model, and its `config.json`; of a GGUF file, what that would say.

    **Raises:**

    `FileNotFoundError`; `UnsupportedConfigError` for another architecture or an option that the models do
    not have; `CheckpointError` for a missing, superfluous or misshapen tensor, or one of a dtype that no
    model computes with; `ValueError` for a `sharding` that a weight cannot follow, or without a mesh.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        def logits(directory):
            model, config = ql.models.load(directory, quantize="nf4")
            return ql.quaxify(model)(jnp.arange(5), jnp.ones(5, bool))
        ```
    """
    skeleton, config, weights = open_model(directory)
    if sharding is not None and mesh is None:
        raise ValueError("`sharding` says how weights are spread over a mesh: give `mesh`, too.")
    family = skeleton.config.family if isinstance(skeleton, Decoder) else None
    place = _placed(skeleton, quantize, mesh, sharding)
    if weights.format in _ALL_QUANTISED:
        place = lambda name, rows, place=place: place(name, _in_float32(rows))
    return fill(skeleton, weights, directory, family=family, place=place), config


def open_model(directory: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], Checkpoint]:
    """The model of a checkpoint with shapes for arrays, its `config.json`, and its weights, not yet read.

    **Raises:** as `load`, for what does not take reading weights.
    """
    path = Pair(Path(directory)).config_path()
    if path.is_file():
        config = read_json_file(path, "the configuration")
        weights = open_checkpoint(directory, dtype=_dtype(config))
    else:
        if not holds_gguf(Path(directory)):
            raise FileNotFoundError(
                f"There is no {path}: a checkpoint directory has config.json in it, or a GGUF file."
            )
        weights = open_checkpoint(directory)
        path, config = Path(directory), dict(weights.config)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedConfigError(f"{path} has architectures={names!r}; it must be a list of names.")
    known = [name for name in names if name in ARCHITECTURES]
    if not known and weights.format == "gguf" and not config:
        name = weights.metadata.get("general.architecture")
        raise UnsupportedConfigError(
            f"{path} is of the architecture {name!r}; of GGUF, {', '.join(gguf_models.ARCHITECTURES)} are "
            "supported. `quaxlike.interop.load` reads its weights."
        )
    if not known:
        raise UnsupportedConfigError(
            f"{path} names the architecture {', '.join(names) or 'of no model'}; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    read, make = ARCHITECTURES[known[0]]
    for name in ("num_hidden_layers", "n_layer"):
        if type(layers := config.get(name)) is int and layers > len(weights):  # before anything is made of it
            raise CheckpointError(
                f"{path} has {name}={layers:,}, and the checkpoint no more than {len(weights):,} arrays."
            )
    return eqx.filter_eval_shape(make, read.from_json(config), key=jax.random.key(0)), config, weights


def fill(
    skeleton: Any,
    weights: Mapping[str, Any],
    source: Any,
    *,
    family: Family | None = None,
    place: Callable[[str, Rows], Any] = lambda name, rows: rows.read(),
) -> Any:
    """The model of this structure with the weights of the same names.

    **Arguments:**

    - `skeleton`: the model, with shapes for arrays.
    - `weights`: by their names in the file; each is looked up once.
    - `source`: what errors call the file.
    - `family`: says how names in files differ. Default: they do not.
    - `place`: reads a weight of the model: its name and its rows to the array. Default: the whole.
    """
    wanted = named_arrays(skeleton)
    loaded: dict[str, Any] = {}
    for name, files in sources_of(skeleton, weights, source, family).items():
        loaded[name] = place(name, _rows(name, files, tuple(wanted[name].shape), weights, source))
    return replace(skeleton, loaded)


def _rows(
    name: str, files: Sequence[str], shape: tuple[int, ...], weights: Mapping[str, Any], source: Any
) -> Rows:
    """The rows of a weight of the model, checked as they are read; `files` are its tensors."""

    def checked(leaf: Any, count: int | None) -> Any:
        expected = shape if count is None else (count, *shape[1:])
        if tuple(leaf.shape) != expected:
            raise CheckpointError(f"{source}: {name} must be of shape {expected}; found {tuple(leaf.shape)}.")
        if not _computes(leaf.dtype):
            raise CheckpointError(
                f"{source}: {name} must be of float32, bfloat16 or float16 (or float64 with jax_enable_x64); "
                f"found {leaf.dtype}."
            )
        return leaf

    if len(files) > 1:  # experts, one by one
        each = len(files) // shape[0]

        def read(start: int = 0, stop: int = shape[0]) -> Any:
            parts = [weights[file] for file in files[start * each : stop * each]]
            return checked(_joined(parts, stop - start), stop - start)

        return Rows(shape[0], read)
    (file,) = files
    whole = lambda: checked(as_transformers(name, weights[file]), None)
    rows = weights.rows(file) if isinstance(weights, Checkpoint) else Rows(None, whole)
    if rows.count is None or rows.count != shape[0]:
        return Rows(None, whole)

    def part(*span: int) -> Any:
        if not span:
            return whole()
        return checked(as_transformers(name, rows.read(*span)), min(span[1], shape[0]) - span[0])

    return Rows(rows.count, part, rows.step)


def sources_of(model: Any, names: Iterable[str], source: Any, family: Family | None) -> dict[str, list[str]]:
    """For each array of a model the tensors of a file that make it up.

    **Raises:** `CheckpointError` for a missing or superfluous name.
    """
    renamed = {_in_model(name, family): name for name in names}
    sources = {name: _sources(name, leaf, renamed, family) for name, leaf in named_arrays(model).items()}
    if not any(file in renamed for files in sources.values() for file in files):
        # Saved with or without the task's head around it.
        renamed = {name.partition(".")[2]: file for name, file in renamed.items()}
    used = {file for files in sources.values() for file in files}
    missing = [file for file in used if file not in renamed]
    if isinstance(model, Decoder) and model.lm_head is None:
        used.add("lm_head.weight")  # some files repeat the embedding
    unknown = [name for name in renamed if name not in used and not name.endswith(_BUFFERS)]
    if missing or unknown:
        raise CheckpointError(
            f"{source} does not fit the model of its config.json. "
            f"Missing: {', '.join(sorted(missing)) or 'none'}. Unknown: {', '.join(unknown) or 'none'}."
        )
    return {name: [renamed[file] for file in files] for name, files in sources.items()}


def _in_model(name: str, family: Family | None) -> str:
    """A name in a file as the model has it."""
    for ours, theirs in (family.files if family else {}).items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _sources(name: str, leaf: Any, files: Mapping[str, str], family: Family | None) -> list[str]:
    """The tensors that make up an array: of experts in files, one or two for each of them."""
    head, _, field = name.rpartition(".")
    if name in files or family is None or family.experts != "out_in" or not head.endswith(".experts"):
        return [name]
    gate, up, down = family.expert_files
    matrices = (gate, up) if field == "gate_up_proj" else (down,)
    return [f"{head}.{i}.{matrix}.weight" for i in range(leaf.shape[0]) for matrix in matrices]


def _joined(parts: list[Any], count: int) -> Any:
    """The stack of `count` matrices whose rows these parts are in turn."""
    each = len(parts) // count
    concatenate, stack = quaxify(jnp.concatenate), quaxify(jnp.stack)
    rows = [concatenate(parts[i : i + each]) if each > 1 else parts[i] for i in range(0, len(parts), each)]
    return stack(rows)


def _placed(skeleton: Any, quantize: Any, mesh: Any, sharding: Any) -> Callable[[str, Rows], Any]:
    """How each weight is read: quantised, and onto the mesh."""
    options = {"scheme": quantize} if isinstance(quantize, str) else dict(quantize or {})
    layouts = layouts_of(skeleton, options.pop("layout", None)) if options else {}
    where, exclude = options.pop("where", "all-linear"), options.pop("exclude", ())
    chosen = select_matrices(skeleton, where, exclude, layouts) if options else {}

    def quantized(name: str, leaf: Any) -> Any:
        if name not in chosen or is_value(leaf):
            return leaf
        return quantize_array(name, leaf, layout=known(name, leaf, layouts[name]), **options)

    if mesh is None:
        return lambda name, rows: quantized(name, rows.read())
    rule = _rule(skeleton, quantized, mesh) if sharding is None else by_name(sharding, named_arrays(skeleton))

    def place(name: str, rows: Rows) -> Any:
        own = dataclasses.replace(rows, then=lambda leaf: quantized(name, leaf))
        return read_onto(name, own, mesh, rule)

    return place


def _rule(skeleton: Any, quantized: Callable[[str, Any], Any], mesh: Any) -> Any:
    """The rule of a model, whose weights are told by their layers; those of files that are quantised already
    by their names."""
    usual = usual_rule(mesh)
    like = {
        name: eqx.filter_eval_shape(lambda leaf, name=name: quantized(name, leaf), leaf)
        for name, leaf in named_arrays(skeleton).items()
    }
    by_layers = usual_rule(mesh, replace(skeleton, like))
    same = lambda name, leaf: jax.tree.structure(leaf) == jax.tree.structure(like[name])
    return lambda name, leaf: (by_layers if same(name, leaf) else usual)(name, leaf)


def _in_float32(rows: Rows) -> Rows:
    return dataclasses.replace(rows, read=lambda *part: rows.read(*part).astype(jnp.float32))


def _computes(dtype: Any) -> bool:
    """Whether models compute with weights of this dtype, as JAX is set up."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    return wide and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype of 16 bits that a configuration names, for quantised weights to stand for."""
    name = config.get("dtype") or config.get("torch_dtype")
    return name if name in ("bfloat16", "float16") else None


#: Formats in which embeddings are quantised, so that no weight says in which dtype activations are.
_ALL_QUANTISED = ("gguf", "mlx")

# Constants that some versions of transformers save along.
_BUFFERS = (
    *("position_ids", "rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"),
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),  # GGUF's; in the config
)
