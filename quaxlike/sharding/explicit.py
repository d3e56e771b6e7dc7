"""What JAX has to be told where the axes of a mesh are explicit, and finds out elsewhere."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from ..core.quaxify import value_of
from .meshes import mesh_of


def rows_of(embedding: eqx.nn.Embedding, at: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """The rows of an embedding for each token, spread as the tokens are, and each of them whole."""
    mesh = mesh_of((embedding, at))
    if mesh is None or not mesh.explicit_axes:
        return jax.vmap(embedding)(at)
    sharding = jax.NamedSharding(mesh, jax.P(*jax.typeof(at).sharding.spec, None))
    return embedding.weight.at[at].get(out_sharding=sharding)


def whole_rows(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """`x`, not spread along its last axis."""
    mesh = mesh_of(x)
    if mesh is None or not mesh.explicit_axes:
        return x
    spec = jax.P(*jax.typeof(x).sharding.spec[:-1], None)
    return jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))


def divided_along(axis: str, tree: Any) -> Any:
    """A tree with the Values that stand behind its leaves, whose arrays say how they are spread; None if the
    first axis of any of them is not spread over this axis of the mesh."""
    tree = jax.tree.map(value_of, tree)
    divided = all(tuple(jax.typeof(x).sharding.spec)[:1] == (axis,) for x in jax.tree.leaves(tree))
    return tree if divided else None
