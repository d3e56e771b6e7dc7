"""Mirrors a module, quaxifying its functions on first access.

Names are looked up in the installed JAX rather than listed here, so a new JAX release can't make this out of
date, and `import quaxlike.numpy` stays fast.
"""

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.operators import anywhere

# These functions return another function, to be quaxified as well.
_MAKE_FUNCTIONS = frozenset(["frompyfunc", "vectorize"])
# These objects in `jax.numpy` create arrays by indexing, rather than by being called.
_BUILDERS = frozenset(["c_", "r_"])
# The array API standard uses these attributes to recognise a module as an array API namespace.
_STANDARD = frozenset(["__array_api_version__", "__array_namespace_info__"])


def names_of(module: types.ModuleType) -> list[str]:
    """Returns the public names in a module."""
    return [name for name in dir(module) if not name.startswith("_")]


def quaxified(module: types.ModuleType, names: dict[str, Any]) -> Callable[[str], Any]:
    """Creates a `__getattr__` for a module mirroring `module`. Results are cached in `names`."""
    ours = names["__name__"]

    def get(name: str) -> Any:
        if (name.startswith("_") and name not in _STANDARD) or not hasattr(module, name):
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
        return _named(_UFunc(x), name, ours)
    if not callable(x) or isinstance(x, type):
        return x
    if name in _MAKE_FUNCTIONS:
        return functools.wraps(x)(lambda *args, **kwargs: _made(x(*args, **kwargs)))
    return _named(anywhere(x), name, ours)


def _named(fn: Any, name: str, ours: str) -> Any:
    """Sets a function's name, so that pickle can find it."""
    fn.__module__, fn.__qualname__ = ours, name
    return fn


def _made(x: Any) -> Any:
    return _UFunc(x) if isinstance(x, jnp.ufunc) else anywhere(x)


class _UFunc:
    """A quaxified ufunc, including its methods (`reduce`, `accumulate`, `at`, ...)."""

    def __init__(self, ufunc: jnp.ufunc) -> None:
        self._ufunc = ufunc
        self._call = anywhere(ufunc)
        functools.update_wrapper(self, ufunc, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look up special methods before `_ufunc` has been set
            raise AttributeError(name)
        found = getattr(self._ufunc, name)
        return anywhere(found) if callable(found) else found

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"quaxify({self._ufunc!r})"


class _Builder:
    """`r_` or `c_`, quaxified."""

    def __init__(self, builder: Any) -> None:
        self._getitem = anywhere(builder.__getitem__)

    def __getitem__(self, key: Any) -> Any:
        return self._getitem(key)
