"""Text generation. To use this from the command line, run `python -m quaxlike.lm.generate`."""

from .generation import Conversation, generate

__all__ = ["Conversation", "generate"]
