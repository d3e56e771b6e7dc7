"""A conversation with a model, in the terminal or for a single message."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._interrupts import interrupts_deferred, take_interrupt
from ..interop.chat import ChatTemplate
from ..interop.files.errors import ErrorAboutFiles
from ..interop.text import TextTokenizer
from ..models import Conversation, Decoder
from .stream import Count, Stream

_HELP = "Type a message. Ctrl-C stops an answer, /new begins anew, Ctrl-D ends."


class GenerateError(ErrorAboutFiles):
    """Texts cannot be generated, for the reason in the message."""


def chat(
    model: Decoder,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    ends: list[int],
    arguments: argparse.Namespace,
    out: Any,
    tell: Callable[[str], None],
) -> Count:
    """Answers messages: `arguments.message`, or those that are typed until the input ends.

    **Raises:** `GenerateError` if the template rejects the conversation, or its text is too long.
    """
    ends = sorted({*ends, *_ends_of_turns(template, tokenizer)})
    talk = _Talk(Conversation(model), tokenizer, template, ends, arguments, out)
    if arguments.message is not None:
        talk.answer(arguments.message)
        return talk.count
    tell(_HELP)
    for text in _typed():
        if text == "/new":
            talk.messages = talk.beginning()
            continue
        try:
            talk.answer(text)
        except GenerateError as error:
            talk.messages.pop()
            tell(str(error))
    return talk.count


def _typed() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text


def _ends_of_turns(template: ChatTemplate, tokenizer: TextTokenizer) -> list[int]:
    """The special token with which the template ends an answer, if it does."""
    try:
        text, spans = template.learned(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
    except ValueError:  # the template takes other conversations
        return []
    start, end = spans[-1]
    ids = tokenizer.encode(text[start:end].rpartition("answer")[2], special=False).ids
    return [token for token in ids[:1] if not tokenizer.decode([token])]


@dataclasses.dataclass
class _Talk:
    conversation: Conversation
    tokenizer: TextTokenizer
    template: ChatTemplate
    ends: list[int]
    arguments: argparse.Namespace
    out: Any

    def __post_init__(self) -> None:
        self.messages = self.beginning()
        self.count = Count(0, 0, 0.0)

    def beginning(self) -> list[dict[str, str]]:
        system = self.arguments.system
        return [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> None:
        """Adds a message and its answer, which Ctrl-C stops."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self.template.render(self.messages, add_generation_prompt=True).text
            ids = self.tokenizer.encode(prompt, special=False).ids
        except ValueError as error:
            raise GenerateError(str(error)) from None
        a, most = self.arguments, self.conversation.context
        if len(ids) >= most:
            raise GenerateError(
                f"The conversation has {len(ids)} tokens; the model takes {most}. Begin anew with /new."
            )
        new = min(a.max_new_tokens, most - len(ids))
        stream = Stream(self.tokenizer, self.out)
        key = jax.random.fold_in(jax.random.key(a.seed), len(self.messages))
        try:
            with interrupts_deferred(""):
                for token in self.conversation.answer(
                    ids, max_new_tokens=new, eos=self.ends, temperature=a.temperature, top_k=a.top_k,
                    top_p=a.top_p, key=key,
                ):  # fmt: skip
                    stream.add(token)
                    take_interrupt()
        except KeyboardInterrupt:
            if a.message is not None:
                raise
        self.count += stream.finish()
        if new < a.max_new_tokens and len(stream.tokens) == new:
            self.out.write(f"[The context of {most} tokens is full.]\n")
        self.messages.append({"role": "assistant", "content": stream.text})
