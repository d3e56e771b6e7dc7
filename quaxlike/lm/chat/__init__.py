"""Conversations as text, by the chat template of a checkpoint. Needs the package jinja2."""

from .template import ChatTemplate, Rendered

__all__ = ["ChatTemplate", "Rendered"]
