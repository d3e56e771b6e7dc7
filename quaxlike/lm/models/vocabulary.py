"""`resize_vocabulary`: change the vocabulary size of a model."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._checked import check_option, checked
from ...arrays.adapted import AdaptedArray
from ...arrays.quantized import AbstractQuantizedArray
from ...core.policy import MaterialisationError, on_materialise
from ...core.quaxify import quaxify
from ...core.values import is_value, materialise, replace_fields
from ...surgery.trees import listing, map_arrays, named_arrays, replace
from ..families import names_of
from .decoder_config import DecoderConfig
from .modern_bert import ModernBertConfig


def embeddings() -> tuple[str, ...]:
    """The names of token embeddings."""
    return (*names_of("embed_tokens"), "word_embeddings", "tok_embeddings", "embed_tokens_per_layer")


def is_of_tokens(name: str) -> bool:
    """Whether a name is that of an array of an embedding or output layer, which has a row per token."""
    layer, _, field = name.rpartition(".")
    return field in ("weight", "bias") and layer.rpartition(".")[2] in (*embeddings(), "lm_head")


@checked
def resize_vocabulary(model: PyTree, n: int) -> PyTree:
    """Changes the vocabulary size of a model, for example for a tokeniser with new tokens.

    [`quaxlike.lm.save`][] writes the new size to `config.json`.

    **Arguments:**

    - `model`: the result of [`quaxlike.lm.load`][], possibly with adapters, or stacked layers.
    - `n`: the new number of tokens. The first ones are kept.

    **Returns:**

    The model with `n` rows in its embedding, and in its output layer unless it is tied. New rows are the mean
    of the other rows, after adaptation if there are adapters. Adapters are resized too. If a weight is
    quantised, then kept rows have the same codes, unless a block spans rows.

    **Raises:**

    `ValueError` if `n` is less than 1 or would remove a trained token, if the model has no token embedding,
    or if the embedding's type does not support new rows.

    !!! example

        ```python
        import jax
        from quaxlike.lm.models import Decoder, DecoderConfig
        from quaxlike.lm import resize_vocabulary

        config = DecoderConfig.from_json({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 50,
            "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4,
        })
        model = resize_vocabulary(Decoder(config, key=jax.random.key(0)), 52)
        model.embedding.shape  # (52, 32)
        ```

    Hewitt, Initializing New Word Embeddings for Pretrained Language Models (2021), as in transformers.
    """
    check_option("resize_vocabulary", "n", n, int)
    arrays = named_arrays(model)
    chosen = {name: x for name, x in arrays.items() if is_of_tokens(name)}
    if not chosen:
        raise ValueError(f"The model has no embedding of tokens to resize: it has {listing(arrays)}.")
    if all(x.shape[max(x.ndim - 2, 0)] == n for x in chosen.values()):
        return model
    resized = map_arrays(lambda name, x: _resized(name, x, n), chosen)  # tied weights stay tied
    return with_new_embeddings(replace(model, resized), n)


def _resized(name: str, x: Any, n: int) -> Any:
    if isinstance(x, AdaptedArray):
        return _resized_adapter(name, x, n)
    if isinstance(x, AbstractQuantizedArray):
        try:
            with on_materialise("error"):
                return _with_rows(x, n)
        except MaterialisationError:  # blocks span rows
            return _quantised_again(x, _with_rows(materialise(x), n))
    if is_value(x):
        raise _without_rows(name, x)
    return _with_rows(x, n)


def _resized_adapter(name: str, x: AdaptedArray, n: int) -> Any:
    def resize(part: Any, axis: int, like: Any = None) -> Any:
        if is_value(part):
            return _resized(name, part, n)
        return _with_rows(part, n, None if like is None else _mean(like, axis), axis=axis)

    try:
        out = x.resized(max(x.ndim - 2, 0), resize)
    except ValueError as error:
        raise ValueError(f"{name} cannot have {n} rows: {error}") from None
    if out is NotImplemented:
        raise _without_rows(name, x)
    return out


def _without_rows(name: str, x: Any) -> ValueError:
    return ValueError(f"{name}: {type(x).__name__} gets no new rows. Materialise it first.")


def _quantised_again(x: AbstractQuantizedArray, dense: jax.Array) -> AbstractQuantizedArray:
    """Quantises a resized array like `x`. Kept blocks have the same codes."""
    stored = dense.transpose([x.permutation.index(i) for i in range(dense.ndim)])
    inner = stored.shape[x.num_lead :]
    codes, scale = x.encoded(stored.reshape(*x.codes.shape[:-1], -1).astype(jnp.float32))
    return dataclasses.replace(x, codes=codes, scale=scale, inner=inner)


def _with_rows(x: Any, n: int, mean: Any = None, *, axis: int = 0) -> Any:
    """Cuts an axis to `n` entries, or appends copies of `mean` (by default, the mean of the entries)."""
    size = x.shape[axis]
    if n <= size:
        return quaxify(lambda x: jax.lax.slice_in_dim(x, 0, n, axis=axis))(x)
    mean = _mean(x, axis) if mean is None else mean
    new = jnp.broadcast_to(jnp.expand_dims(mean, axis), (*x.shape[:axis], n - size, *x.shape[axis + 1 :]))
    if is_value(x):
        assert axis == 0
        like: Any = quaxify(lambda x: jnp.broadcast_to(x[:1], new.shape))(x)
        new = like.requantized(new)
    return quaxify(lambda x, new: jnp.concatenate([x, new], axis=axis))(x, new)


def _mean(x: Any, axis: int = 0) -> jax.Array:
    dense = materialise(x)
    return jnp.mean(dense.astype(jnp.float32), axis=axis).astype(dense.dtype)


def with_new_embeddings(node: Any, n: int) -> Any:
    """Updates the model's static sizes to a vocabulary of `n`, and marks its embeddings as new."""
    if is_value(node) or not isinstance(node, eqx.Module):
        return node

    def is_inner(x: Any) -> Any:
        return x is not node and isinstance(x, eqx.Module)

    out = jtu.tree_map(lambda x: with_new_embeddings(x, n), node, is_leaf=is_inner)
    match out:
        case eqx.nn.Embedding():
            return replace_fields(out, num_embeddings=out.weight.shape[-2])
        case eqx.nn.Linear() if out.out_features != "scalar":
            return replace_fields(out, out_features=out.weight.shape[-2])
    config, sizes = getattr(out, "config", None), {"vocab_size": n}
    if isinstance(config, DecoderConfig | ModernBertConfig):
        if getattr(config, "vocab_size_per_layer_input", 0):
            sizes["vocab_size_per_layer_input"] = n
        return replace_fields(out, config=dataclasses.replace(config, **sizes, new_embeddings=True))
    return out
