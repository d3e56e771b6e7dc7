"""Attention: one softmax with the projections of all architectures, and its cache of keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .decoder_config import DecoderConfig
from .layers import Hidden, Part, each, linears, norm
from .rope import rotate


class Context(NamedTuple):
    """The inputs that layers of one kind share: rotations of heads, the mask of tokens that are seen, and
    factors of queries."""

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    mask: Bool[Array, "tokens seen"]
    factor: Float[Array, " tokens"] | None = None


class Memory(NamedTuple):
    """The cached keys and values of one layer, for up to `room` tokens."""

    key: Float[Array, "room kv_heads size"]
    value: Float[Array, "room kv_heads size"]


class Attention(Part, roles="q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm sinks"):
    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c, family = config, config.family
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        sizes = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        sizes = {"qkv_proj": wide + 2 * narrow} if family.fused else sizes
        bias = lambda of_family: c.attention_bias if of_family is None else of_family
        first, last = jax.random.split(key)
        parts = linears(c, c.hidden_size, sizes, bias(family.qkv_bias), first)
        parts |= linears(c, wide, {"o_proj": c.hidden_size}, bias(family.output_bias), last)
        if family.qk_norm:
            sizes = (c.head_dim, c.head_dim) if family.qk_norm == "heads" else (wide, narrow)
            parts |= {"q_norm": norm(c, sizes[0]), "k_norm": norm(c, sizes[1])}
        self._fill(c, **parts, sinks=jnp.zeros(c.num_attention_heads) if family.sinks else None)

    def __call__(
        self, x: Hidden, context: Context, memory: Memory | None, start: Any
    ) -> tuple[Hidden, Memory | None]:
        c, n = self.config, len(x)
        if c.family.fused:
            q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            parts = jnp.split(each(self.part("qkv_proj"), x), [q, q + kv], axis=-1)
        else:
            parts = [each(self.part(f"{name}_proj"), x) for name in "qkv"]
        if c.family.qk_norm == "whole":
            parts[:2] = self.normed("q_norm", parts[0]), self.normed("k_norm", parts[1])
        query, key, value = (part.reshape(n, -1, c.head_dim) for part in parts)
        if c.family.qk_norm == "heads":
            query = jax.vmap(lambda x: self.normed("q_norm", x))(query)
            key = jax.vmap(lambda x: self.normed("k_norm", x))(key)
        query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if context.factor is not None:
            query = query * context.factor[:, None, None]
        if memory is not None:
            put = lambda old, new: lax.dynamic_update_slice(old, new.astype(old.dtype), (start, 0, 0))
            memory = Memory(put(memory.key, key), put(memory.value, value))
            key, value = memory
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else c.attention_multiplier or None
        cap = c.attn_logit_softcapping
        out = attend(query, key, value, context.mask, scale=scale, softcap=cap, sinks=self.part("sinks"))
        return each(self.part("o_proj"), out), memory


def attend(
    query: Float[Array, "tokens heads size"],
    key: Float[Array, "seen kv_heads size"],
    value: Float[Array, "seen kv_heads size"],
    mask: Bool[Array, "tokens seen"],
    *,
    scale: float | int | None = None,
    softcap: float | int = 0.0,
    sinks: Float[Array, " heads"] | None = None,
) -> Hidden:
    """Softmax attention (Vaswani et al., 2017); several query heads may share a key head.

    **Arguments:**

    - `mask`: which tokens each token sees.
    - `scale`: of the scores. Default: one over the square root of `size`.
    - `softcap`: a bound that scores are squashed to stay below (Gemma 2); 0 for none.
    - `sinks`: for each head, the score of a virtual token (GPT-OSS).
    """
    tokens, n_heads, size = query.shape
    query = query.reshape(tokens, key.shape[1], -1, size)
    scores = jnp.einsum("qhgd,khd->hgqk", query, key) * (size**-0.5 if scale is None else scale)
    scores = scores.astype(jnp.float32)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(*scores.shape[:2], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(key)]
    out = jnp.einsum("hgqk,khd->qhgd", weights.astype(value.dtype), value)
    return out.reshape(tokens, n_heads * size)
