"""Models whose last layer tells classes of texts, or of tokens, apart."""

import abc
from typing import Any, ClassVar

import equinox as eqx

from ..folders.labels import Labels


class AbstractClassifier(eqx.Module):
    """A model that gives a logit for each label."""

    labels: eqx.AbstractVar[Labels]
    of_tokens: ClassVar[bool] = False
    """Whether its logits are those of each token; otherwise, of a whole text."""

    @property
    @abc.abstractmethod
    def architecture(self) -> str:
        """Its name in transformers."""

    @property
    @abc.abstractmethod
    def head_parts(self) -> tuple[str, ...]:
        """The parts that an encoder or a decoder does not have, and that are trained in full."""

    @property
    @abc.abstractmethod
    def layer_list(self) -> Any:
        """The list of layers; or, if stacked, one layer whose arrays have an axis for the layers."""

    def entries(self) -> dict[str, Any]:
        """The entries of `config.json` about the head."""
        return {"architectures": [self.architecture], **self.labels.entries()}
