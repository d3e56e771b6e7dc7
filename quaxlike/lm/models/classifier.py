"""The abstract base class for models with a classification head."""

import abc
from typing import Any, ClassVar

import equinox as eqx

from ..folders.labels import Labels


class AbstractClassifier(eqx.Module):
    """Abstract base class for models computing a logit for each label."""

    labels: eqx.AbstractVar[Labels]
    of_tokens: ClassVar[bool] = False
    """Whether logits are computed per token, rather than for the whole text."""

    @property
    @abc.abstractmethod
    def architecture(self) -> str:
        """The corresponding class name in transformers."""

    @property
    @abc.abstractmethod
    def head_parts(self) -> tuple[str, ...]:
        """The submodules added to the underlying encoder or decoder, and so trained in full."""

    @property
    @abc.abstractmethod
    def layers(self) -> Any:
        """The layers, either as a list or as a single layer with arrays stacked along a leading axis."""

    def entries(self) -> dict[str, Any]:
        """Returns the `config.json` entries describing the classification head."""
        return {"architectures": [self.architecture], **self.labels.entries()}
