"""Writes decoders to GGUF files for use with llama.cpp."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files.errors import CheckpointError, quoted
from .checkpoints.checkpoint import open_checkpoint
from .families import bodies, classifiers
from .gguf.config import config_of, keys_of, rope_tensors, without_blocks_beside
from .gguf.metadata import as_python
from .gguf.names import family_of, llama_cpp_names
from .gguf.vocabulary import ends_in_vocabulary, vocabulary_of
from .gguf.writer import Mixture, write
from .models.decoder_config import DecoderConfig, completed
from .models.rope import Rope
from .models.vocabulary import embeddings
from .tokenizer import read_templates, splits_special_tokens

#: The filename to use when writing to a folder.
NAME = "model.gguf"
# Fields that don't affect the computation, or can be inferred from others.
_APART = ("architecture", "pad_token_id", "original_max_position_embeddings", "ropes", "new_embeddings")


def save_gguf(
    path: Path,
    arrays: Mapping[str, Any],
    config: Mapping[str, Any],
    source: Path,
    mixture: Mixture | None = None,
) -> None:
    """Writes a decoder to a GGUF file, or to `model.gguf` if given a folder.

    The metadata includes the tokeniser of the checkpoint `source`.

    **Raises:** `CheckpointError` if llama.cpp would compute different results or tokenise differently.
    Nothing is written in this case.
    """
    if path.suffix.lower() != ".gguf":
        if any(path.glob("*.safetensors*")):
            raise CheckpointError(
                f"{path} holds safetensors, which readers prefer; name a .gguf file instead."
            )
        path = path / NAME
    tensors, metadata = described(arrays, config, source)
    write(path, tensors, metadata, mixture)


def described(
    arrays: Mapping[str, Any], config: Mapping[str, Any], source: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors and metadata of a GGUF file. `arrays` can contain `jax.ShapeDtypeStruct`s.

    **Raises:** `CheckpointError` if llama.cpp would compute different results. `FileNotFoundError` if there
    is no tokeniser.
    """
    names = config.get("architectures")
    for others, problem in ((classifiers(), "classifies them"), (bodies(), "has no output layer")):
        if isinstance(names, list) and {*names} & {*others}:
            raise CheckpointError(
                f"{source}: GGUF files are written of models that write texts, and {names[0]} {problem}. "
                "Write a directory of safetensors."
            )
    checkpoint, config = open_checkpoint(source), _with_rounded_ramp(config, source)
    if checkpoint.format == "gguf":
        metadata = without_blocks_beside(source, checkpoint.metadata)
        factors = {name: checkpoint[name] for name in checkpoint if name.startswith("rope_f")}
    else:
        metadata, factors = _metadata_of_folder(arrays, config, source)
    arrays, config = _with_output(arrays, config, source, metadata)
    named = llama_cpp_names([*arrays, *factors], metadata)
    if unknown := [name for name, out in named.items() if out == name and name not in factors]:
        raise CheckpointError(
            f"{source}: llama.cpp has no tensor for {unknown[0]} in models of its architecture "
            f"{metadata['general.architecture']!r}."
        )
    shapes = {named[name]: tuple(x.shape) for name, x in {**arrays, **factors}.items()}

    def read(name: str) -> np.ndarray:
        return np.asarray(factors[name])

    found = config_of(source, as_python(metadata), shapes, read)
    _check_held(config, found, source, metadata)
    return {**factors, **arrays}, metadata


def _with_rounded_ramp(config: Mapping[str, Any], source: Path) -> Mapping[str, Any]:
    """Rounds the bounds of YaRN's ramp in the configuration, as llama.cpp always does."""
    for entry in ("rope_parameters", "rope_scaling"):
        rope = config.get(entry)
        if isinstance(rope, Mapping) and rope.get("truncate") is False:
            warnings.warn(
                f"{source}: llama.cpp rounds the bounds of YaRN's ramp, and this model does not "
                "(truncate=False). Its logits will differ from those of transformers, as with every GGUF "
                "file of such a model (GPT-OSS).",
                stacklevel=2,
            )
            config = {**config, entry: {**rope, "truncate": True}}
    return config


def _metadata_of_folder(
    arrays: Mapping[str, Any], config: Mapping[str, Any], source: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from .marks import Marks  # imported here because it requires the optional dependency tokenizers
    from .text import TextTokenizer

    whole = completed(config)
    keys, factors = keys_of(whole, source), rope_tensors(whole)
    ends = tuple(f"{name}.weight" for name in embeddings())
    rows = next(x.shape[0] for name, x in arrays.items() if name.endswith(ends))
    if splits_special_tokens(source):
        raise CheckpointError(
            f"{source / 'tokenizer_config.json'} has split_special_tokens=true, which GGUF cannot say: "
            "programs that read such a file decide themselves whether to split special tokens."
        )
    templates, special = read_templates(source)
    vocabulary = vocabulary_of(source, config, rows, templates, special)
    marks = Marks.of(TextTokenizer(source), source, config)
    keys |= vocabulary | ends_in_vocabulary(
        source, vocabulary, special.get("eos_token"), marks.ends, marks.answer
    )
    return {"general.type": "model", **keys}, factors


def _with_output(
    arrays: Mapping[str, Any], config: Mapping[str, Any], source: Path, metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds a tied embedding as the output layer too, for architectures where llama.cpp requires one."""
    family, head = family_of(as_python(metadata)), "lm_head.weight"
    output = family.gguf.output if family and family.gguf else ""
    if family and output == "own" and head not in arrays:
        return {**arrays, head: arrays[f"{family.name('model.embed_tokens')}.weight"]}, {
            **config,
            "tie_word_embeddings": False,
        }
    if output == "tied" and head in arrays:
        name = metadata["general.architecture"]
        raise CheckpointError(
            f"{source}: {head} is not tied to the embedding; that of {name!r} must be in GGUF."
        )
    return dict(arrays), dict(config)


def _check_held(
    config: Mapping[str, Any], found: Mapping[str, Any], source: Path, metadata: Mapping[str, Any]
) -> None:
    """Checks that the metadata describes the same computation as `config.json`.

    To do so, convert the metadata back to a configuration and compare the two. Without this check, llama.cpp
    may silently run a different model.
    """
    ours, theirs = DecoderConfig.from_json(config), DecoderConfig.from_json(found)
    fields = [field.name for field in dataclasses.fields(ours) if field.name not in _APART]
    lost = [name for name in fields if getattr(ours, name) != getattr(theirs, name)]
    lost += [] if _same_ropes(ours.ropes, theirs.ropes) else ["ropes"]
    if lost:
        lost_entries = ", ".join(f"{name}={quoted(getattr(ours, name))}" for name in lost)
        taken = ", ".join(f"{name}={quoted(getattr(theirs, name))}" for name in lost)
        raise CheckpointError(
            f"{source}: GGUF cannot say {lost_entries} of a model of the architecture "
            f"{metadata['general.architecture']!r}; llama.cpp would take {taken}. If that does as well, say "
            "it in the config.json of a copy, and pass that as `source`."
        )


def _same_ropes(ours: tuple[Rope, ...], theirs: tuple[Rope, ...]) -> bool:
    def numbers(rope: Rope) -> np.ndarray:
        long = rope.frequencies if rope.long is None else rope.long
        switch = rope.switch if long != rope.frequencies else 0
        return np.asarray([*rope.frequencies, *long, rope.scale, switch, rope.growth, rope.step])

    pairs = zip(map(numbers, ours), map(numbers, theirs), strict=False)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=0) for a, b in pairs
    )
