"""Shardings that must be stated if a mesh's axes are explicit, and that JAX infers otherwise."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from ..core.quaxify import value_of
from .meshes import mesh_of


def rows_of(embedding: eqx.nn.Embedding, at: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """The rows of an embedding for each token, sharded like the tokens; no row is split."""
    mesh = mesh_of((embedding, at))
    if mesh is None or not mesh.explicit_axes:
        return jax.vmap(embedding)(at)
    sharding = jax.NamedSharding(mesh, jax.P(*jax.typeof(at).sharding.spec, None))
    return embedding.weight.at[at].get(out_sharding=sharding)


def whole_rows(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """`x`, not sharded along its last axis."""
    mesh = mesh_of(x)
    if mesh is None or not mesh.explicit_axes:
        return x
    spec = jax.P(*jax.typeof(x).sharding.spec[:-1], None)
    return jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))


def divided_along(axis: str, tree: Any) -> Any:
    """The tree with the Values behind its leaves, whose arrays have sharding types; None if the first axis of
    any array is not sharded over this axis of the mesh."""
    tree = jax.tree.map(value_of, tree)
    divided = all(tuple(jax.typeof(x).sharding.spec)[:1] == (axis,) for x in jax.tree.leaves(tree))
    return tree if divided else None
