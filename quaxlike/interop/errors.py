"""Errors about files."""

from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of a kind that cannot be read or written."""


def complain(path: Any, key: str | None, problem: str) -> CheckpointError:
    """An error that names the file, and the entry in it."""
    return CheckpointError(f"{path}: {problem}" if key is None else f"{path}: {key!r}: {problem}")
