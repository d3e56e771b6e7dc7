"""The decoder: one model for all architectures of the table, its arrays named as in their checkpoints."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..surgery.stacking import stack_layers, unstack_layers
from .experts import Experts, route
from .families import DecoderConfig
from .layers import Conv1D, attend, each, heads
from .rope import of_batch, rotate


class Part(eqx.Module):
    """A part of the model, whose own parts go by the names of the checkpoint; those it lacks are None."""

    config: DecoderConfig = eqx.field(static=True)

    def _fill(self, config: DecoderConfig, **parts: Any) -> None:
        names = {config.family.parts.get(role, role): part for role, part in parts.items()}
        for field in dataclasses.fields(self):
            setattr(self, field.name, names.get(field.name))
        self.config = config

    def part(self, role: str) -> Any:
        """A part by the name that Llama has for it."""
        return getattr(self, self.config.family.parts.get(role, role))

    def normed(self, name: str, x: Array) -> Array:
        """`x` after the norm of this name; as it is if there is none."""
        if not name:
            return x
        norm = self.part(name)
        if offset := self.config.family.norm_offset:
            norm = eqx.tree_at(lambda norm: norm.weight, norm, norm.weight + offset)
        return each(norm, x)


class Attention(Part):
    q_proj: Any = None
    k_proj: Any = None
    v_proj: Any = None
    qkv_proj: Any = None
    o_proj: Any = None
    q_norm: Any = None
    k_norm: Any = None
    sinks: Any = None
    c_attn: Any = None
    c_proj: Any = None

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c, family = config, config.family
        q, k, v, o = jax.random.split(key, 4)
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        bias = c.attention_bias if family.qkv_bias is None else family.qkv_bias
        if family.fused:
            parts = {"qkv_proj": _linear(c, c.hidden_size, wide + 2 * narrow, bias, q)}
        else:
            sizes = {"q_proj": (wide, q), "k_proj": (narrow, k), "v_proj": (narrow, v)}
            parts = {name: _linear(c, c.hidden_size, n, bias, key) for name, (n, key) in sizes.items()}
        bias = c.attention_bias if family.output_bias is None else family.output_bias
        parts["o_proj"] = _linear(c, wide, c.hidden_size, bias, o)
        if family.qk_norm:
            sizes = (c.head_dim, c.head_dim) if family.qk_norm == "heads" else (wide, narrow)
            parts |= {"q_norm": _norm(c, sizes[0]), "k_norm": _norm(c, sizes[1])}
        self._fill(c, **parts, sinks=jnp.zeros(c.num_attention_heads) if family.sinks else None)

    def __call__(
        self, x: Float[Array, "tokens hidden"], context: "Context", memory: "Memory | None", start: Any
    ) -> tuple[Float[Array, "tokens hidden"], "Memory | None"]:
        c = self.config
        if c.family.fused:
            wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            query, key, value = jnp.split(each(self.part("qkv_proj"), x), [wide, wide + narrow], axis=-1)
        else:
            query, key, value = (each(self.part(f"{name}_proj"), x) for name in "qkv")
        if c.family.qk_norm == "whole":
            query, key = self.normed("q_norm", query), self.normed("k_norm", key)
        query, key, value = (heads(part, part.shape[-1] // c.head_dim) for part in (query, key, value))
        if c.family.qk_norm == "heads":
            query, key = (
                jax.vmap(lambda x, name=name: self.normed(name, x))(part)
                for name, part in (("q_norm", query), ("k_norm", key))
            )
        query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if memory is not None:
            key, value = (
                lax.dynamic_update_slice(old, new.astype(old.dtype), (start, 0, 0))
                for old, new in zip(memory, (key, value), strict=True)
            )
            memory = Memory(key, value)
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else None
        out = attend(
            query, key, value, context.mask, scale=scale, softcap=c.attn_logit_softcapping, sinks=self.sinks
        )
        return each(self.part("o_proj"), out), memory


class MLP(Part):
    gate_proj: Any = None
    up_proj: Any = None
    gate_up_proj: Any = None
    down_proj: Any = None
    c_fc: Any = None
    c_proj: Any = None

    def __init__(self, config: DecoderConfig, size: int, key: Any) -> None:
        c, bias = config, config.mlp_bias
        gate, up, down = jax.random.split(key, 3)
        parts = {"down_proj": _linear(c, size, c.hidden_size, bias, down)}
        if c.family.gated and c.family.fused:
            parts["gate_up_proj"] = _linear(c, c.hidden_size, 2 * size, bias, gate)
        else:
            parts["up_proj"] = _linear(c, c.hidden_size, size, bias, up)
            if c.family.gated:
                parts["gate_proj"] = _linear(c, c.hidden_size, size, bias, gate)
        self._fill(c, **parts)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        family = self.config.family
        act = jax.nn.silu if family.activation == "silu" else jax.nn.gelu  # by tanh
        if not family.gated:
            wide = act(each(self.part("up_proj"), x))
        elif family.fused:
            gate, up = jnp.split(each(self.gate_up_proj, x), 2, axis=-1)
            wide = act(gate) * up
        else:
            wide = act(each(self.gate_proj, x)) * each(self.part("up_proj"), x)
        return each(self.part("down_proj"), wide)


class SparseMLP(Part):
    """A router and its experts, beside one expert for all tokens (Qwen2-MoE)."""

    gate: Any = None
    router: Any = None
    experts: Any = None
    shared_expert: Any = None
    shared_expert_gate: Any = None

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c = config
        router, experts, shared, gate = jax.random.split(key, 4)
        linear = eqx.nn.Linear(c.hidden_size, c.num_local_experts, c.family.expert_bias, key=router)
        parts: dict[str, Any] = {c.family.router: linear, "experts": Experts(c, experts)}
        if size := c.shared_expert_intermediate_size:
            parts["shared_expert"] = MLP(c, size, shared)
            parts["shared_expert_gate"] = eqx.nn.Linear(c.hidden_size, 1, use_bias=False, key=gate)
        self._fill(c, **parts)

    def logits(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens experts"]:
        return each(self.part(self.config.family.router), x)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        y = self.experts(x, *route(self.logits(x), self.config))
        if self.shared_expert is not None:
            y = y + jax.nn.sigmoid(each(self.shared_expert_gate, x)) * self.shared_expert(x)
        return y


class Layer(Part):
    self_attn: Any = None
    mlp: Any = None
    input_layernorm: Any = None
    post_attention_layernorm: Any = None
    pre_feedforward_layernorm: Any = None
    post_feedforward_layernorm: Any = None
    attn: Any = None
    ln_1: Any = None
    ln_2: Any = None

    def __init__(self, config: DecoderConfig, sparse: bool, key: Any) -> None:
        attention, mlp = jax.random.split(key)
        norms = {name: _norm(config, config.hidden_size) for name in config.family.norms if name}
        dense = config.intermediate_size
        self._fill(
            config,
            self_attn=Attention(config, attention),
            mlp=SparseMLP(config, mlp) if sparse else MLP(config, dense, mlp),
            **norms,
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], context: "Context", memory: "Memory | None", start: Any
    ) -> tuple[Float[Array, "tokens hidden"], "Memory | None"]:
        before, after, before_mlp, after_mlp = self.config.family.norms
        y, memory = self.part("self_attn")(self.normed(before, x), context, memory, start)
        x = x + self.normed(after, y)
        y = self.part("mlp")(self.normed(before_mlp, x))
        return x + self.normed(after_mlp, y), memory


class Context(NamedTuple):
    """The inputs that layers of one kind share: rotations of heads, and the tokens that are seen."""

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    mask: Bool[Array, "tokens seen"]


class Memory(NamedTuple):
    """Keys and values of one layer, for as many tokens as there is room."""

    key: Float[Array, "room kv_heads size"]
    value: Float[Array, "room kv_heads size"]


class Body(Part):
    """The decoder without its output layer."""

    embed_tokens: Any = None
    layers: Any = None
    norm: Any = None
    wte: Any = None
    wpe: Any = None
    h: Any = None
    ln_f: Any = None

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c = config
        embed, position, *keys = jax.random.split(key, 2 + c.num_hidden_layers)
        learned = c.family.learned_positions
        self._fill(
            c,
            embed_tokens=eqx.nn.Embedding(c.vocab_size, c.hidden_size, key=embed),
            wpe=eqx.nn.Embedding(c.max_position_embeddings, c.hidden_size, key=position) if learned else None,
            layers=[Layer(c, sparse, k) for sparse, k in zip(c.sparse, keys, strict=True)],
            norm=_norm(c, c.hidden_size),
        )

    def __call__(
        self,
        ids: Int[Array, " tokens"],
        seen: Bool[Array, " room"],
        memory: Any = None,
        start: Any = 0,
        length: Any = None,
        segments: Int[Array, " tokens"] | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """The hidden states of the tokens from place `start` on, and the memory with theirs in it.

        **Arguments:**

        - `ids`: these tokens.
        - `seen`: of all places, those that hold a token and no padding.
        - `memory`: what `Decoder.memory` made, as long as `seen`. Default: none is kept; `ids` are all.
        - `start`: where the tokens belong.
        - `length`: of the text, where its frequencies depend on it. Default: as many as are `seen`.
        - `segments`: as of `Decoder.hidden`, where no memory is kept.
        """
        c = self.config
        places, last = _places(seen, segments)
        positions = lax.dynamic_slice_in_dim(jnp.maximum(places, 0), start, len(ids))
        x = each(self.part("embed_tokens"), ids)
        if c.family.scaled_embedding:
            x = x * jnp.asarray(c.hidden_size**0.5, x.dtype)
        if c.family.learned_positions:
            x = x + each(self.wpe, positions)
        if length is None and any(rope.long is not None for rope in c.ropes):
            length = of_batch(last + 1)
        contexts = self._contexts(seen, positions, start, length, x.dtype, segments)
        layers = self.part("layers")
        kinds = [int(window) for window in c.windows]
        if isinstance(layers, list):
            kept: Any = [None] * len(layers) if memory is None else list(memory)
            for i, layer in enumerate(layers):
                x, kept[i] = layer(x, contexts[kinds[i]], kept[i], start)
            memory = None if memory is None else kept
        else:  # stacked
            contexts = jax.tree.map(lambda *parts: jnp.stack(parts), *contexts)

            def step(x: Array, part: Any) -> Any:
                layer, kind, kept = part
                return layer(x, jax.tree.map(lambda parts: parts[kind], contexts), kept, start)

            x, memory = lax.scan(step, x, (layers, jnp.asarray(kinds), memory))
        return self.normed("norm", x), memory

    def _contexts(
        self, seen: Any, positions: Any, start: Any, length: Any, dtype: Any, segments: Any
    ) -> list[Context]:
        c, tokens = self.config, len(positions)
        rotations = [rope.rotation(positions, length, dtype) for rope in c.ropes] or [None]
        own, other = start + jnp.arange(tokens)[:, None], jnp.arange(len(seen))[None, :]
        mask = (other <= own) & seen[None, :]
        if segments is not None:
            mask = mask & (segments[:, None] == segments[None, :])
        contexts = [Context(rotations[0], mask)]
        if any(c.windows):
            contexts.append(Context(rotations[-1], mask & (other > own - c.sliding_window)))
        return contexts


class Decoder(Part):
    """Causal language modelling: for each token of one sequence the logits of the next.

    The table of architectures (`quaxlike.models.FAMILIES`) and `config.json` say what it is made of. Arrays
    have the names of transformers; experts are in stacks. Where the output layer is tied to the embedding,
    `lm_head` is None: one array, and one adapter.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.models import Decoder, DecoderConfig

        config = DecoderConfig.from_json({
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
        })
        model = Decoder(config, key=jax.random.key(0))
        logits = model(jnp.arange(5), jnp.ones(5, bool))  # (5, 50)
        ```
    """

    model: Any = None
    transformer: Any = None
    lm_head: Any = None

    def __init__(self, config: DecoderConfig, *, key: Any) -> None:
        body, head = jax.random.split(key)
        linear = eqx.nn.Linear(config.hidden_size, config.vocab_size, use_bias=False, key=head)
        self._fill(config, model=Body(config, body), lm_head=None if config.tie_word_embeddings else linear)

    def __call__(
        self, ids: Int[Array, " tokens"], seen: Bool[Array, " tokens"]
    ) -> Float[Array, "tokens vocab"]:
        """The logits of one sequence.

        **Arguments:**

        - `ids`: the tokens.
        - `seen`: which of them are no padding. That may be on either side; positions count tokens only.
        """
        return self.logits(self.hidden(ids, seen))

    def hidden(
        self,
        ids: Int[Array, " tokens"],
        seen: Bool[Array, " tokens"],
        segments: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """The hidden states that the output layer sees, of one sequence or of several in a row.

        **Arguments:**

        - `ids`, `seen`: as for the logits.
        - `segments`: for each token the number of its text. Texts do not see each other, and the positions of
            each begin at 0. Default: all are one text.
        """
        return self.part("model")(ids, seen, segments=segments)[0]

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens vocab"]:
        """The output layer."""
        if self.lm_head is None:
            out = hidden @ self.part("model").part("embed_tokens").weight.T
        else:
            out = each(self.lm_head, hidden)
        cap = self.config.final_logit_softcapping
        return cap * jnp.tanh(out / cap) if cap else out

    def memory(self, room: int, dtype: Any) -> Any:
        """An empty memory for as many tokens."""
        c = self.config
        layers = self.part("model").part("layers")
        stack = () if isinstance(layers, list) else (c.num_hidden_layers,)
        empty = jnp.zeros((*stack, room, c.num_key_value_heads, c.head_dim), dtype)
        return [Memory(empty, empty) for _ in layers] if isinstance(layers, list) else Memory(empty, empty)

    def stacked(self) -> "Decoder":
        """The same model with its layers as one ([`quaxlike.stack_layers`][]), which is scanned: the time to
        compile does not grow with their number."""
        layers = self.part("model").part("layers")
        return self._with_layers(stack_layers(layers)) if isinstance(layers, list) else self

    def unstacked(self) -> "Decoder":
        """The same model with a list of layers, under the names of the checkpoint."""
        layers = self.part("model").part("layers")
        return self if isinstance(layers, list) else self._with_layers(unstack_layers(layers))

    def _with_layers(self, layers: Any) -> "Decoder":
        return eqx.tree_at(lambda model: model.part("model").part("layers"), self, layers)

    def untied(self) -> "Decoder":
        """The same model with an output layer of its own: an array that is the embedding as it is now."""
        if self.lm_head is not None:
            return self
        c = self.config
        weight = self.part("model").part("embed_tokens").weight
        linear = eqx.filter_eval_shape(
            eqx.nn.Linear, c.hidden_size, c.vocab_size, use_bias=False, key=jax.random.key(0)
        )
        linear = eqx.tree_at(lambda linear: linear.weight, linear, weight)
        return eqx.tree_at(lambda model: model.lm_head, self, linear, is_leaf=lambda x: x is None)


def _places(seen: Bool[Array, " room"], segments: Any) -> tuple[Int[Array, " room"], Any]:
    """The place of each token in its text, and the last place of all."""
    order = jnp.arange(len(seen))
    if segments is None:
        count = jnp.cumsum(seen)
        # Padding behind a text counts on, as in transformers.
        return jnp.where(seen, count - 1, order - jnp.argmax(seen)), count[-1] - 1
    first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    places = order - lax.cummax(jnp.where(first, order, 0))
    return places, jnp.max(jnp.where(seen, places, 0))


def _linear(config: DecoderConfig, n_in: int, n_out: int, bias: bool, key: Any) -> Any:
    make = Conv1D if config.family.conv1d else eqx.nn.Linear
    return make(n_in, n_out, bias, key=key)


def _norm(config: DecoderConfig, size: int) -> Any:
    if config.family.layer_norm:
        return eqx.nn.LayerNorm(size, eps=config.rms_norm_eps)
    return eqx.nn.RMSNorm(size, eps=config.rms_norm_eps, use_bias=False)
