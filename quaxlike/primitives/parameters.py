"""The parameters of a defined primitive, as JAX sees them and as its function and rules see them.

JAX keys its caches by `==`. But 1, 1.0 and True are equal: if only the values were bound, whichever came
first would determine the program for all of them. So where it matters their types are bound as well, as a
parameter `_param_types`. Its name sorts before names in lower case, so that JAX compares types before values:
comparing a NumPy number with a nested tuple is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from ..core.statics import type_of
from .forms import Params

_OURS = ("forms", "in_tree", "_param_types")


def with_types(params: Params) -> Params:
    """Adds `_param_types`, if any parameter may be equal to one of another type."""
    types = []
    for name, value in params.items():
        if name not in _OURS and (of := type_of(value)) is not None:
            types.append((name, of))
    if types:
        types.sort(key=lambda item: item[0])
        return {**params, "_param_types": tuple(types)}
    return without_types(params)


def without_types(params: Params) -> Params:
    if "_param_types" not in params:
        return params
    return {name: value for name, value in params.items() if name != "_param_types"}


# When calling a rule, remove all our own parameters, and unflatten its operands.


def without_form(params: Mapping[str, Any]) -> tuple[Any, Params]:
    *below, form = params["forms"]
    rest = {name: value for name, value in params.items() if name != "forms"}
    return form, ({**rest, "forms": tuple(below)} if below else rest)


def without_tree(params: Mapping[str, Any]) -> tuple[Any, Params]:
    static = {name: value for name, value in params.items() if name not in ("in_tree", "_param_types")}
    return params.get("in_tree"), static


def unflatten(in_tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaves) if in_tree is None else jtu.tree_unflatten(in_tree, leaves)
