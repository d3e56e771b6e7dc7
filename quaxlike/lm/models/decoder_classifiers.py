"""Decoders with a classification head for either texts or tokens. Reward models are of this kind too."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..families import SEQUENCES, TOKENS, classifiers
from ..folders.labels import Labels
from .classifier import AbstractClassifier
from .decoder import AbstractDecoder, Body
from .decoder_config import DecoderConfig
from .layers import Ids, Seen, each, seen_of


class AbstractDecoderClassifier(AbstractDecoder, AbstractClassifier, roles="model score classifier"):
    """Abstract base class for both kinds of decoder classifier. Fields are named as in transformers."""

    labels: Labels = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, *, key: Any) -> None:
        body, head = jax.random.split(key)
        n, bias = len(config.labels.names), self.of_tokens and config.token_classification_bias
        layer = eqx.nn.Linear(config.hidden_size, n, use_bias=bias, key=head)
        self._fill(config, model=Body(config, body), **{self._head_of(config): layer})
        self.labels = config.labels

    @classmethod
    def _head_of(cls, config: DecoderConfig) -> str:
        return config.family.token_head if cls.of_tokens else "score"

    @property
    def head_parts(self) -> tuple[str, ...]:
        return (self._head_of(self.config),)

    @property
    def architecture(self) -> str:
        wanted = self.config.architecture, TOKENS if self.of_tokens else SEQUENCES
        return next(name for name, found in classifiers().items() if found == wanted)

    def entries(self) -> dict[str, Any]:
        pad = self.config.pad_token_id
        return super().entries() | ({"pad_token_id": pad} if pad >= 0 else {})


class DecoderForSequenceClassification(AbstractDecoderClassifier):
    """Computes the logits of a text from its last token. With a single label this is a reward model.

    Fields are named as in transformers.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.lm.models import DecoderConfig, DecoderForSequenceClassification

        config = DecoderConfig.from_json({
            "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3,
            "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
        })
        model = DecoderForSequenceClassification(config, key=jax.random.key(0))
        logits = model(jnp.arange(5))  # (3,)
        ```
    """

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Float[Array, " labels"]:
        """Computes the logits of one text. `ids` and `seen` are as in [`quaxlike.lm.models.Decoder`][]."""
        seen = seen_of(ids, seen)
        last = self.hidden(ids, seen)[self._last(ids, seen)]
        return each(self.part(self.head_parts[0]), last[None])[0]

    def _last(self, ids: Ids, seen: Seen) -> Int[Array, ""]:
        """Returns the position of the last token.

        As in transformers, this is the last token other than the padding token. A padding token is skipped
        even if the text really ends in it.
        """
        counts = seen & (ids != self.config.pad_token_id)
        return jnp.max(jnp.where(counts, jnp.arange(len(ids)), 0))


class DecoderForTokenClassification(AbstractDecoderClassifier):
    """Computes the logits of each token in a text. Fields are named as in transformers."""

    of_tokens: ClassVar[bool] = True

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Float[Array, "tokens labels"]:
        """Computes the logits of one text. `ids` and `seen` are as in [`quaxlike.lm.models.Decoder`][]."""
        return each(self.part(self.head_parts[0]), self.hidden(ids, seen))
