"""Fully sharded data parallelism: each device stores an equal shard of every weight."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._checked import checked
from ..core.values import is_value
from .placing import NamedRule, axes_of, leaf_specs_of, unnested


@checked
def fsdp(mesh: Any, *, axis: str | Sequence[str] | None = None, over: NamedRule | None = None) -> NamedRule:
    """Creates a rule for fully sharded data parallelism.

    Each device stores an equal shard of every weight, and weights are all-gathered when used. The arrays
    inside a Value (e.g. codes, scales, or an adapter's factors) are sharded independently, along any axis
    divisible by the device count. This means gathering packed codes, rather than the much larger materialised
    weights. One-dimensional arrays, such as norm scales and biases, are replicated.

    **Arguments:**

    - `mesh`: the mesh. This can be an abstract mesh.
    - `axis`: the mesh axis (or axes) to shard over. Defaults to all axes not used by `over`.
    - `over`: another rule, such as [`tensor_parallel`][quaxlike.lm.tensor_parallel]. Its shards are sharded
        further. Defaults to none.

    **Returns:** a rule for use with [`shard`][quaxlike.sharding.shard] or
    [`specs_for`][quaxlike.sharding.specs_for]. It works for any model, and for optimiser states.

    **Raises:** `ValueError` if the mesh doesn't have an axis with the given name.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.sharding import fsdp, shard

        mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        mlp = ql.quantize(
            eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)),
            "nf4",
            double_quant=True,
        )
        mlp = shard(mlp, mesh, fsdp(mesh))
        ```

    Source: Rajbhandari et al., ZeRO, <https://arxiv.org/abs/1910.02054>.
    """
    axes = tuple(mesh.shape) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for one in axes:
        check_axis(mesh, one)

    def rule(name: str, leaf: Any) -> Any:
        first = leaf_specs_of(name, leaf, None if over is None else over(name, leaf))
        if not is_value(leaf) and len(leaf.shape) < 2:
            return first
        if jtu.tree_structure(first) != jtu.tree_structure(leaf):
            leaf = eqx.filter_eval_shape(unnested, leaf)
        return jtu.tree_map(lambda x, spec: _cut_further(x, spec, mesh, axes), leaf, first)

    return rule


def _cut_further(x: Any, spec: jax.P, mesh: Any, axes: tuple[str, ...]) -> jax.P:
    """Shards one axis of an array over the mesh axes that aren't used yet.

    Prefers an axis that is already sharded (an all-gather then preserves the order), and then the longest.
    """
    entries = [axes_of(entry) for entry in (*spec, *[None] * (len(x.shape) - len(spec)))]
    used = {name for entry in entries for name in entry}
    free = tuple(name for name in axes if name not in used and mesh.shape[name] > 1)

    def shared_evenly(i: int) -> bool:
        devices = math.prod(mesh.shape[name] for name in (*entries[i], *free))
        return x.shape[i] > 0 and x.shape[i] % devices == 0

    fits = [i for i in range(len(x.shape)) if shared_evenly(i)]
    if not free or not fits:
        return spec
    entries[max(fits, key=lambda i: (bool(entries[i]), x.shape[i]))] += free
    return jax.P(*[None if not names else names[0] if len(names) == 1 else names for names in entries])


def check_axis(mesh: Any, axis: str) -> None:
    if axis not in mesh.shape:
        raise ValueError(f"The mesh has no axis {axis!r}; it has {', '.join(mesh.shape)}.")
