"""The parameters of a defined primitive, as JAX sees them and as its function and rules see them.

JAX keys its caches by `==`. But 3, 3.0 and True are equal, and so are 0.0 and -0.0, and tuples of these. If
we only bound the values, then whichever came first would determine the program for all of them. So where it
matters we also bind their types, as a parameter `param_types`.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .forms import Params

_OURS = ("forms", "in_tree", "param_types")


def with_types(params: Params) -> Params:
    """Adds `param_types`, if any parameter might be equal to one of another type."""
    types = []
    for name, value in params.items():
        if name not in _OURS and (of := _type_of(value)) is not None:
            types.append((name, of))
    if types:
        types.sort(key=lambda item: item[0])
        return {**params, "param_types": tuple(types)}
    return without_types(params)


def without_types(params: Params) -> Params:
    if "param_types" not in params:
        return params
    return {name: value for name, value in params.items() if name != "param_types"}


def _type_of(value: Any) -> Any:
    """Returns what `==` doesn't distinguish. Of equal values we leave one as it is, e.g. the int, in which
    case this is None.
    """
    describe = _description(type(value))
    return None if describe is None else describe(value)


@functools.lru_cache(maxsize=1024)  # the checks below take a few microseconds
def _description(cls: type) -> Callable[[Any], Any] | None:
    """Returns a function that computes `_type_of` for the instances of a class, or None if there's nothing
    to compute.
    """
    if cls in (int, str):
        return None
    if cls is float:
        return lambda x: (cls, repr(x)) if x.is_integer() else None
    if issubclass(cls, numbers.Integral | str):
        return lambda x: cls
    if issubclass(cls, numbers.Number | np.generic):
        return lambda x: (cls, repr(x))  # this includes the sign of zero
    if issubclass(cls, frozenset):
        return lambda x: (cls, frozenset((item, _type_of(item)) for item in x))
    if cls is tuple:
        return _types_of
    if issubclass(cls, tuple):  # a named tuple, which equals a tuple
        return lambda x: (cls, _types_of(x))
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return lambda x: _types_of(getattr(x, name, None) for name in names)
    return None


def _types_of(items: Iterable[Any]) -> Any:
    types = tuple(map(_type_of, items))
    return types if any(types) else None


# When calling a rule, we remove all parameters of ours, and unflatten its operands.


def without_form(params: Mapping[str, Any]) -> tuple[Any, Params]:
    *below, form = params["forms"]
    rest = {name: value for name, value in params.items() if name != "forms"}
    return form, ({**rest, "forms": tuple(below)} if below else rest)


def without_tree(params: Mapping[str, Any]) -> tuple[Any, Params]:
    static = {name: value for name, value in params.items() if name not in ("in_tree", "param_types")}
    return params.get("in_tree"), static


def unflatten(in_tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaves) if in_tree is None else jtu.tree_unflatten(in_tree, leaves)
