"""An encoder of the BERT family, its arrays named as in the checkpoints of transformers."""

# pyright: reportSelfClsParameterName=false

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .config import Config
from .layers import attend, each, heads


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
    num_labels: int = 2

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "BertConfig":
        labels = {"num_labels": len(config["id2label"])} if config.get("id2label") else {}
        return cls.read(
            {**config, **labels}, hidden_act="gelu", position_embedding_type="absolute", is_decoder=False,
            add_cross_attention=False, problem_type=(None, "single_label_classification"),
        )  # fmt: skip


class BertEmbeddings(eqx.Module):
    word_embeddings: eqx.nn.Embedding
    position_embeddings: eqx.nn.Embedding
    token_type_embeddings: eqx.nn.Embedding
    LayerNorm: eqx.nn.LayerNorm

    def __init__(self, config: BertConfig, key: Any) -> None:
        word, position, kind = jax.random.split(key, 3)
        hidden = config.hidden_size
        self.word_embeddings = eqx.nn.Embedding(config.vocab_size, hidden, key=word)
        self.position_embeddings = eqx.nn.Embedding(config.max_position_embeddings, hidden, key=position)
        self.token_type_embeddings = eqx.nn.Embedding(config.type_vocab_size, hidden, key=kind)
        self.LayerNorm = _norm(config)

    def __call__(self, ids: Int[Array, " tokens"], types: Int[Array, " tokens"]) -> Array:
        positions = jnp.arange(len(ids))
        x = each(self.word_embeddings, ids) + each(self.token_type_embeddings, types)
        return each(self.LayerNorm, x + each(self.position_embeddings, positions))


class BertSelfAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)

    def __init__(self, config: BertConfig, key: Any) -> None:
        hidden = config.hidden_size
        self.query, self.key, self.value = (
            eqx.nn.Linear(hidden, hidden, key=k) for k in jax.random.split(key, 3)
        )
        self.n_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "tokens hidden"], mask: Bool[Array, "tokens tokens"]) -> Array:
        query, key, value = (heads(each(f, x), self.n_heads) for f in (self.query, self.key, self.value))
        return attend(query, key, value, mask)


class BertOutput(eqx.Module):
    """A linear layer, the residual, and the norm after it."""

    dense: eqx.nn.Linear
    LayerNorm: eqx.nn.LayerNorm

    def __init__(self, config: BertConfig, wide: int, key: Any) -> None:
        self.dense = eqx.nn.Linear(wide, config.hidden_size, key=key)
        self.LayerNorm = _norm(config)

    def __call__(self, x: Float[Array, "tokens wide"], residual: Float[Array, "tokens hidden"]) -> Array:
        return each(self.LayerNorm, each(self.dense, x) + residual)


class BertAttention(eqx.Module):
    """One of its parts is called `self`, so that the instance goes by `this`."""

    self: BertSelfAttention
    output: BertOutput

    def __init__(this, config: BertConfig, key: Any) -> None:
        attention, output = jax.random.split(key)
        this.self = BertSelfAttention(config, attention)
        this.output = BertOutput(config, config.hidden_size, output)

    def __call__(this, x: Float[Array, "tokens hidden"], mask: Bool[Array, "tokens tokens"]) -> Array:
        return this.output(this.self(x, mask), x)


class Dense(eqx.Module):
    """A linear layer under the name `dense`."""

    dense: eqx.nn.Linear


class BertLayer(eqx.Module):
    attention: BertAttention
    intermediate: Dense
    output: BertOutput

    def __init__(self, config: BertConfig, key: Any) -> None:
        attention, intermediate, output = jax.random.split(key, 3)
        wide = config.intermediate_size
        self.attention = BertAttention(config, attention)
        self.intermediate = Dense(eqx.nn.Linear(config.hidden_size, wide, key=intermediate))
        self.output = BertOutput(config, wide, output)

    def __call__(self, x: Float[Array, "tokens hidden"], mask: Bool[Array, "tokens tokens"]) -> Array:
        x = self.attention(x, mask)
        wide = jax.nn.gelu(each(self.intermediate.dense, x), approximate=False)
        return self.output(wide, x)


class BertEncoder(eqx.Module):
    layer: list[BertLayer]


class Bert(eqx.Module):
    """For each token of one sequence a vector; pooled into one of the sequence by what uses it."""

    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: Dense

    def __init__(self, config: BertConfig, *, key: Any) -> None:
        embeddings, pooler, *keys = jax.random.split(key, 2 + config.num_hidden_layers)
        self.embeddings = BertEmbeddings(config, embeddings)
        self.encoder = BertEncoder([BertLayer(config, k) for k in keys])
        self.pooler = Dense(eqx.nn.Linear(config.hidden_size, config.hidden_size, key=pooler))

    def __call__(
        self,
        ids: Int[Array, " tokens"],
        seen: Bool[Array, " tokens"],
        types: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        x = self.embeddings(ids, jnp.zeros_like(ids) if types is None else types)
        mask = jnp.broadcast_to(seen, (len(ids), len(ids)))
        for layer in self.encoder.layer:
            x = layer(x, mask)
        return x


class BertForSequenceClassification(eqx.Module):
    """The logits of the classes of one sequence."""

    bert: Bert
    classifier: eqx.nn.Linear

    def __init__(self, config: BertConfig, *, key: Any) -> None:
        bert, classifier = jax.random.split(key)
        self.bert = Bert(config, key=bert)
        self.classifier = eqx.nn.Linear(config.hidden_size, config.num_labels, key=classifier)

    def __call__(
        self,
        ids: Int[Array, " tokens"],
        seen: Bool[Array, " tokens"],
        types: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, " classes"]:
        first = self.bert(ids, seen, types)[0]
        return self.classifier(jnp.tanh(self.bert.pooler.dense(first)))


def mean_pooled(x: Float[Array, "tokens hidden"], seen: Bool[Array, " tokens"]) -> Float[Array, " hidden"]:
    """The mean over the tokens that are no padding, of norm one: an embedding of the sentence."""
    weights = seen.astype(x.dtype)
    mean = weights @ x / jnp.maximum(jnp.sum(weights), 1)
    return mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)


def _norm(config: BertConfig) -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
