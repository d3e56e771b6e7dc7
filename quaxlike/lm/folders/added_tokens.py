"""Completes a checkpoint's `tokenizer.json` with tokens and flags from its other files.

These tokens are usually in `tokenizer.json` as well, but not if someone added them by editing another file or
using an old version of transformers. As in transformers, this appends them to the vocabulary. (Otherwise they
would be split into pieces.) Likewise, if the files disagree on a token's flags, such as whether it absorbs
the spaces around it, then this makes the same choice as transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files.errors import file_error, quoted
from ...files.json_text import read_json_file

#: The names of special tokens in `tokenizer_config.json`.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Either of the lists can be an object with names as well. Later entries win, as in transformers.
_OBJECTS = ("model_specific_special_tokens", *_LISTS)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens named in a tokeniser's settings.

    A tokeniser can have its own names, such as `image_token`. transformers writes them as entries, like the
    usual ones, and reads them from objects as well. Any other entries ending in `_token` aren't texts.
    """
    usual = {name: settings[name] for name in SPECIAL if name in settings}
    own = {
        name: token
        for name, token in settings.items()
        if name.endswith("_token") and name not in SPECIAL and isinstance(token, str | dict)
    }
    objects = (settings.get(name) for name in _OBJECTS)
    model_specific, additional, extra = (x if isinstance(x, dict) else {} for x in objects)
    return {**usual, **model_specific, **own, **additional, **extra}


def completed_text(folder: Path, text: str) -> str:
    """Completes the contents of `tokenizer.json`. Returns the same text if nothing changes."""
    if not _named(folder):
        return text
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the caller raises a better error
    out = completed(folder, described) if isinstance(described, dict) else described
    return text if out is described else json.dumps(out)


def completed(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    """As `completed_text`, but for already parsed contents.

    **Raises:** `CheckpointError` if a token has a number other than the next one.
    """
    model, added = described.get("model"), described.get("added_tokens") or []
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocab, dict):
            numbers = dict(vocab)
        else:  # the pieces of a unigram model, with their scores
            numbers = {piece: i for i, (piece, _) in enumerate(list[Any](vocab or []))}
        out = {token["content"]: token for token in added}
        numbers |= {content: token["id"] for content, token in out.items()}
        following = 1 + max(numbers.values(), default=-1)
    except (KeyError, TypeError, ValueError):
        return described  # the caller raises a better error
    for content, token in _named(folder).items():
        if content in out:
            out[content] = token.merged(out[content])
            continue
        if content not in numbers:
            if token.number not in (None, following):
                raise file_error(
                    folder / token.file,
                    content,
                    f"is number {token.number}; tokenizer.json lacks it, and the next number there is "
                    f"{following}",
                )
            numbers[content], following = following, following + 1
        out[content] = {"id": numbers[content], "content": content, **token.flags()}
    return described if [*out.values()] == added else {**described, "added_tokens": [*out.values()]}


@dataclasses.dataclass
class _Token:
    """A token named by another file."""

    file: str
    number: int | None
    given: Mapping[str, bool]
    """The flags specified by the file."""
    in_decoder: bool | None
    """Whether the token is in `added_tokens_decoder`, or None if there is no such entry.

    If there is, then other files don't change the flags in `tokenizer.json`.
    """
    is_named: bool = False
    """Whether the token has a role, such as `eos_token`. If so, it is special."""

    def flags(self) -> dict[str, bool]:
        special = self.is_named or self.given["special"]
        return {**dict.fromkeys(_FLAGS, False), "normalized": not special, **self.given, "special": special}

    def merged(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """Updates the token's flags in `tokenizer.json`. Special tokens always remain special."""
        if self.in_decoder:
            flags = self.flags()
            return {**described, **flags, "special": flags["special"] or described.get("special", False)}
        return {**described, "special": True} if self.is_named and self.in_decoder is None else {**described}


def _named(folder: Path) -> dict[str, _Token]:
    """Returns the tokens named by other files, in transformers' order."""
    out: dict[str, _Token] = {}

    def add(
        file: str, token: Any, number: int | None = None, *, special: bool, is_named: bool = False
    ) -> None:
        given = {"special": special}
        if isinstance(token, dict):
            given |= {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
            token = token.get("content")
        if isinstance(token, str) and token:  # anything else is an error elsewhere
            in_decoder = number is not None if has_decoder else None
            out.setdefault(token, _Token(file, number, given, in_decoder)).is_named |= is_named

    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    settings, special, old = (_read(folder / name) for name in names)
    decoder = settings.get("added_tokens_decoder")
    has_decoder = isinstance(decoder, dict)
    if isinstance(decoder, dict):
        for number, token in sorted(decoder.items(), key=lambda x: (len(x[0]), x[0])):
            if not number.isdecimal():
                raise file_error(folder / names[0], "added_tokens_decoder", f"{quoted(number)} is no number")
            add(names[0], token, int(number), special=isinstance(token, str))
    else:
        for token, number in old.items():
            add(names[2], token, number, special=False)
    for file, fields in ((names[0], settings), (names[1], special)):
        for token in special_tokens(fields).values():
            add(file, token, special=True, is_named=True)
        for name in _LISTS:
            found = fields.get(name)
            for token in found if isinstance(found, list) else []:
                add(file, token, special=True)
    return out


def _read(path: Path) -> dict[str, Any]:
    return read_json_file(path, "the settings of the tokeniser") if path.is_file() else {}
