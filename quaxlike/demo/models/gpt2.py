"""GPT-2, its arrays named as in the checkpoints of transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .config import Config
from .layers import attend, causal, each, heads


@dataclasses.dataclass(frozen=True)
class GPT2Config(Config):
    n_embd: int
    n_head: int
    n_layer: int
    n_positions: int
    vocab_size: int
    n_inner: int = 0
    layer_norm_epsilon: float | int = 1e-5

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "GPT2Config":
        return cls.read(
            config, activation_function="gelu_new", scale_attn_weights=True, add_cross_attention=False,
            scale_attn_by_inverse_layer_idx=False,
        )  # fmt: skip


class Conv1D(eqx.Module):
    """A linear layer whose weight is stored as (in, out): `fan_in_fan_out`, in terms of PEFT."""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, n_in: int, n_out: int, *, key: Any) -> None:
        self.weight = 0.02 * jax.random.normal(key, (n_in, n_out))
        self.bias = jnp.zeros(n_out)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias


class GPT2Attention(eqx.Module):
    c_attn: Conv1D
    c_proj: Conv1D
    n_head: int = eqx.field(static=True)

    def __init__(self, config: GPT2Config, key: Any) -> None:
        attention, projection = jax.random.split(key)
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd, key=attention)
        self.c_proj = Conv1D(config.n_embd, config.n_embd, key=projection)
        self.n_head = config.n_head

    def __call__(self, x: Float[Array, "tokens hidden"], mask: Bool[Array, "tokens tokens"]) -> Array:
        query, key, value = (heads(part, self.n_head) for part in jnp.split(each(self.c_attn, x), 3, axis=-1))
        return each(self.c_proj, attend(query, key, value, mask))


class GPT2MLP(eqx.Module):
    c_fc: Conv1D
    c_proj: Conv1D

    def __init__(self, config: GPT2Config, key: Any) -> None:
        wide, narrow = jax.random.split(key)
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(config.n_embd, inner, key=wide)
        self.c_proj = Conv1D(inner, config.n_embd, key=narrow)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Array:
        return each(self.c_proj, jax.nn.gelu(each(self.c_fc, x), approximate=True))


class GPT2Layer(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GPT2Attention
    ln_2: eqx.nn.LayerNorm
    mlp: GPT2MLP

    def __init__(self, config: GPT2Config, key: Any) -> None:
        attention, mlp = jax.random.split(key)
        self.ln_1, self.ln_2 = _norm(config), _norm(config)
        self.attn, self.mlp = GPT2Attention(config, attention), GPT2MLP(config, mlp)

    def __call__(self, x: Float[Array, "tokens hidden"], mask: Bool[Array, "tokens tokens"]) -> Array:
        x = x + self.attn(each(self.ln_1, x), mask)
        return x + self.mlp(each(self.ln_2, x))


class GPT2Transformer(eqx.Module):
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: list[GPT2Layer]
    ln_f: eqx.nn.LayerNorm

    def __init__(self, config: GPT2Config, key: Any) -> None:
        wte, wpe, *keys = jax.random.split(key, 2 + config.n_layer)
        self.wte = eqx.nn.Embedding(config.vocab_size, config.n_embd, key=wte)
        self.wpe = eqx.nn.Embedding(config.n_positions, config.n_embd, key=wpe)
        self.h = [GPT2Layer(config, k) for k in keys]
        self.ln_f = _norm(config)

    def __call__(self, ids: Int[Array, " tokens"], seen: Bool[Array, " tokens"]) -> Array:
        x = each(self.wte, ids) + each(self.wpe, jnp.arange(len(ids)))
        mask = causal(seen)
        for layer in self.h:
            x = layer(x, mask)
        return each(self.ln_f, x)


class GPT2(eqx.Module):
    """Causal language modelling: for each token of one sequence the logits of the next."""

    transformer: GPT2Transformer
    lm_head: eqx.nn.Linear

    def __init__(self, config: GPT2Config, *, key: Any) -> None:
        transformer, head = jax.random.split(key)
        self.transformer = GPT2Transformer(config, transformer)
        self.lm_head = eqx.nn.Linear(config.n_embd, config.vocab_size, use_bias=False, key=head)

    def __call__(
        self, ids: Int[Array, " tokens"], seen: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens vocab"]:
        return each(self.lm_head, self.transformer(ids, seen))


def _norm(config: GPT2Config) -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
