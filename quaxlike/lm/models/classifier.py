"""The interface of models with a classification layer."""

import abc
from typing import Any, ClassVar

import equinox as eqx

from ..folders.labels import Labels


class AbstractClassifier(eqx.Module):
    """A model that computes a logit for each label."""

    labels: eqx.AbstractVar[Labels]
    of_tokens: ClassVar[bool] = False
    """Whether there are logits for each token, and not for the whole text."""

    @property
    @abc.abstractmethod
    def architecture(self) -> str:
        """The class name in transformers."""

    @property
    @abc.abstractmethod
    def head_parts(self) -> tuple[str, ...]:
        """The parts that the underlying encoder or decoder does not have. Fine-tuning trains them in full."""

    @property
    @abc.abstractmethod
    def layer_list(self) -> Any:
        """The layers: a list, or one layer whose arrays have a leading axis for all layers."""

    def entries(self) -> dict[str, Any]:
        """Returns the entries of `config.json` for the classification head."""
        return {"architectures": [self.architecture], **self.labels.entries()}
