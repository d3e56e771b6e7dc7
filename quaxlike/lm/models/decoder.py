"""The decoder-only transformer: a single model for every architecture in the table.

Arrays are named as in transformers' checkpoints, so that loading doesn't need to translate names. Tokens only
attend to earlier tokens in the same segment. The mask, the positions and the cache must always be consistent
with each other: otherwise generating a text token by token gives different results to calling the model once
on the whole text.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ...surgery.stacking import stack_layers, unstack_layers
from ..families import FAMILIES
from .attention import Attention
from .attention_blocks import Sight
from .decoder_config import DecoderConfig
from .experts_beside import OF_LAYER as OF_EXPERTS
from .experts_beside import of_layer as experts_of_layer
from .experts_beside import with_experts
from .feed_forward import MLP, SparseMLP
from .gated_delta_net import FusedGatedDeltaNet, GatedDeltaNet
from .layers import Hidden, Ids, Part, Seen, each, norm, seen_of, times_rows
from .mixer import AbstractMemory, AbstractMixer, Context
from .per_layer_input import OF_BODY, OF_LAYER, added, inputs_of_layers, of_body, of_layer
from .shared_attention import GlobalAttention, GlobalQueries, LocalAttention, LocalQueries

#: Maps the names used in the table of architectures to mixers.
MIXERS: dict[str, type[AbstractMixer]] = {
    "attention": Attention,
    "gated_delta_net": GatedDeltaNet,
    "fused_gated_delta_net": FusedGatedDeltaNet,
    "local_attention": LocalAttention,
    "global_attention": GlobalAttention,
    "local_queries": LocalQueries,
    "global_queries": GlobalQueries,
}
_ROLES = dict.fromkeys(mixer.role for mixer in MIXERS.values())
_NORMS = dict.fromkeys(name for family in FAMILIES.values() for name in family.norms)


_OTHERS = f"{OF_EXPERTS} {OF_LAYER} layer_scalar"


class DecoderLayer(Part, roles=f"{' '.join(_ROLES)} mlp {' '.join(_NORMS)} {_OTHERS}"):
    role: str = eqx.field(static=True)
    """The name of the field containing the mixer."""

    def __init__(self, config: DecoderConfig, i: int, key: Any) -> None:
        mixing, mlp = jax.random.split(key)
        norms = {name: norm(config, config.hidden_size) for name in config.family.norms if name}
        sparse = config.sparse[i] and not config.family.experts_beside
        feed_forward = SparseMLP(config, mlp) if sparse else MLP(config, config.mlp_size(i), mlp)
        made = MIXERS[config.mixers[i]](config, mixing)
        parts = {made.role: made, "mlp": feed_forward, **norms, **of_layer(config, mlp)}
        parts |= experts_of_layer(config, i, mlp)
        if config.family.layer_scalars:
            parts["layer_scalar"] = jnp.ones(1)
        self._fill(config, **parts)
        self.role = made.role

    def __call__(
        self, x: Hidden, context: Context, memory: AbstractMemory | None, start: Any
    ) -> tuple[Hidden, AbstractMemory | None]:
        # Norms missing from an architecture have an empty name.
        before, after, before_mlp, after_mlp = self.config.family.norms
        y, memory = self.part(self.role)(self.normed(before, x), context, memory, start)
        x = x + self._scaled(self.normed(after, y))
        y = with_experts(self, x, self.part("mlp")(self.normed(before_mlp, x)))
        x = added(self, x + self._scaled(self.normed(after_mlp, y)), context.inputs)
        if (factor := self.part("layer_scalar")) is not None:
            x = x * lax.stop_gradient(factor).astype(x.dtype)[None]  # a buffer in transformers
        return x, memory

    def _scaled(self, y: Hidden) -> Hidden:
        factor = self.config.residual_multiplier
        return y if factor == 1 else y * jnp.asarray(factor, y.dtype)


class Body(Part, roles=f"embed_tokens wpe layers norm {OF_BODY}"):
    """A decoder without its output layer, i.e. everything up to and including the final norm."""

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c = config
        embed, position, *keys = jax.random.split(key, 2 + c.num_hidden_layers)
        learned = c.family.learned_positions
        self._fill(
            c,
            embed_tokens=eqx.nn.Embedding(c.vocab_size, c.hidden_size, key=embed),
            wpe=eqx.nn.Embedding(c.max_position_embeddings, c.hidden_size, key=position) if learned else None,
            layers=[DecoderLayer(c, i, k) for i, k in enumerate(keys)],
            norm=norm(c, c.hidden_size),
            **of_body(c, embed),
        )

    def __call__(
        self,
        ids: Ids,
        seen: Bool[Array, " room"],
        memory: Any = None,
        start: Any = 0,
        length: Any = None,
        segments: Ids | None = None,
    ) -> tuple[Hidden, Any]:
        """Computes the hidden states of the tokens at position `start` onwards and updates the memory.

        `seen` is False for padding. It covers all positions in the memory (see `Decoder.memory`) if there is
        one, and otherwise those in `ids`. If `ids` ends in padding then this must be masked out: not every
        mixer can overwrite a token it has already consumed.

        Some rotary frequencies depend on the text's `length`. By default this is the number of unmasked
        tokens. `segments` is as in `Decoder.hidden`.
        """
        c, layers = self.config, self.part("layers")
        places, last = _places(seen, segments)
        positions = lax.dynamic_slice_in_dim(jnp.maximum(places, 0), start, len(ids))
        x = each(self.part("embed_tokens"), ids)
        factor = c.hidden_size**0.5 if c.family.scaled_embedding else c.embedding_multiplier
        if factor != 1:
            x = x * jnp.asarray(factor, x.dtype)
        if c.family.learned_positions:
            x = x + each(self.part("wpe"), positions)
        if length is None and c.switches:
            length = _largest_of_batch(last + 1)  # texts in a batch share frequencies, as in transformers
        own = None if memory is None else start + jnp.arange(len(ids))
        contexts = self._contexts(seen, positions, own, length, x.dtype, segments)
        kinds, inputs = [int(window) for window in c.windows], inputs_of_layers(self, ids, x)
        if isinstance(layers, list):
            kept: Any = [None] * len(layers) if memory is None else list(memory)
            for i, layer in enumerate(layers):
                context, source = contexts[kinds[i]], c.sources[i]
                context = context if inputs is None else context._replace(inputs=inputs[i])
                x, kept[source] = layer(x, context, kept[source], start)
            memory = None if memory is None else kept
        else:  # the layers are stacked, so scan over them
            context_of = _chosen(contexts, kinds)

            def step(carry: Any, part: Any) -> Any:
                (x, memory), (layer, i, kind, own) = carry, part
                memory = None if memory is None else dataclasses.replace(memory, layer=i)
                x, memory = layer(x, context_of(kind)._replace(inputs=own), memory, start)
                return (x, None if memory is None else dataclasses.replace(memory, layer=None)), None

            order = jnp.arange(c.num_hidden_layers, dtype=jnp.int32)
            (x, memory), _ = lax.scan(step, (x, memory), (layers, order, jnp.asarray(kinds), inputs))
        return self.normed("norm", x), memory

    def _contexts(
        self, seen: Any, positions: Any, places: Any, length: Any, dtype: Any, segments: Any
    ) -> list[Context]:
        """Creates the contexts for layers with full attention and (if any) layers with sliding windows.

        All layers of one kind share a context, so compute it just once. `places` is as in `Sight.of`.
        """
        c = self.config
        rotations = [rope.rotation(positions, length, dtype) for rope in c.ropes] or [None]
        texts = None if segments is None else (segments, segments)
        sight_of = functools.partial(Sight.of, seen, places, after=0, texts=texts)
        factor = c.ropes[0].query_factor(positions, dtype) if c.ropes else None
        contexts = [Context(rotations[0], sight_of(), factor)]
        if any(c.windows):
            near = sight_of(before=c.sliding_window - 1 if c.sliding_window else None)
            contexts.append(Context(rotations[-1], near, factor))
        return contexts


_D = TypeVar("_D", bound="AbstractDecoder")


class AbstractDecoder(Part, roles="model"):
    """Abstract base class for decoders. Subclasses differ only in their output layer."""

    def hidden(self, ids: Ids, seen: Seen | None = None, segments: Ids | None = None) -> Hidden:
        """Computes the final hidden states of a text, or of several texts packed into a single row.

        **Arguments:**

        - `ids`, `seen`: as in `__call__`.
        - `segments`: each token's segment id. Texts with different ids don't attend to each other, and each
            text's positions start from 0. Default: a single text.
        """
        return self.body(ids, seen_of(ids, seen), segments=segments)[0]

    @property
    def body(self) -> Body:
        """The model without its output layer."""
        return self.part("model")

    @property
    def embedding(self) -> Any:
        """The embedding matrix, of shape `(vocab, hidden)`."""
        return self.body.part("embed_tokens").weight

    @property
    def layers(self) -> Any:
        """The layers, either as a list or as a single layer with arrays stacked along a leading axis."""
        return self.body.part("layers")

    def stacked(self: _D) -> _D:
        """Stacks all layers into a single one to scan over. See [`quaxlike.stack_layers`][].

        This compiles much faster, so `quaxlike.lm.finetune` uses it. For generation you should prefer a list:
        a scan copies each layer's weights out of the stack, and with just one token this is more expensive
        than the matrix-vector products themselves.
        """
        return self._with_layers(stack_layers) if isinstance(self.layers, list) else self

    def unstacked(self: _D) -> _D:
        """Inverts `stacked`. The layers become a list again, with the same names as in the checkpoint."""
        return self if isinstance(self.layers, list) else self._with_layers(unstack_layers)

    def _with_layers(self: _D, change: Any) -> _D:
        return eqx.tree_at(lambda model: model.layers, self, change(self.layers))

    def folds(self) -> dict[str, list[str]]:
        """Maps layers to the consumers of their output, for [`quaxlike.balance`][]. See `Family.folds`."""
        return self.config.family.folds()

    def tensors_of(self, name: str) -> list[str]:
        """Lists the checkpoint tensors making up an array. (Stacked experts have several.)"""
        family = self.config.family
        for ours, theirs in family.files.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        head, _, field = name.rpartition(".")
        if family.experts != "out_in" or not head.endswith(".experts"):
            return [name]
        gate, up, down = family.expert_files
        matrices = (gate, up) if field == "gate_up_proj" else (down,)
        return [f"{head}.{i}.{m}.weight" for i in range(self.config.num_local_experts) for m in matrices]


class Decoder(AbstractDecoder, roles="model lm_head"):
    """A causal language model, computing next-token logits for every token in a text.

    Its structure is determined by `config.json` along with the table of architectures
    (`quaxlike.lm.FAMILIES`). Arrays are named as in transformers, but experts are stacked.

    If the output layer is tied to the embedding, then `lm_head` is None. Both share a single array in this
    case, and any adapter for it applies to both.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.lm.models import Decoder, DecoderConfig

        config = DecoderConfig.from_json(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "hidden_size": 32,
                "intermediate_size": 64,
                "head_dim": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 50,
            }
        )
        model = Decoder(config, key=jax.random.key(0))
        logits = model(jnp.arange(5))  # (5, 50)
        ```
    """

    def __init__(self, config: DecoderConfig, *, key: Any) -> None:
        body, head = jax.random.split(key)
        own = None if config.tie_word_embeddings or config.headless else _head(config, head)
        self._fill(config, model=Body(config, body), lm_head=own)

    def __call__(self, ids: Ids, seen: Seen | None = None) -> Float[Array, "tokens vocab"]:
        """Computes the logits for a single sequence.

        **Arguments:**

        - `ids`: the tokens.
        - `seen`: False for padding, which can be on either side and isn't counted towards positions.
            Default: no padding.

        **Raises:** `ValueError` if `ids` isn't a single text.
        """
        return self.logits(self.hidden(ids, seen))

    def logits(self, hidden: Hidden) -> Float[Array, "tokens vocab"]:
        """Applies the output layer.

        **Raises:** `ValueError` if there isn't one, e.g. in decoders from sentence-transformers.
        """
        head = self.part("lm_head")
        if self.config.headless:
            raise ValueError("This decoder has no output layer, and so no logits: it embeds texts.")
        out = times_rows(hidden, self.embedding) if head is None else each(head, hidden)
        if (divisor := self.config.logits_scaling) != 1:
            out = out / jnp.asarray(divisor, out.dtype)
        cap = self.config.final_logit_softcapping
        return cap * jnp.tanh(out / cap) if cap else out

    def memory(self, room: int, cache: str | None = None) -> Any:
        """Creates an empty memory (key-value caches and/or recurrent states) for each layer.

        **Arguments:**

        - `room`: the maximum number of tokens.
        - `cache`: how to store keys and values; see [`quaxlike.lm.generate`][]. Default: in the model's
            dtype.

        **Returns:** a PyTree. (Call [`quaxlike.summary`][] on it to find out its size.)
        """
        c, dtype = self.config, self.embedding.dtype

        def empty(mixer: str) -> Any:
            return MIXERS[mixer].memory(c, room, dtype, cache)

        def stack(leaf: Any) -> Any:
            return jnp.zeros((c.num_hidden_layers, *leaf.shape), leaf.dtype)

        if isinstance(self.layers, list):
            return [empty(c.mixers[i]) if i == source else None for i, source in enumerate(c.sources)]
        # Scanned layers all have the same mixer, so their memories can be stacked too.
        return jax.tree.map(stack, eqx.filter_eval_shape(empty, c.mixers[0]))

    def with_separate_head(self) -> "Decoder":
        """Unties the output layer from the embedding. Initially its weight is still the same array."""
        if self.part("lm_head") is not None:
            return self
        # The weight is about to be replaced, so don't actually initialise it.
        head = eqx.filter_eval_shape(_head, self.config, jax.random.key(0))
        head = eqx.tree_at(lambda head: head.weight, head, self.embedding)
        return eqx.tree_at(lambda model: model.part("lm_head"), self, head, is_leaf=lambda x: x is None)


def _chosen(contexts: list[Context], kinds: list[int]) -> Callable[[Any], Context]:
    """Returns a function mapping a layer's kind to its context.

    If all layers have the same kind, then their window is static. Even then this indexes into stacked
    contexts: otherwise XLA sees the masks for all blocks are loop-invariant, hoists them out of the loop over
    layers, and keeps them all in memory.
    """
    reach = contexts[kinds[0]].sight.reach if len({*kinds}) == 1 else None
    contexts = [context._replace(sight=context.sight._replace(reach=reach)) for context in contexts]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *contexts)
    return lambda kind: jax.tree.map(lambda parts: parts[kind], stacked)


def _head(config: DecoderConfig, key: Any) -> eqx.nn.Linear:
    return eqx.nn.Linear(config.hidden_size, config.vocab_size, use_bias=False, key=key)


def _places(seen: Bool[Array, " room"], segments: Any) -> tuple[Int[Array, " room"], Any]:
    """Computes each token's position within its segment, along with the largest one."""
    order = jnp.arange(len(seen))
    if segments is None:
        count = jnp.cumsum(seen)
        # As in transformers, trailing padding continues the positions of the text before it.
        return jnp.where(seen, count - 1, order - jnp.argmax(seen)), count[-1] - 1
    first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    # Subtract the index at which each segment starts.
    places = order - lax.cummax(jnp.where(first, order, 0))
    return places, jnp.max(jnp.where(seen, places, 0))


@jax.custom_batching.custom_vmap
def _largest_of_batch(x: Any) -> Any:
    """The identity function, or under `jax.vmap` the maximum over the batch.

    All texts in a batch share their rotary frequencies in this way.
    """
    return x


@_largest_of_batch.def_vmap
def _(axis_size: int, in_batched: Any, x: Any) -> Any:
    return _largest_of_batch(jnp.max(x, axis=0) if in_batched[0] else x), False
