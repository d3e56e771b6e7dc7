"""`--task classify`: classification and regression of texts."""

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
from ..rows import check_entries, messages_of, template_options, text_of
from ..settings import DataSettings, FinetuneError, TaskSettings, TrainSettings, option
from .task import AbstractTask, cross_entropy

# More labels than this is a mistake in the data, such as a number to predict that was taken for a class.
_MOST = 100_000


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclasses.dataclass(frozen=True)
class ClassSettings(TaskSettings):
    name: ClassVar[str] = "classify"
    about: ClassVar[str] = "learn the labels of texts, by a last layer that is made if there is none"

    labels: tuple[str, ...] = option(
        "of --task classify: the names of the labels of a new last layer (default: those in the data)", (),
        type=_names, metavar="A,B,C",
    )  # fmt: skip
    problem_type: str | None = option(
        "of --task classify: one label a text, several, or a number (default: as in the checkpoint, or by "
        "the data)", None,
        choices=list(PROBLEMS),
    )  # fmt: skip


class Classes(AbstractTask):
    """Classification of `{"text": ..., "label": ...}`.

    The label is a name or a number from 0. For multi-label classification it is a list of these; for
    regression, any number. `"messages"` may replace `"text"`.
    """

    labels: Labels = eqx.field(static=True)

    help: ClassVar[str] = """\
  ...Classification,  {"text": ..., "label": "a name"}, or its number from 0, a list of labels, or a number
  ... --task classify to predict; messages in place of the text
"""
    models: ClassVar[str] = "models that classify texts, decoders, BERT and ModernBERT"
    peft_type: ClassVar[str] = "SEQ_CLS"
    own: ClassVar[type[TaskSettings] | None] = ClassSettings
    needs_name: ClassVar[bool] = False

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        if isinstance(model, AbstractClassifier):
            return not model.of_tokens
        return isinstance(model, Decoder | Bert | ModernBert)

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        settings = ClassSettings() if data.task is None else data.task
        assert isinstance(settings, ClassSettings)
        names, problem = settings.labels, settings.problem_type
        of_run = _settings_of_adapter(train)
        if isinstance(model, AbstractClassifier):
            found = model.labels
            if names not in ((), found.names):
                raise FinetuneError(
                    f"{train.model} tells {', '.join(found.names)} apart, and --labels names other ones. "
                    "Leave --labels out, or begin with the model without this layer."
                )
            if problem not in (None, found.problem_type or problem):
                raise FinetuneError(
                    f"{train.model} has problem_type={found.problem_type!r}; found --problem-type {problem}."
                )
            return replace_fields(
                model, labels=dataclasses.replace(found, problem_type=found.problem_type or problem)
            ), data
        names, problem = names or of_run.labels, problem or of_run.problem_type
        if not names or problem is None:
            of_data, by_data = _labels_in(data)
            problem = by_data if problem is None else problem
            names = names or (numbered(1) if problem == REGRESSION else of_data)
        if problem == SINGLE and len(names) < 2:
            raise FinetuneError(f"{data.data} has one label, {', '.join(names)}: there must be two at least.")
        data = dataclasses.replace(data, task=ClassSettings(names, problem))
        return new_head(model, config, train, names, problem), data

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Classes":
        return cls(model.labels)

    @classmethod
    def trained_in_full(cls, model: PyTree) -> tuple[str, ...]:
        return model.head_parts if isinstance(model, AbstractClassifier) else ()

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        if {"chosen", "rejected"} <= fields.keys():
            raise ValueError("'chosen' and 'rejected' are preferences, which --task reward learns")
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
            return self._number(label)
        if problem == MULTI:
            if not isinstance(label, list):
                raise ValueError(f"'label' must be a list of labels; found {label!r}")
            found = {self._number(x) for x in label}
            return tuple(float(i in found) for i in range(n))
        values: list[Any] = label if isinstance(label, list) else [label]
        if len(values) != n or not all(type(x) in (int, float) and np.isfinite(x) for x in values):
            wanted = "a number" if n == 1 else f"a list of {n} numbers"
            raise ValueError(f"'label' must be {wanted}; found {label!r}")
        return tuple(map(float, values))

    def _number(self, label: Any) -> int:
        names = self.labels.names
        if isinstance(label, str) and label in names:
            return names.index(label)
        if type(label) is not int or not 0 <= label < len(names):
            named = "" if names == numbered(len(names)) else f"one of {', '.join(names)}, or "
            raise ValueError(
                f"'label' must be {named}a whole number from 0 to {len(names) - 1}; found {label!r}"
            )
        return label

    def layers(self, model: PyTree) -> Any:
        return model.layer_list

    def output(self, model: PyTree, example: Batch) -> Float[Array, " labels"]:
        return model(example.ids[0], example.seen[0]).astype(jnp.float32)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """Returns the loss of transformers. For several labels or for numbers, it averages over a text's
        labels."""
        if self.labels.problem == SINGLE:
            return jnp.sum(cross_entropy(outputs, batch.labels))
        if self.labels.problem == MULTI:
            errors = jax.nn.softplus(outputs) - outputs * batch.labels
        else:
            errors = (outputs - batch.labels) ** 2
        return jnp.sum(jnp.mean(errors, axis=-1))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the accuracy and the loss. With several labels per text, accuracy counts each label."""
        loss = {"loss": float(self.total(outputs, batch)) / self.weight(batch)}
        if self.labels.problem == REGRESSION:
            return loss
        if self.labels.problem == SINGLE:
            right = np.argmax(outputs, axis=-1) == batch.labels
        else:
            right = (outputs > 0) == (np.asarray(batch.labels) > 0.5)
        return {"accuracy": float(np.mean(right))} | loss


def new_head(
    model: PyTree,
    config: Mapping[str, Any],
    train: TrainSettings,
    names: tuple[str, ...],
    problem: str | None,
) -> PyTree:
    """Adds a new last layer, initialised as in transformers.

    As in TRL, the padding token is the configuration's, or else the tokeniser's, or else the end-of-text
    token.
    """
    key = jax.random.fold_in(jax.random.key(train.seed), 1)  # independent of the key for adapters
    pad = None if config.get("pad_token_id") is not None else _padding(train.model, config)
    std = config.get("initializer_range") or 0.02
    try:
        return with_classifier(model, names, key=key, problem_type=problem, std=std, pad_token_id=pad)
    except ValueError as error:
        raise FinetuneError(f"{train.model}: {error}") from error


def _padding(folder: Path, config: Mapping[str, Any]) -> int | None:
    from ...text import TextTokenizer  # imported late: the command line lists tasks without the extra `lm`

    token = read_special_tokens(folder).get("pad_token")
    if token is not None and (folder / "tokenizer.json").is_file():
        found = TextTokenizer(folder).number(token)
        if found is not None and found < config["vocab_size"]:
            return found
    eos = config.get("eos_token_id")
    return eos[0] if isinstance(eos, list) and eos else eos if type(eos) is int else None


def _settings_of_adapter(train: TrainSettings) -> ClassSettings:
    """Reads the labels from the adapter that the run continues."""
    about = train.adapter / "run.json" if isinstance(train.adapter, Path) else None
    if about is None or not about.is_file():
        return ClassSettings()
    found = read_json_file(about, "the settings of the run")
    names, problem = found.get("labels") or (), found.get("problem_type")
    return ClassSettings(tuple(map(str, names)), problem if problem in PROBLEMS else None)


def _labels_in(data: DataSettings) -> tuple[tuple[str, ...], str]:
    """Collects the label names from the data files, and tells which kind of problem they pose."""
    found: list[Any] = []

    def note(fields: Mapping[str, Any]) -> Example:
        found.append(label := fields.get("label"))
        for x in label if isinstance(label, list) else [label]:
            if type(x) not in (str, int, float):
                raise ValueError(f"'label' must be the name of a label, or a number; found {label!r}")
        return Example(([],))

    for path in [data.data] if data.eval_data is None else [data.data, data.eval_data]:
        read_examples(path, note)
    if not found:
        raise FinetuneError(f"{data.data} (--data) has no examples. Add examples.")
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
        return numbered(1), REGRESSION
    problem = MULTI if any(lists) else SINGLE
    if str in kinds:
        return tuple(sorted({*each})), problem
    if each and (min(each) < 0 or max(each) > _MOST):
        raise FinetuneError(
            f"{data.data} has labels from {min(each)} to {max(each)}: labels are numbered from 0 on, up to "
            f"{_MOST:,}. To predict numbers, use --problem-type {REGRESSION}."
        )
    return numbered(1 + max(each, default=0)), problem
