"""Meshes as the arguments of commands describe them."""

import math
import re

import jax


def mesh_from_text(text: str) -> jax.sharding.Mesh:
    """The mesh that a text such as "data=2,model=4" describes: of all devices, with automatic axes.

    **Raises:** `ValueError` for another text, or another number of devices than there are.
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
