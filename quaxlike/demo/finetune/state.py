"""An older name of `quaxlike.finetune.state`."""

from ...finetune.state import *  # noqa: F403
