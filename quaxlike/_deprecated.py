"""Moved names and modules. The old names keep working for one more release, but emit a warning."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_REMOVED_IN = "0.3"

#: Maps the old locations of modules to their new locations. An entry also covers all submodules.
_MODULES = {
    "arrays.adapters": "adapters",
    # Each of these used to contain several methods. Keep them importable for old pickles.
    **dict.fromkeys(
        (f"arrays.adapters.{x}" for x in ("low_rank", "products", "rotated", "scaled")), "adapters"
    ),
    "arrays.adapters.activated": "adapters.alora",
    "finetune": "lm.finetune",
    "generate": "lm.generate",
    "interop.bitsandbytes": "lm.bitsandbytes",
    "interop.chat": "lm.chat",
    "interop.checkpoint": "lm.checkpoints.checkpoint",
    "interop.files": "files",
    **{f"interop.files.{x}": f"lm.folders.{x}" for x in ("companions", "file_pair", "model_config")},
    "interop.formats": "lm.formats",
    "interop.gguf": "lm.gguf",
    "interop.peft": "lm.peft",
    **dict.fromkeys(
        (f"interop.peft.methods{x}" for x in ("", ".low_rank", ".products", ".rotated", ".scaled")),
        "adapters",
    ),
    "interop.peft.methods.method": "adapters.record",
    "interop.safetensors": "files.safetensors",
    "interop.saving": "lm.checkpoints.saving",
    "interop.text": "lm.text",
    "interop.tokenizer": "lm.tokenizer",
    "models.generation": "lm.generate.generation",
    "models.loading": "lm.loading",
    "models.to_gguf": "lm.to_gguf",
}
#: Old packages, since split up. Any name not listed here has moved to the module under "".
_PACKAGES = {
    "interop": {
        "": "lm",
        "CheckpointError": "files",
        "load": "lm.read",
        "safetensors": "files",
        "save": "lm.write",
    },
    "surgery.methods": {"": "adapters.METHODS"},
    "models": {
        "": "lm.models",
        **dict.fromkeys(("Conversation", "FAMILIES", "UnsupportedConfigError", "generate", "load"), "lm"),
        **dict.fromkeys(("resize_vocabulary", "save"), "lm"),
    },
}


def find_spec(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Finds the spec for the old path of a module, or returns None if it hasn't moved."""
    package, _, name = fullname.partition(".")
    new = _moved(name)
    if new is None:
        return None
    if name in _PACKAGES:
        return importlib.machinery.ModuleSpec(fullname, _OldPackage(name), is_package=True)
    is_package = not name.endswith("__main__")
    return importlib.machinery.ModuleSpec(fullname, _Moved(f"{package}.{new}"), is_package=is_package)


def _moved(name: str) -> str | None:
    """Returns the new path of a module, or None if it hasn't moved."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        old = ".".join(parts[:n])
        new = _MODULES.get(old) or _PACKAGES.get(old, {}).get("")
        if new is not None:
            return ".".join([new, *parts[n:]])
    return None


class _Moved(importlib.abc.InspectLoader):
    """Imports a module under its old name. Afterwards both names refer to the same module object."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.new)
        warn(module.__name__, self.new)

    def get_source(self, fullname: str) -> str:
        """Returns source code running the new command, for `python -m` with the old path."""
        old, new = (name.removesuffix(".__main__") for name in (fullname, self.new))
        command = new.rpartition(".")[2]
        said = f"`python -m {old}` is `{_PACKAGE} {command}` now, or `python -m {new}`."
        return (
            "import runpy, sys\n"
            f"print({said!r}, file=sys.stderr)\n"
            f"runpy.run_module({new!r}, run_name='__main__', alter_sys=True)\n"
        )


class _OldPackage(importlib.abc.Loader):
    """Creates a stand-in for an old package with names now spread over several modules."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = functools.partial(_name_of_package, self.name)


def _name_of_package(package: str, name: str) -> Any:
    names = _PACKAGES[package]
    if name.startswith("__"):
        raise AttributeError(f"module '{_PACKAGE}.{package}' has no attribute {name!r}")
    where = names.get(name, names[""])
    return moved_name(f"{package}.{name}", where if where.endswith(("read", "write")) else f"{where}.{name}")


def moved_name(old: str, new: str) -> Any:
    """Returns the object at `new` and warns that `old` is deprecated. Both are paths inside quaxlike."""
    module, _, name = new.rpartition(".")
    found = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    warn(f"{_PACKAGE}.{old}", f"{_PACKAGE}.{new}")
    return found


def warn(old: str, new: str) -> None:
    """Warns that an old name is deprecated, attributing this to a line of the user's code.

    By default the blame falls on quaxlike, or on a library in between. So look for the innermost frame
    outside quaxlike, the import system, and jaxtyping's annotation checks.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is {new} now; quaxlike {_REMOVED_IN} will not have the old name.",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_ours(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in (_PACKAGE, "importlib", "dataclasses", "jaxtyping", "beartype")
