"""Continuation of texts by a decoder; `python -m quaxlike.lm.generate` does it from the command line."""

from .generation import Conversation, generate

__all__ = ["Conversation", "generate"]
