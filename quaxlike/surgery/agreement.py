"""Whether models agree in what they must share."""

import dataclasses
import types
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._checked import a_or_an
from .trees import path_of


def difference(x: PyTree, y: PyTree) -> str | None:
    """Where two trees differ first, and how; None if they agree.

    Arrays agree if they are the same object, or of equal shape, dtype and values (NaN equals NaN). Values
    that are not known, those of traced arrays, count as equal.
    """
    return _difference(x, y, ())


def _difference(x: Any, y: Any, path: tuple[Any, ...]) -> str | None:
    if x is y:
        return None
    name = path_of(path) if path else "the whole"
    if _is_array(x) or _is_array(y):
        return _of_arrays(x, y, name)
    one_level = lambda tree: jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    (children, structure), (others, other_structure) = one_level(x), one_level(y)
    if jtu.treedef_is_leaf(structure) or jtu.treedef_is_leaf(other_structure):
        return None if _same_object(x, y) else f"{name} is {_short(x)} in one and {_short(y)} in the other"
    if type(x) is not type(y):
        return f"{name} is {a_or_an(type(x))} in one and {a_or_an(type(y))} in the other"
    keys, other_keys = ({path_of(key) for key, _ in each} for each in (children, others))
    if keys != other_keys:
        named = (path_of((*path, jtu.DictKey(key))) for key in sorted(keys ^ other_keys))
        return f"only one of them has {', '.join(named)}"
    for (key, child), (_, other) in zip(children, others, strict=True):
        if (found := _difference(child, other, path + key)) is not None:
            return found
    return None if structure == other_structure else _of_statics(x, y, path, name)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _of_arrays(x: Any, y: Any, name: str) -> str | None:
    forms = [f"{z.dtype}{list(z.shape)}" if _is_array(z) else _short(z) for z in (x, y)]
    if forms[0] != forms[1]:
        return f"{name} is {forms[0]} in one and {forms[1]} in the other"
    return None if same_values(x, y) else f"{name} has other values"


def same_values(x: Any, y: Any) -> bool:
    """Whether two arrays of one shape and dtype hold the same; True if that is not known."""
    if x is y or any(isinstance(z, jax.core.Tracer | jax.ShapeDtypeStruct) for z in (x, y)):
        return True
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    if isinstance(x, jax.Array) and isinstance(y, jax.Array) and x.sharding == y.sharding:
        return bool(_equal(x, y))
    return bool(np.all(_equal_each(np.asarray(x), np.asarray(y))))


def _equal_each(x: Any, y: Any) -> Any:
    return (x == y) | ((x != x) & (y != y))


@jax.jit
def _equal(x: Any, y: Any) -> Any:
    return jnp.all(_equal_each(x, y))


def _of_statics(x: Any, y: Any, path: tuple[Any, ...], name: str) -> str:
    for field in dataclasses.fields(x) if dataclasses.is_dataclass(x) else ():
        both = getattr(x, field.name, None), getattr(y, field.name, None)
        if field.metadata.get("static") and not _same_object(*both):
            where = path_of((*path, jtu.GetAttrKey(field.name)))
            return f"{where} is {_short(both[0])} in one and {_short(both[1])} in the other"
    return f"the static fields of {name}, {a_or_an(type(x))}, differ"


def _same_object(x: Any, y: Any) -> bool:
    """Whether two objects that are not arrays are equal. Functions are, if they are the same code over equal
    variables: a layer may make its activation anew for each model."""
    if isinstance(x, types.FunctionType) and isinstance(y, types.FunctionType):
        parts = [(f.__code__, f.__defaults__, [c.cell_contents for c in f.__closure__ or ()]) for f in (x, y)]
        return x is y or bool(parts[0] == parts[1])
    return x is y or bool(x == y)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 80 else f"{text[:80]}…"
