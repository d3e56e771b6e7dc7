"""Ring attention, i.e. context parallelism: the tokens are sharded over one axis of a mesh.

Each device keeps the queries for its own tokens, whilst keys and values are passed around a ring of devices.
Each device attends to every key in one full rotation, using a running softmax and never storing more than two
shards. The backward pass does a second rotation, including cotangents.

See Ring Attention (Liu et al., 2023) and FlashAttention-2 (Dao, 2023).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ...kernels.multilinear import vary_alike, varying_zeros
from ...sharding.meshes import mesh_of
from .attention_blocks import Sight, Sums, in_blocks, out_of_blocks


def of_ring(
    query: Array, key: Array, value: Array, sight: Sight, scores: Any, sinks: Any, *, axis: str
) -> Array:
    """As `of_one_device`, but for tokens sharded over an axis of a mesh."""
    mesh = mesh_of((query, key, value))
    ring = _Ring(axis, mesh.shape[axis], scores)

    def of_device(*operands: Any) -> Array:
        # Make all operands device-varying up front, so that the cotangents of replicated operands are summed
        # here. Not every device would take part in this collective inside the `lax.cond` below.
        return ring(*vary_alike(operands))

    own: Any = jax.P(axis)
    whole: Any = jax.P()
    sights = sight._replace(places=own, seen=own, before=whole, after=whole)
    sights = sights._replace(texts=None if sight.texts is None else (own, own))
    return jax.shard_map(
        of_device, mesh=mesh, axis_names={axis}, in_specs=(own, own, own, sights, whole), out_specs=own,
    )(query, key, value, sight, sinks)  # fmt: skip


class _Ring:
    """Attention over a ring of `count` devices.

    Call this inside a `shard_map`, with all operands varying over `axis`.
    """

    def __init__(self, axis: str, count: int, scores: Any) -> None:
        self.axis, self.count, self.scores = axis, count, scores
        attend = jax.custom_vjp(lambda *operands: self._forward(*operands)[0])
        attend.defvjp(self._forward, self._backward)
        self._attend = attend

    def __call__(self, query: Array, key: Array, value: Array, sight: Sight, sinks: Any) -> Array:
        return self._attend(query, key, value, sight, sinks)

    def _forward(self, query: Array, key: Array, value: Array, sight: Sight, sinks: Any) -> Any:
        tokens = len(query)
        queries, keys = self._queries(query, sight), self._keys(key, value, sight)
        empty = jax.vmap(lambda query: Sums.empty(query, key, value, sinks))(queries[0])

        def turn(carry: Any, i: Any) -> Any:
            sums, keys = carry
            starts = self._starts(keys, tokens, i)

            def block(part: Any) -> Sums:
                queries, sums = part

                def add(sums: Sums, keys: Any) -> Any:
                    sees, mask = self._sight(sight, queries, *keys)

                    def see(sums: Any) -> Any:
                        return sums.plus(self.scores(queries[0], keys[0][0], mask()), keys[0][1])

                    return lax.cond(sees, see, lambda sums: sums, sums), None

                return lax.scan(add, sums, (keys, starts))[0]

            return (lax.map(block, (queries, sums)), self._passed(keys)), None

        (sums, _), _ = lax.scan(turn, (empty, keys), jnp.arange(self.count))
        out = out_of_blocks(jax.vmap(lambda sums: sums.mean(value.dtype))(sums), tokens)
        return out, (query, key, value, sight, sinks, out, sums.positive_weight, sums.most)

    def _backward(self, kept: Any, cotangent: Array) -> Any:
        query, key, value, sight, sinks, out, weight, most = kept
        tokens = len(query)
        # The VJP of the softmax: the cotangent of a score is its weight multiplied by the cotangent of the
        # weight minus their weighted mean. This mean is also the inner product of the output with its
        # cotangent, so computing it doesn't need another pass over the keys.
        mean = jnp.sum(cotangent.astype(jnp.float32) * out, axis=-1)
        means = jnp.moveaxis(in_blocks(mean), 1, -1)
        queries, keys = self._queries(query, sight), self._keys(key, value, sight)
        of_queries = queries, in_blocks(cotangent), weight, most, means

        def zeros(x: Any) -> Any:
            return varying_zeros(x.shape, jnp.float32, query, key, value)

        def turn(carry: Any, i: Any) -> Any:
            dqueries, keys, dkeys = carry
            starts = self._starts(keys, tokens, i)

            def block(dqueries: Any, part: Any) -> Any:
                keys, dkeys, start = part

                def add(dkeys: Any, part: Any) -> Any:
                    queries, dquery = part
                    sees, mask = self._sight(sight, queries[0], keys, start)

                    def see(dkeys: Any, dquery: Any) -> Any:
                        return self._with_cotangents(dkeys, dquery, queries, keys, mask())

                    return lax.cond(sees, see, lambda *sums: sums, dkeys, dquery)

                dkeys, dqueries = lax.scan(add, dkeys, (of_queries, dqueries))
                return dqueries, dkeys

            dqueries, dkeys = lax.scan(block, dqueries, (keys, dkeys, starts))
            # Pass on cotangents together with their keys and values, so that they return to the owner.
            return (dqueries, self._passed(keys), self._passed(dkeys)), None

        begin = zeros(queries[0]), keys, (zeros(keys[0]), zeros(keys[1]))
        (dqueries, _, dkeys), _ = lax.scan(turn, begin, jnp.arange(self.count))

        def like(x: Any, blocks: Any) -> Any:
            return out_of_blocks(blocks, tokens).astype(x.dtype)

        dsinks = None
        if sinks is not None:
            of_queries = jax.vmap(lambda *of: jnp.exp(sinks - of[0]) / of[1] * of[2])(most, weight, means)
            dsinks = -jnp.sum(of_queries, axis=(0, -1))[..., None]
        return like(query, dqueries), like(key, dkeys[0]), like(value, dkeys[1]), None, dsinks

    def _with_cotangents(self, dkeys: Any, dquery: Array, queries: Any, keys: Any, mask: Array) -> Any:
        """Adds the cotangents from one query block attending to one key block."""
        (query, *_), cotangent, weight, most, mean = queries
        (dkey, dvalue), (key, value, *_) = dkeys, keys
        found, back = jax.vjp(lambda query, key: self.scores(query, key, mask), query, key)
        weights = jnp.exp(found - most[..., None]) / weight[..., None]
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dvalue += product("hgqk,qhgd->khd", weights.astype(value.dtype), cotangent)
        above = product("qhgd,khd->hgqk", cotangent, value) - mean[..., None]
        of_query, of_key = back(weights * above)
        return (dkey + of_key.astype(jnp.float32), dvalue), dquery + of_query.astype(jnp.float32)

    def _queries(self, query: Array, sight: Sight) -> Any:
        """Splits the queries into blocks, along with their positions and segment ids."""
        return jax.tree.map(in_blocks, (query, sight.places, sight.texts and sight.texts[0]))

    def _keys(self, key: Array, value: Array, sight: Sight) -> Any:
        """Splits the keys and values into blocks, along with their mask and segment ids."""
        return jax.tree.map(in_blocks, (key, value, sight.seen, sight.texts and sight.texts[1]))

    def _starts(self, keys: Any, tokens: int, i: Any) -> Array:
        """Returns each key block's starting position, for the shard held after `i` turns."""
        owner = (lax.axis_index(self.axis) - i) % self.count
        return owner * tokens + keys[0].shape[1] * jnp.arange(len(keys[0]))

    def _sight(self, sight: Sight, queries: Any, keys: Any, start: Any) -> Any:
        """Returns whether a query block attends to a key block at all, plus a function for the mask.

        The mask is only needed if it does, and so only computed then.
        """
        (_, places, text), (_, _, seen, other) = queries, keys
        near = sight._replace(places=places, seen=seen, texts=None if text is None else (text, other))
        return ~near.is_far(start, start + len(seen) - 1), lambda: near.mask(start)

    def _passed(self, tree: Any) -> Any:
        """Passes arrays on to the next device in the ring, using a collective permute."""
        along = [(i, (i + 1) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, along), tree)
