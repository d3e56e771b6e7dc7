"""`--task classify`: text classification and regression."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ....core.values import replace_fields
from ....files.json_text import read_json_file
from ...folders.labels import MULTI, PROBLEMS, REGRESSION, SINGLE, Labels, numbered
from ...models import AbstractClassifier, Bert, Decoder, ModernBert
from ...models.new_head import with_classifier
from ...tokenizer import read_special_tokens
from ..data import Batch, Example, Tokens, read_examples
from ..rows import NO_LABEL, check_entries, has_words, messages_of, template_options, text_of, words_of
from ..settings import DataSettings, FinetuneError, TaskSettings, TrainSettings, option
from .task import AbstractTask, cross_entropy

# Any more labels are a mistake: most likely, regression targets taken for classes.
_MOST = 100_000


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclasses.dataclass(frozen=True)
class ClassSettings(TaskSettings):
    name: ClassVar[str] = "classify"
    about: ClassVar[str] = "learn the labels of texts or words, by a last layer that is made if there is none"

    labels: tuple[str, ...] = option(
        "of --task classify: the names of the labels of a new last layer (default: those in the data)", (),
        type=_names, metavar="A,B,C",
    )  # fmt: skip
    problem_type: str | None = option(
        "of --task classify: one label a text, several, or a number (default: as in the checkpoint, or by "
        "the data)", None,
        choices=list(PROBLEMS),
    )  # fmt: skip
    label_words: bool | None = option(
        "of --task classify: a new last layer is for each word, not the text (default: by the data)", None,
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip


class AbstractClassification(AbstractTask):
    """Abstract base class for predicting the labels of either texts or words."""

    labels: Labels = eqx.field(static=True)

    own: ClassVar[type[TaskSettings] | None] = ClassSettings
    needs_name: ClassVar[bool] = False

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "AbstractClassification":
        return cls(model.labels)

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        if isinstance(model, AbstractClassifier):
            return with_settings(model, train, data), data
        settings, of_run = _settings_in(data), _settings_of_adapter(train)
        names, problem = settings.labels or of_run.labels, settings.problem_type or of_run.problem_type
        words = of_run.label_words if settings.label_words is None else settings.label_words
        if not names or (problem is None and not words):
            of_data = _labels_in(data)
            words = of_data.label_words if words is None else words
            if words != of_data.label_words:
                raise FinetuneError(
                    f"{data.data} has {'rows of texts' if words else 'rows of words'}: leave out "
                    f"--{'' if words else 'no-'}label-words."
                )
            problem = of_data.problem_type if problem is None and not words else problem
            names = names or (numbered(1) if problem == REGRESSION else of_data.labels)
        if words and problem not in (None, SINGLE):
            raise FinetuneError(f"A word has one label; found --problem-type {problem}.")
        words, problem = bool(words), None if words else problem
        if (words or problem == SINGLE) and len(names) < 2:
            raise FinetuneError(f"{data.data} has one label, {', '.join(names)}: there must be two at least.")
        data = dataclasses.replace(data, task=ClassSettings(names, problem, words))
        return new_head(model, config, train, names, problem, of_tokens=words), data

    def output(self, model: PyTree, example: Batch) -> Float[Array, "*tokens labels"]:
        return model(example.ids[0], example.seen[0]).astype(jnp.float32)


class Classes(AbstractClassification):
    """Classification. Rows have the form `{"text": ..., "label": ...}`.

    A label is given by name or by index. For multi-label classification it's a list of these, and for
    regression it's any number. To classify conversations, use `"messages"` rather than `"text"`.
    """

    help: ClassVar[str] = """\
  ...Classification,  {"text": ..., "label": "a name"}, or its number from 0, a list of labels, or a number
  ... --task classify to predict; messages in place of the text
"""
    models: ClassVar[str] = "models that classify texts, decoders, BERT and ModernBERT"
    peft_type: ClassVar[str] = "SEQ_CLS"

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        if isinstance(model, AbstractClassifier):
            return not model.of_tokens
        return isinstance(model, Decoder | Bert | ModernBert)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        if {"chosen", "rejected"} <= fields.keys():
            raise ValueError("'chosen' and 'rejected' are preferences, which --task reward learns")
        if has_words(fields):
            raise ValueError("a row of words is for a model that classifies tokens, or --label-words")
        label = self._label(fields.get("label"))
        if "messages" in fields:
            check_entries(fields, ("messages", "label", "tools", "chat_template_kwargs"))
            text = tokens.chat.render(messages_of(fields), **template_options(fields)).text
            ids = tokens.ids(text)
            return Example((ids[: tokens.max_length],), label=label, was_cut=len(ids) > tokens.max_length)
        check_entries(fields, ("text", "label"))
        ids, was_cut = tokens.cut(text_of(fields, "text"))
        return Example((ids,), label=label, was_cut=was_cut)

    def _label(self, label: Any) -> int | tuple[float, ...]:
        n, problem = len(self.labels.names), self.labels.problem
        if problem == SINGLE:
            return number_of(label, self.labels)
        if problem == MULTI:
            if not isinstance(label, list):
                raise ValueError(f"'label' must be a list of labels; found {label!r}")
            found = {number_of(x, self.labels) for x in label}
            return tuple(float(i in found) for i in range(n))
        values: list[Any] = label if isinstance(label, list) else [label]
        if len(values) != n or not all(type(x) in (int, float) and np.isfinite(x) for x in values):
            wanted = "a number" if n == 1 else f"a list of {n} numbers"
            raise ValueError(f"'label' must be {wanted}; found {label!r}")
        return tuple(map(float, values))

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """Computes the same loss as transformers.

        Multi-label classification and regression average over the labels of each text.
        """
        if self.labels.problem == SINGLE:
            return jnp.sum(cross_entropy(outputs, batch.labels))
        if self.labels.problem == MULTI:
            errors = jax.nn.softplus(outputs) - outputs * batch.labels
        else:
            errors = (outputs - batch.labels) ** 2
        return jnp.sum(jnp.mean(errors, axis=-1))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the accuracy (over all labels, if there are several) and the loss."""
        loss = {"loss": float(self.total(outputs, batch)) / self.weight(batch)}
        if self.labels.problem == REGRESSION:
            return loss
        if self.labels.problem == SINGLE:
            right = np.argmax(outputs, axis=-1) == batch.labels
        else:
            right = (outputs > 0) == (np.asarray(batch.labels) > 0.5)
        return {"accuracy": float(np.mean(right))} | loss


def number_of(label: Any, labels: Labels) -> int:
    """Returns the index of a label, given either by name or as an index."""
    names = labels.names
    if isinstance(label, str) and label in names:
        return names.index(label)
    if type(label) is not int or not 0 <= label < len(names):
        named = "" if names == numbered(len(names)) else f"one of {', '.join(names)}, or "
        raise ValueError(f"'label' must be {named}a whole number from 0 to {len(names) - 1}; found {label!r}")
    return label


def with_settings(model: Any, train: TrainSettings, data: DataSettings) -> Any:
    """Applies the settings to a classifier, for anything unspecified by its checkpoint."""
    settings, found = _settings_in(data), model.labels
    problem = settings.problem_type
    if settings.labels not in ((), found.names):
        raise FinetuneError(
            f"{train.model} tells {', '.join(found.names)} apart, and --labels names other ones. "
            "Leave --labels out, or begin with the model without this layer."
        )
    if settings.label_words not in (None, model.of_tokens):
        raise FinetuneError(
            f"{train.model} classifies {'words' if model.of_tokens else 'texts'}: leave out "
            f"--{'' if settings.label_words else 'no-'}label-words."
        )
    if problem not in (None, SINGLE if model.of_tokens else found.problem_type or problem):
        raise FinetuneError(
            f"{train.model} has problem_type={found.problem_type!r}; found --problem-type {problem}."
        )
    if model.of_tokens:
        return model
    return replace_fields(
        model, labels=dataclasses.replace(found, problem_type=found.problem_type or problem)
    )


def new_head(
    model: PyTree,
    config: Mapping[str, Any],
    train: TrainSettings,
    names: tuple[str, ...],
    problem: str | None,
    *,
    of_tokens: bool = False,
) -> PyTree:
    """Adds a new classification head, initialised as in transformers.

    If the configuration has no padding token, then this uses the tokeniser's, or failing that the end-of-text
    token. (As in TRL.)
    """
    key = jax.random.fold_in(jax.random.key(train.seed), 1)  # adapters already use the key itself
    pad = None if config.get("pad_token_id") is not None else _padding(train.model, config)
    std = config.get("initializer_range") or 0.02
    try:
        return with_classifier(
            model, names, of_tokens=of_tokens, key=key, problem_type=problem, std=std, pad_token_id=pad
        )
    except ValueError as error:
        raise FinetuneError(f"{train.model}: {error}") from error


def _padding(folder: Path, config: Mapping[str, Any]) -> int | None:
    from ...text import TextTokenizer  # not at module level: listing the tasks should work without `lm`

    token = read_special_tokens(folder).get("pad_token")
    if token is not None and (folder / "tokenizer.json").is_file():
        found = TextTokenizer(folder).number(token)
        if found is not None and found < config["vocab_size"]:
            return found
    eos = config.get("eos_token_id")
    return eos[0] if isinstance(eos, list) and eos else eos if type(eos) is int else None


def _settings_in(data: DataSettings) -> ClassSettings:
    settings = ClassSettings() if data.task is None else data.task
    assert isinstance(settings, ClassSettings)
    return settings


def _settings_of_adapter(train: TrainSettings) -> ClassSettings:
    """Reads the labels of an existing adapter, if training one further."""
    about = train.adapter / "run.json" if isinstance(train.adapter, Path) else None
    if about is None or not about.is_file():
        return ClassSettings()
    found = read_json_file(about, "the settings of the run")
    names, problem, words = found.get("labels") or (), found.get("problem_type"), found.get("label_words")
    return ClassSettings(
        tuple(map(str, names)), problem if problem in PROBLEMS else None, words if words is True else None
    )


def _labels_in(data: DataSettings) -> ClassSettings:
    """Collects all label names in the data files, and infers the problem type from them."""
    found: list[Any] = []
    of_words: set[bool] = set()

    def note(fields: Mapping[str, Any]) -> Example:
        of_words.add(words := has_words(fields))
        if words:
            _, tags = words_of(fields)
            found.append(label := [tag for tag in tags if tag != NO_LABEL])
        else:
            found.append(label := fields.get("label"))
        for x in label if isinstance(label, list) else [label]:
            if type(x) not in ((str, int) if words else (str, int, float)):
                kind = "" if words else ", or a number"
                raise ValueError(f"'label' must be the name of a label{kind}; found {x!r}")
        return Example(([],))

    for path in [data.data] if data.eval_data is None else [data.data, data.eval_data]:
        read_examples(path, note)
    if not found:
        raise FinetuneError(f"{data.data} (--data) has no examples. Add examples.")
    if len(of_words) > 1:
        raise FinetuneError(f"{data.data} has rows of words and rows of texts: all must be of one kind.")
    (words,) = of_words
    lists = [isinstance(label, list) for label in found]
    each = [x for label in found for x in (label if isinstance(label, list) else [label])]
    kinds = {type(x) for x in each}
    if any(lists) != all(lists) or (str in kinds and len(kinds) > 1):
        raise FinetuneError(
            f"{data.data} has labels of several kinds, such as {found[0]!r}: all must be names, or all whole "
            "numbers, or all lists of these, or all numbers to predict."
        )
    if float in kinds:
        if any(lists):
            raise FinetuneError(
                f"{data.data} has lists of numbers; found {found[0]!r}. Name them by --labels."
            )
        return ClassSettings(numbered(1), REGRESSION, False)
    problem = None if words else MULTI if any(lists) else SINGLE
    if str in kinds:
        return ClassSettings(tuple(sorted({*each})), problem, words)
    if each and (min(each) < 0 or max(each) > _MOST):
        raise FinetuneError(
            f"{data.data} has labels from {min(each)} to {max(each)}: labels are numbered from 0 on, up to "
            f"{_MOST:,}. To predict numbers, use --problem-type {REGRESSION}."
        )
    return ClassSettings(numbered(1 + max(each, default=0)), problem, words)
