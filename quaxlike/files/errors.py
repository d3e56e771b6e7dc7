"""Errors and helpers for error messages about files."""

import os
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def quoted(value: Any) -> str:
    """Returns the `repr` of a value that was read from a file. Long values are truncated."""
    return _SHORT.repr(value)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: Iterable[str]) -> str:
    """Lists just the first few names, together with how many others there are."""
    first, others = (names := list(names))[:5], len(names) - 5
    return ", ".join(map(shortened, first)) + (f" and {others:,} more" if others > 0 else "")


class ErrorAboutFiles(ValueError):
    """An error whose message can quote from a file. The message is truncated, so that it's never too long, no
    matter what is in the file.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > 4_000:
            message = f"{message[:2_000]} … {message[-1_000:]}"
        super().__init__(message)


class CheckpointError(ErrorAboutFiles):
    """Raised if a checkpoint is damaged, incomplete, or not supported."""


def hub_hint(path: Any) -> str:
    """Suggests how to download a Hugging Face repository, if that is what a missing path looks like. This is
    empty otherwise.
    """
    name = os.fspath(path)
    files = (".safetensors", ".gguf", ".json")
    if os.path.exists(name) or name.endswith(files) or not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        return ""
    return (
        " Paths are of files on this machine, and nothing is downloaded. If this is a name on the Hugging "
        f"Face hub, `hf download {name} --local-dir {name.rpartition('/')[2]}` gets it: pass that folder."
    )


def file_error(path: Any, key: str | None, problem: str) -> CheckpointError:
    """Creates an error whose message mentions the file and the entry."""
    return CheckpointError(f"{path}: {problem}" if key is None else f"{path}: {quoted(key)}: {problem}")
