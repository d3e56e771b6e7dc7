"""The names of a module, quaxified on first access."""

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.quaxify import quaxify

# Functions that return functions.
_MAKE_FUNCTIONS = frozenset(["frompyfunc", "vectorize"])
# Objects of jax.numpy that build arrays by indexing.
_BUILDERS = frozenset(["c_", "r_"])


def names_of(module: types.ModuleType) -> list[str]:
    """The public names of a module."""
    return [name for name in dir(module) if not name.startswith("_")]


def quaxified(module: types.ModuleType, names: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that mirrors another one; it caches results in `names`."""
    ours = names["__name__"]

    def get(name: str) -> Any:
        if name.startswith("_") or not hasattr(module, name):
            raise AttributeError(f"module {ours!r} has no attribute {name!r}; nor has {module.__name__!r}.")
        names[name] = out = _quaxified(name, getattr(module, name), ours)
        return out

    return get


def _quaxified(name: str, x: Any, ours: str) -> Any:
    if isinstance(x, types.ModuleType):
        return importlib.import_module(f"{ours}.{name}")
    if name in _BUILDERS:
        return _Builder(x)
    if isinstance(x, jnp.ufunc):
        return _UFunc(x)
    if not callable(x) or isinstance(x, type):
        return x
    if name in _MAKE_FUNCTIONS:
        return functools.wraps(x)(lambda *args, **kwargs: _made(x(*args, **kwargs)))
    return quaxify(x)


def _made(x: Any) -> Any:
    return _UFunc(x) if isinstance(x, jnp.ufunc) else quaxify(x)


class _UFunc:
    """A ufunc with its methods: `reduce`, `accumulate`, `at`, ..."""

    def __init__(self, ufunc: jnp.ufunc) -> None:
        self._ufunc = ufunc
        self._call = quaxify(ufunc)
        functools.update_wrapper(self, ufunc, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ufunc, name)
        return quaxify(found) if callable(found) else found

    def __repr__(self) -> str:
        return f"quaxify({self._ufunc!r})"


class _Builder:
    """`r_` and `c_`."""

    def __init__(self, builder: Any) -> None:
        self._getitem = quaxify(builder.__getitem__)

    def __getitem__(self, key: Any) -> Any:
        return self._getitem(key)
