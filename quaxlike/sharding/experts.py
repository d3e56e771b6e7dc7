"""Sums over experts on a mesh: each device runs its own."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .meshes import expert_axis, mesh_of

_Experts = TypeVar("_Experts")


def sum_over_experts(
    run: Callable[[_Experts, Array, Array, Array], Array],
    experts: _Experts,
    count: int,
    x: Float[Array, "tokens hidden"],
    chosen: Int[Array, "tokens choices"],
    share: Float[Array, "tokens choices"],
) -> Float[Array, "tokens hidden"]:
    """`run(experts, x, chosen, share)`, which sums what the chosen experts make of each token.

    On a mesh whose devices can share the experts evenly ([`quaxlike.sharding.expert_parallel`][]) each runs
    its own, on all tokens, and one sum over devices follows. No weight moves.

    **Arguments:**

    - `run`: may be given a part of the experts; `chosen` then counts within it.
    - `experts`: `count` of them, along the first axis of all arrays in it.
    - `share`: what each choice is multiplied by.
    """
    mesh = mesh_of((experts, x))
    axis = None if mesh is None else expert_axis(mesh, count)
    if axis is None:
        return run(experts, x, chosen, share)

    def of_device(own: Any, numbers: Array, x: Array, chosen: Array, share: Array) -> Array:
        chosen = chosen - numbers[0]
        is_own = (chosen >= 0) & (chosen < len(numbers))
        return lax.psum(run(own, x, jnp.where(is_own, chosen, 0), jnp.where(is_own, share, 0)), axis)

    whole, cut = jax.P(), jax.P(axis)
    specs = (cut, cut, whole, whole, whole)
    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=whole, axis_names={axis})
    return mapped(experts, jnp.arange(count), x, chosen, share)
