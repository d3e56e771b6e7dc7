"""Generation of text; `python -m quaxlike.lm.generate` is the command."""

from .generation import Conversation, generate

__all__ = ["Conversation", "generate"]
