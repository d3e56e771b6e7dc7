"""An older name of `quaxlike.finetune.run`."""

from ...finetune.run import *  # noqa: F403
