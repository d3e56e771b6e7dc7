"""`with_classifier`, for replacing a model's output layer with a classification head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..._checked import checked
from ...core.values import replace_fields
from ...surgery.trees import named_arrays, replace
from ..families import SEQUENCES, TOKENS
from ..folders.labels import PROBLEMS, Labels
from .bert import Bert, BertConfig, BertForSequenceClassification, BertForTokenClassification
from .classifier import AbstractClassifier
from .decoder import Decoder
from .decoder_classifiers import DecoderForSequenceClassification, DecoderForTokenClassification
from .modern_bert import ModernBert, ModernBertForSequenceClassification, ModernBertForTokenClassification


@checked
def with_classifier(
    model: PyTree,
    labels: Sequence[str],
    *,
    key: Any,
    of_tokens: bool = False,
    problem_type: str | None = None,
    std: float | int = 0.02,
    pad_token_id: int | None = None,
) -> PyTree:
    """Adds a newly-initialised classification head to a model.

    Use this to fine-tune a pretrained decoder or encoder as a classifier or a reward model.

    [`quaxlike.lm.save`][] saves the result as the corresponding class in transformers, for example
    `LlamaForSequenceClassification`.

    **Arguments:**

    - `model`: a decoder or encoder, as returned by [`quaxlike.lm.load`][]. A decoder's output layer (if any)
        is dropped.
    - `labels`: the names of the labels. Pass a single one for a reward model or any other scalar regression.
    - `key`: a PRNG key for the new weights, which are normal with standard deviation `std`. (Biases start at
        zero.)
    - `of_tokens`: whether to classify individual tokens rather than the whole text. Default: False.
    - `problem_type`: as in `config.json`, one of `"single_label_classification"`,
        `"multi_label_classification"` or `"regression"`. Default: unset. Transformers then assumes regression
        if there is only one label, and single-label classification if there are several.
    - `std`: Default: 0.02, the `initializer_range` of most models.
    - `pad_token_id`: the padding token, never considered the last token of a text. Only needed for decoders
        without one in their configuration. Default: unset. Transformers can then only classify one text at a
        time.

    **Returns:** the model with its new head. Existing trained arrays and adapters are kept.

    **Raises:** `ValueError` if the model is unsupported or already has a classification head, if its
    architecture has no classification head of this kind, or if labels aren't distinct.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike.lm import models

        def reward_model(directory):
            model, config = ql.lm.load(directory)
            return models.with_classifier(model, ["reward"], key=jax.random.key(0))
        ```
    """
    if problem_type not in (None, *PROBLEMS):
        raise ValueError(f"`problem_type` must be one of {', '.join(PROBLEMS)}; found {problem_type!r}.")
    names = tuple(labels)
    if not names or len({*names}) < len(names) or not all(isinstance(x, str) for x in names):
        raise ValueError(f"`labels` must be different names, one at least; found {names!r}.")
    if len(names) == 1 and problem_type == PROBLEMS[0]:
        raise ValueError(f"One label, {names[0]!r}, cannot be told from others: name two at least.")
    of_labels = Labels(names, problem_type)
    match model:
        case Decoder():
            new = _on_decoder(model, of_labels, of_tokens, pad_token_id)
        case Bert():
            make: Any = BertForTokenClassification if of_tokens else BertForSequenceClassification
            (size,) = named_arrays(model)["embeddings.LayerNorm.weight"].shape
            # The encoder itself is about to be replaced, so only the hidden size matters here.
            like = BertConfig(size, 1, 0, 1, 1, 1, labels=of_labels)
            shapes = _shapes(make, like)
            bert = model
            if of_tokens or model.pooler is None:  # a new pooler, if the checkpoint has none
                pooler = shapes.bert.pooler
                bert = eqx.tree_at(lambda m: m.pooler, model, pooler, is_leaf=lambda x: x is None)
            shapes = replace_fields(shapes, new_pooler=not of_tokens and model.pooler is None)
            new = eqx.tree_at(lambda m: m.bert, shapes, bert)
        case ModernBert():
            make = ModernBertForTokenClassification if of_tokens else ModernBertForSequenceClassification
            config = dataclasses.replace(model.config, labels=of_labels)
            new = eqx.tree_at(lambda m: m.model, _shapes(make, config), model)
        case _:
            kind = "classifies already" if isinstance(model, AbstractClassifier) else "does not read texts"
            raise ValueError(
                f"with_classifier takes a decoder, BERT or ModernBERT; {type(model).__name__} {kind}."
            )
    dtype = next(iter(named_arrays(model).values())).dtype
    started: dict[str, Any] = {}
    # Anything not taken from the existing model is still abstract, so initialise it.
    for name, x in named_arrays(new).items():
        if isinstance(x, jax.ShapeDtypeStruct):
            key, own = jax.random.split(key)
            started[name] = _started(name, x, std, own).astype(dtype)
    return replace(new, started)


def _on_decoder(model: Decoder, labels: Labels, of_tokens: bool, pad: int | None) -> Any:
    c, head = model.config, TOKENS if of_tokens else SEQUENCES
    if c.body_name:
        raise ValueError(
            "The decoder is a part of a model that reads images as well. Write it alone, by "
            "`quaxlike.lm.save`, and load that."
        )
    if head not in c.family.heads:
        raise ValueError(f"{c.architecture} has no {head} here: its family names none.")
    make: Any = DecoderForTokenClassification if of_tokens else DecoderForSequenceClassification
    config = dataclasses.replace(c, head=head, labels=labels, headless=False)
    if pad is not None and c.pad_token_id < 0:
        config = dataclasses.replace(config, pad_token_id=pad)
    return eqx.tree_at(lambda m: m.part("model"), _shapes(make, config), model.body)


def _shapes(make: Any, config: Any) -> Any:
    return eqx.filter_eval_shape(make, config, key=jax.random.key(0))


def _started(name: str, like: jax.ShapeDtypeStruct, std: float | int, key: Any) -> jax.Array:
    if len(like.shape) > 1:
        return std * jax.random.normal(key, like.shape)
    return jnp.full(like.shape, float(name.endswith("norm.weight")))
