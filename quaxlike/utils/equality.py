"""Equality and hash of pytree dataclasses, by the values of their arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# The classes made by `dataclass`. JAX's registry of pytrees keeps them alive as well.
made: set[type[Any]] = set()


def is_static(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is part of a pytree's structure."""
    return field.metadata.get("static", False)


def equal(self: Any, other: Any) -> Any:
    """`__eq__`: a bool, or a traced one where arrays are traced."""
    if type(other) is not type(self):
        return NotImplemented
    names = [f.name for f in dataclasses.fields(self) if f.compare and not is_static(f)]
    static = [f.name for f in dataclasses.fields(self) if f.compare and is_static(f)]
    if any(getattr(self, name) != getattr(other, name) for name in static):
        return False
    leaves, structure = _flatten_to_dataclasses([getattr(self, name) for name in names])
    others, other_structure = _flatten_to_dataclasses([getattr(other, name) for name in names])
    if structure != other_structure:
        return False
    all_same: Any = True
    for leaf, other_leaf in zip(leaves, others, strict=True):
        same = _leaf_equal(leaf, other_leaf)
        if same is False:
            return False
        all_same = all_same & same
    return all_same


def hash_of(self: Any) -> int:
    """`__hash__`: equal instances have equal hashes."""
    fields = [f for f in dataclasses.fields(self) if (f.compare if f.hash is None else f.hash)]
    static = tuple(getattr(self, f.name) for f in fields if is_static(f))
    leaves, _ = _flatten_to_dataclasses([getattr(self, f.name) for f in fields if not is_static(f)])
    return hash((static, *map(_leaf_hash, leaves)))


def _flatten_to_dataclasses(tree: Any) -> Any:
    # Nested dataclasses compare by their own `__eq__`, which may leave fields out.
    return jax.tree.flatten(tree, is_leaf=lambda node: type(node) in made)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _on_host(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            x = jax.random.key_data(x)
    return np.asarray(x)


def _leaf_equal(x: Any, y: Any) -> Any:
    if not _is_array(x) and not _is_array(y):
        same = x == y
        return same if isinstance(same, Tracer) else bool(same)
    if not (_is_array(x) and _is_array(y)) or x.shape != y.shape or x.dtype != y.dtype:
        return False
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return jnp.all(jnp.asarray(x) == jnp.asarray(y))
    return bool(np.array_equal(_on_host(x), _on_host(y)))


def _leaf_hash(x: Any) -> int:
    if not _is_array(x):
        return hash(x)
    if isinstance(x, Tracer):
        raise TypeError(
            f"Cannot hash a dataclass that holds a traced array ({x.aval}), whose values are not "
            "known yet. Hash it outside of jit, grad and vmap."
        )
    # Adding zero makes -0.0 and 0.0, which are equal, the same bytes.
    values = _on_host(x) + np.zeros((), _on_host(x).dtype)
    return hash((x.shape, str(x.dtype), values.tobytes()))
