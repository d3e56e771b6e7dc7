"""Texts from prompts."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from .._checked import a_or_an
from ..interop import CheckpointError, peft
from ..interop.chat import ChatTemplate
from ..interop.files.json_text import read_json_file
from ..interop.text import TextTokenizer
from ..models import Decoder, UnsupportedConfigError, generate, load
from ..sharding.meshes import mesh_from_text
from ..sharding.reading import usual_rule
from .chat import GenerateError, chat
from .stream import Clock, Count, Stream


def run(arguments: argparse.Namespace, out: Any, tell: Callable[[str], None]) -> Count:
    """Continues prompts or answers messages, writes the texts to `out`, and tells the user what happens.

    **Raises:** `FileNotFoundError`, `CheckpointError`, `UnsupportedConfigError`, or `GenerateError` for a
    model that is not a decoder, a damaged tokeniser or an empty prompt.
    """
    tokenizer = TextTokenizer(arguments.model)
    try:
        mesh = None if arguments.mesh is None else mesh_from_text(arguments.mesh)
        sharding = None if mesh is None else usual_rule(mesh, fully=False)
        model, config = load(arguments.model, quantize=arguments.quantize, mesh=mesh, sharding=sharding)
    except (CheckpointError, UnsupportedConfigError):
        raise
    except ValueError as error:  # from weights that the devices cannot share
        raise GenerateError(str(error)) from error
    if not isinstance(model, Decoder):
        raise GenerateError(f"{arguments.model} holds {a_or_an(type(model))}, which is not a decoder.")
    if arguments.adapter is not None:
        model = peft.load_adapter(arguments.adapter, model)
    ends = ends_of(arguments.model, config)
    if arguments.prompt is None:
        return chat(model, tokenizer, ChatTemplate(arguments.model), ends, arguments, out, tell)
    return _continue(model, tokenizer, ends, arguments, out, tell)


def _continue(
    model: Decoder,
    tokenizer: TextTokenizer,
    ends: list[int],
    arguments: argparse.Namespace,
    out: Any,
    tell: Callable[[str], None],
) -> Count:
    try:
        prompts = [tokenizer.encode(text).ids for text in arguments.prompt]
    except UnicodeEncodeError as error:
        raise GenerateError(f"A prompt is not Unicode: {error}") from None
    if not all(prompts):
        raise GenerateError(f"A prompt has no tokens: {arguments.prompt[prompts.index([])]!r}.")
    width, most = max(map(len, prompts)), model.config.max_position_embeddings
    if width >= most:
        raise GenerateError(f"A prompt has {width} tokens; the model takes {most}, new ones included.")
    new = min(arguments.max_new_tokens, most - width)
    writer = _Writer(tokenizer, ends, len(prompts), out)
    ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, True
    try:
        generate(
            model, ids, mask=mask, max_new_tokens=new, eos=ends or None,
            temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
            key=jax.random.key(arguments.seed), on_token=writer,
        )  # fmt: skip
    except ValueError as error:
        raise GenerateError(str(error)) from error
    count = writer.finish(arguments.prompt)
    if new < arguments.max_new_tokens and not writer.ended:
        tell(f"Stopped where the context of the model ends, at {most} tokens.")
    return count


def ends_of(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, from `generation_config.json` or else `config.json`.

    **Raises:** `GenerateError` if these are not tokens.
    """
    path, found = directory / "generation_config.json", None
    if path.is_file():
        found = read_json_file(path, "the settings of generation").get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ends):
        raise GenerateError(f"{directory} has eos_token_id={found!r}; expected the numbers of tokens.")
    return ends


class _Writer:
    """Turns tokens into texts: a single one as it comes, several when they are complete."""

    def __init__(self, tokenizer: TextTokenizer, ends: list[int], rows: int, out: Any) -> None:
        self._tokenizer, self._ends, self._out = tokenizer, ends, out
        self._stream, self._clock = Stream(tokenizer, out) if rows == 1 else None, Clock()
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows

    @property
    def ended(self) -> bool:
        """Whether all texts have ended."""
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
        """Writes the remaining text."""
        if self._stream is not None:
            self._stream.finish()
        else:
            texts = map(self._tokenizer.decode, self._rows)
            self._out.writelines(f"{prompt!r}: {text}\n" for prompt, text in zip(prompts, texts, strict=True))
            self._out.flush()
        return self._clock.count()
