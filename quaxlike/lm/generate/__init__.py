"""Text generation. The command is `python -m quaxlike.lm.generate`."""

from .generation import Conversation, generate

__all__ = ["Conversation", "generate"]
