"""Attention: one softmax with the projections of all architectures, and its cache of keys and values.

Scores of all pairs of tokens are made for short texts alone. For long ones memory is linear in the length:
blocks of queries meet blocks of keys, with a running softmax (Milakov and Gimelshein, 2018, as in Dao et al.,
FlashAttention, 2022), and are computed again for their derivatives. On a mesh with an axis for tokens, each
device has the queries of its share, and gathers the keys and values of all.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..arrays.quantized import CODECS, CacheArray
from ..kernels.multilinear import vary_alike, varying_zeros
from ..sharding.meshes import mesh_of, sequence_axis
from .decoder_config import DecoderConfig
from .layers import Hidden, Part, each, linears, norm
from .rope import rotate

# Pairs of a query and a key up to which the scores of all are made at once.
_ALL_AT_ONCE = 2**19
_BLOCK = 512  # queries, and keys, at a time for more of them


class Sight(NamedTuple):
    """Which tokens each token sees: those that are no padding, are near enough and belong to the same text.

    **Attributes:**

    - `places`: of the tokens that see, among those that are seen.
    - `seen`: which tokens are no padding.
    - `before`, `after`: how far a token sees.
    - `texts`: for tokens that see and that are seen, the numbers of their texts; None if they are one.
    """

    places: Int[Array, " tokens"]
    seen: Bool[Array, " seen"]
    before: Int[Array, ""]
    after: Int[Array, ""]
    texts: tuple[Int[Array, " tokens"], Int[Array, " seen"]] | None = None

    @classmethod
    def of(
        cls,
        seen: Bool[Array, " seen"],
        places: Int[Array, " tokens"] | None = None,
        *,
        before: Any = None,
        after: Any = None,
        texts: tuple[Any, Any] | None = None,
    ) -> "Sight":
        """`places`: default: all. `before` and `after`: without a limit if None."""
        far = lambda reach: jnp.asarray(len(seen) if reach is None else reach, jnp.int32)
        places = jnp.arange(len(seen)) if places is None else places
        return cls(places, seen, far(before), far(after), texts)

    def mask(self, first: Any = 0) -> Bool[Array, "tokens seen"]:
        """The pairs of a token and one that it sees; `first`: the place of the first that is seen."""
        distance = self.places[:, None] - (first + jnp.arange(len(self.seen)))[None, :]
        mask = (distance <= self.before) & (-distance <= self.after) & self.seen[None, :]
        return mask if self.texts is None else mask & (self.texts[0][:, None] == self.texts[1][None, :])


class Context(NamedTuple):
    """The inputs that layers of one kind share: rotations of heads, the tokens that are seen, and factors of
    queries."""

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    sight: Sight
    factor: Float[Array, " tokens"] | None = None


class Memory(eqx.Module):
    """The cached keys and values of one layer, for up to `room` tokens: arrays, or Values that round what is
    written to them. Those of scanned layers are arrays of all of them, which the scan carries: they are
    written in place."""

    key: Float[Array, "*layers room kv_heads size"]
    value: Float[Array, "*layers room kv_heads size"]
    rotates: bool = eqx.field(static=True, default=False)
    """Whether keys, and the queries that meet them, are rotated by `hadamard`."""
    layer: Int[Array, ""] | None = None
    """Which layer this is, of those whose keys and values the arrays hold; None if they hold one."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: Any, scheme: str | None) -> "Memory":
        """`scheme`: as for `generate`."""
        if scheme is None or scheme == "bfloat16":
            of = lambda: jnp.zeros(shape, dtype if scheme is None else scheme)
            return cls(of(), of())
        if scheme not in CODECS:
            known = ", ".join(["bfloat16", *CODECS])
            raise ValueError(f"`cache` must be None or one of {known}; found {scheme!r}.")
        of: Any = lambda: CacheArray.empty(shape, scheme, dtype=dtype)
        return cls(of(), of(), rotates=CODECS[scheme].bits <= 4)

    def write(self, key: Array, value: Array, start: Any) -> "Memory":
        """The memory with the keys and values of the tokens from `start` on."""
        place = (start, 0, 0) if self.layer is None else (self.layer, start, 0, 0)

        def put(old: Any, new: Array) -> Any:
            new = new.astype(old.dtype).reshape(*[1] * (len(place) - 3), *new.shape)
            return lax.dynamic_update_slice(old, new, place)

        return dataclasses.replace(self, key=put(self.key, key), value=put(self.value, value))

    def read(self, dtype: Any) -> tuple[Array, Array]:
        """The keys and values of the layer."""
        parts = self.key, self.value
        if self.layer is not None:
            parts = tuple(lax.dynamic_index_in_dim(part, self.layer, keepdims=False) for part in parts)
        key, value = (part.astype(dtype) for part in parts)
        return key, value


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
            if memory.rotates:
                query, key = hadamard(query), hadamard(key)
            memory = memory.write(key, value, start)
            key, value = memory.read(query.dtype)
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else c.attention_multiplier or None
        cap = c.attn_logit_softcapping
        out = attend(query, key, value, context.sight, scale=scale, softcap=cap, sinks=self.part("sinks"))
        return each(self.part("o_proj"), out), memory


def hadamard(x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
    """Rotates rows so that large elements are spread over all; products of two rotated rows stay as they
    were. Of a size that is no power of two, parts are rotated.

    Ashkboos et al., QuaRot (2024).
    """
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides it
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
    """Softmax attention (Vaswani et al., 2017); several query heads may share a key head.

    For up to 2¹⁹ pairs of tokens their scores are made at once; for more, memory is linear in the number of
    tokens, in derivatives, too.

    If the mesh of the arrays has an axis called seq, context or cp, tokens that see each other are divided
    along it: each device computes the rows of its own queries, and the keys and values of all tokens, which
    are few where heads share them, are gathered for one layer at a time, as for Llama 3 (Grattafiori et al.,
    2024, section 3.3.2).

    **Arguments:**

    - `sight`: which tokens each token sees.
    - `scale`: of the scores. Default: one over the square root of `size`.
    - `softcap`: a bound that scores are squashed to stay below (Gemma 2); 0 for none.
    - `sinks`: for each head, the score of a virtual token (GPT-OSS).
    """
    tokens, n_heads, size = query.shape
    query = query.reshape(tokens, key.shape[1], -1, size)
    scores = functools.partial(_scores, scale=size**-0.5 if scale is None else scale, softcap=softcap)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*query.shape[1:3], 1)
    axis = sequence_axis((query, key, value)) if len(key) == tokens else None
    of_all = _of_all if axis is None else functools.partial(_of_shares, axis=axis)
    return of_all(query, key, value, sight, scores, sinks).reshape(tokens, n_heads * size)


def _of_all(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    of_all = _at_once if len(query) * len(key) <= _ALL_AT_ONCE else _by_blocks
    return of_all(query, key, value, sight, scores, sinks)


def _of_shares(
    query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any, *, axis: str
) -> Array:
    """Each device's own queries, along an axis of the mesh, with all keys."""

    def of_device(*operands: Any) -> Array:
        # Derivatives by what is whole are summed over devices here: within `lax.cond`, some would not come.
        query, key, value, sight, sinks = vary_alike(operands)
        return _of_all(query, key, value, sight, scores, sinks)

    own: Any = jax.P(axis)
    whole: Any = jax.P()
    sights = Sight(own, whole, whole, whole, None if sight.texts is None else (own, whole))
    return jax.shard_map(
        of_device, mesh=mesh_of((query, key, value)), axis_names={axis},
        in_specs=(own, whole, whole, sights, whole), out_specs=own,
    )(query, key, value, sight, sinks)  # fmt: skip


def _scores(query: Array, key: Array, mask: Array, *, scale: float, softcap: float) -> Array:
    """Scores in float32, `(kv_heads, group, tokens, seen)`; the least number where a token does not see."""
    scores = (jnp.einsum("qhgd,khd->hgqk", query, key) * scale).astype(jnp.float32)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask[None, None], scores, jnp.finfo(jnp.float32).min)


def _at_once(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    found = scores(query, key, sight.mask())
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[..., None], (*found.shape[:3], 1))
        found = jnp.concatenate([found, sink], axis=-1)
    weights = jax.nn.softmax(found, axis=-1)[..., : len(key)]
    return jnp.einsum("hgqk,khd->qhgd", weights.astype(value.dtype), value)


def _by_blocks(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    """Blocks of queries one after the other, each with the blocks of keys that it may see."""
    tokens, keys = len(query), len(key)
    texts = sight.texts or (jnp.zeros(tokens, jnp.int32), jnp.zeros(keys, jnp.int32))
    of_queries = jax.tree.map(_in_blocks, (query, sight.places, texts[0]))
    of_keys = jax.tree.map(_in_blocks, (key, value, sight.seen, texts[1], jnp.arange(keys)))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(queries: Any) -> Array:
        query, places, text = queries
        own = sight._replace(places=places)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def add(sums: Any, keys: Any) -> Any:
            key, value, seen, other, order = keys
            near = own._replace(seen=seen, texts=(text, other))

            def see(sums: Any) -> Any:
                total, weight, most = sums
                found = scores(query, key, near.mask(order[0]))
                higher = lax.stop_gradient(jnp.maximum(most, jnp.max(found, axis=-1)))
                weights, fade = jnp.exp(found - higher[..., None]), jnp.exp(most - higher)
                part = jnp.einsum("hgqk,khd->hgqd", weights.astype(value.dtype), value)
                total = total * fade[..., None] + part.astype(jnp.float32)
                return total, weight * fade + jnp.sum(weights, axis=-1), higher

            # All queries are too far from the block. This depends on places alone, which batches share.
            far = (places[0] - own.before > order[-1]) | (places[-1] + own.after < order[0])
            return lax.cond(far, lambda sums: sums, see, sums), None

        heads = (*query.shape[1:3], len(query))
        zeros = varying_zeros((*heads, value.shape[-1]), jnp.float32, query, key, value)
        weight = zeros[..., 0]
        most = weight + (jnp.finfo(jnp.float32).min if sinks is None else lax.stop_gradient(sinks))
        weight = weight if sinks is None else jnp.exp(sinks - most)  # of the virtual token
        empty = zeros, weight, most
        total, weight, _ = lax.scan(add, empty, of_keys)[0]
        out = total / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)[..., None]
        return jnp.moveaxis(out, 2, 0).astype(value.dtype)

    out = lax.map(block, of_queries)
    return out.reshape(-1, *out.shape[2:])[:tokens]


def _in_blocks(x: Array) -> Array:
    """Rows in blocks of one length, the last of which is filled up: numbers go on as they end."""
    count = -(-len(x) // _BLOCK)
    size = -(-len(x) // count)
    if missing := count * size - len(x):
        fill = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, fill, mode="edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant")
    return x.reshape(count, size, *x.shape[1:])
