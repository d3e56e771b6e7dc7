"""Whole models in a safetensors file, with arrays of all shipped types."""

import difflib
import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._checked import checked
from ..core.values import is_value
from ..surgery.trees import path_of
from .errors import CheckpointError, complain
from .manifest import Types, decode, encode, shipped_types
from .tensors import Tensors, as_jax, open_tensors, read_json, write_tensors

__all__ = ["load", "save"]

_VERSION = 1
_MANIFEST = "quaxlike"
_Model = TypeVar("_Model")


@checked
def save(path: str | os.PathLike[str], model: Any, *, types: Iterable[type] = ()) -> None:
    """Writes the arrays of a model, quantised, adapted, sparse or plain, by their dotted names.

    Everything else about the model (its structure, functions, numbers) comes from code when it is loaded.
    Plain arrays are tensors that any reader of the format can read; other arrays are stored as one tensor per
    part, and a manifest in the header describes how these belong together. The file appears only once it is
    complete, and the same model always gives the same bytes.

    **Arguments:**

    - `path`: the file to write.
    - `model`: any pytree.
    - `types`: your own classes that the model holds, dataclasses such as `quaxlike.ArrayValue`s, besides
        those that ship with quaxlike.

    **Raises:** `CheckpointError` for a value that a file cannot hold; no file is written then.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.interop import safetensors

        make = lambda: eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        safetensors.save("mlp.safetensors", ql.quantize(make(), "nf4"))
        model = safetensors.load("mlp.safetensors", like=eqx.filter_eval_shape(make))
        ```
    """
    path = Path(path)
    known = _known(types)
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}

    def put(name: str, array: np.ndarray) -> None:
        if name in tensors:
            raise complain(path, name, "two arrays of the model have this name")
        tensors[name] = array

    for key_path, leaf in jtu.tree_leaves_with_path(model, is_leaf=is_value):
        name = path_of(key_path, model)
        if not is_value(leaf) and not _is_array(leaf):
            continue
        try:
            before = len(tensors)
            node = encode(leaf, name, known, put)
        except TypeError as error:
            raise complain(path, name, str(error)) from None
        if set(node) != {"array"}:
            values[name] = node
            parts = itertools.islice(tensors.items(), before, None)
            dtypes |= {part: array.dtype.name for part, array in parts}
    manifest = json.dumps({"version": _VERSION, "values": values, "dtypes": dtypes}, sort_keys=True)
    write_tensors(path, tensors, {_MANIFEST: manifest})


@checked
def load(
    path: str | os.PathLike[str], like: _Model, *, types: Iterable[type] = (), strict: bool = True
) -> _Model:
    """Reads a file that `save` wrote, or any safetensors file with the names of the model.

    The file determines the types of arrays, `like` their shapes and dtypes: a file of quantised weights loads
    into the model before quantisation.

    **Arguments:**

    - `path`: a `.safetensors` file, an index of several, or a folder with one.
    - `like`: a model of the same structure; its arrays may be `jax.ShapeDtypeStruct`s
        (`eqx.filter_eval_shape`).
    - `types`: as for `save`.
    - `strict`: whether to raise for arrays in the file that the model does not have. Default: True.

    **Returns:** `like` with the arrays of the file.

    **Raises:** `FileNotFoundError` if there is nothing at `path`; `CheckpointError` if it is damaged, of an
    unknown version, or does not fit the model, with file, name, expected and found.
    """
    tensors = open_tensors(path)
    nodes = _read_manifest(tensors)
    known = _known(types)
    used: set[str] = set()

    def get(name: str) -> Any:
        if name not in tensors:
            raise ValueError(f"its tensor {name!r} is missing")
        used.add(name)
        return as_jax(tensors[name])

    def read(key_path: Any, leaf: Any) -> Any:
        if not (is_value(leaf) or _is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            return leaf
        name = path_of(key_path, like)
        if name not in nodes and name not in tensors:
            near = difflib.get_close_matches(name, [*nodes, *tensors], n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise complain(tensors.path, name, f"is missing.{hint}")
        try:
            found = decode(nodes[name], known, get) if name in nodes else get(name)
            shape, dtype = tuple(found.shape), found.dtype
        except CheckpointError:
            raise
        except Exception as error:  # an inconsistent value may make its type raise anything
            raise complain(tensors.path, name, f"cannot be rebuilt: {error}") from error
        if shape != tuple(leaf.shape) or dtype != leaf.dtype:
            raise complain(
                tensors.path,
                name,
                f"the model has {leaf.dtype} of shape {tuple(leaf.shape)}, the file {dtype} of {shape}",
            )
        return np.asarray(found) if isinstance(leaf, np.ndarray) and not is_value(found) else found

    out = jtu.tree_map_with_path(read, like, is_leaf=is_value)
    left = sorted(set(tensors) - used)
    if strict and left:
        names = ", ".join(map(repr, left[:5])) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise complain(tensors.path, None, f"the model has no place for {names}; pass strict=False to ignore")
    return out


def open_values(tensors: Tensors) -> tuple[dict[str, Callable[[], Any]], set[str]]:
    """The Values of a file that `save` wrote, by name, each as a function that reads it; and the names of
    their tensors."""
    nodes, known, used = _read_manifest(tensors), _known(()), set[str]()

    def names_in(node: Any) -> None:
        if isinstance(node, dict):
            used.update(v for k, v in node.items() if k in ("array", "key") and isinstance(v, str))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            names_in(child)

    def read(name: str) -> Any:
        def get(part: str) -> Any:
            if part not in tensors:
                raise ValueError(f"its tensor {part!r} is missing")
            return as_jax(tensors[part])

        try:
            return decode(nodes[name], known, get)
        except Exception as error:  # an inconsistent value may make its type raise anything
            raise complain(tensors.path, name, f"cannot be rebuilt: {error}") from error

    names_in(nodes)
    return {name: lambda name=name: read(name) for name in nodes}, used


def _read_manifest(tensors: Tensors) -> dict[str, Any]:
    if _MANIFEST not in tensors.metadata:
        return {}
    manifest = read_json(tensors.path, tensors.metadata[_MANIFEST], "the manifest")
    if manifest.get("version") != _VERSION:
        raise complain(
            tensors.path,
            "version",
            f"the manifest is of version {manifest.get('version')!r}, this is for version {_VERSION}",
        )
    values = manifest.get("values")
    if not isinstance(values, dict):
        raise complain(tensors.path, "values", "the manifest must hold an object here")
    dtypes = manifest.get("dtypes", {})  # older files have none
    if not isinstance(dtypes, dict):
        raise complain(tensors.path, "dtypes", "the manifest must hold an object here")
    for name, dtype in dtypes.items():
        if name in tensors and (found := tensors.info[name].dtype.name) != dtype:
            raise complain(tensors.path, name, f"is of {found}, and of {str(dtype)[:40]} in the manifest")
    return values


def _known(types: Iterable[type]) -> Types:
    return {**shipped_types(), **{cls.__name__: cls for cls in types}}


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
