"""Reads a checkpoint's tokeniser, chat templates and special tokens, all as strings."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._checked import checked
from ..files.errors import CheckpointError, file_error, quoted
from ..files.json_text import read_json_file
from .folders.added_tokens import SPECIAL, completed_text, special_tokens
from .folders.companions import hint_for
from .gguf.container import holds_gguf, open_gguf
from .gguf.metadata import as_python
from .gguf.tokenizer import tokenizer_of

_SETTINGS = "tokenizer_config.json"
_SPLITS = "split_special_tokens"
# The names of special tokens in GGUF files.
_TOKENS = dict(zip(SPECIAL, ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask"), strict=True))


@checked
def read_tokenizer(path: str | os.PathLike[str]) -> str:
    """Reads a checkpoint's tokeniser. You can pass the result to `tokenizers.Tokenizer.from_str`.

    **Arguments:**

    - `path`: either a folder with `tokenizer.json`, or a GGUF file. The latter's vocabulary is converted.

    **Returns:** the contents of `tokenizer.json`. As in transformers, this includes any missing tokens from
    `tokenizer_config.json`, `special_tokens_map.json` or `added_tokens.json`, and their token flags take
    precedence. However, `split_special_tokens` can't be represented: set `encode_special_tokens` of the
    `Tokenizer` instead.

    **Raises:** `FileNotFoundError` if there is no tokeniser. `CheckpointError` if the file isn't text, or if
    the GGUF file's vocabulary isn't supported.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if file.is_file():
        return completed_text(folder, _text(file))
    if not holds_gguf(folder):
        raise FileNotFoundError(f"There is no {file}, which the tokeniser is read from.{hint_for(path)}")
    gguf = open_gguf(folder)
    return json.dumps(tokenizer_of(gguf.path, as_python(gguf.metadata)))


def read_templates(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Reads chat templates ("default", "tool_use", …) and special tokens ("bos_token", …), both by name.

    These include the tokeniser's own names, such as "image_token": templates use them like the others.

    `directory` is either a GGUF file, or a folder with `chat_template.jinja` or a `chat_template` entry in
    `tokenizer_config.json`.

    **Raises:** `CheckpointError` if one of the templates or tokens isn't text.
    """
    path, settings = directory / _SETTINGS, _settings_of(directory)
    found = settings.get("chat_template") or []
    try:
        sources = {"default": found} if isinstance(found, str) else {x["name"]: x["template"] for x in found}
        if not all(isinstance(text, str) for pair in sources.items() for text in pair):
            raise TypeError
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path} has chat_template={repr(found)[:60]}; it must be a text, or a list of objects with the "
            "texts name and template."
        ) from None
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    sources |= {name: _text(file) for name, file in files.items() if file.is_file()}
    return sources, _special_tokens(path, settings)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Reads the special tokens, by name ("bos_token", …). Raises the same errors as `read_templates`."""
    return _special_tokens(directory / _SETTINGS, _settings_of(directory))


def read_settings(directory: Path) -> dict[str, Any]:
    """Reads `tokenizer_config.json`. Returns `{}` if there is none, as for GGUF."""
    path = directory / _SETTINGS
    return read_json_file(path, "the settings of the tokeniser") if path.is_file() else {}


def splits_special_tokens(directory: Path) -> bool:
    """Returns whether names of special tokens within a text are split like any other text.

    This is the entry `split_special_tokens` in `tokenizer_config.json`.

    **Raises:** `CheckpointError` if this isn't a boolean.
    """
    found = read_settings(directory).get(_SPLITS)
    if not isinstance(found, bool | None):
        raise file_error(directory / _SETTINGS, _SPLITS, f"expected true or false; found {quoted(found)}")
    return bool(found)


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for name, found in special_tokens(settings).items():
        token = found.get("content") if isinstance(found, dict) else found
        if not isinstance(token, str | None):
            raise CheckpointError(f"{path} has {name}={quoted(found)}; it must be a text.")
        if token:
            special[name] = token
    return special


def _settings_of(directory: Path) -> dict[str, Any]:
    """Reads a tokeniser's settings, either from `tokenizer_config.json` or from a GGUF file.

    Any missing special tokens are read from `special_tokens_map.json`.
    """
    path = directory / _SETTINGS
    if not path.is_file() and holds_gguf(directory):
        return _settings_in_gguf(as_python(open_gguf(directory).metadata))
    settings = read_settings(directory)
    path = directory / "special_tokens_map.json"
    special = read_json_file(path, "the special tokens") if path.is_file() else {}
    return special_tokens(special) | {name: value for name, value in settings.items() if value is not None}


def _settings_in_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Converts GGUF metadata about the tokeniser to entries of `tokenizer_config.json`."""
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")
    }
    templates |= {"default": metadata[key]} if key in metadata else {}
    settings: dict[str, Any] = {
        "chat_template": [{"name": name, "template": text} for name, text in templates.items()]
    }
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    for name, theirs in _TOKENS.items():
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[name] = tokens[number]
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise file_error(path, None, f"is not UTF-8 text: {error}") from None
