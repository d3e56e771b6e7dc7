"""Types of static values, for keys of caches.

Python's `==` doesn't distinguish 3, 3.0 and True, 0.0 and -0.0, or tuples of these, so with just the values
as a key, one would find the other's results. This also affects JAX's own caches, and comparing pytree
structures.
"""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# In each of our own dataclasses, a field has the same type in all instances. (Describing those of a kernel
# would take as long as binding it.)
_PACKAGE = f"{__name__.partition('.')[0]}."

# Types without a description. Values of two of them are never equal.
_SELF_EVIDENT = frozenset({int, str, type(None)})


def type_of(value: Any) -> Any:
    """Returns what `==` doesn't tell about a value. None for one of several equal values, e.g. the int."""
    describe = _description(type(value))
    return None if describe is None else describe(value)


def types_of(values: Iterable[Any]) -> Any:
    """Returns the `type_of` each value, or None if it's None for all of them."""
    values = tuple(values)
    if _SELF_EVIDENT.issuperset(map(type, values)):
        return None
    types = tuple(map(type_of, values))
    return types if any(types) else None


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
