"""What the example models have in common."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def heads(x: Float[Array, "tokens hidden"], n: int) -> Float[Array, "tokens heads size"]:
    return x.reshape(x.shape[0], n, -1)


def attend(
    query: Float[Array, "tokens heads size"],
    key: Float[Array, "tokens kv_heads size"],
    value: Float[Array, "tokens kv_heads size"],
    mask: Bool[Array, "tokens tokens"],
) -> Float[Array, "tokens hidden"]:
    """Softmax attention (Vaswani et al., 2017); several query heads may share a key head.

    A row of `mask` says which tokens that token sees.
    """
    tokens, n_heads, size = query.shape
    key, value = (jnp.repeat(x, n_heads // x.shape[1], axis=1) for x in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) * size**-0.5
    scores = jnp.where(mask[None], scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(tokens, n_heads * size)


def causal(seen: Bool[Array, " tokens"]) -> Bool[Array, "tokens tokens"]:
    """Each token sees those up to itself, less the padding."""
    n = seen.shape[0]
    return jnp.tri(n, dtype=bool) & seen[None, :]


def each(layer: Any, x: Shaped[Array, "tokens *in"]) -> Float[Array, "tokens out"]:
    """A layer of one token, applied to each of them."""
    return jax.vmap(layer)(x)
