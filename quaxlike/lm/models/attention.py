"""Attention for all architectures, along with its key-value cache.

The cache must be updated in-place: copying it for every token costs more than the attention itself. XLA only
updates it in-place if nothing else reads the old buffer, as ensured by the barrier in `Memory._written`.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ...arrays.quantized import CODECS, CacheArray
from ...sharding.meshes import sequence_axis
from .attention_backends import Case, chosen
from .attention_blocks import Sight, of_one_device, scores_of
from .decoder_config import DecoderConfig
from .layers import Hidden, Part, each, linears, norm
from .mixer import AbstractMemory, AbstractMixer, Context
from .ring_attention import of_ring
from .rope import rotate

Axes = tuple[int, int, int]


class Memory(AbstractMemory):
    """The key-value cache of a single layer, with space for up to `room` tokens.

    Keys and values are either arrays or quantised Values. If the layers are scanned over, then they share
    arrays with a leading layer axis. (XLA can only update these in-place if they are part of the scan's
    carry.)

    Quantised caches have shape `(room, kv_heads, size)`. Plain arrays instead use `(kv_heads, size, room)`
    for keys and `(kv_heads, room, size)` for values, so that both products for a single query contract over
    the second-to-last axis. This is fastest on CPUs.
    """

    by_place: ClassVar = True

    key: Float[Array, "..."]
    value: Float[Array, "..."]
    key_axes: Axes = eqx.field(static=True, default=(1, 2, 0))
    """The order of the axes (tokens, heads, size) in `key`."""
    value_axes: Axes = eqx.field(static=True, default=(1, 0, 2))
    rotates: bool = eqx.field(static=True, default=False)
    """Whether to rotate keys and queries by `hadamard`, which makes them easier to quantise to a few bits."""
    layer: Int[Array, ""] | None = None
    """This layer's index into arrays stacked over layers, or None if they aren't stacked."""

    @classmethod
    def empty(cls, room: int, heads: int, size: int, dtype: Any, scheme: str | None) -> "Memory":
        """Creates an empty cache. `scheme` is the `cache` argument of `generate`."""
        if scheme is None or scheme == "bfloat16":
            dtype = dtype if scheme is None else scheme
            return cls(jnp.zeros((heads, size, room), dtype), jnp.zeros((heads, room, size), dtype))
        if scheme not in CODECS:
            known = ", ".join(["bfloat16", *CODECS])
            raise ValueError(f"`cache` must be None or one of {known}; found {scheme!r}.")
        # A buffer can only be donated once, so don't reuse one for both.
        key: Any = CacheArray.empty((room, heads, size), scheme, dtype=dtype)
        value: Any = CacheArray.empty((room, heads, size), scheme, dtype=dtype)
        axes = (0, 1, 2)
        return cls(key, value, axes, axes, rotates=CODECS[scheme].bits <= 4)

    @property
    def room(self) -> int:
        return self.value.shape[self.value_axes.index(0) - 3]

    def grown(self, more: int) -> "Memory":
        """Extends the cache with space for `more` tokens."""

        def grow(part: Any, axes: Axes) -> Any:
            ends = [(0, 0 if axis else more) for axis in axes]
            return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 3) + ends), part)

        key, value = grow(self.key, self.key_axes), grow(self.value, self.value_axes)
        return dataclasses.replace(self, key=key, value=value)

    def write(self, key: Array, value: Array, start: Any, dtype: Any) -> tuple["Memory", Array, Array]:
        """Writes keys and values at position `start` onwards.

        Returns the updated cache along with all this layer's keys and values (not just the new ones), each of
        shape `(room, kv_heads, size)` and converted to `dtype`.
        """
        key, keys = self._written(self.key, key, start, self.key_axes)
        value, values = self._written(self.value, value, start, self.value_axes)
        return dataclasses.replace(self, key=key, value=value), keys.astype(dtype), values.astype(dtype)

    def read(self, dtype: Any) -> tuple[Array, Array]:
        """Returns all keys and values in this layer, each `(room, kv_heads, size)`."""

        def part(whole: Any, axes: Axes) -> Array:
            own = whole if self.layer is None else self._layer_of(whole)
            return jnp.transpose(own, [axes.index(axis) for axis in range(3)]).astype(dtype)

        return part(self.key, self.key_axes), part(self.value, self.value_axes)

    def _written(self, old: Any, new: Array, start: Any, axes: Axes) -> tuple[Any, Any]:
        """Writes `new` into `old`. Returns the full array along with this layer's part."""
        new = jnp.transpose(new.astype(old.dtype), axes)
        place = tuple(0 if axis else start for axis in axes)
        # Without this barrier, XLA would fuse the write with the reads below and therefore write to a copy.
        old_part = old if self.layer is None else self._layer_of(old)
        out = part = lax.optimization_barrier(lax.dynamic_update_slice(old_part, new, place))
        if self.layer is not None:
            out = lax.dynamic_update_slice(old, part[None], (self.layer, 0, 0, 0))
        return out, jnp.transpose(part, [axes.index(axis) for axis in range(3)])

    def _layer_of(self, whole: Any) -> Any:
        return lax.dynamic_index_in_dim(whole, self.layer, keepdims=False)


class Attention(Part, AbstractMixer, roles="q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm sinks"):
    role: ClassVar = "self_attn"

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c, family = config, config.family
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        queries = 2 * wide if family.gated_attention else wide
        sizes = {"q_proj": queries, "k_proj": narrow, "v_proj": narrow}
        sizes = {"qkv_proj": queries + 2 * narrow} if family.fused else sizes

        def bias(of_family: Any) -> Any:
            return c.attention_bias if of_family is None else of_family

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
        c, n, gate = self.config, len(x), None
        if c.family.fused:
            # The fused projection is the concatenation of queries, keys and values, in that order.
            kv, fused = c.num_key_value_heads * c.head_dim, each(self.part("qkv_proj"), x)
            parts = jnp.split(fused, [fused.shape[-1] - 2 * kv, fused.shape[-1] - kv], axis=-1)
        else:
            parts = [each(self.part(f"{name}_proj"), x) for name in "qkv"]
        if c.family.gated_attention:
            # Within each head, queries are followed by gates.
            query, gate = jnp.split(parts[0].reshape(n, -1, 2 * c.head_dim), 2, axis=-1)
            parts[0], gate = query.reshape(n, -1), gate.reshape(n, -1)
        # Normalise either over all heads together (e.g. OLMo 2), or over each head separately (e.g. Qwen3).
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
            # Rotating both leaves the scores unchanged, but makes the keys easier to quantise.
            if memory.rotates:
                query, key = hadamard(query), hadamard(key)
            memory, key, value = memory.write(key, value, start, query.dtype)
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else c.attention_multiplier or None
        cap = c.attn_logit_softcapping
        out = attend(query, key, value, context.sight, scale=scale, softcap=cap, sinks=self.part("sinks"))
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return each(self.part("o_proj"), out), memory

    @classmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> Memory:
        return Memory.empty(room, config.num_key_value_heads, config.head_dim, dtype, cache)


def hadamard(x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
    """Rotates rows by a Hadamard matrix, which spreads outliers evenly over all elements.

    Without this, a few outliers determine the scale when quantising the rows. The matrix is orthogonal, so
    inner products are unchanged if both sides are rotated. (If the size isn't a power of two, then the matrix
    is block-diagonal. Its block size is the largest power of two dividing the size.)

    Ashkboos et al., QuaRot (2024).
    """
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two dividing the size
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) * np.float32(0.5**0.5)
    parts = x.reshape(*x.shape[:-1], -1, size).astype(jnp.float32)
    return (parts @ matrix).reshape(x.shape).astype(x.dtype)


def attend(
    query: Float[Array, "tokens heads size"],
    key: Float[Array, "seen kv_heads size"],
    value: Float[Array, "seen kv_heads size"],
    sight: Sight,
    *,
    scale: float | int | None = None,
    softcap: float | int = 0.0,
    sinks: Float[Array, " heads"] | None = None,
) -> Hidden:
    """Softmax attention (Vaswani et al., 2017). Each key head can be shared by several query heads (GQA).

    Up to 2¹⁹ (query, key) pairs, this computes the full matrix of scores. Beyond that it attends blockwise,
    with memory linear in the number of tokens, including when differentiated.

    If the arrays live on a mesh with an axis named seq, context or cp, then tokens are sharded along this
    axis. As in Ring Attention (Liu et al., 2023), each device computes the output for its own queries whilst
    keys and values are passed around. This only supports reverse-mode autodifferentiation (`jax.grad`,
    `jax.vjp`).

    Inside [`quaxlike.lm.models.attention_backend`][], the chosen kernel is used if it supports the inputs.

    **Arguments:**

    - `sight`: the attention mask.
    - `scale`: the factor to multiply scores by. Default: `1 / sqrt(size)`.
    - `softcap`: the bound to soft-cap scores at, as in Gemma 2; 0 to disable.
    - `sinks`: the score of a virtual token for each head, as in GPT-OSS.
    """
    tokens, n_heads, size = query.shape
    factor = size**-0.5 if scale is None else scale
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    # With a cache, queries and keys belong to different tokens, so don't shard either of them.
    axis = sequence_axis((query, key, value)) if len(key) == tokens else None
    case = Case(query, key, value, sight, factor, softcap, sinks, divided=axis is not None)
    if (kernel := chosen(case)) is not None:
        return kernel(case).reshape(tokens, n_heads * size)
    query = query.reshape(tokens, key.shape[1], -1, size)
    scores = functools.partial(scores_of, scale=factor, softcap=softcap)
    if sinks is not None:
        sinks = sinks.reshape(*query.shape[1:3], 1)
    of_all = of_one_device if axis is None else functools.partial(of_ring, axis=axis)
    return of_all(query, key, value, sight, scores, sinks).reshape(tokens, n_heads * size)
