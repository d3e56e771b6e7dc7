"""Shapes and dtypes in place of the leaves of a Value.

They keep everything a Value's aval depends on, including weak types, and shardings in the type. The results
of rules are weakly typed only where the primitive's are.
"""

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu

from . import compat
from .hooks import probing

_T = TypeVar("_T")


def as_shapes(value: _T) -> _T:
    """Replaces every array leaf by its shape and dtype, and leaves of any other JAX type by an `OfType`."""

    def shape(leaf: Any) -> Any:
        aval = jax.typeof(leaf) if eqx.is_array_like(leaf) else leaf
        if isinstance(aval, jax.core.ShapedArray):
            sharding = compat.explicit_sharding(aval)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
        return OfType(aval) if isinstance(aval, jax.core.AbstractValue) else leaf

    return jtu.tree_map(shape, value)


class OfType:
    """A leaf known only by its type. Like `jax.ShapeDtypeStruct`, but for hijax types in a Value."""

    __slots__ = ("aval",)

    def __init__(self, aval: jax.core.AbstractValue) -> None:
        self.aval = aval


compat.register_stand_in(OfType, operator.attrgetter("aval"))


def leaf_aval(leaf: Any) -> Any:
    """Returns the aval of a leaf, which may only be a shape and a dtype."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval = jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(leaf.weak_type))
        sharding = compat.explicit_sharding(leaf)
        return aval if sharding is None else aval.update(sharding=sharding)
    return jax.typeof(leaf)


def sharded_like_dense(value: Any, aval: Any, leaf_avals: Sequence[Any]) -> Any:
    """Returns a type's own `aval` with the sharding of the dense array, if this has one."""
    if compat.explicit_sharding(aval) is not None or not any(map(compat.explicit_sharding, leaf_avals)):
        return aval
    try:
        with probing():
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(value))
        return aval.update(sharding=out.sharding) if out.shape == aval.shape else aval
    except Exception:  # a type may refuse with any error
        return aval


def is_weak(x: Any) -> bool:
    """Returns whether an array, or any array in a list or tuple, is weakly typed."""
    if isinstance(x, list | tuple):
        return any(map(is_weak, x))
    return getattr(x, "weak_type", False) or type(x) in (int, float, complex)


def as_strong(out: Any, expected: Sequence[Any] | None) -> Any:
    """Converts a rule's weakly typed results to strong types where the primitive's are strong.

    Otherwise whatever is computed from them next would have another dtype.
    """

    def strong(x: Any, want: Any) -> Any:
        is_strong = isinstance(want, jax.core.ShapedArray) and not want.weak_type
        if not is_strong or not is_weak(x) or jax.typeof(x).dtype != want.dtype:
            return x
        return jax.lax.convert_element_type(x, want.dtype)

    if not isinstance(out, list | tuple):
        return strong(out, expected[0] if expected else None)
    if expected is None or len(expected) != len(out):  # `check_results` says so
        return out
    return [strong(x, want) for x, want in zip(out, expected, strict=True)]
