"""JSON from untrusted files, whose contents and size are bounded before it is parsed."""

import json
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any

from .errors import CheckpointError, complain
from .open_file import OpenFile, check_regular

_MOST_BYTES = 64 << 20  # far more than any configuration or index
_MOST_LEVELS = 64  # of lists and objects within each other
_MOST_ENTRY = 8_192  # characters of a header's entry for one tensor: 64 sizes take at most 1,300


def read_json(path: Path, text: bytes | str, what: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes.

    **Arguments:**

    - `path`: the file, for messages.
    - `text`: the bytes.
    - `what`: the name of the text in messages, such as "the index".

    **Raises:** `CheckpointError` if it is not a JSON object, has a name twice, or would take much more memory
    than the text.
    """
    out = _parsed(path, text, what)
    if not isinstance(out, dict):
        raise complain(path, None, f"{what} must be a JSON object, found {type(out).__name__}")
    return out


def _parsed(path: Path, text: bytes | str, what: str) -> Any:
    try:
        text = text.decode() if isinstance(text, bytes) else text
        text.encode()  # text from inside a file may have lone surrogates
        _check_count(text)
        out = json.loads(text, object_pairs_hook=_no_duplicates)
        if isinstance(out, dict | list):
            _check_levels(out)
    except (ValueError, RecursionError) as error:
        raise complain(path, None, f"{what} is not JSON: {error}") from None
    return out


def read_json_file(path: Path, what: str) -> dict[str, Any]:
    """Reads a file, like `read_json`. Raises `FileNotFoundError` unless it is a regular file."""
    check_regular(path)
    return read_json(path, _bounded(path, path.stat().st_size, path.read_bytes, what), what)


def read_json_list(path: Path, what: str) -> list[Any]:
    """Reads a file like `read_json_file`, but for a JSON list."""
    check_regular(path)
    out = _parsed(path, _bounded(path, path.stat().st_size, path.read_bytes, what), what)
    if not isinstance(out, list):
        raise complain(path, None, f"{what} must be a JSON list, found {type(out).__name__}")
    return out


def read_json_of(file: OpenFile, what: str) -> dict[str, Any]:
    """Reads an open file, like `read_json`."""
    text = _bounded(file.path, file.size, lambda: file.read(0, file.size, None), what)
    return read_json(file.path, text, what)


def _bounded(path: Path, size: int, read: Callable[[], bytes], what: str) -> bytes:
    if size > _MOST_BYTES:
        raise complain(path, None, f"{what} has {size:,} bytes; at most {_MOST_BYTES:,} can be read")
    return read()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name appears twice")
    return out


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for part in parts for x in part if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(f"lists and objects are within each other to more than {_MOST_LEVELS} levels")


def _check_count(text: str) -> None:
    # An empty list takes three characters of text, and 64 bytes of memory.
    containers = text.count("[") + text.count("{")
    if containers > 10_000 + len(text) // 8:
        raise ValueError(f"{containers:,} lists and objects are too many for {len(text):,} characters")


class _Scanner:
    """A reading position in a JSON text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def next(self) -> str:
        """The next non-space character; an empty string at the end."""
        while self.text[self.at : self.at + 1] in (" ", "\t", "\n", "\r"):
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, character: str) -> None:
        if self.next() != character:
            raise ValueError(f"expected {character!r} at character {self.at:,}")
        self.at += 1

    def string(self) -> str:
        self.take('"')
        value, self.at = scanstring(self.text, self.at, True)
        value.encode()  # a lone surrogate is not a character
        return value

    def members(self) -> Iterator[str]:
        """Yields the names in an object; the caller reads the value before it asks for the next name."""
        seen: set[str] = set()
        self.take("{")
        while self.next() != "}":
            if seen:
                self.take(",")
            name = self.string()
            if name in seen:
                raise ValueError("a name appears twice")
            seen.add(name)
            self.take(":")
            yield name
        self.take("}")

    def flat(self) -> Any:
        """An object without nested objects; anything else as text."""
        if self.next() != "{":
            return re.compile(r"[^,}]{0,80}").match(self.text, self.at)[0]  # pyright: ignore[reportOptionalSubscript]
        end = self.text.find("}", self.at, self.at + _MOST_ENTRY) + 1
        if not end:
            raise ValueError(
                f"an entry at character {self.at:,} has no end within {_MOST_ENTRY:,} characters"
            )
        start, self.at = self.at, end
        text = self.text[start:end]
        if text.count("[") > _MOST_LEVELS:
            raise ValueError(f"an entry at character {start:,} has {text.count('['):,} lists")
        return json.loads(text, object_pairs_hook=_no_duplicates)


def read_header(path: Path, raw: bytes, metadata: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a safetensors header entry by entry, so that none takes much more memory than its text.

    **Arguments:**

    - `path`: the file, for messages.
    - `raw`: the header.
    - `metadata`: the name of the entry that maps names to text. Every other entry describes a tensor.

    **Returns:** what the header says about tensors, by name, and the metadata.

    **Raises:** `CheckpointError` for anything else.
    """
    entries: dict[str, Any] = {}
    texts: dict[str, str] = {}
    try:
        if not raw.startswith(b"{"):
            raise ValueError("it must begin with '{'")
        scanner = _Scanner(raw.decode())
        for name in scanner.members():
            if name != metadata:
                entries[name] = scanner.flat()
                if isinstance(entries[name], str):
                    problem = f"expected dtype, shape and data_offsets, found {entries[name]}"
                    raise complain(path, name, problem)
                continue
            if scanner.next() != "{":
                raise complain(path, metadata, "must map names to text")
            for inner in scanner.members():
                if scanner.next() != '"':
                    raise complain(path, metadata, "must map names to text")
                texts[inner] = scanner.string()
        if scanner.next():
            raise ValueError(f"there is more after its end at character {scanner.at:,}")
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise complain(path, None, f"the header is not JSON: {error}") from None
    return entries, texts
