"""BERT. Weights are loaded by name, so fields are named as in transformers' checkpoints."""

# pyright: reportSelfClsParameterName=false

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families import SEQUENCES, TOKENS
from ..folders.labels import ENTRIES as LABEL_ENTRIES
from ..folders.labels import UNNAMED, Labels
from ..folders.model_config import Config
from .attention import Sight, attend
from .classifier import AbstractClassifier
from .layers import Hidden, Ids, Seen, each, seen_of


@dataclasses.dataclass(frozen=True)
class BertConfig(Config):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float | int = 1e-12
    labels: Labels = UNNAMED

    @property
    def num_labels(self) -> int:
        return len(self.labels.names)

    def known_entries(self) -> set[str]:  # transformers ignores `head_dim` here
        required = ("hidden_act", "position_embedding_type", "is_decoder", "add_cross_attention")
        return super().known_entries() | {*required, *LABEL_ENTRIES, "head_dim"}

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "BertConfig":
        return cls.read(
            {**config, "labels": Labels.from_json(config)},
            hidden_act="gelu",
            position_embedding_type="absolute",
            is_decoder=False,
            add_cross_attention=False,
        )


class BertEmbeddings(eqx.Module):
    word_embeddings: eqx.nn.Embedding
    position_embeddings: eqx.nn.Embedding
    token_type_embeddings: eqx.nn.Embedding
    LayerNorm: eqx.nn.LayerNorm

    def __call__(self, ids: Ids, types: Ids) -> Hidden:
        x = each(self.word_embeddings, ids) + each(self.token_type_embeddings, types)
        return each(self.LayerNorm, x + each(self.position_embeddings, jnp.arange(len(ids))))


class BertSelfAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)

    def __call__(self, x: Hidden, sight: Sight) -> Hidden:
        def heads(layer: Any) -> Any:
            return each(layer, x).reshape(len(x), self.n_heads, -1)

        return attend(heads(self.query), heads(self.key), heads(self.value), sight)


class BertOutput(eqx.Module):
    """A linear layer, followed by a residual connection and then a layer norm."""

    dense: eqx.nn.Linear
    LayerNorm: eqx.nn.LayerNorm

    def __call__(self, x: Float[Array, "tokens wide"], residual: Hidden) -> Hidden:
        return each(self.LayerNorm, each(self.dense, x) + residual)


class BertAttention(eqx.Module):
    """Self-attention, including its output projection.

    Checkpoints have a field called `self`, so methods use `this` to refer to the instance.
    """

    self: BertSelfAttention
    output: BertOutput

    def __init__(this, attention: BertSelfAttention, output: BertOutput) -> None:
        this.self, this.output = attention, output


class Dense(eqx.Module):
    dense: eqx.nn.Linear


class BertLayer(eqx.Module):
    attention: BertAttention
    intermediate: Dense
    output: BertOutput

    def __call__(self, x: Hidden, sight: Sight) -> Hidden:
        x = self.attention.output(self.attention.self(x, sight), x)
        wide = jax.nn.gelu(each(self.intermediate.dense, x), approximate=False)
        return self.output(wide, x)


class BertEncoder(eqx.Module):
    layer: list[BertLayer]


class Bert(eqx.Module):
    """A BERT encoder, returning one vector for each token. (Pooling them is left to the caller.)"""

    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: Dense | None

    def __init__(self, config: BertConfig, *, pooled: bool = True, key: Any) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size
        keys = iter(jax.random.split(key, 4 + 6 * config.num_hidden_layers))

        def norm() -> Any:
            return eqx.nn.LayerNorm(hidden, eps=config.layer_norm_eps)

        def table(n: Any) -> Any:
            return eqx.nn.Embedding(n, hidden, key=next(keys))

        def linear(n_in: Any, n_out: Any) -> Any:
            return eqx.nn.Linear(n_in, n_out, key=next(keys))

        def layer() -> BertLayer:
            query, key, value = (linear(hidden, hidden) for _ in range(3))
            attention = BertSelfAttention(query, key, value, config.num_attention_heads)
            return BertLayer(
                BertAttention(attention, BertOutput(linear(hidden, hidden), norm())),
                Dense(linear(hidden, wide)),
                BertOutput(linear(wide, hidden), norm()),
            )

        words, positions = table(config.vocab_size), table(config.max_position_embeddings)
        self.embeddings = BertEmbeddings(words, positions, table(config.type_vocab_size), norm())
        self.encoder = BertEncoder([layer() for _ in range(config.num_hidden_layers)])
        self.pooler = Dense(linear(hidden, hidden)) if pooled else None

    def __call__(self, ids: Ids, seen: Seen | None = None, types: Ids | None = None) -> Hidden:
        seen = seen_of(ids, seen)
        x = self.embeddings(ids, jnp.zeros_like(ids) if types is None else types)
        sight = Sight.of(seen)
        for layer in self.layers:
            x = layer(x, sight)
        return x

    @property
    def layers(self) -> list[BertLayer]:
        return self.encoder.layer


class AbstractBertClassifier(AbstractClassifier):
    """Abstract base class for both kinds of BERT classifier."""

    bert: Bert
    classifier: eqx.nn.Linear
    labels: Labels = eqx.field(static=True)
    new_pooler: bool = eqx.field(static=True)
    """Whether the pooler isn't the checkpoint's. If so, it is trained in full, like the classifier."""

    def __init__(self, config: BertConfig, *, key: Any) -> None:
        self.new_pooler = False
        bert, classifier = jax.random.split(key)
        self.bert = Bert(config, pooled=not self.of_tokens, key=bert)
        self.classifier = eqx.nn.Linear(config.hidden_size, config.num_labels, key=classifier)
        self.labels = config.labels

    @property
    def architecture(self) -> str:
        return "Bert" + (TOKENS if self.of_tokens else SEQUENCES)

    @property
    def head_parts(self) -> tuple[str, ...]:
        return ("classifier", "pooler") if self.new_pooler else ("classifier",)

    @property
    def layers(self) -> list[BertLayer]:
        return self.bert.layers


class BertForSequenceClassification(AbstractBertClassifier):
    """Computes the class logits of a whole text, using BERT."""

    def __call__(
        self, ids: Ids, seen: Seen | None = None, types: Ids | None = None
    ) -> Float[Array, " classes"]:
        # The pooler only looks at the first token, i.e. [CLS].
        first = self.bert(ids, seen, types)[0]
        assert self.bert.pooler is not None
        return self.classifier(jnp.tanh(self.bert.pooler.dense(first)))


class BertForTokenClassification(AbstractBertClassifier):
    """Computes the class logits of each token in a text, using BERT."""

    of_tokens: ClassVar[bool] = True

    def __call__(
        self, ids: Ids, seen: Seen | None = None, types: Ids | None = None
    ) -> Float[Array, "tokens classes"]:
        return each(self.classifier, self.bert(ids, seen, types))
