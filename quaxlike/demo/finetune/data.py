"""An older name of `quaxlike.finetune.data`."""

from ...finetune.data import *  # noqa: F403
