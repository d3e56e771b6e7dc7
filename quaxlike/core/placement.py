"""Devices and shardings of Values, determined from their leaves.

A result must also be correct for the dense array. There may be no sharding of the logical array explaining
how every leaf is placed: we then raise an error, rather than report some arbitrary leaf's sharding.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .jaxprs.slots import LeafLayout, leaf_specs
from .values import Value, aval_of


def devices(value: Value) -> set[Any]:
    """As `jax.Array.devices`, for the leaves.

    For a Value without leaves, the default device: it would be materialised there.
    """
    return set().union(*(leaf.devices() for leaf in _arrays(value)))


def device(value: Value) -> Any:
    """As `jax.Array.device`: the sharding if there are several devices."""
    _require_placed(value, "device")
    found = devices(value)
    return found.pop() if len(found) == 1 else sharding(value)


def sharding(value: Value) -> jax.sharding.Sharding:
    """As `jax.Array.sharding`, for the logical array."""
    _require_placed(value, "sharding")
    arrays = _arrays(value)
    found = [leaf.sharding for leaf in [*filter(_is_placed, arrays)] or arrays]
    # On a single device all shardings are equivalent, so the leaves' may differ.
    if len(devices(value)) == 1 and len({x.memory_kind for x in found}) == 1:
        (at,) = devices(value)
        return jax.sharding.SingleDeviceSharding(at, memory_kind=found[0].memory_kind)
    named = [x for x in found if isinstance(x, jax.NamedSharding)]
    if named and len(named) == len(found) and len({(x.mesh, x.memory_kind) for x in named}) == 1:
        leaves, treedef = jtu.tree_flatten(value)
        slot = LeafLayout(treedef, tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in leaves))
        # Use the leaves' specs as candidates. This works for nearly every type: usually some leaf has all
        # axes of the array.
        for candidate in named:
            if len(candidate.spec) <= len(aval_of(value).shape) and _follow(slot, candidate.spec, leaves):
                return candidate
    raise AttributeError(
        f"No one sharding says how the leaves of {type(value).__name__} are placed. "
        "Ask each: `jax.tree.map(lambda leaf: leaf.sharding, value)`."
    )


def dlpack_device(value: Value) -> Any:
    """As `jax.Array.__dlpack_device__`."""
    found = devices(value)
    if len(found) != 1:
        name = type(value).__name__
        raise BufferError(f"__dlpack__ needs one device; found {name} on {len(found)} devices.")
    array: Any = jnp.zeros((), device=found.pop())
    return array.__dlpack_device__()


def _arrays(value: Value) -> list[Any]:
    # Without leaves, create an array to see on which device JAX places it. (Outside any trace: inside, it
    # would be a tracer.)
    with jax.ensure_compile_time_eval():
        return [x for x in jtu.tree_leaves(value) if isinstance(x, jax.Array)] or [jnp.zeros(())]


def _is_placed(leaf: Any) -> bool:
    """Returns whether a leaf affects where a value is placed. An uncommitted scalar doesn't."""
    return isinstance(leaf, jax.Array) and (leaf.ndim > 0 or leaf.committed)


def _require_placed(value: Value, name: str) -> None:
    """Raises the same error as JAX for tracers, which aren't on any device yet."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jtu.tree_leaves(value)):
        hint = " Use `jax.typeof(value).sharding`." if name == "sharding" else ""
        raise AttributeError(
            f"The {name!r} attribute is not available on {type(value).__name__} of traced arrays.{hint}"
        )


def _follow(slot: LeafLayout, spec: jax.P, leaves: list[Any]) -> bool:
    """Returns whether each leaf is placed as if the logical array were sharded by `spec`."""
    try:
        expected = leaf_specs(slot, spec)
    except ValueError:
        return False
    return all(
        x.sharding.is_equivalent_to(jax.NamedSharding(x.sharding.mesh, s), x.ndim)
        for x, s in zip(leaves, expected, strict=True)
        if _is_placed(x)
    )
