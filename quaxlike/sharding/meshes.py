"""Meshes: the names of their axes, the mesh that arrays are on, and meshes described by text."""

import math
import re
from typing import Any

import jax

#: Names of axes that layers are split along, and of those that experts are distributed along.
MODEL_AXES = ("model", "tensor", "tp")
EXPERT_AXES = ("expert", "ep")


def expert_axis(mesh: Any, count: int | None = None) -> str | None:
    """The mesh axis that experts are distributed along: one for experts, or else one for layers.

    **Arguments:** `count`, the number of experts. Default: any.

    **Returns:** its name; None if no such axis is free, or if its devices cannot share the experts evenly.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = jax.sharding.AxisType.Manual
    name = next((n for n in (*EXPERT_AXES, *MODEL_AXES) if kinds.get(n, manual) != manual), None)
    if name is None or mesh.shape[name] == 1 or (count is not None and count % mesh.shape[name]):
        return None
    return name


def mesh_of(tree: Any) -> Any:
    """The mesh that the arrays of a tree are on by their types, also inside `jax.jit`; None if they are on
    one device."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if not mesh.empty), None)


def mesh_from_text(text: str) -> jax.sharding.Mesh:
    """The mesh of all devices that a text such as "data=2,model=4" describes, with automatic axes.

    **Raises:** `ValueError` for a malformed text, or if the number of devices does not match.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part)
        if found is None or found[1] in sizes:
            raise ValueError(
                f"--mesh takes axes and their sizes, such as data=2,model=4; found {part.strip()!r}."
            )
        sizes[found[1]] = int(found[2])
    needed, there = math.prod(sizes.values()), jax.device_count()
    if needed != there:
        hint = f" For a trial on a CPU set JAX_NUM_CPU_DEVICES={needed}." if there == 1 else ""
        raise ValueError(f"--mesh {text} is of {needed} devices; there are {there}.{hint}")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )
