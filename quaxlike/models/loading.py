"""Reads a checkpoint directory of transformers into a model."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checked import checked
from ..core.values import is_value
from ..interop import Checkpoint, CheckpointError, gguf_models, open_checkpoint
from ..interop.gguf import holds_gguf
from ..interop.model_config import UnsupportedConfigError
from ..interop.pairs import Pair
from ..interop.pieces import rows_of, sources_of
from ..sharding.reading import read_onto, usual_rule
from ..sharding.specs import Rule as SpecRule
from ..sharding.specs import by_name
from ..surgery.quantize import quantizers
from ..surgery.trees import named_arrays, replace
from .bert import Bert, BertConfig, BertForSequenceClassification
from .decoder import Decoder
from .families import FAMILIES, DecoderConfig

# By the architecture that `config.json` names: the configuration and the model.
ARCHITECTURES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "BertModel": (BertConfig, Bert),
    "BertForSequenceClassification": (BertConfig, BertForSequenceClassification),
    **dict.fromkeys(FAMILIES, (DecoderConfig, Decoder)),
}


@checked
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
    options = {"scheme": quantize} if isinstance(quantize, str) else quantize
    chosen = quantizers(skeleton, **options) if options else {}

    def made(name: str, leaf: Any) -> Any:
        """A weight, or rows of it, as the model has it."""
        leaf = leaf.astype(jnp.float32) if weights.format in _ALL_QUANTISED else leaf
        return leaf if name not in chosen or is_value(leaf) else chosen[name](leaf)

    arrays, loaded, rule = named_arrays(skeleton), {}, None
    if mesh is not None and sharding is None:
        like = {name: eqx.filter_eval_shape(partial(made, name), leaf) for name, leaf in arrays.items()}
        rule = usual_rule(mesh, replace(skeleton, like))
    elif sharding is not None:
        rule = by_name(sharding, arrays)
    for name, files in sources(skeleton, weights, directory).items():
        rows = rows_of(name, files, tuple(arrays[name].shape), weights, directory)
        rows = dataclasses.replace(rows, then=partial(made, name))
        loaded[name] = rows.then(rows.read()) if mesh is None else read_onto(name, rows, mesh, rule)
    return replace(skeleton, loaded), config


def open_model(directory: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], Checkpoint]:
    """The model of a checkpoint with shapes for arrays, its `config.json`, and its weights, not yet read.

    **Raises:** as `load`, for what does not take reading weights.
    """
    path = Pair(Path(directory)).config_path()
    if not path.is_file() and not holds_gguf(Path(directory)):
        raise FileNotFoundError(
            f"There is no {path}: a checkpoint directory has config.json in it, or a GGUF file."
        )
    weights = open_checkpoint(directory)
    path, config = path if path.is_file() else Path(directory), dict(weights.config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if weights.format != "gguf" and dtype in ("bfloat16", "float16"):
        weights = weights.standing_for(dtype)
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


def sources(model: Any, names: Iterable[str], directory: Any) -> dict[str, list[str]]:
    """For each array of a model the tensors of a checkpoint that make it up."""
    if not isinstance(model, Decoder):
        return sources_of(named_arrays(model), names, directory)
    # Some files repeat the embedding that the output layer is tied to.
    optional = ("lm_head.weight",) if model.part("lm_head") is None else ()
    return sources_of(named_arrays(model), names, directory, published=model.tensors_of, optional=optional)


#: Formats in which embeddings are quantised, so that no weight says in which dtype activations are.
_ALL_QUANTISED = ("gguf", "mlx")
