"""Renders conversations as text using chat templates. This requires jinja2."""

from .template import ChatTemplate, Rendered

__all__ = ["ChatTemplate", "Rendered"]
