"""Tools for treating models from any framework as trees with named arrays.

Names not only select layers but also load checkpoints, so they must match the framework's state dict. In
particular, Flax's boxes around arrays (`nnx.Variable` or Linen's axis metadata) must not be part of a name.
"""

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._checked import checked, did_you_mean
from ..core.values import is_value


@checked
def path_of(key_path: Sequence[Any], model: PyTree = None) -> str:
    """Converts a key path to the dotted name of the leaf, as used in state dicts.

    Pass these names to any function that looks up arrays or layers.

    **Arguments:**

    - `key_path`: a key path, for example from `jax.tree_util.tree_flatten_with_path`.
    - `model`: the path's tree. This is only needed for Flax, where the path to an array inside an `nnx.Param`
        ends in `.value`, although this isn't part of its name. Without a model, any trailing `.value` is
        dropped if Flax has been imported.

    **Returns:**

    A name such as `"layers.0.attention.query.weight"`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        [ql.path_of(path) for path, leaf in jax.tree_util.tree_leaves_with_path(mlp)]
        ```
    """
    keys = tuple(key_path)
    if model is not None:
        keys = tuple(key for node, key in _steps(model, keys) if not _is_box(node))
    elif len(keys) > 1 and keys[-1] == jtu.GetAttrKey("value") and "flax" in sys.modules:
        keys = keys[:-1]
    return jtu.keystr(keys, simple=True, separator=".")


def owner_of(model: PyTree, key_path: Sequence[Any]) -> Any:
    """Returns the node containing a leaf, ignoring any boxes.

    This is `None` for a node not accessible by its key path, e.g. because of a custom flattening.
    """
    owner: Any = None
    for node, _ in _steps(model, key_path):
        owner = owner if _is_box(node) else node
    return owner


def _steps(model: PyTree, key_path: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs each key along a path with the node it is applied to."""
    steps: list[tuple[Any, Any]] = []
    node: Any = model
    for key in key_path:
        steps.append((node, key))
        if _is_box(node):
            node = node.get_raw_value() if hasattr(node, "get_raw_value") else node.value
            continue
        match key:
            case jtu.GetAttrKey(name):
                node = getattr(node, name, None)
            case jtu.SequenceKey(index):
                node = None if node is None else node[index]
            case jtu.DictKey(name):
                node = None if node is None else node[name]
            case _:
                node = None
    return steps


def _flax_type(module: str, name: str) -> Any:
    """Returns a class from Flax, for use in `isinstance`.

    This is an empty tuple if Flax hasn't been imported: there are no instances then.
    """
    return getattr(sys.modules.get(module), name, ())


def _is_box(node: Any) -> bool:
    boxes = (_flax_type("flax.nnx", "Variable"), _flax_type("flax.core.meta", "AxisMetadata"))
    return isinstance(node, boxes)


# Arrays by name -----------------------------------------------------------------------------------


def leaves_with_path(model: PyTree) -> list[tuple[Any, Any]]:
    """Returns all arrays and Values in a model, along with their key paths."""

    def is_array(leaf: Any) -> Any:
        return is_value(leaf) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))

    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_value)
    return [(path, leaf) for path, leaf in leaves if is_array(leaf)]


def named_leaves_with_path(model: PyTree) -> dict[str, tuple[Any, Any]]:
    """Returns all arrays and Values in a model, along with their key paths, by name.

    **Raises:** `ValueError` if two have the same name: one would be taken for the other.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for path, leaf in leaves_with_path(model):
        name = path_of(path, model)
        if name in found:
            both = " and ".join(map(jtu.keystr, (found[name][0], path)))
            raise ValueError(
                f"Two arrays of the model are named {name!r}: those at {both}. Rename a key with a dot in it."
            )
        found[name] = path, leaf
    return found


def named_arrays(model: PyTree) -> dict[str, Any]:
    """Returns all arrays and Values in a model, by name. Names must differ."""
    return {name: leaf for name, (_, leaf) in named_leaves_with_path(model).items()}


def map_arrays(change: Callable[[str, Any], Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Calls `change(name, array)` for each array, or each list of arrays.

    For an array appearing several times, e.g. a tied weight, `change` is only called once, so the results are
    tied as well.
    """

    # `arrays` keeps them alive, so `id` is safe as a key.
    def key(array: Any) -> Any:
        return tuple(map(id, array)) if isinstance(array, list) else id(array)

    done: dict[Any, Any] = {}
    for name, array in arrays.items():
        if key(array) not in done:
            done[key(array)] = change(name, array)
    return {name: done[key(array)] for name, array in arrays.items()}


def replace(model: PyTree, new: Mapping[str, Any]) -> PyTree:
    """Replaces arrays in a model by name. This includes leaves that are `None`."""
    if isinstance(model, _flax_type("flax.nnx", "Module")):
        # Don't map over the module directly: variables appearing several times in it would no longer be
        # shared.
        nnx: Any = sys.modules["flax.nnx"]
        graph, state = nnx.split(model)
        return nnx.merge(graph, replace(state, new))
    return jtu.tree_map_with_path(
        lambda path, leaf: new.get(path_of(path, model), leaf),
        model,
        is_leaf=lambda x: x is None or is_value(x),
    )


def tensors_of(model: PyTree, name: str) -> list[str]:
    """Returns the names of the tensors making up an array in a published checkpoint.

    Models override this by defining a `tensors_of` method.
    """
    return model.tensors_of(name) if hasattr(model, "tensors_of") else [name]


def unstacked(model: PyTree) -> PyTree:
    """Returns the model with its layers unstacked, if it defines an `unstacked` method."""
    return model.unstacked() if hasattr(model, "unstacked") else model


# Layers by name -----------------------------------------------------------------------------------

# The names of a layer's weight in PyTorch, Equinox, Flax and Haiku. The name of a layer refers to this
# weight, so users can pass the same name for every framework.
_WEIGHT = re.compile(r"(?P<layer>.+)\.(weight|kernel|embedding|embeddings|w)")


def layer_of(name: str) -> str:
    """Returns the name of a weight's layer (the "module" in PEFT)."""
    found = _WEIGHT.fullmatch(name)
    return found["layer"] if found else name


_BIAS = re.compile(r"bias(_\w+)?|b")


def is_bias(name: str) -> bool:
    """Returns whether an array is named like a bias. (Recurrent cells can have several, such as `bias_n`.)"""
    return _BIAS.fullmatch(name.rpartition(".")[2]) is not None


def bias_of(name: str, arrays: Container[str]) -> str | None:
    """Returns the name of the bias in the same layer as a weight, if there is one."""
    layer, dot, field = name.rpartition(".")
    if not _WEIGHT.fullmatch(f"_.{field}"):
        return None
    return next((n for n in (f"{layer}{dot}bias", f"{layer}{dot}b") if n in arrays), None)


def biases_beside(name: str, arrays: Mapping[str, Any]) -> list[str]:
    """Returns the names of all biases in the same layer or recurrent cell as a weight."""
    layer, dot, _ = name.rpartition(".")
    return [n for n in arrays if n.rpartition(".")[:2] == (layer, dot) and is_bias(n)]


def matches(pattern: str, name: str, *, regex: bool) -> bool:
    """Returns whether a pattern matches an array's name or the name of its layer.

    A regular expression must match the whole name. Otherwise, equal last components are enough.
    """
    names = {name, layer_of(name)}
    if regex:
        try:
            return any(re.fullmatch(pattern, n) for n in names)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from None
    return any(n == pattern or n.endswith((f".{pattern}", f"/{pattern}")) for n in names)


def suggestion(pattern: str, arrays: Mapping[str, Any]) -> str:
    """Suggests alternatives to a pattern that matches nothing, for an error message."""
    plain = re.sub(r"[\\^$()*+?\[\]{}|]|\.(?=[*+])", "", pattern).strip(".")
    inside = {name: leaf for name, leaf in arrays.items() if f".{plain}." in f".{name}."}
    if plain and inside:
        return f"It is a part of the model, with the arrays {listing(inside)}."
    layers = list(dict.fromkeys(layer_of(name) for name in arrays))
    depth = plain.count(".") + 1
    known = {layer: layer for layer in layers}
    for layer in layers:
        known.setdefault(".".join(layer.split(".")[-depth:]), layer)
    hint = did_you_mean(plain, known, cutoff=0.5, show=lambda found: repr(known[found]))
    return hint.lstrip() or f"There are {listing(arrays)}."


def listing(arrays: Mapping[str, Any]) -> str:
    """Formats the first few names and shapes for an error message."""
    at_most = 8
    names = [f"{name or repr(name)} {tuple(leaf.shape)}" for name, leaf in arrays.items()]
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "") or "no arrays"


# Comparing models ---------------------------------------------------------------------------------


def difference(x: PyTree, y: PyTree) -> str | None:
    """Describes the first difference between two trees, or returns `None` if they are equal.

    Arrays count as equal if they are the same object, or if they have the same shape, dtype and values. NaNs
    count as equal to each other, and so do traced arrays: their values can't be compared.
    """
    return _difference(x, y, ())


def _difference(x: Any, y: Any, path: tuple[Any, ...]) -> str | None:
    if x is y:
        return None
    name = path_of(path) if path else "the whole"
    if _is_plain_array(x) or _is_plain_array(y):
        forms = [f"{z.dtype}{list(z.shape)}" if _is_plain_array(z) else _short(z) for z in (x, y)]
        if forms[0] != forms[1]:
            return f"{name} is {forms[0]} in one and {forms[1]} in the other"
        return None if same_values(x, y) else f"{name} has other values"

    def one_level(tree: Any) -> Any:
        return jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)

    (children, structure), (others, other_structure) = one_level(x), one_level(y)
    if jtu.treedef_is_leaf(structure) or jtu.treedef_is_leaf(other_structure):
        return None if _same_object(x, y) else f"{name} is {_short(x)} in one and {_short(y)} in the other"
    if type(x) is not type(y):
        return f"{name} is of type {type(x).__name__} in one and {type(y).__name__} in the other"
    keys, other_keys = ({path_of(key) for key, _ in each} for each in (children, others))
    if keys != other_keys:
        named = (path_of((*path, jtu.DictKey(key))) for key in sorted(keys ^ other_keys))
        return f"only one of them has {', '.join(named)}"
    for (key, child), (_, other) in zip(children, others, strict=True):
        if (found := _difference(child, other, path + key)) is not None:
            return found
    return None if structure == other_structure else _static_difference(x, y, path, name)


def _is_plain_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def same_values(x: Any, y: Any) -> bool:
    """Returns whether two arrays of the same shape and dtype have the same values.

    This is always true for traced arrays: their values can't be compared.
    """
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


def _static_difference(x: Any, y: Any, path: tuple[Any, ...], name: str) -> str:
    for field in dataclasses.fields(x) if dataclasses.is_dataclass(x) else ():
        both = getattr(x, field.name, None), getattr(y, field.name, None)
        if field.metadata.get("static") and not _same_object(*both):
            where = path_of((*path, jtu.GetAttrKey(field.name)))
            return f"{where} is {_short(both[0])} in one and {_short(both[1])} in the other"
    return f"the static fields of {name}, of type {type(x).__name__}, differ"


def _same_object(x: Any, y: Any) -> bool:
    """Returns whether two non-array objects are equal.

    Functions are compared by code and closure rather than by identity: some layers define their activation
    function inside `__init__`, giving every model a different function object.
    """
    if isinstance(x, types.FunctionType) and isinstance(y, types.FunctionType):
        parts = [(f.__code__, f.__defaults__, [c.cell_contents for c in f.__closure__ or ()]) for f in (x, y)]
        return x is y or bool(parts[0] == parts[1])
    return x is y or bool(x == y)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 80 else f"{text[:80]}…"
