"""Warnings about a tokeniser's settings contradicting its `tokenizer.json`."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ...files.errors import listed, quoted

# Entries of `tokenizer_config.json`, along with the equivalent step of `tokenizer.json` and its entry.
_STEPS = {
    "do_lower_case": ("BertNormalizer", "lowercase"),
    "strip_accents": ("BertNormalizer", "strip_accents"),
    "tokenize_chinese_chars": ("BertNormalizer", "handle_chinese_chars"),
    "add_prefix_space": ("ByteLevel", "add_prefix_space"),
}
# For these classes, transformers also ignores the settings.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def warn_of_contradictions(where: str, settings: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Warns if `tokenizer_config.json` contradicts `tokenizer.json`.

    The latter takes precedence here, but some of transformers' classes build the tokeniser from the former.
    """
    if settings.get("tokenizer_class") in _GENERIC:
        return
    steps = [*_steps_of(described.get("normalizer")), *_steps_of(described.get("pre_tokenizer"))]
    found = [
        f"{name}={quoted(settings[name])}"
        for name, (kind, entry) in _STEPS.items()
        for step in steps
        if isinstance(settings.get(name), bool)
        and step.get("type") == kind
        and isinstance(step.get(entry), bool)
        and settings[name] != step[entry]
    ]
    if found:
        warnings.warn(
            f"{where} has {listed(found)}, and tokenizer.json says the opposite, which counts here. "
            "transformers may tokenise texts in another way: change one of the two.",
            stacklevel=3,
        )


def _steps_of(described: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normaliser or pre-tokeniser, including those inside sequences."""
    if isinstance(described, Mapping):
        yield described
        for inner in (described.get("normalizers"), described.get("pretokenizers")):
            for step in inner if isinstance(inner, list) else []:
                yield from _steps_of(step)
