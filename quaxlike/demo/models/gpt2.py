"""Older names for `quaxlike.models`."""

from . import *  # noqa: F403
