"""Errors about files."""

import os
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def quoted(value: Any) -> str:
    """Returns the `repr` of a value from a file, shortened."""
    return _SHORT.repr(value)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: Iterable[str]) -> str:
    """Lists the first few names, and the number of further ones."""
    first, others = (names := list(names))[:5], len(names) - 5
    return ", ".join(map(shortened, first)) + (f" and {others:,} more" if others > 0 else "")


class ErrorAboutFiles(ValueError):
    """An error with a message that may quote a file. Its length is bounded, whatever the file contains."""

    def __init__(self, message: str = "") -> None:
        if len(message) > 4_000:
            message = f"{message[:2_000]} … {message[-1_000:]}"
        super().__init__(message)


class CheckpointError(ErrorAboutFiles):
    """A checkpoint is damaged, incomplete, or not supported."""


def hub_hint(path: Any) -> str:
    """Says how to download a missing path, if it looks like a name on the Hugging Face hub; else empty."""
    name = os.fspath(path)
    files = (".safetensors", ".gguf", ".json")
    if os.path.exists(name) or name.endswith(files) or not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        return ""
    return (
        " Paths are of files on this machine, and nothing is downloaded. If this is a name on the Hugging "
        f"Face hub, `hf download {name} --local-dir {name.rpartition('/')[2]}` gets it: pass that folder."
    )


def file_error(path: Any, key: str | None, problem: str) -> CheckpointError:
    """Makes an error that names the file and the entry."""
    return CheckpointError(f"{path}: {problem}" if key is None else f"{path}: {quoted(key)}: {problem}")
