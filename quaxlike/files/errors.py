"""Errors and helpers for error messages about files."""

import os
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def quoted(value: Any) -> str:
    """Returns the `repr` of a value read from a file, truncated if long."""
    return _SHORT.repr(value)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: Iterable[str]) -> str:
    """Lists the first few names, and how many others there are."""
    first, others = (names := list(names))[:5], len(names) - 5
    return ", ".join(map(shortened, first)) + (f" and {others:,} more" if others > 0 else "")


class ErrorAboutFiles(ValueError):
    """An error that may quote from a file. Long messages are truncated, whatever the file contains."""

    def __init__(self, message: str = "") -> None:
        if len(message) > 4_000:
            message = f"{message[:2_000]} … {message[-1_000:]}"
        super().__init__(message)


class CheckpointError(ErrorAboutFiles):
    """Raised if a checkpoint is damaged, incomplete, or not supported."""


def hub_hint(path: Any) -> str:
    """Suggests a download if a missing path looks like a Hugging Face repository. Empty otherwise."""
    name = os.fspath(path)
    files = (".safetensors", ".gguf", ".json")
    if os.path.exists(name) or name.endswith(files) or not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        return ""
    return (
        " Paths are of files on this machine, and nothing is downloaded. If this is a name on the Hugging "
        f"Face hub, `hf download {name} --local-dir {name.rpartition('/')[2]}` gets it: pass that folder."
    )


def file_error(path: Any, key: str | None, problem: str) -> CheckpointError:
    """Creates an error naming the file and the entry."""
    return CheckpointError(f"{path}: {problem}" if key is None else f"{path}: {quoted(key)}: {problem}")
