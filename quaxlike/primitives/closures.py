"""Replacement of tracers that functions have closed over.

A function may be called after the trace that it was made under has ended. Then it can no longer use the
tracers of that trace, and keeping them would be a leak. It can be called with other values in their place.
"""

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
from jax.core import Tracer

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Hole:
    """A placeholder for a tracer."""

    index: int


def extract_tracers(value: _T) -> tuple[_T, list[Any]]:
    """Extracts the tracers that functions in a tree reach by closure, default, partial or method.

    Objects with `__jax_array__` are converted to arrays first.

    **Returns:** the tree without tracers, and each tracer once. `fill_tracers` puts values in their place.
    """
    tracers: list[Any] = []

    def leaf(x: Any) -> Any:
        if becomes_array(x):
            x = x.__jax_array__()
        if not isinstance(x, Tracer):
            return x
        found = [i for i, t in enumerate(tracers) if t is x]
        if not found:
            tracers.append(x)
        return _Hole(found[0] if found else len(tracers) - 1)

    template = _Copy(leaf).tree(value)
    return (template, tracers) if tracers else (value, [])


def fill_tracers(template: _T, values: Sequence[Any]) -> _T:
    """The tree that was passed to `extract_tracers`, with `values` in place of the tracers."""
    fill = lambda x: values[x.index] if isinstance(x, _Hole) else x
    return _Copy(fill).tree(template) if values else template


def becomes_array(x: Any) -> bool:
    """Whether `x`, possibly a tree, converts to an array (`__jax_array__` is None if it does not)."""
    return getattr(x, "__jax_array__", None) is not None


class _Copy:
    """Copies functions with everything they hold. Each function is copied once, and before what it holds,
    since functions may hold themselves and each other."""

    def __init__(self, of_leaf: Callable[[Any], Any]) -> None:
        self._of_leaf = of_leaf
        self._copies: dict[int, tuple[Any, Any]] = {}  # by identity; the original is kept alive

    def tree(self, value: Any) -> Any:
        return jtu.tree_map(self._leaf, value, is_leaf=becomes_array)

    def _leaf(self, x: Any) -> Any:
        if id(x) in self._copies:
            return self._copies[id(x)][1]
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self._leaf(x.__func__), self.tree(x.__self__))
        if isinstance(x, functools.partial):
            return functools.partial(self._leaf(x.func), *self.tree(x.args), **self.tree(x.keywords))
        if hasattr(type(x), "functions_held"):
            new = self._remember(x, copy.copy(x))
            for name in x.functions_held:
                setattr(new, name, self._leaf(getattr(x, name)))
            return new
        return self._of_leaf(x)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
            return fn
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells)
        functools.update_wrapper(new, fn)
        vars(new).pop("__wrapped__")
        self._remember(fn, new)
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            try:
                contents = old.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
            cell.cell_contents = self.tree(contents)
        new.__defaults__ = self.tree(fn.__defaults__)
        new.__kwdefaults__ = self.tree(fn.__kwdefaults__)
        return new

    def _remember(self, old: Any, new: Any) -> Any:
        self._copies[id(old)] = (old, new)
        return new
