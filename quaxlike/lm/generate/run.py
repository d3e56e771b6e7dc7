"""The implementation of `python -m quaxlike.lm.generate`, for both completions and conversations."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

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
    """Raised if text can't be generated. The message gives the reason."""


class Clock:
    """Counts and times generated tokens.

    The first two steps of each text each compile a program, so these aren't timed.
    """

    def __init__(self) -> None:
        self.tokens, self.timed, self.seconds = 0, 0, 0.0
        self.begin_text()

    def begin_text(self) -> None:
        self._steps, self._last = 0, 0.0

    def tick(self, tokens: int) -> None:
        """Counts the tokens of a completed step."""
        now = time.perf_counter()
        self.tokens += tokens
        self._steps += 1
        if self._steps > 2:
            self.timed += tokens
            self.seconds += now - self._last
        self._last = now


class Stream:
    """Decodes a single text's tokens, and writes out any new characters as each one arrives."""

    def __init__(self, tokenizer: TextTokenizer, out: Any) -> None:
        self._tokenizer, self._out = tokenizer, out
        self.tokens: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens)
        # A character can consist of several tokens, decoding to U+FFFD until the last one has arrived.
        if not text.endswith("\ufffd") and text.startswith(self.text):
            self._write(text)

    def _write(self, text: str) -> None:
        self._out.write(text.removeprefix(self.text))
        self._out.flush()
        self.text = text

    def finish(self) -> None:
        self._write(self._tokenizer.decode(self.tokens))
        self._out.write("\n")
        self._out.flush()


def run(arguments: argparse.Namespace, out: Any, tell: Callable[[str], None]) -> Clock:
    """Continues prompts or answers messages. Writes texts to `out`, and reports progress using `tell`.

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
    except ValueError as error:  # a weight can't be sharded evenly
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
    writer = _Writer(model, tokenizer, marks, arguments, out, tell)
    if arguments.prompt is None:
        writer.chat(ChatTemplate(arguments.model))
    else:
        writer.continue_prompts()
    return writer.clock


def _bytes_of_token(model: Decoder, cache: str | None) -> int:
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.memory(1, cache)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@dataclasses.dataclass
class _Writer:
    """Writes texts using a model, as requested by the command-line arguments."""

    model: Decoder
    tokenizer: TextTokenizer
    marks: Marks
    arguments: argparse.Namespace
    out: Any
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        a, self.clock = self.arguments, Clock()
        self.context = self.model.config.max_position_embeddings
        self.sampling = {"temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p}

    def continue_prompts(self) -> None:
        """Continues all prompts. A single text is streamed, but several are written once all are complete."""
        a, most, given = self.arguments, self.context, self.arguments.prompt
        try:
            prompts = [self.marks.begun(self.tokenizer.encode(text, special=False).ids) for text in given]
        except UnicodeEncodeError as error:
            raise GenerateError(f"A prompt is not Unicode: {error}") from None
        if not all(prompts):
            raise GenerateError(f"A prompt has no tokens: {given[prompts.index([])]!r}.")
        width = max(map(len, prompts))
        if width >= most:
            raise GenerateError(f"A prompt has {width} tokens; the model takes {most}, new ones included.")
        new = min(a.max_new_tokens, most - width)
        ids = np.zeros((len(prompts), width), np.int32)
        mask = np.zeros((len(prompts), width), bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, True
        stream = Stream(self.tokenizer, self.out) if len(prompts) == 1 else None
        texts: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)

        def write(tokens: Int[np.ndarray, " batch"]) -> None:
            self.clock.tick(ended.count(False))
            for row, token in enumerate(tokens.tolist()):
                ended[row] = ended[row] or token in self.marks.ends
                if not ended[row]:
                    texts[row].append(token)
                    if stream is not None:
                        stream.add(token)

        try:
            generate(
                self.model, ids, mask=mask, max_new_tokens=new, eos=self.marks.ends or None, **self.sampling,
                key=jax.random.key(a.seed), on_token=write, cache=a.cache,
            )  # fmt: skip
        except ValueError as error:
            raise GenerateError(str(error)) from error
        if stream is not None:
            stream.finish()
        else:
            decoded = map(self.tokenizer.decode, texts)
            self.out.writelines(f"{prompt!r}: {text}\n" for prompt, text in zip(given, decoded, strict=True))
            self.out.flush()
        if new < a.max_new_tokens and not all(ended):
            self.tell(f"Stopped where the context of the model ends, at {most} tokens.")

    def chat(self, template: ChatTemplate) -> None:
        """Answers messages, either from `arguments.message` or typed by the user.

        **Raises:** `GenerateError` if the conversation is too long, or if the template rejects it.
        """
        a = self.arguments
        conversation = Conversation(self.model, cache=a.cache)
        beginning = [] if a.system is None else [{"role": "system", "content": a.system}]
        messages = [*beginning]
        if a.message is not None:
            self._answer(a.message, messages, conversation, template)
            return
        self.tell(_HELP)
        for text in _typed_messages():
            if text == "/new":
                messages = [*beginning]
                continue
            try:
                self._answer(text, messages, conversation, template)
            except GenerateError as error:
                messages.pop()
                self.tell(str(error))

    def _answer(
        self, text: str, messages: list[dict[str, str]], conversation: Conversation, template: ChatTemplate
    ) -> None:
        """Adds a message and generates an answer to it. The user can cut this short with Ctrl-C."""
        messages.append({"role": "user", "content": text})
        try:
            prompt = template.render(messages, add_generation_prompt=True).text
            ids = self.tokenizer.encode(prompt, special=False).ids
        except ValueError as error:
            raise GenerateError(str(error)) from None
        a, most = self.arguments, self.context
        if len(ids) >= most:
            raise GenerateError(
                f"The conversation has {len(ids)} tokens; the model takes {most}. Begin anew with /new."
            )
        new = min(a.max_new_tokens, most - len(ids))
        stream = Stream(self.tokenizer, self.out)
        key = jax.random.fold_in(jax.random.key(a.seed), len(messages))
        ends = sorted({*self.marks.ends, *self.marks.answer})
        self.clock.begin_text()
        try:
            with interrupts_deferred(""):
                for token in conversation.answer(ids, max_new_tokens=new, eos=ends, key=key, **self.sampling):
                    self.clock.tick(1)
                    stream.add(token)
                    take_interrupt()
        except KeyboardInterrupt:
            if a.message is not None:
                raise
        stream.finish()
        if new < a.max_new_tokens and len(stream.tokens) == new:
            self.out.write(f"[The context of {most} tokens is full.]\n")
        messages.append({"role": "assistant", "content": stream.text})


def _typed_messages() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text
