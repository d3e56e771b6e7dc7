"""Per-layer embeddings, as introduced by Gemma 3n and also used by Gemma 4.

In addition to the usual embedding, each token has a small embedding for every layer. The layer gates this by
its hidden states, and then adds a projection of the result to them.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .decoder_config import DecoderConfig
from .feed_forward import activation
from .layers import Hidden, Ids, Part, each, linears, norm

#: The names of the parts added to the body, and to each layer.
OF_BODY = "embed_tokens_per_layer per_layer_model_projection per_layer_projection_norm"
OF_LAYER = "per_layer_input_gate per_layer_projection post_per_layer_input_norm"


def of_body(config: DecoderConfig, key: Any) -> dict[str, Any]:
    """Initialises the body's additional parts. Returns `{}` for models without per-layer embeddings."""
    c, size = config, config.hidden_size_per_layer_input
    if not size:
        return {}
    first, last = jax.random.split(key)
    wide = c.num_hidden_layers * size
    return {
        "embed_tokens_per_layer": eqx.nn.Embedding(c.vocab_size_per_layer_input, wide, key=first),
        **linears(c, c.hidden_size, {"per_layer_model_projection": wide}, False, last),
        "per_layer_projection_norm": norm(c, size),
    }


def of_layer(config: DecoderConfig, key: Any) -> dict[str, Any]:
    """Initialises a single layer's additional parts."""
    c, size = config, config.hidden_size_per_layer_input
    if not size:
        return {}
    first, last = jax.random.split(key)
    return {
        **linears(c, c.hidden_size, {"per_layer_input_gate": size}, False, first),
        **linears(c, size, {"per_layer_projection": c.hidden_size}, False, last),
        "post_per_layer_input_norm": norm(c, c.hidden_size),
    }


def inputs_of_layers(body: Part, ids: Ids, x: Hidden) -> Float[Array, "layers tokens size"] | None:
    """Computes the additional inputs for all layers, given the tokens and their usual embeddings `x`.

    Up to a constant factor, each one averages an embedding of the token and a projection of `x`.
    """
    c, size = body.config, body.config.hidden_size_per_layer_input
    if not size:
        return None

    def by_layer(x: Float[Array, "tokens wide"], factor: float) -> Float[Array, "tokens layers size"]:
        return x.reshape(len(x), -1, size) * jnp.asarray(factor, x.dtype)

    rows = by_layer(each(body.part("embed_tokens_per_layer"), ids), size**0.5)
    projected = by_layer(each(body.part("per_layer_model_projection"), x), c.hidden_size**-0.5)
    projected = jax.vmap(lambda x: body.normed("per_layer_projection_norm", x))(projected)
    return jnp.moveaxis((projected + rows) * jnp.asarray(2**-0.5, x.dtype), 1, 0)


def added(layer: Part, x: Hidden, inputs: Float[Array, "tokens size"] | None) -> Hidden:
    """Adds the contribution of the layer's additional input to `x`."""
    if inputs is None:
        return x
    act = activation(layer.config)
    y = each(layer.part("per_layer_projection"), act(each(layer.part("per_layer_input_gate"), x)) * inputs)
    return x + layer.normed("post_per_layer_input_norm", y)
