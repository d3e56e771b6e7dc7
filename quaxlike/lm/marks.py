"""How texts begin and end: special tokens around a text, and the tokens at which a model stops.

`finetune`, `generate` and `chat` all use this file. If they disagreed, a fine-tuned model would learn one
end, and generation would wait for another.
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
    """The special tokens around a checkpoint's texts."""

    begin: list[int]
    """Tokens that the tokeniser adds before a text."""
    end: list[int]
    """Tokens that the tokeniser adds after a text."""
    ends: list[int]
    """Tokens that end generated text. Models learn to write the first one, except after answers."""
    answer: list[int]
    """The special token that the chat template writes after an answer, if there is one."""
    differ: str = ""
    """A message for the user if the checkpoint's files contradict each other."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer, folder: Path, config: Mapping[str, Any]) -> "Marks":
        """Reads them from a checkpoint.

        Tokens around a text come from `tokenizer.json` alone. Like transformers, we ignore `add_bos_token`
        and `add_eos_token` if this file exists. Tokens that end a text come from the first of these that
        states any: `generation_config.json`, `config.json`, `tokenizer_config.json` (or
        `special_tokens_map.json`), and the tokens after a text.

        **Raises:** `CheckpointError` if one of them is not a token.
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
        """Adds the tokens before a prompt, unless it already begins with them. It gets no end."""
        own = next((n for n in range(len(self.begin), 0, -1) if [*ids[:n]] == self.begin[-n:]), 0)
        return [*self.begin[: len(self.begin) - own], *ids]

    def finished(self, ids: Sequence[int], *, answer: bool = False) -> list[int]:
        """Adds the end that this model should learn, unless the text already has it.

        An answer gets the chat template's end, if generation stops there. For Llama 3.1 this is `<|eot_id|>`,
        which is the last of three such tokens.
        """
        if ids and ids[-1] in (self.ends or self.end[-1:]):
            return [*ids]
        if answer and self.answer and self.answer[0] in self.ends:
            return [*ids, *self.answer]
        usual = self.end if self.end[-1:] and self.end[-1] in (self.ends or self.end) else self.ends[:1]
        return [*ids, *usual]

    def around(self, ids: Sequence[int], most: int) -> tuple[list[int], bool]:
        """Adds the tokens before and after a text, and cuts it to `most` tokens before its end.

        Also returns whether anything was lost.
        """
        if self.end and [*ids[-len(self.end) :]] == self.end:
            ids = ids[: -len(self.end)]
        ids = self.begun(ids)
        room = max(0, most - len(self.end))
        return [*ids[:room], *self.end], len(ids) > room


def _end_of_answers(tokenizer: TextTokenizer, folder: Path) -> list[int]:
    """Finds the special token that the chat template writes after an answer."""
    if "default" not in read_templates(folder)[0]:
        return []
    try:
        from .chat import ChatTemplate  # imported late: only chat templates need jinja2

        text, spans = ChatTemplate(folder).learned(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
    except (ModuleNotFoundError, CheckpointError, ValueError):  # the template rejects this conversation
        return []
    start, end = spans[-1]
    ids = tokenizer.encode(text[start:end].rpartition("answer")[2], special=False).ids
    return [token for token in ids[:1] if not tokenizer.decode([token])]
