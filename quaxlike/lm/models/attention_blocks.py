"""Softmax attention on a single device, either with all scores materialised or blockwise in linear memory.

The latter attends from query blocks to key blocks using a running softmax (Milakov and Gimelshein, 2018, as
in Dao et al., FlashAttention, 2022). The backward pass recomputes the scores, so they are never all stored at
once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ...kernels.dense_matmul import stacked_matmul
from ...kernels.multilinear import varying_zeros
from .layers import has_values

# The maximum number of (query, key) pairs for which to materialise all scores. Beyond this, go blockwise.
_ALL_AT_ONCE = 2**19
# On CPUs, handle a single query by direct summation rather than matrix multiplication. This reads the keys
# again for every query head, so it's only worth it for up to this many query heads per key head.
_MOST_SUMMED = 8
_BLOCK = 512  # number of queries or keys per block


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reach:
    """The attention window before and after each token. None means unlimited."""

    before: int | None
    after: int | None


class Sight(NamedTuple):
    """The attention mask. Queries attend to non-padding keys in their window and segment.

    **Attributes:**

    - `places`: the position of each query amongst the keys.
    - `seen`: False for padding.
    - `before`, `after`: the size of the window before and after each query.
    - `texts`: the segment ids of queries and keys, or None if there is only one segment.
    - `reach`: the window as static integers, required by some kernels. None if the window is dynamic, or if
        queries and keys belong to different tokens.
    """

    places: Int[Array, " tokens"]
    seen: Bool[Array, " seen"]
    before: Int[Array, ""]
    after: Int[Array, ""]
    texts: tuple[Int[Array, " tokens"], Int[Array, " seen"]] | None = None
    reach: Reach | None = None

    @classmethod
    def of(
        cls,
        seen: Bool[Array, " seen"],
        places: Int[Array, " tokens"] | None = None,
        *,
        before: int | None = None,
        after: int | None = None,
        texts: tuple[Any, Any] | None = None,
    ) -> "Sight":
        """Creates a mask. By default, every key is also a query and the window is unlimited."""

        def far(reach: Any) -> Any:
            return jnp.asarray(len(seen) if reach is None else reach, jnp.int32)

        reach = Reach(before, after) if places is None else None
        places = jnp.arange(len(seen)) if places is None else places
        return cls(places, seen, far(before), far(after), texts, reach)

    def mask(self, first: Any = 0) -> Bool[Array, "tokens seen"]:
        """Materialises the mask as a matrix of shape `(tokens, seen)`.

        `first` is the position of the first key: nonzero if the keys are one of many blocks.
        """
        distance = self.places[:, None] - (first + jnp.arange(len(self.seen)))[None, :]
        mask = (distance <= self.before) & (-distance <= self.after) & self.seen[None, :]
        return mask if self.texts is None else mask & (self.texts[0][:, None] == self.texts[1][None, :])

    def is_far(self, first: Any, last: Any) -> Bool[Array, ""]:
        """Returns whether the keys from `first` to `last` are outside every query's window.

        This only depends on positions. They aren't batched, so under `jax.vmap` a `lax.cond` on the result is
        still a branch rather than a `select`.
        """
        return (self.places[0] - self.before > last) | (self.places[-1] + self.after < first)


class Sums(NamedTuple):
    """A running softmax, i.e. each query's sums over the keys processed so far.

    **Attributes:**

    - `total`: the weighted sum of values, `(kv_heads, group, tokens, size)`.
    - `weight`: the sum of weights.
    - `most`: the maximum score. To avoid overflow, this is subtracted from scores before exponentiating.
    """

    total: Float[Array, "kv_heads group tokens size"]
    weight: Float[Array, "kv_heads group tokens"]
    most: Float[Array, "kv_heads group tokens"]

    @classmethod
    def empty(cls, query: Array, key: Array, value: Array, sinks: Any) -> "Sums":
        """Initialises the sums. Sinks (if any) contribute a weight but no value."""
        heads = (*query.shape[1:3], len(query))
        zeros = varying_zeros((*heads, value.shape[-1]), jnp.float32, query, key, value)
        weight = zeros[..., 0]
        most = weight + (jnp.finfo(jnp.float32).min if sinks is None else lax.stop_gradient(sinks))
        return cls(zeros, weight if sinks is None else jnp.exp(sinks - most), most)

    def plus(self, scores: Array, value: Array) -> "Sums":
        # Mathematically the result doesn't depend on the maximum subtracted, so don't differentiate it.
        higher = lax.stop_gradient(jnp.maximum(self.most, jnp.max(scores, axis=-1)))
        weights, fade = jnp.exp(scores - higher[..., None]), jnp.exp(self.most - higher)
        rounded = weights.astype(value.dtype)
        part = _product("hgqk,khd->hgqd", _sums_by_heads, rounded, value, weights.shape[2])
        total = self.total * fade[..., None] + part.astype(jnp.float32)
        return Sums(total, self.weight * fade + jnp.sum(weights, axis=-1), higher)

    def mean(self, dtype: Any) -> Float[Array, "tokens kv_heads group size"]:
        """Computes the weighted mean of the values, once all keys have been added."""
        out = self.total / self.positive_weight[..., None]
        return jnp.moveaxis(out, 2, 0).astype(dtype)

    @property
    def positive_weight(self) -> Array:
        return jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


def of_one_device(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    """Computes attention for queries of shape `(tokens, kv_heads, group, size)`.

    Each group of query heads shares one key head.

    **Arguments:**

    - `scores`: `scores_of` with its options already bound.
    - `sinks`: an array of shape `(kv_heads, group, 1)`, or None.
    """
    of_all = _at_once if len(query) * len(key) <= _ALL_AT_ONCE else _by_blocks
    return of_all(query, key, value, sight, scores, sinks)


class _Products(NamedTuple):
    """The two products in attention.

    `scores` multiplies queries by keys, giving shape `(kv_heads, group, tokens, seen)`. `means` multiplies
    weights by values.
    """

    scores: Callable[[Array, Array], Array]
    means: Callable[[Array, Array], Array]


def _scores_of_one(query: Array, key: Array) -> Array:
    return stacked_matmul(query[0], jnp.moveaxis(key, 0, -1))[:, :, None]


def _means_of_one(weights: Array, value: Array) -> Array:
    return stacked_matmul(weights[:, :, 0], jnp.swapaxes(value, 0, 1))[None]


def _product(
    subscripts: str, by_heads: Callable[[Array, Array], Array], x: Array, y: Array, tokens: int
) -> Float[Array, "..."]:
    """Computes `jnp.einsum(subscripts, x, y)`, where `y` has shape `(seen, kv_heads, size)`.

    For bfloat16 keys from a cache on a CPU, this calls `by_heads` with `y` of shape `(kv_heads, seen, size)`.
    XLA only has fast products for matrices with contiguous rows, and computes any others element by element.
    The barrier keeps it from undoing the transposition. If there are as many keys as queries (as in
    training), then XLA chooses the layout of both, and its gradients are faster.
    """
    plain = functools.partial(jnp.einsum, subscripts)
    if tokens == len(y) or y.dtype != jnp.bfloat16 or has_values((x, y)):
        return plain(x, y)

    def contiguous(x: Array, y: Array) -> Array:
        return by_heads(x, lax.optimization_barrier(jnp.swapaxes(y, 0, 1)))

    return lax.platform_dependent(x, y, cpu=contiguous, default=plain)


def _scores_by_heads(query: Array, key: Array) -> Array:
    return jnp.einsum("hgqd,hkd->hgqk", jnp.moveaxis(query, 0, 2), key)


def _sums_by_heads(weights: Array, value: Array) -> Array:
    return jnp.einsum("hgqk,hkd->hgqd", weights, value)


def _means_by_heads(weights: Array, value: Array) -> Array:
    return jnp.moveaxis(_sums_by_heads(weights, value), 2, 0)


def _scores(query: Array, key: Array) -> Array:
    return _product("qhgd,khd->hgqk", _scores_by_heads, query, key, len(query))


def _means(weights: Array, value: Array) -> Array:
    return _product("hgqk,khd->qhgd", _means_by_heads, weights, value, weights.shape[2])


_DOTS = _Products(_scores, _means)
# Direct summation, for a single query. XLA's CPU dot would convert and transpose its operands first.
_OF_ONE = _Products(_scores_of_one, _means_of_one)


def scores_of(
    query: Array, key: Array, mask: Array, *, scale: float, softcap: float | int, products: _Products = _DOTS
) -> Array:
    """Computes scores in float32, with shape `(kv_heads, group, tokens, seen)`.

    Masked entries are set to the most negative finite number. Infinity would produce NaNs in fully-masked
    rows.
    """
    scores = (products.scores(query, key).astype(key.dtype) * scale).astype(jnp.float32)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask[None, None], scores, jnp.finfo(jnp.float32).min)


def _at_once(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    def by(products: _Products, query: Array, key: Array, value: Array) -> Array:
        found = scores(query, key, sight.mask(), products=products)
        # A sink is just one more score, except that its weight is dropped again after the softmax.
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[..., None], (*found.shape[:3], 1))
            found = jnp.concatenate([found, sink], axis=-1)
        weights = jax.nn.softmax(found, axis=-1)[..., : len(key)].astype(value.dtype)
        return products.means(weights, value).astype(value.dtype)

    by_dots, of_one = (functools.partial(by, products) for products in (_DOTS, _OF_ONE))
    if len(query) > 1 or query.shape[2] > _MOST_SUMMED or has_values(key):
        return by_dots(query, key, value)
    return lax.platform_dependent(query, key, value, cpu=of_one, default=by_dots)


def _by_blocks(query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any) -> Array:
    """Computes attention blockwise, skipping key blocks outside the windows of a query block."""
    tokens, keys = len(query), len(key)
    texts = sight.texts or (jnp.zeros(tokens, jnp.int32), jnp.zeros(keys, jnp.int32))
    of_queries = jax.tree.map(in_blocks, (query, sight.places, texts[0]))
    of_keys = jax.tree.map(in_blocks, (key, value, sight.seen, texts[1], jnp.arange(keys)))

    # Rematerialise both loops: otherwise the scores of every block are stored for the backward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(queries: Any) -> Array:
        query, places, text = queries
        own = sight._replace(places=places)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def add(sums: Sums, keys: Any) -> Any:
            key, value, seen, other, order = keys
            near = own._replace(seen=seen, texts=(text, other))

            def see(sums: Any) -> Any:
                return sums.plus(scores(query, key, near.mask(order[0])), value)

            return lax.cond(own.is_far(order[0], order[-1]), lambda sums: sums, see, sums), None

        sums, _ = lax.scan(add, Sums.empty(query, key, value, sinks), of_keys)
        return sums.mean(value.dtype)

    return out_of_blocks(lax.map(block, of_queries), tokens)


def in_blocks(x: Array) -> Array:
    """Splits the leading axis into blocks of equal size, padding the last one if necessary.

    Positions have to remain sorted, so integers are padded by repeating the last row. Everything else is
    padded with zeros.
    """
    count = -(-len(x) // _BLOCK)
    size = -(-len(x) // count)
    if missing := count * size - len(x):
        fill = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, fill, mode="edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant")
    return x.reshape(count, size, *x.shape[1:])


def out_of_blocks(x: Array, count: int) -> Array:
    """Inverts `in_blocks`: concatenates the blocks and keeps the first `count` rows."""
    return x.reshape(-1, *x.shape[2:])[:count]
