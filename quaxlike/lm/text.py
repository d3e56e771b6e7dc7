"""A checkpoint's tokeniser. This requires `tokenizers`."""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..files.errors import file_error
from .folders.tokenizer_settings import warn_of_contradictions
from .tokenizer import read_settings, read_tokenizer, splits_special_tokens


class TextTokenizer:
    """A checkpoint's tokeniser. Padding and truncation are disabled.

    **Raises:** as in `read_tokenizer`, and `CheckpointError` if the file isn't a valid tokeniser.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        described, file = read_tokenizer(path), Path(path, "tokenizer.json")
        self._file = file if file.is_file() else Path(path)
        parsed = _parsed(described)
        if (growth := _growth(parsed)) > _MAX_GROWTH:
            raise file_error(
                self._file,
                None,
                f"the normalisers make texts up to {growth:.3g} times as long: they would fill the memory",
            )
        with self._as_file_errors("is not a tokeniser"):
            self._tokenizer: Any = Tokenizer.from_str(described)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = splits_special_tokens(Path(path))
        warn_of_contradictions(f"{path}/tokenizer_config.json", read_settings(Path(path)), parsed)

    def number(self, token: str) -> int | None:
        """Returns the id of a token, or None if it isn't in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Maps each token to its id. (Except for added tokens.)"""
        return self._tokenizer.get_vocab(with_added_tokens=False)

    @property
    def tokens(self) -> dict[str, int]:
        """Maps each token to its id, including added tokens."""
        return self._tokenizer.get_vocab()

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens added by the tokeniser at the start and end of a text."""
        if self._tokenizer.post_processor is None:
            return [], []
        for text in itertools.chain("a0.", self._tokenizer.get_vocab()):
            mask = (encoding := self.encode(text)).special_tokens_mask
            if 0 in mask:
                first, behind = mask.index(0), mask[::-1].index(0)
                return encoding.ids[:first], encoding.ids[len(mask) - behind :]
        return [], []

    def encode(self, text: str, *, special: bool = True) -> Any:
        """Encodes a text, adding special tokens around it if `special` is True.

        Raises `ValueError` if the text isn't Unicode, and `CheckpointError` if the tokeniser is corrupt.
        """
        text.encode()  # raises an error if there are lone surrogates
        with self._as_file_errors("the tokeniser is damaged"):
            return self._tokenizer.encode(text, add_special_tokens=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens to a text. Raises `CheckpointError` if the tokeniser is corrupt."""
        with self._as_file_errors("the tokeniser is damaged"):
            return self._tokenizer.decode(tokens)

    @contextlib.contextmanager
    def _as_file_errors(self, problem: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # `tokenizers` raises bare Exceptions, but also Rust panics, which aren't even Exceptions.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise file_error(self._file, None, f"{problem}: {error}") from None


_MAX_GROWTH = 100_000


def _parsed(described: str) -> dict[str, Any]:
    """Parses a tokeniser, or returns `{}` if it's damaged: `tokenizers` raises a better error."""
    try:
        parsed = json.loads(described)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _growth(described: dict[str, Any]) -> float:
    """Returns a bound on how many times longer a text can get when normalised."""
    waiting = [described.get("normalizer")]
    growth = 1.0
    while waiting:
        match waiting.pop():
            case {"normalizers": list(steps)}:
                waiting += steps
            case {"content": str(put), "pattern": {"String": str(found)}} if found:
                growth *= max(1.0, len(put) / len(found))
            case {"content": str(put)} | {"prepend": str(put)}:
                growth *= 1.0 + len(put)
            case _:
                pass
    return growth
