"""The options of the command line: those of the three settings, and of the tasks."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from ...adapters import METHODS
from ...surgery.quantize import is_recipe_file, scheme_of
from ..gguf.mixtures import type_of
from .settings import DataSettings, FinetuneError, RunSettings, Settings, TrainSettings, in_order
from .tasks import TASKS

_OF_TASKS = {task.own.name: task.own for task in TASKS if task.own is not None}


class CommandOption(NamedTuple):
    name: str
    default: Any
    """`dataclasses.MISSING` if there is none."""
    of_argument: dict[str, Any]
    """The options of its argument, for `argparse`."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def options() -> list[CommandOption]:
    """All options, in the order of `--help`."""
    fields = in_order([TrainSettings, DataSettings, RunSettings], _OF_TASKS.values())
    found = [CommandOption(field.name, field.default, {**field.metadata}) for field in fields]
    for option in found:
        if option.name == "task":
            about = [f"{name}: {task.about}" for name, task in _OF_TASKS.items()]
            option.of_argument["help"] = f"{'; '.join(about)} {option.of_argument['help']}"
            option.of_argument["choices"] = list(_OF_TASKS)
    return found


def settings_of(**values: Any) -> Settings:
    """The settings with the values of these options. Those of other tasks have no effect. An adapter that
    names a folder becomes its path, unless a method has that name, and so does a recipe that names a file.

    **Raises:** `FinetuneError` for a file of another task, which would not be read, and for a scheme or
    recipe that there is not.
    """

    def taken(cls: Any) -> dict[str, Any]:
        return {x.name: values.pop(x.name) for x in dataclasses.fields(cls) if x.name in values}

    adapter = values.get("adapter")
    if isinstance(adapter, str) and adapter not in METHODS and Path(adapter).is_dir():
        values["adapter"] = Path(adapter)
    for name, read in {"quantize": scheme_of, "outtype": type_of}.items():
        if (scheme := values.get(name)) in (None, "none"):
            continue
        try:
            read(scheme)
        except (ValueError, OSError) as error:
            raise FinetuneError(f"--{name}: {error}") from None
        values[name] = Path(scheme) if is_recipe_file(scheme) else scheme
    own = {name: taken(task) for name, task in _OF_TASKS.items()}
    train, data, run = (taken(cls) for cls in (TrainSettings, DataSettings, RunSettings))
    if values:
        raise TypeError(f"There are no options {', '.join(sorted(values))}.")
    wanted = data.pop("task", None)
    for name, of_task in own.items():
        if name != wanted and (files := [x for x, value in of_task.items() if isinstance(value, Path)]):
            raise FinetuneError(f"--{files[0].replace('_', '-')} is for --task {name}.")
    task = None if wanted is None else _OF_TASKS[wanted](**own[wanted])
    return Settings(TrainSettings(**train), DataSettings(**data, task=task), RunSettings(**run))
