"""ModernBERT: an encoder with rotary embeddings and sliding-window attention (Warner et al., 2024)."""

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
from ..folders.model_config import ATTENTION, Config, kinds_of, refused, whole
from .attention import Sight, attend
from .classifier import AbstractClassifier
from .layers import Hidden, Ids, Seen, each, seen_of
from .mixer import Context
from .pooling import MODES
from .rope import Rope, rope_for, rotate

# Entries read below, but without a field of their own. (Except for `position_embedding_type`: positions are
# always rotary, so this is ignored.)
_DERIVED = (
    *("layer_types", "global_attn_every_n_layers", "rope_parameters", "rope_scaling"),
    *("global_rope_theta", "local_rope_theta", "rope_theta", "position_embedding_type", "hidden_activation"),
)


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(Config):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int = 8192
    original_max_position_embeddings: int = 0
    norm_eps: float | int = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    classifier_bias: bool = False
    """Whether there is a bias in the dense layer of the classification head."""
    classifier_pooling: str = "cls"
    """What to classify: either the first token ("cls") or the mean over all tokens ("mean")."""
    labels: Labels = UNNAMED
    new_embeddings: bool = False
    """Whether embeddings differ from the checkpoint's. See `DecoderConfig.new_embeddings`."""

    windows: tuple[bool, ...] = ()
    """Whether each layer uses a sliding window, with `local_attention / 2` tokens on either side."""
    ropes: tuple[Rope, ...] = ()
    """The rotary embeddings: first for layers without a window, then for those with one."""

    @property
    def num_labels(self) -> int:
        return len(self.labels.names)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // max(self.num_attention_heads, 1)

    def known_entries(self) -> set[str]:
        return super().known_entries() | {*_DERIVED, *LABEL_ENTRIES}

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "ModernBertConfig":
        """Parses a `config.json` from transformers 4 or 5.

        **Raises:** `UnsupportedConfigError` if a value isn't supported.
        """
        fields = {**config, **dict.fromkeys(("new_embeddings", "windows", "ropes"))}
        fields["labels"] = Labels.from_json(config)
        out = cls.read(
            fields,
            hidden_activation=("gelu", None),
            classifier_activation=("gelu", None),
            classifier_pooling=("cls", "mean", None),
        )
        types, label = config.get("layer_types"), "ModernBertConfig"
        if types is None:
            every = whole(config, "global_attn_every_n_layers", 3, label) or 1
            windows = tuple(i % every != 0 for i in range(out.num_hidden_layers))
        else:
            windows = tuple(ATTENTION[kind] for kind in kinds_of(types, out.num_hidden_layers, label))
        thetas = {"full_attention": ("global", 160000.0), "sliding_attention": ("local", 10000.0)}
        given, ropes = config.get("rope_parameters") or {}, []
        for kind, (name, theta) in thetas.items():
            part = given.get(kind) if isinstance(given, Mapping) else given
            if not isinstance(part, Mapping | None):
                raise refused("rope_parameters", given, label, "an object for each kind of attention")
            shared = {"rope_theta": config.get(f"{name}_rope_theta") or theta}
            ropes.append(
                rope_for({**shared, **(config.get("rope_scaling") or {}), **(part or {})}, out, label)
            )
        return dataclasses.replace(out, windows=windows, ropes=tuple(ropes))


class ModernBertEmbeddings(eqx.Module):
    tok_embeddings: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm

    def __call__(self, ids: Ids) -> Hidden:
        return each(self.norm, each(self.tok_embeddings, ids))


class ModernBertAttention(eqx.Module):
    Wqkv: eqx.nn.Linear
    Wo: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)

    def __call__(self, x: Hidden, context: Context) -> Hidden:
        query, key, value = jnp.split(each(self.Wqkv, x).reshape(len(x), 3 * self.n_heads, -1), 3, axis=1)
        query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        return each(self.Wo, attend(query, key, value, context.sight))


class ModernBertMLP(eqx.Module):
    Wi: eqx.nn.Linear
    Wo: eqx.nn.Linear

    def __call__(self, x: Hidden) -> Hidden:
        x, gate = jnp.split(each(self.Wi, x), 2, axis=-1)
        return each(self.Wo, jax.nn.gelu(x, approximate=False) * gate)


class ModernBertLayer(eqx.Module):
    attn_norm: eqx.nn.LayerNorm | None
    attn: ModernBertAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: ModernBertMLP

    def __call__(self, x: Hidden, context: Context) -> Hidden:
        x = x + self.attn(x if self.attn_norm is None else each(self.attn_norm, x), context)
        return x + self.mlp(each(self.mlp_norm, x))


class ModernBert(eqx.Module):
    """A ModernBERT encoder, returning one vector for each token.

    Typically these are then pooled into a single one, for example using
    [`quaxlike.lm.models.mean_pooled`][].
    """

    embeddings: ModernBertEmbeddings
    layers: list[ModernBertLayer]
    final_norm: eqx.nn.LayerNorm
    config: ModernBertConfig = eqx.field(static=True)

    def __init__(self, config: ModernBertConfig, *, key: Any) -> None:
        self.config, c = config, config
        embed, *keys = jax.random.split(key, 1 + 4 * c.num_hidden_layers)

        def norm() -> Any:
            return eqx.nn.LayerNorm(c.hidden_size, eps=c.norm_eps, use_bias=c.norm_bias)

        def layer(i: int) -> ModernBertLayer:
            qkv, out, wide, narrow = keys[4 * i : 4 * i + 4]

            def linear(n_in: Any, n_out: Any, bias: Any, key: Any) -> Any:
                return eqx.nn.Linear(n_in, n_out, use_bias=bias, key=key)

            attention = ModernBertAttention(
                linear(c.hidden_size, 3 * c.hidden_size, c.attention_bias, qkv),
                linear(c.hidden_size, c.hidden_size, c.attention_bias, out),
                c.num_attention_heads,
            )
            mlp = ModernBertMLP(
                linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, wide),
                linear(c.intermediate_size, c.hidden_size, c.mlp_bias, narrow),
            )
            # The first layer has no attention norm: the embeddings have only just been normalised.
            return ModernBertLayer(norm() if i else None, attention, norm(), mlp)

        table = eqx.nn.Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.embeddings = ModernBertEmbeddings(table, norm())
        self.layers = [layer(i) for i in range(c.num_hidden_layers)]
        self.final_norm = norm()

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Hidden:
        """Computes a vector for each token in `ids`. `seen` is False for padding. Default: no padding."""
        seen = seen_of(ids, seen)
        x, order = self.embeddings(ids), jnp.arange(len(ids))
        reach, length = self.config.local_attention // 2, jnp.sum(seen)
        sights = Sight.of(seen), Sight.of(seen, before=reach, after=reach)
        contexts = [
            Context(rope.rotation(order, length, x.dtype), sight)
            for rope, sight in zip(self.config.ropes, sights, strict=True)
        ]
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            x = layer(x, contexts[window])
        return each(self.final_norm, x)


class PredictionHead(eqx.Module):
    """A linear layer, followed by an activation and then a layer norm."""

    dense: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, config: ModernBertConfig, *, key: Any) -> None:
        size = config.hidden_size
        self.dense = eqx.nn.Linear(size, size, use_bias=config.classifier_bias, key=key)
        self.norm = eqx.nn.LayerNorm(size, eps=config.norm_eps, use_bias=config.norm_bias)

    def __call__(self, x: Hidden) -> Hidden:
        return each(self.norm, jax.nn.gelu(each(self.dense, x), approximate=False))


class AbstractModernBertClassifier(AbstractClassifier):
    """Abstract base class for both kinds of ModernBERT classifier."""

    model: ModernBert
    head: PredictionHead
    classifier: eqx.nn.Linear
    labels: Labels = eqx.field(static=True)

    def __init__(self, config: ModernBertConfig, *, key: Any) -> None:
        body, head, classifier = jax.random.split(key, 3)
        self.model, self.labels = ModernBert(config, key=body), config.labels
        self.head = PredictionHead(config, key=head)
        self.classifier = eqx.nn.Linear(config.hidden_size, config.num_labels, key=classifier)

    @property
    def architecture(self) -> str:
        return "ModernBert" + (TOKENS if self.of_tokens else SEQUENCES)

    @property
    def head_parts(self) -> tuple[str, ...]:
        return ("head", "classifier")

    @property
    def layers(self) -> list[ModernBertLayer]:
        return self.model.layers


class ModernBertForSequenceClassification(AbstractModernBertClassifier):
    """Computes the class logits of a whole text, using ModernBERT."""

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Float[Array, " classes"]:
        seen = seen_of(ids, seen)
        hidden = self.model(ids, seen)
        # As in transformers, use the first position even if it happens to be padding.
        pooled = MODES["mean"](hidden, seen) if self.model.config.classifier_pooling == "mean" else hidden[0]
        return each(self.classifier, self.head(pooled[None]))[0]


class ModernBertForTokenClassification(AbstractModernBertClassifier):
    """Computes the class logits of each token in a text, using ModernBERT."""

    of_tokens: ClassVar[bool] = True

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Float[Array, "tokens classes"]:
        return each(self.classifier, self.head(self.model(ids, seen)))
