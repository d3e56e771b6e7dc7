"""An older name of `quaxlike.finetune.tasks`."""

from ...finetune.tasks import AbstractTask, Classes, NextToken, Pairs, task_for

__all__ = ["AbstractTask", "Classes", "NextToken", "Pairs", "task_for"]
