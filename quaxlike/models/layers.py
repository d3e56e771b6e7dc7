"""Small parts that the models have in common."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


class Conv1D(eqx.Module):
    """A linear layer whose weight is stored as (in, out): `fan_in_fan_out`, in terms of PEFT."""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    weight_layouts: ClassVar = {"weight": "io"}

    def __init__(self, n_in: int, n_out: int, use_bias: bool = True, *, key: Any) -> None:
        self.weight = 0.02 * jax.random.normal(key, (n_in, n_out))
        self.bias = jnp.zeros(n_out)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias


def heads(x: Float[Array, "tokens hidden"], n: int) -> Float[Array, "tokens heads size"]:
    return x.reshape(x.shape[0], n, -1)


def attend(
    query: Float[Array, "tokens heads size"],
    key: Float[Array, "seen kv_heads size"],
    value: Float[Array, "seen kv_heads size"],
    mask: Bool[Array, "tokens seen"],
    *,
    scale: float | int | None = None,
    softcap: float | int = 0.0,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens hidden"]:
    """Softmax attention (Vaswani et al., 2017); several query heads may share a key head.

    **Arguments:**

    - `mask`: which tokens each token sees.
    - `scale`: of the scores. Default: one over the root of `size`.
    - `softcap`: scores are bent to stay below it (Gemma 2); 0 for none.
    - `sinks`: of each head, the score of a token that is not there (GPT-OSS).
    """
    tokens, n_heads, size = query.shape
    shared = n_heads // key.shape[1]
    query = query.reshape(tokens, key.shape[1], shared, size)
    scores = jnp.einsum("qhgd,khd->hgqk", query, key) * (size**-0.5 if scale is None else scale)
    scores = scores.astype(jnp.float32)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(key.shape[1], shared, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("hgqk,khd->qhgd", weights.astype(value.dtype), value)
    return out.reshape(tokens, n_heads * size)


def each(layer: Any, x: Shaped[Array, "tokens *in"]) -> Float[Array, "tokens out"]:
    """A layer of one token, applied to each of them."""
    return jax.vmap(layer)(x)
