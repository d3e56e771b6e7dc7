"""The command-line options: one for each setting of a run or task."""

import dataclasses
from pathlib import Path
from typing import Any

from ...adapters import METHODS
from ...surgery.quantize import is_recipe_file, scheme_of
from ..gguf.mixtures import type_of
from .settings import DataSettings, FinetuneError, RunSettings, Settings, TrainSettings, in_order
from .tasks import TASKS

#: The settings of named tasks, by name.
TASK_SETTINGS = {task.own.name: task.own for task in TASKS if task.own is not None}


def options() -> list[dataclasses.Field[Any]]:
    """Returns all options, in the same order as in `--help`. See `settings.option`."""
    return in_order([TrainSettings, DataSettings, RunSettings], TASK_SETTINGS.values())


def settings_of(**values: Any) -> Settings:
    """Creates settings from option values.

    Options for tasks other than the chosen one are ignored. If `adapter` is the name of a folder then it is
    converted to a path, unless there is a method of that name. (The same goes for `quantize` and recipe
    files.)

    **Raises:** `FinetuneError` if an option specifies a file for a task other than the chosen one, or if a
    scheme or recipe is unknown.
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
    own = {name: taken(task) for name, task in TASK_SETTINGS.items()}
    train, data, run = (taken(cls) for cls in (TrainSettings, DataSettings, RunSettings))
    if values:
        raise TypeError(f"There are no options {', '.join(sorted(values))}.")
    wanted = data.pop("task", None)
    for name, of_task in own.items():
        if name != wanted and (files := [x for x, value in of_task.items() if isinstance(value, Path)]):
            raise FinetuneError(f"--{files[0].replace('_', '-')} is for --task {name}.")
    task = None if wanted is None else TASK_SETTINGS[wanted](**own[wanted])
    return Settings(TrainSettings(**train), DataSettings(**data, task=task), RunSettings(**run))
