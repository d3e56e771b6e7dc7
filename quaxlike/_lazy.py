"""Modules of a package that are imported on first use."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType


def lazily(
    package: str, names: Iterable[str], namespace: Mapping[str, object]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package that imports the named modules on demand."""
    modules = frozenset(names)

    def __getattr__(name: str) -> ModuleType:
        if name in modules:
            return importlib.import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*namespace, *modules})

    return __getattr__, __dir__
