"""The model class for each architecture in `config.json`."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..files.errors import quoted
from .families import FAMILIES, MULTIMODAL, SEQUENCES, bodies, classifiers
from .folders.model_config import UnsupportedConfigError
from .models.bert import Bert, BertConfig, BertForSequenceClassification, BertForTokenClassification
from .models.decoder import Decoder
from .models.decoder_classifiers import DecoderForSequenceClassification, DecoderForTokenClassification
from .models.decoder_config import DecoderConfig
from .models.modern_bert import (
    ModernBert,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)

# Maps the name of each encoder in `config.json` to its configuration and model classes.
_ENCODERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "BertModel": (BertConfig, Bert),
    "BertForSequenceClassification": (BertConfig, BertForSequenceClassification),
    "BertForTokenClassification": (BertConfig, BertForTokenClassification),
    "ModernBertModel": (ModernBertConfig, ModernBert),
    "ModernBertForSequenceClassification": (ModernBertConfig, ModernBertForSequenceClassification),
    "ModernBertForTokenClassification": (ModernBertConfig, ModernBertForTokenClassification),
}
# Encoders as pretrained, and how most are published. They are read without the head for masked tokens.
_PRETRAINED = {
    "BertForMaskedLM": "BertModel",
    "BertForPreTraining": "BertModel",
    "ModernBertForMaskedLM": "ModernBertModel",
}
_OF_PRETRAINING = {Bert: re.compile(r"cls\."), ModernBert: re.compile(r"(head|decoder)\.")}


def without_pretraining(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an encoder's `config.json` without its pretraining head. Any others are unchanged."""
    names = config.get("architectures")
    found = [name for name in _PRETRAINED if isinstance(names, list) and name in names]
    return {**config, **({"architectures": [_PRETRAINED[found[0]]]} if found else {})}


def is_of_pretraining(model: Any, tensor: str) -> bool:
    """Returns whether a tensor belongs to a pretraining head, dropped from the encoder `model`."""
    pattern = _OF_PRETRAINING.get(type(model))
    return pattern is not None and pattern.match(tensor) is not None


def architecture_of(
    path: Path, config: Mapping[str, Any], tensors: Collection[str]
) -> tuple[Any, Callable[..., Any]]:
    """Returns the classes of the configuration and of the model.

    **Raises:** `UnsupportedConfigError` if the architecture is unknown.
    """
    names = config.get("architectures")
    classify = classifiers()
    supported = (*_ENCODERS, *FAMILIES, *classify)
    known = [name for name in (*supported, *bodies()) if isinstance(names, list) and name in names]
    if not known:
        raise unknown(path, quoted(names), "transformers", [*supported, *MULTIMODAL])
    name = known[0]
    if name in _ENCODERS:
        read, make = _ENCODERS[name]
        # transformers can omit the pooler, and does so for masked language models.
        is_pooled = make is not Bert or any("pooler.dense." in tensor for tensor in tensors)
        return read, make if is_pooled else partial(make, pooled=False)
    if name not in classify:
        return DecoderConfig, Decoder
    of_texts = classify[name][1] == SEQUENCES
    return DecoderConfig, DecoderForSequenceClassification if of_texts else DecoderForTokenClassification


def unknown(path: Path, found: str, kind: str, supported: Collection[str]) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{path} is of the architecture {found}; of {kind}, {', '.join(supported)} are supported. "
        "`quaxlike.lm.read` reads its weights."
    )
