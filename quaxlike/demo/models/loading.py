"""Reads a checkpoint directory of transformers into one of the example models."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ...interop import CheckpointError
from ...interop.bitsandbytes import open_checkpoint
from ...interop.tensors import read_json
from ...surgery.select import named_arrays, replace
from .bert import Bert, BertConfig, BertForSequenceClassification
from .config import UnsupportedConfigError
from .gpt2 import GPT2, GPT2Config
from .llama import Llama, LlamaConfig

# By the architecture that `config.json` names: the configuration and the model.
ARCHITECTURES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "LlamaForCausalLM": (LlamaConfig, Llama),
    "BertModel": (BertConfig, Bert),
    "BertForSequenceClassification": (BertConfig, BertForSequenceClassification),
    "GPT2LMHeadModel": (GPT2Config, GPT2),
}


def load_model(directory: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """Reads a model from a checkpoint directory: `config.json` and `model.safetensors`, or its shards.

    Weights keep their dtypes; those stored in 4 bits by bitsandbytes become 4-bit arrays.

    **Arguments:**

    - `directory`: as `save_pretrained` of transformers writes it.

    **Returns:**

    The model, and its `config.json`.

    **Raises:**

    `FileNotFoundError`; `UnsupportedConfigError` for another architecture or an option that the models do
    not have; `CheckpointError` for a missing, superfluous or misshapen tensor, or one of a dtype that no
    model computes with.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.demo.models import load_model

        def logits(directory):
            model, config = load_model(directory)
            return ql.quaxify(model)(jnp.arange(5), jnp.ones(5, bool))
        ```
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}: a checkpoint directory has config.json in it.")
    config = read_json(path, path.read_bytes(), "the configuration")
    names = config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise UnsupportedConfigError(
            f"{path} names the architecture {', '.join(names) or 'of no model'}; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    read, make = ARCHITECTURES[known[0]]
    skeleton = eqx.filter_eval_shape(make, read.from_json(config), key=jax.random.key(0))
    tied = config.get("tie_word_embeddings", True)
    return fill(skeleton, open_checkpoint(directory), directory, tied), config


def fill(skeleton: Any, weights: Mapping[str, Any], source: Any, tied: bool) -> Any:
    """The model of this structure with the weights of the same names.

    Where an output layer is `tied` and left out it becomes the same array as the embedding. An adapter on
    one of them leaves the other as it was, as in PEFT.
    """
    wanted = named_arrays(skeleton)
    names = {name: name for name in weights}
    if not any(name in wanted for name in names):  # saved with or without the task's head around it
        names = {name.partition(".")[2]: name for name in weights}
    if tied and "lm_head.weight" in wanted:
        for embedding in EMBEDDINGS:
            if embedding in names:
                names.setdefault("lm_head.weight", names[embedding])
    missing = [name for name in wanted if name not in names]
    unknown = [name for name in names if name not in wanted and not name.endswith(_BUFFERS)]
    if missing or unknown:
        raise CheckpointError(
            f"{source} does not fit the model of its config.json. Missing: {', '.join(missing) or 'none'}. "
            f"Unknown: {', '.join(unknown) or 'none'}."
        )
    read = {key: weights[key] for key in dict.fromkeys(names[name] for name in wanted)}
    loaded = {name: read[names[name]] for name in wanted}
    for name, leaf in loaded.items():
        if tuple(leaf.shape) != tuple(wanted[name].shape):
            raise CheckpointError(
                f"{source}: {name} must be of shape {tuple(wanted[name].shape)}; found {tuple(leaf.shape)}."
            )
        if not _computes(leaf.dtype):
            raise CheckpointError(
                f"{source}: {name} must be of float32, bfloat16 or float16 (or float64 with jax_enable_x64); "
                f"found {leaf.dtype}."
            )
    return replace(skeleton, loaded)


def _computes(dtype: Any) -> bool:
    """Whether models compute with weights of this dtype, as JAX is set up."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    return wide and jax.dtypes.canonicalize_dtype(dtype) == dtype


# What `lm_head` may be tied to.
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")

# Constants that some versions of transformers save along.
_BUFFERS = ("position_ids", "rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
