"""Tokens that other files of a checkpoint add to its `tokenizer.json`.

These are usually in `tokenizer.json` as well, but not if someone added them by editing another file, or by
using an old version of transformers. As transformers does, we then append them to the vocabulary. (Otherwise
they would be split into pieces.)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files.errors import file_error, quoted
from ...files.json_text import read_json_file

#: The names of special tokens in `tokenizer_config.json`.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def completed_text(folder: Path, text: str) -> str:
    """Adds tokens to the contents of `tokenizer.json`. We only parse them if there are any to add."""
    if all(_stands_in(text, name) for name in _named(folder)):
        return text
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        return text  # whoever uses this raises a better error
    return json.dumps(completed(folder, described)) if isinstance(described, dict) else text


def completed(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    """As `completed_text`, but for contents that have been parsed.

    **Raises:** `CheckpointError` if a token has another number than the one that is next.
    """
    model, added = described.get("model"), described.get("added_tokens") or []
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocab, dict):
            numbers = dict(vocab)
        else:  # the pieces of a unigram model, with their scores
            numbers = {piece: i for i, (piece, _) in enumerate(list[Any](vocab or []))}
        numbers |= {token["content"]: token["id"] for token in added}
        following = 1 + max(numbers.values(), default=-1)
    except (KeyError, TypeError, ValueError):
        return described  # whoever uses this raises a better error
    added = [*added]
    for name, (file, number, flags) in _named(folder).items():
        if name in numbers:
            continue
        if number not in (None, following):
            raise file_error(
                folder / file,
                name,
                f"is number {number}; tokenizer.json lacks it, and the next number there is {following}",
            )
        default = _FLAGS | {"normalized": not flags.get("special", True)}
        added.append({"id": following, "content": name, **default, **flags})
        following += 1
    return {**described, "added_tokens": added}


def _stands_in(text: str, name: str) -> bool:
    return any(json.dumps(name, ensure_ascii=ascii) in text for ascii in (False, True))


def _named(folder: Path) -> dict[str, tuple[str, int | None, Mapping[str, Any]]]:
    """Returns the file, number and flags of each token that other files name, in transformers' order."""
    out: dict[str, tuple[str, int | None, Mapping[str, Any]]] = {}

    def add(file: str, token: Any, number: int | None = None, **flags: bool) -> None:
        if isinstance(token, dict):
            flags |= {name: bool(token[name]) for name in _FLAGS if name in token}
            token = token.get("content")
        if isinstance(token, str) and token:  # if it's anything else then this is an error elsewhere
            out.setdefault(token, (file, number, flags))

    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    settings, special, old = (_read(folder / name) for name in names)
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for number, token in sorted(decoder.items(), key=lambda x: (len(x[0]), x[0])):
            if not number.isdecimal():
                raise file_error(folder / names[0], "added_tokens_decoder", f"{quoted(number)} is no number")
            add(names[0], token, int(number))
    else:
        for token, number in old.items():
            add(names[2], token, number, special=False)
    for file, fields in ((names[0], settings), (names[1], special)):
        for name in SPECIAL:
            add(file, fields.get(name), special=True)
        for name in _LISTS:
            found = fields.get(name)
            for token in found.values() if isinstance(found, dict) else found or []:
                add(file, token, special=True)
    return out


def _read(path: Path) -> dict[str, Any]:
    return read_json_file(path, "the settings of the tokeniser") if path.is_file() else {}
