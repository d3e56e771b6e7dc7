"""Errors about files."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def quoted(value: Any) -> str:
    """The `repr` of a value from a file, shortened: messages have a bounded length whatever files hold."""
    return _SHORT.repr(value)


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of a kind that cannot be read or written."""


def complain(path: Any, key: str | None, problem: str) -> CheckpointError:
    """An error that names the file, and the entry in it."""
    return CheckpointError(f"{path}: {problem}" if key is None else f"{path}: {key!r}: {problem}")
