"""`--adapter`, for using your own type of adapter, or for training an existing one further."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._checked import did_you_mean
from ...adapters import LORA, METHODS
from ...arrays.adapted import AdaptedArray
from ...surgery.adapt import check_make
from ...surgery.trainable import trainable
from ...surgery.trees import named_arrays
from ..adapter_folder import OWN_FILE, holds_own, module_of_user, read_adapter
from ..peft.config import AdapterConfig, files_of, read_config
from .settings import FinetuneError, TrainSettings

_WANTED = "`make(w, *, key, layout)`, which returns an AdaptedArray on the weight `w`"


def make_of(text: str) -> Callable[..., Any]:
    """Looks up a function for creating adapters, to be passed to `quaxlike.adapt`.

    `text` is either the name of a built-in method, or the `MODULE:NAME` of a function or of a class with a
    method called `make`.

    **Raises:** `FinetuneError` if there is no such function.
    """
    module, colon, name = text.partition(":")
    if text in METHODS:
        return METHODS[text].start
    if not (module and colon and name):
        raise FinetuneError(
            "--adapter takes MODULE:NAME, such as mymodule:MyAdapter, or one of "
            f"{', '.join(sorted(METHODS))}, or the folder of an adapter; found {text!r}."
        )
    found = module_of_user(module, lambda problem: FinetuneError(f"--adapter {text}: {problem}"))
    if not hasattr(found, name):
        hint = did_you_mean(name, vars(found))
        raise FinetuneError(f"--adapter {text}: the module {module} has no {name!r}.{hint}")
    make = getattr(found, name)
    if isinstance(make, type):
        if not issubclass(make, AdaptedArray):
            raise FinetuneError(
                f"--adapter {text}: {name} is a class, but no AdaptedArray. Name one, or a function "
                f"{_WANTED}."
            )
        make = getattr(make, "make", None)
        if make is None:
            raise FinetuneError(f"--adapter {text}: give {name} a class method {_WANTED}.")
    try:
        check_make(make)
    except TypeError as error:
        raise FinetuneError(f"--adapter {text}: it must be a function {_WANTED}. {error}") from None
    return make


def is_own(settings: TrainSettings) -> bool:
    """Returns whether the adapter needs our own format because PEFT's can't represent it."""
    if isinstance(settings.adapter, Path):
        return holds_own(settings.adapter)
    return settings.adapter is not None and settings.adapter not in METHODS


def config_of(folder: Path, settings: TrainSettings) -> AdapterConfig | None:
    """Reads the configuration of an adapter to train further.

    Returns None if the adapter is in our own format: this has no configuration.

    **Raises:** `FinetuneError` if there is no adapter, or if it isn't consistent with the settings.
    """
    file = files_of(folder).config_path()
    if not file.is_file() and not (folder / OWN_FILE).is_file():
        raise FinetuneError(f"--adapter {folder}: there is no {file}, so it is no adapter to go on with.")
    config = read_config(file) if file.is_file() else None
    options = {"--freeze-a": settings.freeze_a, "--lora-plus": settings.lora_plus is not None}
    given = [name for name, value in options.items() if value]
    if given and (config is None or config.method is not LORA):
        found = "of another type" if config is None else config.method.name
        raise FinetuneError(
            f"{', '.join(given)} cannot be used with the adapter in {folder}, which is {found}: these are "
            "options of LoRA."
        )
    return config


def continued(model: Any, folder: Path) -> Any:
    """Loads the adapter from a folder. Its trainable arrays are cast to float32, as for a new adapter."""
    model = read_adapter(folder, model)
    trained, frozen = eqx.partition(model, trainable(model))
    return eqx.combine(jax.tree.map(lambda x: x.astype(jnp.float32), trained), frozen)


def types_of(model: Any) -> list[type]:
    """Returns the types of all adapters in a model, other than those from quaxlike itself."""
    types = (type(x) for x in named_arrays(model).values() if isinstance(x, AdaptedArray))
    return list(dict.fromkeys(cls for cls in types if not cls.__module__.startswith("quaxlike.")))


def how_to_load(file: Path, types: list[type]) -> str:
    names = [f"{x.__module__}.{x.__qualname__}" for x in types]
    listed = f", types=[{', '.join(names)}]" if names else ""
    return f"quaxlike.files.safetensors.load_adapters({str(file)!r}, model{listed})"
