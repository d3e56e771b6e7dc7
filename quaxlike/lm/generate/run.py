"""The implementation of `python -m quaxlike.lm.generate`, for both completions and conversations."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from ...files.errors import CheckpointError, ErrorAboutFiles
from ...kernels import native
from ...sharding.meshes import mesh_from_text
from .._interrupts import interrupts_deferred, take_interrupt
from ..adapter_folder import other_tokenizer, read_adapter
from ..chat import ChatTemplate
from ..folders.model_config import UnsupportedConfigError
from ..loading import load
from ..marks import Marks
from ..models import Decoder
from ..sharding import usual_rule
from ..text import TextTokenizer
from .generation import Conversation, generate

_HELP = "Type a message. Ctrl-C stops an answer, /new begins anew, Ctrl-D ends."


class GenerateError(ErrorAboutFiles):
    """Raised if we cannot generate text. The message gives the reason."""


class Count(NamedTuple):
    """The number of generated tokens, along with how long this took. (Not counting compilation.)"""

    tokens: int
    timed: int
    seconds: float

    def __add__(self, other: "Count") -> "Count":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Count(self.tokens + other.tokens, self.timed + other.timed, self.seconds + other.seconds)


class Clock:
    """Counts the tokens of each step. The first two are excluded, because each of them compiles a program."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._counts: list[int] = []

    def tick(self, tokens: int) -> None:
        self._times.append(time.perf_counter())
        self._counts.append(tokens)

    def count(self) -> Count:
        if len(self._times) < 3:
            return Count(sum(self._counts), 0, 0.0)
        return Count(sum(self._counts), sum(self._counts[2:]), self._times[-1] - self._times[1])


class Stream:
    """Decodes a single text's tokens and writes out whatever is new as each one arrives."""

    def __init__(self, tokenizer: TextTokenizer, out: Any) -> None:
        self._tokenizer, self._out, self._clock = tokenizer, out, Clock()
        self.tokens: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        self._clock.tick(1)
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens)
        # A character can consist of several tokens. These decode to U+FFFD until the last one has arrived.
        if not text.endswith("\ufffd") and text.startswith(self.text):
            self._write(text)

    def _write(self, text: str) -> None:
        self._out.write(text.removeprefix(self.text))
        self._out.flush()
        self.text = text

    def finish(self) -> Count:
        self._write(self._tokenizer.decode(self.tokens))
        self._out.write("\n")
        self._out.flush()
        return self._clock.count()


def run(arguments: argparse.Namespace, out: Any, tell: Callable[[str], None]) -> Count:
    """Continues prompts or answers messages, writing the texts to `out`. Progress is reported using `tell`.

    **Raises:** `FileNotFoundError`, `CheckpointError`, `UnsupportedConfigError`, or `GenerateError` if the
    model isn't a decoder, the tokeniser is corrupt, or a prompt is empty.
    """
    tokenizer = TextTokenizer(arguments.model)
    try:
        mesh = None if arguments.mesh is None else mesh_from_text(arguments.mesh)
        sharding = None if mesh is None else usual_rule(mesh, fully=False)
        options = {"quantize": arguments.quantize, "dtype": arguments.compute_dtype}
        options["compute"] = arguments.compute
        model, config = load(arguments.model, **options, mesh=mesh, sharding=sharding)
    except (CheckpointError, UnsupportedConfigError):
        raise
    except ValueError as error:  # there is a weight that we can't shard evenly
        raise GenerateError(str(error)) from error
    if not isinstance(model, Decoder):
        raise GenerateError(
            f"{arguments.model} holds {type(model).__name__}, which is no decoder that writes texts."
        )
    if arguments.adapter is not None:
        if warning := other_tokenizer(arguments.adapter, arguments.model):
            tell(warning)
        model = read_adapter(arguments.adapter, model)
    if arguments.cache is not None:
        found, dense = (_bytes_of_token(model, cache) for cache in (arguments.cache, None))
        tell(f"The cache takes {found:,} bytes a token; {dense:,} in {model.embedding.dtype}.")
    native.prepare(tell)
    marks = Marks.of(tokenizer, arguments.model, config)
    if marks.differ:
        tell(marks.differ)
    if arguments.prompt is None:
        return _chat(model, tokenizer, ChatTemplate(arguments.model), marks, arguments, out, tell)
    return _continue(model, tokenizer, marks, arguments, out, tell)


def _bytes_of_token(model: Decoder, cache: str | None) -> int:
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.memory(1, cache)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _continue(
    model: Decoder,
    tokenizer: TextTokenizer,
    marks: Marks,
    arguments: argparse.Namespace,
    out: Any,
    tell: Callable[[str], None],
) -> Count:
    try:
        prompts = [marks.begun(tokenizer.encode(text, special=False).ids) for text in arguments.prompt]
    except UnicodeEncodeError as error:
        raise GenerateError(f"A prompt is not Unicode: {error}") from None
    if not all(prompts):
        raise GenerateError(f"A prompt has no tokens: {arguments.prompt[prompts.index([])]!r}.")
    width, most = max(map(len, prompts)), model.config.max_position_embeddings
    if width >= most:
        raise GenerateError(f"A prompt has {width} tokens; the model takes {most}, new ones included.")
    new = min(arguments.max_new_tokens, most - width)
    writer = _Writer(tokenizer, marks.ends, len(prompts), out)
    ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, True
    try:
        generate(
            model, ids, mask=mask, max_new_tokens=new, eos=marks.ends or None,
            temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
            key=jax.random.key(arguments.seed), on_token=writer, cache=arguments.cache,
        )  # fmt: skip
    except ValueError as error:
        raise GenerateError(str(error)) from error
    count = writer.finish(arguments.prompt)
    if new < arguments.max_new_tokens and not writer.ended:
        tell(f"Stopped where the context of the model ends, at {most} tokens.")
    return count


class _Writer:
    """Writes out texts. A single text is streamed, but if there are several then we wait for all of them."""

    def __init__(self, tokenizer: TextTokenizer, ends: list[int], rows: int, out: Any) -> None:
        self._tokenizer, self._ends, self._out = tokenizer, ends, out
        self._stream, self._clock = Stream(tokenizer, out) if rows == 1 else None, Clock()
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows

    @property
    def ended(self) -> bool:
        return all(self._ended)

    def __call__(self, tokens: Int[np.ndarray, " batch"]) -> None:
        self._clock.tick(self._ended.count(False))
        for row, token in enumerate(tokens.tolist()):
            self._ended[row] = self._ended[row] or token in self._ends
            if self._ended[row]:
                continue
            self._rows[row].append(token)
            if self._stream is not None:
                self._stream.add(token)

    def finish(self, prompts: list[str]) -> Count:
        if self._stream is not None:
            self._stream.finish()
        else:
            texts = map(self._tokenizer.decode, self._rows)
            self._out.writelines(f"{prompt!r}: {text}\n" for prompt, text in zip(prompts, texts, strict=True))
            self._out.flush()
        return self._clock.count()


# Conversations ------------------------------------------------------------------------------------


def _chat(
    model: Decoder,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    marks: Marks,
    arguments: argparse.Namespace,
    out: Any,
    tell: Callable[[str], None],
) -> Count:
    """Answers messages. These are either taken from `arguments.message`, or typed by the user.

    **Raises:** `GenerateError` if the template rejects the conversation, or if the conversation is too long.
    """
    ends = sorted({*marks.ends, *marks.answer})
    session = _Session(Conversation(model, cache=arguments.cache), tokenizer, template, ends, arguments, out)
    if arguments.message is not None:
        session.answer(arguments.message)
        return session.count
    tell(_HELP)
    for text in _typed_messages():
        if text == "/new":
            session.messages = session.beginning()
            continue
        try:
            session.answer(text)
        except GenerateError as error:
            session.messages.pop()
            tell(str(error))
    return session.count


def _typed_messages() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text


@dataclasses.dataclass
class _Session:
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
        """Adds a message and then generates an answer to it. The user can cut this short with Ctrl-C."""
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
