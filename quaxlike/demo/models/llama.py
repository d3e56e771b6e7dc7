"""A decoder of the Llama family, its arrays named as in the checkpoints of transformers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .config import Config, UnsupportedConfigError
from .layers import attend, causal, each, heads


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Config):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float | int = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UnsupportedConfigError(
                f"config.json has rope_type={kind!r}; LlamaConfig supports 'default', 'linear' or 'llama3'."
            )
        out = cls.read(config, hidden_act="silu", pretraining_tp=1, sliding_window=None)
        return dataclasses.replace(
            out,
            num_key_value_heads=out.num_key_value_heads or out.num_attention_heads,
            head_dim=out.head_dim or out.hidden_size // out.num_attention_heads,
            rope=tuple(sorted(rope.items())),
        )


class LlamaAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, key: Any) -> None:
        c, hidden = config, config.hidden_size
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q, k, v, o = jax.random.split(key, 4)
        self.q_proj = eqx.nn.Linear(hidden, wide, c.attention_bias, key=q)
        self.k_proj = eqx.nn.Linear(hidden, narrow, c.attention_bias, key=k)
        self.v_proj = eqx.nn.Linear(hidden, narrow, c.attention_bias, key=v)
        self.o_proj = eqx.nn.Linear(wide, hidden, c.attention_bias, key=o)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]],
        mask: Bool[Array, "tokens tokens"],
    ) -> Float[Array, "tokens hidden"]:
        query = heads(each(self.q_proj, x), self.config.num_attention_heads)
        key = heads(each(self.k_proj, x), self.config.num_key_value_heads)
        value = heads(each(self.v_proj, x), self.config.num_key_value_heads)
        return each(self.o_proj, attend(rotate(query, rotation), rotate(key, rotation), value, mask))


class LlamaMLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, config: LlamaConfig, key: Any) -> None:
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = eqx.nn.Linear(hidden, wide, bias, key=gate)
        self.up_proj = eqx.nn.Linear(hidden, wide, bias, key=up)
        self.down_proj = eqx.nn.Linear(wide, hidden, bias, key=down)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return each(self.down_proj, jax.nn.silu(each(self.gate_proj, x)) * each(self.up_proj, x))


class LlamaLayer(eqx.Module):
    self_attn: LlamaAttention
    mlp: LlamaMLP
    input_layernorm: eqx.nn.RMSNorm
    post_attention_layernorm: eqx.nn.RMSNorm

    def __init__(self, config: LlamaConfig, key: Any) -> None:
        attention, mlp = jax.random.split(key)
        self.self_attn, self.mlp = LlamaAttention(config, attention), LlamaMLP(config, mlp)
        self.input_layernorm, self.post_attention_layernorm = _norm(config), _norm(config)

    def __call__(self, x: Float[Array, "tokens hidden"], rotation: Any, mask: Any) -> Any:
        x = x + self.self_attn(each(self.input_layernorm, x), rotation, mask)
        return x + self.mlp(each(self.post_attention_layernorm, x))


class LlamaModel(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[LlamaLayer]
    norm: eqx.nn.RMSNorm
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, key: Any) -> None:
        embed, *keys = jax.random.split(key, 1 + config.num_hidden_layers)
        self.embed_tokens = eqx.nn.Embedding(config.vocab_size, config.hidden_size, key=embed)
        self.layers = [LlamaLayer(config, k) for k in keys]
        self.norm = _norm(config)
        self.config = config

    def __call__(
        self, ids: Int[Array, " tokens"], seen: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        x = each(self.embed_tokens, ids)
        rotation, mask = rotary(self.config, len(ids), x.dtype), causal(seen)
        for layer in self.layers:
            x = layer(x, rotation, mask)
        return each(self.norm, x)


class Llama(eqx.Module):
    """Causal language modelling: for each token of one sequence the logits of the next."""

    model: LlamaModel
    lm_head: eqx.nn.Linear

    def __init__(self, config: LlamaConfig, *, key: Any) -> None:
        model, head = jax.random.split(key)
        self.model = LlamaModel(config, model)
        self.lm_head = eqx.nn.Linear(config.hidden_size, config.vocab_size, use_bias=False, key=head)

    def __call__(
        self, ids: Int[Array, " tokens"], seen: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens vocab"]:
        return each(self.lm_head, self.model(ids, seen))


def _norm(config: LlamaConfig) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, use_bias=False)


def rotary(config: LlamaConfig, tokens: int, dtype: Any) -> tuple[Array, Array]:
    """The cosines and sines of rotary position embeddings (Su et al., 2021)."""
    rope = dict(config.rope)
    inverse = rope["rope_theta"] ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if rope["rope_type"] == "linear":
        inverse = inverse / rope["factor"]
    elif rope["rope_type"] == "llama3":  # slow waves are stretched, fast ones kept, those between blended
        turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        inverse = (1 - kept) * inverse / rope["factor"] + kept * inverse
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * inverse[None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: Float[Array, "tokens heads size"], rotation: tuple[Array, Array]) -> Array:
    cos, sin = (part[:, None, :] for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin
