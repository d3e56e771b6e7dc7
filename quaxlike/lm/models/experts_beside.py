"""Experts next to a feed-forward layer, rather than in place of it, as in Gemma 4.

Both have the same input, but their own norms before and after.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .decoder_config import DecoderConfig
from .feed_forward import Experts, route
from .layers import Hidden, Part, each, norm, normalised

_BEFORE, _AFTER_MLP, _AFTER = (
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
#: The names of the parts added to each layer.
OF_LAYER = f"router experts {_BEFORE} {_AFTER_MLP} {_AFTER}"


class Router(Part, roles="proj scale per_expert_scale"):
    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c = config
        proj = eqx.nn.Linear(c.hidden_size, c.num_local_experts, use_bias=False, key=key)
        ones = jnp.ones(c.hidden_size), jnp.ones(c.num_local_experts)
        self._fill(c, proj=proj, scale=ones[0], per_expert_scale=ones[1])

    def __call__(self, x: Hidden) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        c, factor = self.config, self.part("scale") * self.config.hidden_size**-0.5
        x = normalised(x, c.rms_norm_eps) * factor.astype(x.dtype)[None]
        chosen, share = route(each(self.part("proj"), x), c)
        # Don't use indexing: on meshes with explicit axes, this needs the sharding of its result.
        is_chosen = chosen[..., None] == jnp.arange(c.num_local_experts)[None, None]
        scale = jnp.sum(jnp.where(is_chosen, self.part("per_expert_scale")[None, None], 0), axis=-1)
        return chosen, share * scale.astype(share.dtype)


def of_layer(config: DecoderConfig, layer: int, key: Any) -> dict[str, Any]:
    """Initialises a layer's additional parts. Returns `{}` if it has no experts of this kind."""
    if not (config.family.experts_beside and config.sparse[layer]):
        return {}
    first, last = jax.random.split(key)
    norms = {name: norm(config, config.hidden_size) for name in (_BEFORE, _AFTER_MLP, _AFTER)}
    return {"router": Router(config, first), "experts": Experts(config, last), **norms}


def with_experts(layer: Part, x: Hidden, y: Hidden) -> Hidden:
    """Adds the experts' output for the input `x` to the feed-forward layer's output `y`."""
    experts = layer.part("experts")
    if experts is None:
        return y
    z = experts(layer.normed(_BEFORE, x), *layer.part("router")(x))
    return layer.normed(_AFTER_MLP, y) + layer.normed(_AFTER, z)
