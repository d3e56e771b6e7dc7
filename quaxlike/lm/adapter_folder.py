"""Reads an adapter from a folder, either in PEFT's format or (for types PEFT lacks) in our own."""

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
from .models.vocabulary import resize_vocabulary
from .peft import load_adapter
from .peft.config import files_of
from .peft.load import VocabularySizeError
from .tokenizer import read_templates

#: The name of the file in our own format.
OWN_FILE = "adapters.safetensors"


def holds_own(folder: Path) -> bool:
    """Returns whether a folder has an adapter in our own format. (PEFT's takes precedence.)"""
    return not files_of(folder).config_path().is_file() and (folder / OWN_FILE).is_file()


def read_adapter(folder: Path, model: Any) -> Any:
    """Adds the adapter from a folder to a model.

    If the vocabulary was resized before the adapter was trained, then so is the model's. (The adapter has the
    new embeddings.)

    **Raises:** the same errors as [`quaxlike.lm.peft.load_adapter`][]. In addition, `CheckpointError` if
    `run.json` names a module (for a type of the user's own) that doesn't exist.
    """
    if not holds_own(folder):
        try:
            return load_adapter(folder, model)
        except VocabularySizeError as error:
            return load_adapter(folder, resize_vocabulary(model, error.n))
    return safetensors.load_adapters(folder / OWN_FILE, model, types=_types_in(folder))


def other_tokenizer(adapter: Path, model: Path) -> str:
    """Returns a warning if an adapter's folder has another tokeniser or chat template than its model.

    TRL saves both next to an adapter, but only the model's are ever used.
    """
    found: list[str] = []
    if any((adapter / name).is_file() for name in ("tokenizer_config.json", "chat_template.jinja")):
        own, models = (
            {name: text.strip() for name, text in read_templates(folder)[0].items()}
            for folder in (adapter, model)
        )
        found += ["chat template"] if own and own != models else []
    if (adapter / "tokenizer.json").is_file():
        from .text import TextTokenizer  # not at module level, as it requires the extra `lm`

        tokens = TextTokenizer(adapter).tokens
        try:
            number = TextTokenizer(model).number
        except FileNotFoundError:  # the model has none, which is fine for `convert`
            number = dict[str, int]().get
        found += ["tokeniser"] if any(number(token) != i for token, i in tokens.items()) else []
    if not found:
        return ""
    return (
        f"Warning: {adapter} has a {' and a '.join(found)} of its own, which the adapter may have been "
        f"trained with. Those of {model} are used: to use the others, copy them there."
    )


def module_of_user(name: str, error: Callable[[str], Exception]) -> ModuleType:
    """Imports a user's module. Raises `error(message)` if there is no module of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the module does exist, but something it imports doesn't
        problem = f"there is no module {missing.name!r}. Run the command in its folder, or install it."
        raise error(problem) from None


def _types_in(folder: Path) -> list[type]:
    """Imports the user's own adapter types, as used by the run in this folder."""
    about = folder / "run.json"
    given = read_json_file(about, "the settings of the run").get("adapter") if about.is_file() else None
    if not isinstance(given, str) or given in METHODS:
        return []
    if Path(given).is_dir():  # the run started from another adapter, so look there
        return _types_in(Path(given))

    def error(problem: str) -> CheckpointError:
        return CheckpointError(f"{about} names {given}, the type of the adapter, and {problem}")

    found = vars(module_of_user(given.partition(":")[0], error)).values()
    return [x for x in found if isinstance(x, type) and issubclass(x, AdaptedArray)]
