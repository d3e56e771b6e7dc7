"""Values as JSON: the description, in a file, of arrays that consist of several tensors.


A node is a dict with one entry, whose name says what it is; a type has `fields` besides. `array` and `key`
name a tensor, `type` a class that ships with quaxlike; `dtype`, `unit`, `tuple`, `float` and `value` are
statics.
"""

import dataclasses
import functools
import importlib
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import jax
import numpy as np

import quaxlike.arrays
from quaxlike.arrays.unitful import Unit

from .._checked import a_or_an

Types = Mapping[str, type]

_EXPONENT = re.compile(r"-?[0-9]{1,9}(/[1-9][0-9]{0,8})?")


@functools.cache
def shipped_types() -> Types:
    """The types of `quaxlike.arrays` and of their parts, by name."""
    package = quaxlike.arrays
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith(package.__name__ + ".")]
    return {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
    }


def encode(x: Any, name: str, types: Types, put: Callable[[str, np.ndarray], None]) -> dict[str, Any]:
    """The node for `x`. Passes its arrays to `put`, under names that begin with `name`.

    **Raises:** `TypeError` for a value that a file cannot hold.
    """
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        put(name, np.asarray(jax.random.key_data(x)))
        return {"key": name, "impl": str(jax.random.key_impl(x))}
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        put(name, np.asarray(x))
        return {"array": name}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        kind = type(x).__name__
        if types.get(kind) is not type(x):
            raise TypeError(f"{a_or_an(kind)} is not a type that the file can name; pass it in `types`")
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        nodes = {field: encode(v, f"{name}.{field}", types, put) for field, v in fields.items()}
        return {"type": kind, "fields": nodes}
    if isinstance(x, tuple | list):
        return {"tuple": [encode(v, f"{name}.{i}", types, put) for i, v in enumerate(x)]}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if isinstance(x, Unit):
        return {"unit": {symbol: str(power) for symbol, power in x.exponents.items()}}
    if isinstance(x, float):
        return {"value": x} if math.isfinite(x) else {"float": repr(x)}
    if x is None or isinstance(x, bool | int | str):
        return {"value": x}
    raise TypeError(f"{a_or_an(type(x))} cannot be written to a file")


def decode(node: Any, types: Types, get: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; `get` returns a tensor by its name.

    **Raises:** `ValueError` for a node that `encode` does not write, or an inconsistent value.
    """
    if not isinstance(node, dict):
        raise ValueError(f"expected an object, found {type(node).__name__}")
    match node:
        case {"array": str(name)} if len(node) == 1:
            return get(name)
        case {"key": str(name), "impl": str(impl)} if len(node) == 2:
            return jax.random.wrap_key_data(get(name), impl=impl)
        case {"type": str(kind), "fields": dict(fields)} if len(node) == 2:
            return _build(kind, fields, types, get)
        case {"tuple": list(nodes)} if len(node) == 1:
            return tuple(decode(x, types, get) for x in nodes)
        case {"dtype": str(name)} if len(node) == 1:
            return jax.numpy.dtype(name)
        case {"unit": dict(exponents)} if len(node) == 1:
            return _unit(exponents)
        case {"float": "nan" | "inf" | "-inf" as text} if len(node) == 1:
            return float(text)
        case {"value": None | bool() | int() | float() | str() as value} if len(node) == 1:
            return value
    raise ValueError(f"the entries {sorted(node)} do not form a known node")


def _unit(exponents: dict[str, Any]) -> Unit:
    for symbol, power in exponents.items():
        if not isinstance(power, str) or not _EXPONENT.fullmatch(power):
            raise ValueError(f"a unit has a fraction as exponent of {symbol!r}, not {power!r}")
    return Unit({symbol: Fraction(power) for symbol, power in exponents.items()})


def _build(kind: str, fields: dict[str, Any], types: Types, get: Callable[[str], Any]) -> Any:
    if kind not in types:
        raise ValueError(f"unknown type {kind!r}; known are {', '.join(sorted(types))}")
    cls = types[kind]
    known = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: decode(node, types, get) for name, node in fields.items() if name in known}
    for name, field in known.items():
        if name not in given and field.default is not dataclasses.MISSING:
            given[name] = field.default
    if set(given) != set(known) or set(fields) - set(known):
        differing = ", ".join(sorted((set(known) - set(given)) | (set(fields) - set(known))))
        raise ValueError(f"{kind}: missing or unknown fields: {differing}")
    # Like unflattening: `__init__` may take arguments other than the fields.
    value = object.__new__(cls)
    for name, x in given.items():
        object.__setattr__(value, name, x)
    for base in cls.__mro__:
        check = vars(base).get("__check_init__") or vars(base).get("__post_init__")
        if check is not None:
            check(value)
    return value
