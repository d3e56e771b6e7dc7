"""`save` and `load`, for whole models (including any Values in them) as safetensors files."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

import quaxlike.adapters
import quaxlike.arrays
from quaxlike.arrays.adapted import AdaptedArray, innermost, number
from quaxlike.arrays.gradients import GradientsArray
from quaxlike.arrays.quantized import AbstractQuantizedArray, Codec, NestedScales
from quaxlike.arrays.unitful import Unit

from .._checked import checked, did_you_mean
from .._version import __version__
from ..core.values import is_value
from ..surgery.recipes import RECIPE_ENTRY, recipe_of
from ..surgery.records import layouts
from ..surgery.trees import named_arrays, path_of, replace, suggestion
from .errors import CheckpointError, file_error
from .tensors import Tensors, as_jax, open_tensors, read_json, write_tensors

__all__ = ["load", "load_adapters", "save", "save_adapters"]

_VERSION = 1
_MANIFEST = "quaxlike"
_Model = TypeVar("_Model")
_Types = Mapping[str, type]


@checked
def save(path: str | os.PathLike[str], model: Any, *, types: Iterable[type] = ()) -> None:
    """Saves all arrays in a model (plain, quantised, adapted or sparse) under their dotted names.

    *Only* arrays are saved. Everything else in the model (its structure, functions and numbers) must be
    recreated in code when loading. Plain arrays become ordinary tensors, readable by any safetensors library.
    All other arrays become one tensor per part, with a manifest in the header describing how to reassemble
    them. If any weights are quantised, then the header includes a `recipe` for `quaxlike.quantize.from_file`.
    The file is written atomically and its contents are deterministic.

    **Arguments:**

    - `path`: the file to write.
    - `model`: any pytree.
    - `types`: any custom classes in the model, in addition to quaxlike's own. These must be dataclasses, such
        as subclasses of `quaxlike.ArrayValue`.

    **Raises:** `CheckpointError` if a value can't be saved. In this case no file is written.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.files import safetensors

        make = lambda: eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        safetensors.save("mlp.safetensors", ql.quantize(make(), "nf4"))
        model = safetensors.load("mlp.safetensors", like=eqx.filter_eval_shape(make))
        ```
    """
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_value)
    named = [(path_of(key_path, model), leaf) for key_path, leaf in leaves]
    arrays = [(name, leaf) for name, leaf in named if is_value(leaf) or _is_array(leaf)]
    write_tensors(Path(path), *stored(Path(path), arrays, types, model))


def stored(
    path: Path, arrays: Iterable[tuple[str, Any]], types: Iterable[type] = (), model: Any = None
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the tensors for some named arrays, and a header describing their types and quantisation.

    The layers of `model` say which axes are inputs; without it, the names do.

    **Raises:** `CheckpointError` if a value can't be saved.
    """
    arrays, known = list(arrays), _known(types)
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}

    def put(name: str, array: np.ndarray) -> None:
        if name in tensors:
            raise file_error(path, name, "two arrays of the model have this name")
        tensors[name] = array

    for name, leaf in arrays:
        try:
            before = len(tensors)
            node = _encode(leaf, name, known, put)
        except TypeError as error:
            raise file_error(path, name, str(error)) from None
        if set(node) != {"array"}:
            values[name] = node
            parts = itertools.islice(tensors.items(), before, None)
            dtypes |= {part: array.dtype.name for part, array in parts}
    about = {"version": _VERSION, "quaxlike": __version__}
    header = {_MANIFEST: json.dumps(about | {"values": values, "dtypes": dtypes}, sort_keys=True)}
    quantised = {name: x for name, x in arrays if isinstance(innermost(x), AbstractQuantizedArray)}
    known_layouts = layouts(quantised if model is None else model) if quantised else {}
    if recipe := recipe_of(dict(arrays), known_layouts):
        header[RECIPE_ENTRY] = json.dumps(recipe)
    return tensors, header


@checked
def load(
    path: str | os.PathLike[str], like: _Model, *, types: Iterable[type] = (), strict: bool = True
) -> _Model:
    """Loads a file written by `save`, or any other safetensors file with the model's names.

    The file determines the types of arrays, and `like` their shapes and dtypes. For example, you can load
    quantised weights into the original, unquantised model.

    **Arguments:**

    - `path`: a `.safetensors` file, the index of a sharded checkpoint, or a folder containing either.
    - `like`: a model with the same structure. Its arrays can be `jax.ShapeDtypeStruct`s (see
        `eqx.filter_eval_shape`).
    - `types`: as for `save`.
    - `strict`: whether to raise an error if the file has arrays missing from the model. Defaults to True.

    **Returns:** `like` with its arrays replaced by the file's. These are NumPy arrays where `like` has one.
    So are 64-bit arrays in place of a `jax.ShapeDtypeStruct`, unless `jax_enable_x64` is set.

    **Raises:** `FileNotFoundError` if `path` doesn't exist. `CheckpointError` if the checkpoint is damaged,
    was saved by an unknown version, or doesn't match the model. The message names the file and the array.
    """
    tensors = open_tensors(path)
    nodes = _read_manifest(tensors)
    known = _known(types)
    used, places = set[str](), set[str]()

    def get(name: Any) -> Any:
        used.add(name)
        return _tensor(tensors, name)

    def read(key_path: Any, leaf: Any) -> Any:
        if not (is_value(leaf) or _is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            return leaf
        name = path_of(key_path, like)
        if name in places:
            raise tensors.error(name, "two arrays of the model have this name")
        places.add(name)
        if name not in nodes and name not in tensors:
            raise tensors.error(name, f"is missing.{did_you_mean(name, [*nodes, *tensors])}")
        with _rebuilding(name, tensors):
            found = _decode(nodes[name], known, get) if name in nodes else get(name)
            shape, dtype = tuple(found.shape), found.dtype
        # `eqx.filter_eval_shape` gives NumPy arrays their dtypes in JAX.
        is_described = isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(found, np.ndarray)
        dtypes = {dtype, jax.dtypes.canonicalize_dtype(dtype)} if is_described else {dtype}
        if shape != tuple(leaf.shape) or leaf.dtype not in dtypes:
            raise tensors.error(
                name, f"the model has {leaf.dtype} of shape {tuple(leaf.shape)}, the file {dtype} of {shape}"
            )
        return np.asarray(found) if isinstance(leaf, np.ndarray) and not is_value(found) else found

    out = jtu.tree_map_with_path(read, like, is_leaf=is_value)
    left = sorted(set(tensors) - used)
    if strict and left:
        names = ", ".join(map(repr, left[:5])) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise tensors.error(None, f"the model has no place for {names}; pass strict=False to ignore")
    return out


@checked
def save_adapters(path: str | os.PathLike[str], model: Any, *, types: Iterable[type] = ()) -> None:
    """Saves only the adapters in a model, without their base weights.

    The file contains all parts of each adapter, along with any other arrays trained directly. Base weights
    are only included if they are trained as well (`gradients="train"` or [`quaxlike.train_scales`][]). For
    software that only supports LoRA, use [`quaxlike.lm.peft.save_adapter`][] instead.

    **Arguments:**

    - `path`: the file to write.
    - `model`: a model with adapters, such as the output of [`quaxlike.adapt`][].
    - `types`: any custom classes, as for `save`.

    **Raises:** `ValueError` if the model has no adapters, or if an initialisation has moved part of a weight
    into an adapter (then save the whole model). `CheckpointError` if a value can't be saved.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.files import safetensors

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=4, key=jax.random.key(1))
        safetensors.save_adapters("adapters.safetensors", model)
        again = safetensors.load_adapters("adapters.safetensors", mlp)
        ```
    """
    adapters = {name: x for name, x in named_arrays(model).items() if isinstance(x, AdaptedArray)}
    if not adapters:
        raise ValueError("The model has no adapters to save.")
    for name, x in adapters.items():
        if x.taken is not None:
            raise ValueError(
                f"The initialisation of the adapter on {name} took a part of the weight, which a file "
                "without weights does not hold. Save the whole model with "
                "`quaxlike.files.safetensors.save`, or LoRA with `quaxlike.lm.peft.save_adapter`."
            )
    bare = [(name, _without_base(x)) for name, x in adapters.items()]
    write_tensors(Path(path), *stored(Path(path), bare, types))


@checked
def load_adapters(path: str | os.PathLike[str], model: _Model, *, types: Iterable[type] = ()) -> _Model:
    """Loads a file written by `save_adapters` and applies the adapters to a model.

    **Arguments:**

    - `path`: the file.
    - `model`: the model without adapters. Its weights may have a different type than when saving, e.g.
        quantised to 4 bits.
    - `types`: any custom classes, as for `save_adapters`.

    **Returns:** the adapted model.

    **Raises:** `FileNotFoundError` if `path` does not exist. `CheckpointError` if the file is damaged or
    doesn't match the model. `ValueError` if the model already has adapters.
    """
    tensors = open_tensors(path)
    nodes, known, used = _read_manifest(tensors), _known(types), set[str]()
    whole: Any = model
    arrays = named_arrays(whole)
    if any(name not in arrays for name in nodes) and hasattr(whole, "with_separate_head"):
        whole = whole.with_separate_head()
        arrays = named_arrays(whole)
    loaded: dict[str, Any] = {}
    for name, node in nodes.items():
        base = arrays.get(name)
        if isinstance(base, AdaptedArray):
            raise ValueError(
                f"{name} is of type {type(base).__name__} already. Load the adapters on the bare model."
            )

        def get(part: Any, base: Any = base, name: str = name) -> Any:
            if part is _BASE and base is None:
                raise tensors.error(name, f"the model has no such array. {suggestion(name, arrays)}")
            return base if part is _BASE else used.add(part) or _tensor(tensors, part)

        with _rebuilding(name, tensors):
            found = _decode(node, known, get)
            shape = tuple(found.shape)
        if not isinstance(found, AdaptedArray):
            raise tensors.error(name, f"expected an adapter; found {type(found).__name__}")
        if base is not None and shape[len(shape) - base.ndim :] != tuple(base.shape):
            raise tensors.error(name, f"is an adapter of shape {shape}; the weight is of {tuple(base.shape)}")
        loaded[name] = found
    if left := sorted({*tensors} - used):
        raise tensors.error(left[0], "is no part of an adapter; `load` reads the files of whole models")
    return replace(whole, loaded)


class _Base:
    """A placeholder for the base of an adapter, in files without it."""


_BASE: Any = _Base()


def _without_base(x: AdaptedArray) -> AdaptedArray:
    if x.w is None or "train" in (x.gradients, getattr(x.w, "gradients", None)):
        return x
    return x.with_base(_without_base(x.w) if isinstance(x.w, AdaptedArray) else _BASE)


def open_values(tensors: Tensors) -> tuple[dict[str, Callable[[], Any]], set[str]]:
    """Finds the Values in a file written by `save`.

    Returns a dict from names to functions reading the Value, and the set of all tensors in these Values.
    """
    nodes, known, used = _read_manifest(tensors), _known(()), set[str]()

    def names_in(node: Any) -> None:
        if isinstance(node, dict):
            used.update(v for k, v in node.items() if k in ("array", "key") and isinstance(v, str))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            names_in(child)

    def read(name: str) -> Any:
        with _rebuilding(name, tensors):
            return _decode(nodes[name], known, functools.partial(_tensor, tensors))

    names_in(nodes)
    return {name: lambda name=name: read(name) for name in nodes}, used


@contextlib.contextmanager
def _rebuilding(name: str, tensors: Tensors) -> Iterator[None]:
    """Names the array in any error raised while rebuilding it from its tensors."""
    try:
        yield
    except CheckpointError:
        raise
    # For inconsistent values, a type may raise any kind of error.
    except Exception as error:
        raise tensors.error(name, f"cannot be rebuilt: {error}{_if_later(tensors)}") from error


def _tensor(tensors: Tensors, name: Any) -> Any:
    if name is _BASE:
        raise ValueError("the file holds adapters without their bases; read it with `load_adapters`")
    if name not in tensors:
        raise ValueError(f"its tensor {name!r} is missing")
    return as_jax(tensors[name])


def _read_manifest(tensors: Tensors) -> dict[str, Any]:
    if _MANIFEST not in tensors.metadata:
        return {}
    manifest = read_json(tensors.path, tensors.metadata[_MANIFEST], "the manifest")
    if manifest.get("version") != _VERSION:
        writer = str(manifest.get("quaxlike", "unknown"))[:40]
        raise tensors.error(
            "version",
            f"the manifest is of version {manifest.get('version')!r}, of quaxlike {writer}; this is quaxlike "
            f"{__version__}, which reads version {_VERSION}. Install quaxlike>={writer}",
        )
    values = manifest.get("values")
    if not isinstance(values, dict):
        raise tensors.error("values", "the manifest must hold an object here")
    dtypes = manifest.get("dtypes", {})  # older files don't have this
    if not isinstance(dtypes, dict):
        raise tensors.error("dtypes", "the manifest must hold an object here")
    for name, dtype in dtypes.items():
        if name in tensors and (found := tensors.info[name].dtype.name) != dtype:
            raise tensors.error(name, f"is of {found}, and of {str(dtype)[:40]} in the manifest")
    return values


def _if_later(tensors: Tensors) -> str:
    """Returns a suffix for error messages, empty unless a later version of quaxlike wrote this file."""
    manifest = read_json(tensors.path, tensors.metadata[_MANIFEST], "the manifest")
    writer = str(manifest.get("quaxlike", ""))[:40]

    def numbers(version: Any) -> Any:
        return [int(n) for n in re.findall(r"\d+", version)[:3]]

    if numbers(writer) <= numbers(__version__):
        return ""
    return f". The file is of quaxlike {writer}, this is {__version__}: install quaxlike>={writer}"


def _known(types: Iterable[type]) -> _Types:
    return {**_shipped_types(), **{cls.__name__: cls for cls in types}}


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray)


# -------------------------------------------------------------------------------------------------
# Values as JSON: the manifest of arrays stored as several tensors
#
# Each node is a dict, and its first key is the kind of node. A `type` is the name of a class, with its
# `fields` alongside. `array` and `key` are the names of tensors, the latter with its `impl` alongside. `base`
# is the base weight of an adapter, taken from the model. A `tuple` contains further nodes. `dtype`, `unit`,
# `float`, `complex` and `value` are static.
# -------------------------------------------------------------------------------------------------


_EXPONENT = re.compile(r"-?[0-9]{1,9}(/[1-9][0-9]{0,8})?")


@functools.cache
def _shipped_types() -> _Types:
    """Returns all types in `quaxlike.arrays` and `quaxlike.adapters`, and in their submodules, keyed by name.

    This imports all of their modules: the file may contain types not imported yet.
    """
    names = [
        module.name
        for package in (quaxlike.arrays, quaxlike.adapters)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    modules = list(map(importlib.import_module, names))
    return {"Codec": Codec, "NestedScales": NestedScales} | {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
    }


def _encode(x: Any, name: str, types: _Types, put: Callable[[str, np.ndarray], None]) -> dict[str, Any]:
    """Converts `x` to a node. Passes all arrays to `put`, under names starting with `name`.

    Raises `TypeError` if a value can't be saved.
    """
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        put(name, np.asarray(jax.random.key_data(x)))
        return {"key": name, "impl": str(jax.random.key_impl(x))}
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        put(name, np.asarray(x))
        return {"array": name}
    if x is _BASE:
        return {"base": True}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        kind = type(x).__name__
        if types.get(kind) is not type(x):
            raise TypeError(f"{kind} is not a type that the file can name; pass it in `types`")
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        nodes = {field: _encode(v, f"{name}.{field}", types, put) for field, v in fields.items()}
        return {"type": kind, "fields": nodes}
    if isinstance(x, tuple | list):
        return {"tuple": [_encode(v, f"{name}.{i}", types, put) for i, v in enumerate(x)]}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if isinstance(x, Unit):
        return {"unit": {symbol: str(power) for symbol, power in x.exponents.items()}}
    if isinstance(x, float):
        return {"value": x} if math.isfinite(x) else {"float": repr(x)}
    if isinstance(x, complex):
        return {"complex": [repr(x.real), repr(x.imag)]}
    if x is None or isinstance(x, bool | int | str):
        return {"value": x}
    raise TypeError(f"{type(x).__name__} cannot be written to a file")


def _decode(node: Any, types: _Types, get: Callable[[Any], Any]) -> Any:
    """The inverse of `_encode`. `get` looks up a tensor by its name, or the base.

    Raises `ValueError` if a node wasn't produced by `_encode`, or if a value is inconsistent.
    """
    if not isinstance(node, dict):
        raise ValueError(f"expected an object, found {type(node).__name__}")
    match node:
        case {"array": str(name)} if len(node) == 1:
            return get(name)
        case {"base": True} if len(node) == 1:
            return get(_BASE)
        case {"key": str(name), "impl": str(impl)} if len(node) == 2:
            return jax.random.wrap_key_data(get(name), impl=impl)
        case {"type": str(kind), "fields": dict(fields)} if len(node) == 2:
            return _build(kind, fields, types, get)
        case {"tuple": list(nodes)} if len(node) == 1:
            return tuple(_decode(x, types, get) for x in nodes)
        case {"dtype": str(name)} if len(node) == 1:
            return jax.numpy.dtype(name)
        case {"unit": dict(exponents)} if len(node) == 1:
            return _unit(exponents)
        case {"float": "nan" | "inf" | "-inf" as text} if len(node) == 1:
            return float(text)
        case {"complex": [str(real), str(imaginary)]} if len(node) == 1:
            return complex(float(real), float(imaginary))
        case {"value": None | bool() | int() | float() | str() as value} if len(node) == 1:
            return value
    raise ValueError(f"the entries {sorted(node)} do not form a known node")


def _unit(exponents: dict[str, Any]) -> Unit:
    for symbol, power in exponents.items():
        if not isinstance(power, str) or not _EXPONENT.fullmatch(power):
            raise ValueError(f"a unit has a fraction as exponent of {symbol!r}, not {power!r}")
    return Unit({symbol: Fraction(power) for symbol, power in exponents.items()})


def _build(kind: str, fields: dict[str, Any], types: _Types, get: Callable[[Any], Any]) -> Any:
    if kind not in types:
        raise ValueError(f"unknown type {kind!r}; known are {', '.join(sorted(types))}")
    cls: Any = types[kind]
    known = {field.name: field for field in dataclasses.fields(cls)}
    older = cls.older_switches if issubclass(cls, GradientsArray) else ()
    given = {n: _decode(node, types, get) for n, node in fields.items() if n in known or n in older}
    given = cls.without_switches(given) if older else given
    if issubclass(cls, AdaptedArray):  # prior to version 0.2 these numbers were static fields
        given |= {n: number(given[n]) for n in cls.numbers if given.get(n) is not None}
    for name, field in known.items():
        if name not in given and field.default is not dataclasses.MISSING:
            given[name] = field.default
    unknown = set(fields) - {*known, *older}
    if differing := ", ".join(sorted((set(known) ^ set(given)) | unknown)):
        raise ValueError(f"{kind}: missing or unknown fields: {differing}")
    # As when unflattening a pytree, don't call `__init__`: its parameters may differ from the fields.
    value = object.__new__(cls)
    for name, x in given.items():
        object.__setattr__(value, name, x)
    for base in cls.__mro__:
        check = vars(base).get("__check_init__") or vars(base).get("__post_init__")
        if check is not None:
            check(value)
    return value
