"""The tasks to fine-tune for. Each has a file with its data, loss, metrics and options."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from ..settings import DataSettings, FinetuneError, TrainSettings
from .classes import Classes, ClassSettings
from .distillation import Distillation, DistillationSettings
from .next_token import AbstractTextTask, NextToken
from .pairs import Pairs
from .preferences import Preferences, PreferenceSettings
from .rewards import Rewards, RewardSettings
from .task import AbstractTask
from .word_classes import WordClasses

__all__ = [
    "TASKS",
    "AbstractTask",
    "AbstractTextTask",
    "ClassSettings",
    "Classes",
    "Distillation",
    "DistillationSettings",
    "NextToken",
    "Pairs",
    "PreferenceSettings",
    "Preferences",
    "RewardSettings",
    "Rewards",
    "WordClasses",
    "begun",
    "kind_for",
    "task_for",
]

#: All tasks, in the same order as in `--help`.
TASKS: tuple[type[AbstractTask], ...] = (
    *(NextToken, Preferences, Rewards, Distillation, Pairs, Classes, WordClasses),
)


def kind_for(model: PyTree, train: TrainSettings, data: DataSettings) -> type[AbstractTask]:
    """Selects the task, based on the model if the settings don't specify one."""
    if data.task is None:
        tasks = [task for task in TASKS if not task.needs_name]
    else:
        tasks = [task for task in TASKS if task.own is type(data.task)]
    for task in tasks:
        if task.takes(model, train.model):
            return task
    if data.task is None:
        raise FinetuneError(f"There is no task for {type(model).__name__}.")
    raise FinetuneError(f"--task {data.task.name} is for {tasks[0].models}; found {type(model).__name__}.")


def task_for(model: PyTree, train: TrainSettings, data: DataSettings) -> AbstractTask:
    """Creates the task for a model already prepared by `begun`."""
    return kind_for(model, train, data).of(model, train, data)


def begun(
    model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
) -> tuple[PyTree, DataSettings]:
    """Prepares a model for its task, e.g. by replacing its last layer. See `AbstractTask.begun`."""
    return kind_for(model, train, data).begun(model, config, train, data)
