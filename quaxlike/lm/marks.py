"""Where a text begins and ends: the marks that a tokeniser puts around it, and the tokens that end it.

`finetune`, `generate` and `chat` take them from here, so that a model stops at the end that it learned.
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
    """The marks of a checkpoint's texts."""

    begin: list[int]
    """What the tokeniser puts before a text."""
    end: list[int]
    """What the tokeniser puts after a text."""
    ends: list[int]
    """The tokens that end what a model writes. It learns the first, but for answers."""
    answer: list[int]
    """The token that the chat template writes after an answer; none if it writes no special one."""
    differ: str = ""
    """What to tell the user if files do not agree about the ends."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer, folder: Path, config: Mapping[str, Any]) -> "Marks":
        """Reads them: what is around a text from `tokenizer.json` alone, as transformers does, which has no
        use for `add_bos_token` and `add_eos_token` beside that file; the ends from the first that names any
        of `generation_config.json`, `config.json`, `tokenizer_config.json` (or `special_tokens_map.json`),
        and what `tokenizer.json` puts after a text.

        Raises `CheckpointError` for ends that are no tokens.
        """
        special = read_special_tokens(folder)
        numbers = {name: tokenizer.number(token) for name, token in special.items()}
        begin, end = tokenizer.around
        sources = named_ends(folder, config)
        if (own := numbers.get("eos_token")) is not None:
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
        """A prompt: with the marks of its beginning, unless it brings them, and none of an end."""
        own = next((n for n in range(len(self.begin), 0, -1) if [*ids[:n]] == self.begin[-n:]), 0)
        return [*self.begin[: len(self.begin) - own], *ids]

    def finished(self, ids: Sequence[int], *, answer: bool = False) -> list[int]:
        """A text that a model learns to end, unless it brings its end. An answer ends as the chat template
        ends one, if the model stops there: Llama 3.1's at `<|eot_id|>`, the last of three."""
        if ids and ids[-1] in (self.ends or self.end[-1:]):
            return [*ids]
        if answer and self.answer and self.answer[0] in self.ends:
            return [*ids, *self.answer]
        usual = self.end if self.end[-1:] and self.end[-1] in (self.ends or self.end) else self.ends[:1]
        return [*ids, *usual]

    def around(self, ids: Sequence[int], most: int) -> tuple[list[int], bool]:
        """A text between the tokeniser's marks, cut to at most `most` tokens before that of its end; and
        whether some were cut."""
        if self.end and [*ids[-len(self.end) :]] == self.end:
            ids = ids[: -len(self.end)]
        ids = self.begun(ids)
        room = max(0, most - len(self.end))
        return [*ids[:room], *self.end], len(ids) > room


def _end_of_answers(tokenizer: TextTokenizer, folder: Path) -> list[int]:
    """The special token that the chat template writes after an answer, if it does."""
    if "default" not in read_templates(folder)[0]:
        return []
    try:
        from .chat import ChatTemplate  # here, since texts need no jinja2

        text, spans = ChatTemplate(folder).learned(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
    except (ModuleNotFoundError, CheckpointError, ValueError):  # the template takes other conversations
        return []
    start, end = spans[-1]
    ids = tokenizer.encode(text[start:end].rpartition("answer")[2], special=False).ids
    return [token for token in ids[:1] if not tokenizer.decode([token])]
