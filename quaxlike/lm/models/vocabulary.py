"""`resize_vocabulary`, for changing a model's vocabulary size."""

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
    """Returns the names of token embeddings in all models."""
    return (*names_of("embed_tokens"), "word_embeddings", "tok_embeddings", "embed_tokens_per_layer")


def is_of_tokens(name: str) -> bool:
    """Returns whether a name belongs to an embedding or output layer (with one row per token)."""
    layer, _, field = name.rpartition(".")
    return field in ("weight", "bias") and layer.rpartition(".")[2] in (*embeddings(), "lm_head")


@checked
def resize_vocabulary(model: PyTree, n: int) -> PyTree:
    """Changes a model's vocabulary size. This is useful if you have added tokens to its tokeniser.

    [`quaxlike.lm.save`][] writes the new size to `config.json`.

    **Arguments:**

    - `model`: a model, as returned by [`quaxlike.lm.load`][]. It can have adapters or stacked layers.
    - `n`: the new number of tokens. If there were more before, then only the first `n` are kept.

    **Returns:**

    The model with `n` rows in its embedding, as well as in its output layer if this isn't tied to it. Each
    new row is the mean of all existing ones. (For adapted weights it's the mean after applying the adapters,
    which are resized too.) If a weight is quantised then existing rows keep their exact codes, unless blocks
    span several rows.

    **Raises:**

    `ValueError` if `n` is less than 1 or removes a trained token, if the model has no token embedding, or if
    the type of its embedding doesn't support new rows.

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
    resized = map_arrays(lambda name, x: _resized(name, x, n), chosen)  # this also keeps tied weights tied
    return with_new_embeddings(replace(model, resized), n)


def _resized(name: str, x: Any, n: int) -> Any:
    if isinstance(x, AdaptedArray):
        return _resized_adapter(name, x, n)
    if isinstance(x, AbstractQuantizedArray):
        try:
            with on_materialise("error"):
                return _with_rows(x, n)
        except MaterialisationError:  # raised if blocks span several rows
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
    """Quantises a resized array to the same format as `x`. Unchanged blocks keep their codes."""
    stored = dense.transpose([x.permutation.index(i) for i in range(dense.ndim)])
    inner = stored.shape[x.num_lead :]
    codes, scale = x.encoded(stored.reshape(*x.codes.shape[:-1], -1).astype(jnp.float32))
    return dataclasses.replace(x, codes=codes, scale=scale, inner=inner)


def _with_rows(x: Any, n: int, mean: Any = None, *, axis: int = 0) -> Any:
    """Changes an axis size to `n`, either by truncating it or by appending copies of `mean`.

    Default: the mean over the axis.
    """
    size = x.shape[axis]
    if n <= size:
        return quaxify(lambda x: jax.lax.slice_in_dim(x, 0, n, axis=axis))(x)
    mean = _mean(x, axis) if mean is None else mean
    new = jnp.broadcast_to(jnp.expand_dims(mean, axis), (*x.shape[:axis], n - size, *x.shape[axis + 1 :]))
    if is_value(x):
        assert axis == 0
        # Quantise the new rows like an existing one.
        like: Any = quaxify(lambda x: jnp.broadcast_to(x[:1], new.shape))(x)
        new = like.requantized(new)
    return quaxify(lambda x, new: jnp.concatenate([x, new], axis=axis))(x, new)


def _mean(x: Any, axis: int = 0) -> jax.Array:
    dense = materialise(x)
    return jnp.mean(dense.astype(jnp.float32), axis=axis).astype(dense.dtype)


def with_new_embeddings(node: Any, n: int) -> Any:
    """Updates a model's static fields for a vocabulary of size `n` and marks its embeddings as new."""
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
