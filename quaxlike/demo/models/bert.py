"""An older name of `quaxlike.models`."""

from ..._deprecated import deprecated
from . import NAMES

__getattr__, __dir__ = deprecated(__name__, NAMES, removed_in="0.2")
