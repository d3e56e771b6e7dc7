"""Tasks. Each task is one file, with its data, loss, metrics and options, and an entry in the table."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from ..settings import DataSettings, FinetuneError, TrainSettings
from .classes import Classes, ClassSettings
from .distillation import Distillation, DistillationSettings
from .next_token import NextToken
from .pairs import Pairs
from .preferences import Preferences, PreferenceSettings
from .rewards import Rewards, RewardSettings
from .task import AbstractTask
from .word_classes import WordClasses

__all__ = [
    "TASKS",
    "AbstractTask",
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

#: In the order of `--help`.
TASKS: tuple[type[AbstractTask], ...] = (
    *(NextToken, Preferences, Rewards, Distillation, Pairs, Classes, WordClasses),
)


def kind_for(model: PyTree, train: TrainSettings, data: DataSettings) -> type[AbstractTask]:
    """The kind of task of the settings, or else the one that a model from [`quaxlike.lm.load`][] is made
    for."""
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
    """The task of that kind for a model that has all that it needs."""
    return kind_for(model, train, data).of(model, train, data)


def begun(
    model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
) -> tuple[PyTree, DataSettings]:
    """A model from the checkpoint with what the task adds to it, and the settings with what it found in the
    data for that."""
    return kind_for(model, train, data).begun(model, config, train, data)
