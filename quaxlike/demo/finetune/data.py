"""An older name of `quaxlike.finetune.data`."""

from ..._deprecated import deprecated, names_of
from ...finetune import data as _new

__getattr__, __dir__ = deprecated(__name__, names_of(_new), removed_in="0.2")
