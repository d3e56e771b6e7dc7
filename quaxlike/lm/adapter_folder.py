"""The folder of an adapter: PEFT's files, or our own, of the types that these do not hold."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..adapters import METHODS
from ..arrays.adapted import AdaptedArray
from ..files import safetensors
from ..files.errors import CheckpointError
from ..files.json_text import read_json_file
from .peft import load_adapter
from .peft.config import files_of

#: The file of adapters that PEFT's files do not hold.
OWN_FILE = "adapters.safetensors"


def holds_own(folder: Path) -> bool:
    """Whether a folder has our own file, and not those of PEFT."""
    return not files_of(folder).config_path().is_file() and (folder / OWN_FILE).is_file()


def read_adapter(folder: Path, model: Any) -> Any:
    """The model with the adapter in a folder.

    **Raises:** as [`quaxlike.lm.peft.load_adapter`][], and `CheckpointError` if the module of a type of the
    user's, which `run.json` beside our own file names, is not there.
    """
    if not holds_own(folder):
        return load_adapter(folder, model)
    return safetensors.load_adapters(folder / OWN_FILE, model, types=_types_in(folder))


def module_of_user(name: str, error: Callable[[str], Exception]) -> ModuleType:
    """Imports a module; raises what `error` makes of the problem if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the module is there, and misses another
        problem = f"there is no module {missing.name!r}. Run the command in its folder, or install it."
        raise error(problem) from None


def _types_in(folder: Path) -> list[type]:
    """The user's types of adapters, from the module that the run in this folder was given."""
    about = folder / "run.json"
    given = read_json_file(about, "the settings of the run").get("adapter") if about.is_file() else None
    if not isinstance(given, str) or given in METHODS:
        return []
    if Path(given).is_dir():  # it went on with another
        return _types_in(Path(given))

    def error(problem: str) -> CheckpointError:
        return CheckpointError(f"{about} names {given}, the type of the adapter, and {problem}")

    found = vars(module_of_user(given.partition(":")[0], error)).values()
    return [x for x in found if isinstance(x, type) and issubclass(x, AdaptedArray)]
