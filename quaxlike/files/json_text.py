"""Parsing of JSON from untrusted files, with bounds on its size and nesting.

Python's parser can use about 20 times as much memory as the input, and recurses into nested lists. Without
bounds, even a small file could exhaust memory or overflow the stack.
"""

import json
from pathlib import Path
from typing import Any

from .errors import file_error
from .open_file import OpenFile, check_regular

_MAX_BYTES = 64 << 20  # in practice configurations and indices are far smaller
_MAX_LEVELS = 64  # of nested lists and objects, so as not to overflow Python's stack


def read_json(path: Path, text: bytes | str, what: str) -> dict[str, Any]:
    """Parses a JSON object from untrusted bytes. Error messages refer to it as `what` in the file `path`.

    **Raises:** `CheckpointError` if this isn't a JSON object, if it has duplicate names, or if it would take
    much more memory than the input.
    """
    return _require_kind(path, _parsed(path, text, what), what, dict)


def read_json_file(path: Path, what: str) -> dict[str, Any]:
    """Like `read_json`, but for a file. Raises `FileNotFoundError` unless this is a regular file."""
    return _require_kind(path, _parsed_file(path, what), what, dict)


def read_json_list(path: Path, what: str) -> list[Any]:
    return _require_kind(path, _parsed_file(path, what), what, list)


def read_json_of(file: OpenFile, what: str) -> dict[str, Any]:
    _check_size(file.path, file.size, what)
    return read_json(file.path, file.read(0, file.size, None), what)


def _require_kind(path: Path, found: Any, what: str, kind: type) -> Any:
    if not isinstance(found, kind):
        name = {dict: "object", list: "list"}[kind]
        raise file_error(path, None, f"{what} must be a JSON {name}, found {type(found).__name__}")
    return found


def _check_size(path: Path, size: int, what: str) -> None:
    if size > _MAX_BYTES:
        raise file_error(path, None, f"{what} has {size:,} bytes; at most {_MAX_BYTES:,} can be read")


def _parsed_file(path: Path, what: str) -> Any:
    check_regular(path)
    _check_size(path, path.stat().st_size, what)
    return _parsed(path, path.read_bytes(), what)


def _parsed(path: Path, text: bytes | str, what: str) -> Any:
    try:
        text = text.decode() if isinstance(text, bytes) else text
        text.encode()  # raises an error for lone surrogates
        # An empty list takes three characters (with its comma), but 64 bytes of memory.
        containers = text.count("[") + text.count("{")
        if containers > 10_000 + len(text) // 8:
            raise ValueError(f"{containers:,} lists and objects are too many for {len(text):,} characters")
        out = json.loads(text, object_pairs_hook=_without_duplicates)
        _check_levels(out)
    except (ValueError, RecursionError) as error:
        raise file_error(path, None, f"{what} is not JSON: {error}") from None
    return out


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name appears twice")
    return out


def _check_levels(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_LEVELS):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for part in parts for x in part if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(f"lists and objects are within each other to more than {_MAX_LEVELS} levels")
