"""Older names for `quaxlike.models`."""

from ...models import *  # noqa: F403
