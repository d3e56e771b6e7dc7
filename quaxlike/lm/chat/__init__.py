"""Rendering of conversations using chat templates. Requires jinja2."""

from .template import ChatTemplate, Rendered

__all__ = ["ChatTemplate", "Rendered"]
