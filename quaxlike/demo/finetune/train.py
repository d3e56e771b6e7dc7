"""An older name of `quaxlike.finetune.train`."""

from ...finetune.train import *  # noqa: F403
