"""Linearity of Values in their leaves, and which leaves correspond between two Values.

Integer, boolean and key leaves don't have tangents. Together they make up the *pattern* of a Value; a typical
example is the indices of the stored elements. Patterns must never be added or differentiated. So two Values
need the same pattern to be added leaf by leaf, or for the leaves of one to be derivatives for the other's.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..rules import RuleWarning
from ..statics import are_of_same_types, statics_of
from ..values import Value, is_value, refuses, replace_fields

_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_linear(value: Any) -> bool:
    """Returns whether a Value is linear in its leaves.

    It is if its own type, and that of every Value inside it, is declared to be linear. This is also assumed
    of some types that can't be materialised.
    """
    # For example, a type with units or names is linear by itself, but may contain a type that isn't.
    return all(x.linear or _is_its_leaves(x) for x in (value, *held(value)))


def _is_its_leaves(value: Value) -> bool:
    """Returns whether a Value can only be differentiated with respect to its leaves.

    True if it can't be materialised and its type doesn't specify whether it's linear. (For example, no type
    written for quax does: quax has no such attribute.)
    """
    cls = type(value)
    # `cls.linear` alone doesn't tell a type setting it to False from one not setting it.
    says = any("linear" in vars(base) for base in cls.__mro__ if base is not Value)
    if says or not refuses(value):
        return False
    if cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"{cls.__name__} refuses to materialise, so it is differentiated by its leaves, as "
            f"if it were linear in them. Set `linear = True` on {cls.__name__} if it is, or else "
            "`linear = False`, which makes that an error.",
            RuleWarning,
            stacklevel=2,
        )
    return True


_warned: weakref.WeakSet[type] = weakref.WeakSet()


def memoised(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Memoises `fn`, except if any argument is unhashable (e.g. due to an unhashable static)."""
    cached = functools.lru_cache(maxsize=4096)(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return cached(*args, **kwargs)
        # Either the key is unhashable, or `fn` itself raised this error. In both cases it's correct to call
        # it again.
        except TypeError:
            return fn(*args, **kwargs)

    return call


def held(value: Value) -> list[Value]:
    """Returns the Values inside a Value, at any depth."""
    outer = [
        x for x in jtu.tree_leaves(value, is_leaf=lambda x: x is not value and is_value(x)) if is_value(x)
    ]
    return [y for x in outer for y in (x, *held(x))]


def map_parts(f: Callable[[Value], Any], value: Value) -> Any:
    """Applies `f` to each field that is a Value."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return replace_fields(value, **{name: f(x) for name, x in fields.items() if is_value(x)})


def linear_part(value: Value, to_dense: Callable[[Value], Any]) -> Any:
    """Materialises any nonlinear parts, or the whole Value if its own type isn't linear."""
    if not is_linear(value) and value.linear:
        value = map_parts(lambda part: linear_part(part, to_dense), value)
    # If the type itself isn't linear then materialising its parts wouldn't help.
    return value if is_linear(value) else to_dense(value)


def has_tangent(aval: Any) -> bool:
    """Returns whether a leaf has tangents. (If not, it's part of the pattern.)"""
    return getattr(aval.to_tangent_aval(), "dtype", None) != jax.dtypes.float0


def has_pattern(value: Value) -> bool:
    """Returns whether a Value has a pattern, i.e. leaves without tangents."""
    return not all(has_tangent(jax.typeof(leaf)) for leaf in jtu.tree_leaves(value))


def same_pattern(x: Any, y: Any) -> bool:
    """Returns whether two Values differ at most in the contents of their differentiable leaves.

    I.e. they have the same static fields and shapes, and their patterns are known to be equal.
    """
    (p, of_x), (q, of_y) = jtu.tree_flatten(x), jtu.tree_flatten(y)
    alike = of_x == of_y and are_of_same_types(statics_of(x), statics_of(y))
    return alike and have_leaves_alike(p, q)


def have_leaves_alike(p: Sequence[Any], q: Sequence[Any]) -> bool:
    """Returns whether the leaves have the same shapes, and patterns known to be equal."""
    return len(p) == len(q) and all(map(_belong_together, p, q))


def _belong_together(p: Any, q: Any) -> bool:
    a, b = jax.typeof(p), jax.typeof(q)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and (has_tangent(a) or _known_equal(p, q))


def _known_equal(p: Any, q: Any) -> bool:
    if p is q:
        return True
    # If in doubt, return False: adding leaves with different indices would silently add elements in different
    # positions.
    unknown = isinstance(p, jax.core.Tracer) or isinstance(q, jax.core.Tracer)
    if unknown or jnp.issubdtype(jnp.result_type(p), jax.dtypes.extended):
        return False
    return np.array_equal(p, q)


def as_cotangent(value: Any) -> Any:
    """Converts a cotangent for the backward function of a custom_vjp.

    Calls `Value.cotangent` on the Value itself, and on every Value inside it.
    """

    def as_part(x: Any) -> Any:
        return as_cotangent(x) if is_value(x) else x

    inner = jtu.tree_map(as_part, value, is_leaf=lambda x: x is not value and is_value(x))
    return type(value).cotangent(inner)


def is_derivative(x: Any, of: Value) -> bool:
    """Returns whether the leaves of `x` are tangents or cotangents for the leaves of the Value `of`."""
    return (
        type(x) is type(of)
        and is_linear(of)
        and is_linear(x)
        and same_pattern(as_cotangent(x), as_cotangent(of))
    )
