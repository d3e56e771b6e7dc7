"""Texts from prompts."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from ..interop import CheckpointError, peft
from ..interop.errors import ErrorAboutFiles
from ..interop.json_text import read_json_file
from ..interop.text import TextTokenizer
from ..models import Decoder, UnsupportedConfigError, generate, load
from ..sharding.meshes import mesh_from_text
from ..sharding.reading import usual_rule


class GenerateError(ErrorAboutFiles):
    """Texts cannot be generated, for the reason in the message."""


class Count(NamedTuple):
    """The number of tokens, and the time that they took."""

    tokens: int
    after_first: int
    seconds_after_first: float


def run(arguments: argparse.Namespace, out: Any) -> Count:
    """Continues the prompts, and writes the texts to `out`.

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
        raise GenerateError(f"{arguments.model} holds a {type(model).__name__}, which is not a decoder.")
    if arguments.adapter is not None:
        model = peft.load_adapter(arguments.adapter, model)
    try:
        prompts = [tokenizer.encode(text).ids for text in arguments.prompt]
    except UnicodeEncodeError as error:
        raise GenerateError(f"A prompt is not Unicode: {error}") from None
    if not all(prompts):
        raise GenerateError(f"A prompt has no tokens: {arguments.prompt[prompts.index([])]!r}.")

    ends = ends_of(arguments.model, config)
    writer = _Writer(tokenizer, ends, len(prompts), out)
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, True
    try:
        generate(
            model, ids, mask=mask, max_new_tokens=arguments.max_new_tokens, eos=ends or None,
            temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
            key=jax.random.key(arguments.seed), on_token=writer,
        )  # fmt: skip
    except ValueError as error:
        raise GenerateError(str(error)) from error
    return writer.finish(arguments.prompt)


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
    """Turns tokens into text, and streams the text of a single prompt."""

    def __init__(self, tokenizer: TextTokenizer, ends: list[int], rows: int, out: Any) -> None:
        self._tokenizer, self._ends, self._out = tokenizer, ends, out
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._written = ""
        self._times: list[float] = []
        self._counts: list[int] = []

    def __call__(self, tokens: Int[np.ndarray, " batch"]) -> None:
        self._times.append(time.perf_counter())
        self._counts.append(self._ended.count(False))
        for row, token in enumerate(tokens.tolist()):
            self._ended[row] = self._ended[row] or token in self._ends
            if not self._ended[row]:
                self._rows[row].append(token)
        if len(self._rows) == 1:
            text = self._tokenizer.decode(self._rows[0])
            # A character may need several tokens, and decodes to U+FFFD until it is complete.
            if not text.endswith("\ufffd") and text.startswith(self._written):
                self._out.write(text[len(self._written) :])
                self._out.flush()
                self._written = text

    def finish(self, prompts: list[str]) -> Count:
        """Writes the remaining text."""
        texts = [self._tokenizer.decode(row) for row in self._rows]
        if len(texts) == 1:
            self._out.write(texts[0].removeprefix(self._written) + "\n")
        else:
            self._out.writelines(f"{prompt!r}: {text}\n" for prompt, text in zip(prompts, texts, strict=True))
        self._out.flush()
        return Count(sum(self._counts), sum(self._counts[1:]), self._times[-1] - self._times[0])
