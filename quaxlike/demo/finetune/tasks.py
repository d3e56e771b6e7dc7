"""An older name of `quaxlike.finetune.tasks`."""

from ...finetune.tasks import *  # noqa: F403
