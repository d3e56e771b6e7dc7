"""Types of static values, for keys of caches.

Python's `==` doesn't distinguish 3, 3.0 and True, 0.0 and -0.0, or tuples of these, so with just the values
as a key, one would find the other's results. This also affects JAX's own caches, and comparing pytree
structures.
"""

import contextlib
import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

# In each of our own dataclasses, a field has the same type in all instances. (Describing those of a kernel
# would take as long as binding it.)
_PACKAGE = f"{__name__.partition('.')[0]}."


def type_of(value: Any) -> Any:
    """Returns what `==` doesn't tell about a value. None for one of several equal values, e.g. the int."""
    describe = _description(type(value))
    return None if describe is None else describe(value)


def types_of(values: Iterable[Any]) -> Any:
    """Returns the `type_of` each value, or None if it's None for all of them."""
    values = tuple(values)
    try:
        known = _types.get(values)
    except TypeError:  # unhashable values
        known = None
    # Equal values have one entry between them, so compare by identity.
    if known is not None and all(map(operator.is_, known[0], values)):
        return known[1]
    types = tuple(map(type_of, values))
    if not any(types):
        return None
    if len(_types) > 4096:
        _types.clear()
    with contextlib.suppress(TypeError):  # unhashable values
        _types[values] = values, types
    return types


# The results for the same objects, as far as they aren't None. (Every aval needs one.)
_types: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = {}


def statics_of(tree: Any) -> tuple[Any, ...]:
    """Returns everything static in a pytree, as a treedef has it."""
    return () if (read := _reader(type(tree))) is None else read(tree)


def are_of_same_types(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
    """Returns whether statics that are equal also have equal types. (Treedefs don't compare these.)"""
    return all(map(operator.is_, x, y)) or types_of(x) == types_of(y)


@functools.lru_cache(maxsize=1024)
def fields_of(cls: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]] | None]:
    """Returns the names of a module's fields with leaves, and a function returning any static fields."""
    fields = dataclasses.fields(cls)
    static = [f.name for f in fields if f.metadata.get("static")]
    return [f.name for f in fields if f.name not in static], attributes(static) if static else None


_LEAVES = (jax.Array, jax.core.Tracer, np.ndarray, np.generic, numbers.Number, str, type(None))


@functools.lru_cache(maxsize=1024)
def _reader(cls: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """Returns `statics_of` for a class's instances, or None if these are leaves."""
    if issubclass(cls, _LEAVES):
        return None
    if not issubclass(cls, eqx.Module):
        return _statics_of_node
    names, read_statics = fields_of(cls)
    read_parts = attributes(names)

    def read(module: Any) -> tuple[Any, ...]:
        try:
            own = () if read_statics is None else read_statics(module)
            parts = read_parts(module)
        except AttributeError:  # a field was never set
            return _statics_of_node(module)
        nested = _nested(tuple(map(type, parts)))
        return (*own, *(x for i in nested for x in statics_of(parts[i]))) if nested else own

    return read


@functools.lru_cache(maxsize=4096)
def _nested(types: tuple[type, ...]) -> tuple[int, ...]:
    """Returns the positions of parts that may contain something static."""
    return tuple(i for i, cls in enumerate(types) if _reader(cls) is not None)


def _statics_of_node(node: Any) -> tuple[Any, ...]:
    if (level := jtu.default_registry.flatten_one_level(node)) is None:  # a leaf
        return ()
    children, aux = level
    return (aux, *(x for child in children for x in statics_of(child)))


def attributes(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function returning these attributes of an object."""
    if len(names) > 1:
        return operator.attrgetter(*names)  # a tuple, unlike for a single name
    return lambda x: tuple([getattr(x, name) for name in names])


@functools.lru_cache(maxsize=1024)  # the checks below take a few microseconds
def _description(cls: type) -> Callable[[Any], Any] | None:
    """Returns a function computing `type_of` for a class's instances, or None if it's always None."""
    if cls in (int, str):
        return None
    if cls is float:
        return lambda x: (cls, repr(x)) if x.is_integer() else None
    if issubclass(cls, numbers.Integral | str):
        return type
    if issubclass(cls, numbers.Number | np.generic):
        return lambda x: (cls, repr(x))  # this includes the sign of zero
    if issubclass(cls, frozenset):
        return lambda x: (cls, frozenset((item, type_of(item)) for item in x))
    if cls in (tuple, list):
        return types_of
    if issubclass(cls, tuple):  # a named tuple, which equals a tuple
        return lambda x: (cls, types_of(x))
    if dataclasses.is_dataclass(cls) and not cls.__module__.startswith(_PACKAGE):
        names = [field.name for field in dataclasses.fields(cls)]
        return lambda x: types_of(getattr(x, name, None) for name in names)
    return None
