"""The special tokens at the start and end of a text, and the tokens at which to stop generating.

`finetune`, `generate` and `chat` must agree about these. Otherwise a model may be trained to end its texts
with one token, but `generate` then waits for a different one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files.errors import CheckpointError, quoted
from .folders.companions import named_ends
from .text import TextTokenizer
from .tokenizer import read_special_tokens, read_templates


@dataclasses.dataclass(frozen=True)
class Marks:
    """The special tokens around texts in a checkpoint."""

    begin: list[int]
    """The tokens added by the tokeniser at the start of a text."""
    end: list[int]
    """The tokens added by the tokeniser at the end of a text."""
    ends: list[int]
    """The tokens to stop at. Models are trained to produce the first one, except after answers."""
    answer: list[int]
    """The special token written by the chat template after each answer. (Empty if there is none.)"""
    differ: str = ""
    """A warning for the user if the checkpoint's files contradict each other."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer, folder: Path, config: Mapping[str, Any]) -> "Marks":
        """Reads a checkpoint's special tokens.

        The tokens around a text only come from `tokenizer.json`. If this file exists then `add_bos_token` and
        `add_eos_token` are ignored, as in transformers. The tokens to stop at come from the first of these to
        have any: `generation_config.json`, `config.json`, `tokenizer_config.json` (or
        `special_tokens_map.json`), and finally the tokens at the end of a text.

        **Raises:** `CheckpointError` if one of them isn't a token.
        """
        special = read_special_tokens(folder)
        own = tokenizer.number(special["eos_token"]) if "eos_token" in special else None
        begin, end = tokenizer.around
        sources = named_ends(folder, config)
        if own is not None and own < config.get("vocab_size", own + 1):
            sources["tokenizer_config.json"] = [own]
        elif "eos_token" in special and not sources:
            raise CheckpointError(
                f"{folder} has eos_token={quoted(special['eos_token'])}, which is no token of its tokeniser."
            )
        if end:
            sources["tokenizer.json"] = end[-1:]
        (first, ends), *others = [*sources.items()] or [("", [])]
        differ = ""
        if any(ends[0] not in found for _, found in others):
            found = ", ".join(f"{name} {found}" for name, found in sources.items())
            differ = (
                f"Warning: the files of {folder} name different tokens that end a text: {found}. Those of "
                f"{first} count, and {ends[0]} is the one that is learned."
            )
        return cls(begin, end, ends, _end_of_answers(tokenizer, folder), differ)

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Adds the start tokens (but no end tokens) to a prompt, unless it begins with them already."""
        own = next((n for n in range(len(self.begin), 0, -1) if [*ids[:n]] == self.begin[-n:]), 0)
        return [*self.begin[: len(self.begin) - own], *ids]

    def finished(self, ids: Sequence[int], *, answer: bool = False) -> list[int]:
        """Adds the end token for training, unless the text already ends with one.

        For answers, this is the chat template's end token, provided that generation stops there. For example,
        Llama 3.1 uses `<|eot_id|>` even though two others come before it.
        """
        if ids and ids[-1] in (self.ends or self.end[-1:]):
            return [*ids]
        if answer and self.answer and self.answer[0] in self.ends:
            return [*ids, *self.answer]
        usual = self.end if self.end[-1:] and self.end[-1] in (self.ends or self.end) else self.ends[:1]
        return [*ids, *usual]

    def around(self, ids: Sequence[int], most: int) -> tuple[list[int], bool]:
        """Adds the tokens at the start and end of a text, truncating it to `most` tokens in total.

        Also returns whether it was truncated.
        """
        if self.end and [*ids[-len(self.end) :]] == self.end:
            ids = ids[: -len(self.end)]
        ids = self.begun(ids)
        room = max(0, most - len(self.end))
        return [*ids[:room], *self.end], len(ids) > room


def _end_of_answers(tokenizer: TextTokenizer, folder: Path) -> list[int]:
    """Returns the special token written by the chat template after an answer, if there is one."""
    if "default" not in read_templates(folder)[0]:
        return []
    from .chat import ChatTemplate  # this requires jinja2, so only import it if there is a template

    try:
        text, spans = ChatTemplate(folder).learned(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
    except (CheckpointError, ValueError):  # the template rejects this conversation
        return []
    start, end = spans[-1]
    ids = tokenizer.encode(text[start:end].rpartition("answer")[2], special=False).ids
    return [token for token in ids[:1] if not tokenizer.decode([token])]
