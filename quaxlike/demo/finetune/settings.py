"""An older name of `quaxlike.finetune.settings`."""

from ...finetune.settings import *  # noqa: F403
