"""Lazy imports, along with redirects for moved modules."""

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazily(
    package: str,
    modules: Iterable[str],
    namespace: dict[str, Any],
    names: Mapping[str, Iterable[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Creates the `__getattr__` and `__dir__` functions of a package with lazily imported submodules.

    **Arguments:**

    - `package`: the `__name__` of the package.
    - `modules`: the submodules to import on first use.
    - `namespace`: the package's `globals()`, which cache anything imported.
    - `names`: maps each submodule to its names also available from the package.
    """
    known = frozenset(modules)
    sources = {name: module for module, each in (names or {}).items() for name in each}

    def __getattr__(name: str) -> Any:
        if name in sources:
            found = getattr(importlib.import_module(f".{sources[name]}", package), name)
            namespace[name] = found
            return found
        if name in known:
            return importlib.import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*namespace, *known, *sources})

    return __getattr__, __dir__


class OlderPaths(importlib.abc.MetaPathFinder):
    """An import hook for modules formerly at one of `paths`. See `_deprecated` for where they went."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(self._paths):
            return None
        from ._deprecated import find_spec

        return find_spec(fullname)

    def install(self) -> None:
        # Insert this before Python's own finders, which would import moved submodules a second time.
        if not any(isinstance(finder, OlderPaths) for finder in sys.meta_path):
            sys.meta_path.insert(0, self)
