"""Rendering of conversations by chat templates. This needs the package jinja2."""

from .template import ChatTemplate, Rendered

__all__ = ["ChatTemplate", "Rendered"]
