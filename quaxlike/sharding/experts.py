"""Sums over experts, on one device, or on a mesh where each device runs its own experts."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..core.quaxify import quaxify
from ..kernels.multilinear import varying_zeros
from .meshes import divided_along, expert_axis, mesh_of

_Experts = TypeVar("_Experts")


def sum_over_experts(
    one: Callable[[_Experts, Array], Array],
    experts: _Experts,
    x: Float[Array, "tokens hidden"],
    chosen: Int[Array, "tokens choices"],
    share: Float[Array, "tokens choices"],
    *,
    count: int,
) -> Float[Array, "tokens hidden"]:
    """Sums the outputs of the experts chosen for each token, weighted by their shares.

    On a mesh whose devices can share the experts evenly ([`quaxlike.sharding.expert_parallel`][]), each
    device runs its own experts on all tokens, and one sum over devices follows. No weights move. `one` maps
    an expert and tokens to an array of the tokens' shape; every array and Value in `experts` has all `count`
    of them along its first axis.
    """
    mesh = mesh_of((experts, x))
    axis = None if mesh is None else expert_axis(mesh, count)
    stacks, numbers = experts, jnp.arange(count)
    if mesh is not None and axis is not None and axis in mesh.explicit_axes:
        stacks = divided_along(axis, experts)
        numbers = jax.sharding.reshard(numbers, jax.NamedSharding(mesh, jax.P(axis)))
    if axis is None or stacks is None:
        return _sum(one, experts, x, chosen, share, count)

    def of_device(own: Any, numbers: Array, x: Array, chosen: Array, share: Array) -> Array:
        chosen = chosen - numbers[0]
        is_own = (chosen >= 0) & (chosen < len(numbers))
        chosen, share = jnp.where(is_own, chosen, 0), jnp.where(is_own, share, 0)
        return lax.psum(_sum(one, own, x, chosen, share, len(numbers)), axis)

    whole, cut = jax.P(), jax.P(axis)
    specs = (cut, cut, whole, whole, whole)
    mapped = jax.shard_map(quaxify(of_device), mesh=mesh, in_specs=specs, out_specs=whole, axis_names={axis})
    return mapped(stacks, numbers, x, chosen, share)


def _sum(
    one: Callable[[Any, Array], Array], experts: Any, x: Array, chosen: Array, share: Array, count: int
) -> Array:
    """The sum over the experts on this device.

    For few tokens (decoding), each looks up its experts. Many tokens pass through all experts in turn, with a
    share of 0 for those not chosen, so that no array grows with tokens times experts, for stacks of any type.
    """
    tokens, choices = chosen.shape
    zeros = varying_zeros(x.shape, x.dtype, x, share)
    if tokens * choices < count:
        pairs = jnp.repeat(jnp.arange(tokens), choices), chosen.reshape(-1), share.reshape(-1)

        def add_choice(y: Array, pair: Any) -> tuple[Array, None]:
            token, i, part = pair
            own = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), experts)
            return y.at[token].add(part * one(own, x[token][None])[0]), None

        return lax.scan(add_choice, zeros, pairs)[0]
    shares = jnp.zeros((tokens, count), share.dtype).at[jnp.arange(tokens)[:, None], chosen].add(share)

    def add_expert(y: Array, part: Any) -> tuple[Array, None]:
        expert, share = part
        return y + share[:, None] * one(expert, x), None

    return lax.scan(add_expert, zeros, (experts, shares.T))[0]
