"""Helpers for meshes, e.g. to find the mesh some arrays are on, or to parse a mesh from a string.

If a mesh has explicit axes, then JAX can't infer the output sharding of some operations (such as indexing),
and raises an error during tracing. Models should use the functions below, which specify these shardings.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from ..core.quaxify import value_of

#: Possible names of the mesh axes for tensor parallelism, expert parallelism and context parallelism.
MODEL_AXES = ("model", "tensor", "tp")
EXPERT_AXES = ("expert", "ep")
SEQUENCE_AXES = ("seq", "context", "cp")


def expert_axis(mesh: Any, count: int | None = None) -> str | None:
    """Finds the mesh axis for expert parallelism, or else the axis for tensor parallelism.

    Returns None if neither is available, or if `count` isn't divisible by its size.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = jax.sharding.AxisType.Manual
    name = next((n for n in (*EXPERT_AXES, *MODEL_AXES) if kinds.get(n, manual) != manual), None)
    if name is None or mesh.shape[name] == 1 or (count is not None and count % mesh.shape[name]):
        return None
    return name


def sequence_axis(tree: Any) -> str | None:
    """Finds the mesh axis for context parallelism, i.e. along the first axis (tokens) in the given arrays.

    Returns None if there isn't one, or if the token count isn't divisible by its size.
    """
    if (mesh := mesh_of(tree)) is None:
        return None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual, explicit = jax.sharding.AxisType.Manual, jax.sharding.AxisType.Explicit
    name = next((n for n in SEQUENCE_AXES if kinds.get(n, manual) != manual and mesh.shape[n] > 1), None)
    if name is None or any(len(x) % mesh.shape[name] for x in jax.tree.leaves(tree)):
        return None
    return name if kinds[name] != explicit or divided_along(name, tree) is not None else None


def mesh_of(tree: Any) -> Any:
    """Returns the mesh of the arrays in a tree (also inside `jax.jit`), or None if they are on one device."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if not mesh.empty), None)


def mesh_from_text(text: str, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Creates a mesh over all devices from a string such as "data=2,model=4". Its axes are all automatic.

    By default these are the available devices. Pass `devices` to compile for others, e.g. the ones in a
    topology description.

    **Raises:** `ValueError` if the string is malformed, or if the number of devices doesn't match.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part)
        if found is None or found[1] in sizes:
            raise ValueError(
                f"--mesh takes axes and their sizes, such as data=2,model=4; found {part.strip()!r}."
            )
        sizes[found[1]] = int(found[2])
    needed = math.prod(sizes.values())
    there = jax.device_count() if devices is None else len(devices)
    if needed != there:
        hint = f" For a trial on a CPU set JAX_NUM_CPU_DEVICES={needed}." if there == 1 else ""
        raise ValueError(f"--mesh {text} is of {needed} devices; there are {there}.{hint}")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=devices,
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    )  # fmt: skip


# Explicit axes ------------------------------------------------------------------------------------


def rows_of(embedding: eqx.nn.Embedding, at: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """Looks up rows in an embedding. The output is sharded like the tokens, and its rows aren't sharded."""
    mesh = mesh_of((embedding, at))
    if mesh is None or not mesh.explicit_axes:
        return jax.vmap(lambda at: embedding(at))(at)
    sharding = jax.NamedSharding(mesh, jax.P(*jax.typeof(at).sharding.spec, None))
    return embedding.weight.at[at].get(out_sharding=sharding)


def whole_rows(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Reshards `x`, with its last axis unsharded."""
    mesh = mesh_of(x)
    if mesh is None or not mesh.explicit_axes:
        return x
    spec = jax.P(*jax.typeof(x).sharding.spec[:-1], None)
    return jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))


def divided_along(axis: str, tree: Any) -> Any:
    """Returns the Values underlying a tree's leaves, if the first axis of every array is sharded over `axis`.

    Otherwise, this returns None.
    """
    tree = jax.tree.map(value_of, tree)
    divided = all(tuple(jax.typeof(x).sharding.spec)[:1] == (axis,) for x in jax.tree.leaves(tree))
    return tree if divided else None
