"""Gated DeltaNet: linear attention using the delta rule with decay.

Each layer has a state of fixed size, so unlike in attention the cost per token doesn't depend on the number
of previous tokens. Each token looks up the value predicted by the state for its key, corrects this towards
the actual value, and then reads from the state.

Yang et al., Gated Delta Networks (2024), as in Qwen3-Next and Qwen3.5.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...kernels.multilinear import varying_zeros
from ..folders.model_config import refused
from .decoder_config import DecoderConfig
from .layers import Hidden, each
from .mixer import AbstractMemory, AbstractMixer, Context

_CHUNK = 64  # tokens per triangular solve. The work inside a chunk is quadratic in this.


class RecurrentState(AbstractMemory):
    """A layer's recurrent state: a matrix for each head, and the latest inputs to the convolution.

    If layers are scanned over, then both arrays have a leading layer axis.
    """

    by_place: ClassVar = False

    heads: Float[Array, "*layers heads key_size value_size"]
    inputs: Float[Array, "*layers width features"]
    places: int = eqx.field(static=True)
    """The capacity of the caches in other layers, for reporting as `room`. (The state has a fixed size.)"""
    layer: Int[Array, ""] | None = None

    @property
    def room(self) -> int:
        return self.places

    def grown(self, more: int) -> "RecurrentState":
        return dataclasses.replace(self, places=self.places + more)

    def read(self) -> tuple[Array, Array]:
        """Returns the state matrices and the convolution inputs for this layer."""
        if self.layer is None:
            return self.heads, self.inputs
        return self.heads[self.layer], self.inputs[self.layer]

    def written(self, heads: Array, inputs: Array) -> "RecurrentState":
        heads, inputs = heads.astype(self.heads.dtype), inputs.astype(self.inputs.dtype)
        if self.layer is not None:
            heads = self.heads.at[self.layer].set(heads)
            inputs = self.inputs.at[self.layer].set(inputs)
        return dataclasses.replace(self, heads=heads, inputs=inputs)


class _Sizes:
    """The number of heads and their sizes, derived from the configuration."""

    def __init__(self, config: DecoderConfig) -> None:
        self.width = config.size("linear_conv_kernel_dim")
        self.key, self.value = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
        self.key_heads = config.size("linear_num_key_heads")
        self.heads = config.size("linear_num_value_heads")
        if self.heads % self.key_heads != 0:
            needed = f"a multiple of linear_num_key_heads, which is {self.key_heads}"
            raise refused("linear_num_value_heads", self.heads, config.architecture, needed)
        self.shared = self.heads // self.key_heads
        self.keys, self.values = self.key_heads * self.key, self.heads * self.value
        self.convolved = 2 * self.keys + self.values


class AbstractGatedDeltaNet(AbstractMixer):
    """A Gated DeltaNet without its input projections. Value heads can share query and key heads."""

    conv1d: eqx.AbstractVar[eqx.nn.Conv1d]
    dt_bias: eqx.AbstractVar[Float[Array, " heads"]]
    A_log: eqx.AbstractVar[Float[Array, " heads"]]
    norm: eqx.AbstractVar[eqx.nn.RMSNorm]
    out_proj: eqx.AbstractVar[eqx.nn.Linear]
    config: eqx.AbstractVar[DecoderConfig]

    def _begin(self, config: DecoderConfig, key: Any, **sizes: int) -> None:
        """Initialises all parameters. `sizes` are the output features of the input projections."""
        s, keys = _Sizes(config), jax.random.split(key, 3 + len(sizes))
        for (name, size), own in zip(sizes.items(), keys[3:], strict=True):
            setattr(self, name, eqx.nn.Linear(config.hidden_size, size, use_bias=False, key=own))
        n = s.convolved
        self.conv1d = eqx.nn.Conv1d(n, n, s.width, groups=n, use_bias=False, key=keys[0])
        self.dt_bias = jnp.ones(s.heads)
        self.A_log = jnp.log(jax.random.uniform(keys[1], (s.heads,), minval=0.01, maxval=16.0))
        self.norm = eqx.nn.RMSNorm(s.value, eps=config.rms_norm_eps, use_bias=False)
        self.out_proj = eqx.nn.Linear(s.values, config.hidden_size, use_bias=False, key=keys[2])
        self.config = config

    @abc.abstractmethod
    def projected(self, x: Hidden) -> tuple[Array, Array, Array, Array]:
        """Computes four projections of each token.

        In order: the queries, keys and values (all concatenated), the output gates (concatenated too), and
        two numbers per head, i.e. the pre-activations of the correction's learning rate and of the decay.
        """

    def __call__(
        self, x: Hidden, context: Context, memory: RecurrentState | None, start: Any
    ) -> tuple[Hidden, RecurrentState | None]:
        s, sight = _Sizes(self.config), context.sight
        seen, texts = sight.seen[sight.places], None if sight.texts is None else sight.texts[0]
        mixed, gate, corrects, forgets = self.projected(x)
        # Padding must not change the state, so set its inputs, learning rates and log-decays to zero.
        mixed = jnp.where(seen[:, None], mixed, 0)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        if memory is None:
            state = varying_zeros((s.heads, s.key, s.value), dtype, mixed, forgets)
            past = varying_zeros((s.width - 1, s.convolved), mixed.dtype, mixed)
        else:
            state, past = memory.read()
        age = None if texts is None else _age(texts)
        inputs = jnp.concatenate([past.astype(mixed.dtype), mixed])
        mixed = jax.nn.silu(_convolved(inputs, self.conv1d.weight[:, 0], age)).astype(dtype)
        query, key, value = jnp.split(mixed, [s.keys, 2 * s.keys], axis=-1)
        query, key = (_normalised(part.reshape(len(x), s.key_heads, s.key)) for part in (query, key))
        query, key = (jnp.repeat(part, s.shared, axis=1) for part in (query * s.key**-0.5, key))
        share = jnp.where(seen[:, None], jax.nn.sigmoid(corrects.astype(dtype)), 0)
        rate = jax.nn.softplus(forgets.astype(dtype) + self.dt_bias.astype(dtype)[None])
        decay = jnp.where(seen[:, None], -jnp.exp(self.A_log.astype(dtype))[None] * rate, 0)
        value = value.reshape(len(x), s.heads, s.value)
        first = None if age is None else age == 0
        out, state = gated_delta_rule(query, key, value, decay, share, state.astype(dtype), first)
        out = jax.vmap(jax.vmap(self.norm))(out.astype(x.dtype)).astype(dtype)
        out = out * jax.nn.silu(gate.astype(dtype)).reshape(out.shape)
        if memory is not None:
            # Keep the most recent inputs for the next call, other than trailing padding.
            end = jnp.max(jnp.where(seen, jnp.arange(1, len(x) + 1), 0))
            memory = memory.written(state, lax.dynamic_slice_in_dim(inputs, end, s.width - 1))
        return each(self.out_proj, out.reshape(len(x), -1).astype(x.dtype)), memory

    @classmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> RecurrentState:
        s, wide = _Sizes(config), jnp.promote_types(dtype, jnp.float32)
        heads = jnp.zeros((s.heads, s.key, s.value), wide)
        return RecurrentState(heads, jnp.zeros((s.width - 1, s.convolved), dtype), room)


class GatedDeltaNet(AbstractGatedDeltaNet):
    """The variant in Qwen3.5. Each of the four inputs has a separate projection."""

    in_proj_qkv: eqx.nn.Linear
    in_proj_z: eqx.nn.Linear
    in_proj_b: eqx.nn.Linear
    in_proj_a: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    dt_bias: Float[Array, " heads"]
    A_log: Float[Array, " heads"]
    norm: eqx.nn.RMSNorm
    out_proj: eqx.nn.Linear
    config: DecoderConfig = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        s = _Sizes(config)
        sizes = {"in_proj_qkv": s.convolved, "in_proj_z": s.values}
        self._begin(config, key, **sizes, in_proj_b=s.heads, in_proj_a=s.heads)

    def projected(self, x: Hidden) -> tuple[Array, Array, Array, Array]:
        qkv, z, b, a = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return each(qkv, x), each(z, x), each(b, x), each(a, x)


class FusedGatedDeltaNet(AbstractGatedDeltaNet):
    """The variant in Qwen3-Next. It has two projections, with outputs interleaved by key head."""

    in_proj_qkvz: eqx.nn.Linear
    in_proj_ba: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    dt_bias: Float[Array, " heads"]
    A_log: Float[Array, " heads"]
    norm: eqx.nn.RMSNorm
    out_proj: eqx.nn.Linear
    config: DecoderConfig = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        s = _Sizes(config)
        self._begin(config, key, in_proj_qkvz=s.convolved + s.values, in_proj_ba=2 * s.heads)

    def projected(self, x: Hidden) -> tuple[Array, Array, Array, Array]:
        s, n = _Sizes(self.config), len(x)
        qkvz = each(self.in_proj_qkvz, x).reshape(n, s.key_heads, -1)
        ends = [s.key, 2 * s.key, 2 * s.key + s.shared * s.value]
        query, key, value, gate = (part.reshape(n, -1) for part in jnp.split(qkvz, ends, axis=-1))
        ba = jnp.split(each(self.in_proj_ba, x).reshape(n, s.key_heads, -1), 2, axis=-1)
        corrects, forgets = (part.reshape(n, -1) for part in ba)
        return jnp.concatenate([query, key, value], axis=-1), gate, corrects, forgets


def _normalised(x: Float[Array, "tokens heads size"]) -> Float[Array, "tokens heads size"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _age(texts: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
    """Counts the tokens preceding each token in the same text.

    If a text started in an earlier call, then the count is unknown, so this returns a large number.
    """
    order, begins = jnp.arange(len(texts)), texts[1:] != texts[:-1]
    begins = jnp.concatenate([jnp.zeros(1, bool), begins])
    return order - lax.cummax(jnp.where(begins, order, -(2**30)))


def _convolved(
    inputs: Float[Array, "past_and_tokens features"],
    weight: Float[Array, "features width"],
    age: Int[Array, " tokens"] | None,
) -> Float[Array, "tokens features"]:
    """A causal depthwise convolution. Inputs of different packed texts aren't mixed."""
    width = weight.shape[1]
    tokens, out = len(inputs) - width + 1, inputs[width - 1 :] * weight[None, :, -1]
    for i in range(width - 1):
        part = inputs[i : i + tokens]
        if age is not None:
            # Ignore inputs from a previous text.
            part = jnp.where((age >= width - 1 - i)[:, None], part, 0)
        out = out + part * weight[None, :, i]
    return out


def gated_delta_rule(
    query: Float[Array, "tokens heads key_size"],
    key: Float[Array, "tokens heads key_size"],
    value: Float[Array, "tokens heads value_size"],
    decay: Float[Array, "tokens heads"],
    share: Float[Array, "tokens heads"],
    state: Float[Array, "heads key_size value_size"],
    first: Bool[Array, " tokens"] | None = None,
) -> tuple[Float[Array, "tokens heads value_size"], Float[Array, "heads key_size value_size"]]:
    """Applies the gated delta rule. Returns the output for each token along with the final state.

    Mathematically, a token with key k and value v updates the state S to exp(decay) S + share · k (v −
    exp(decay) Sᵀ k)ᵀ, and then outputs Sᵀ q. The corrections within a chunk of 64 tokens solve a triangular
    system, so this goes chunk by chunk rather than token by token.

    **Arguments:**

    - `decay`: the logarithm of the decay. This must not be positive.
    - `share`: the learning rate for each correction, between 0 and 1.
    - `first`: whether each token is the first in a new text, and so resets the state to zero. Default: False
        for all tokens.
    """
    if len(key) == 1 and first is None:
        out, state = _of_one(query[0], key[0], value[0], decay[0], share[0], state)
        return out[None], state
    tokens = len(key)
    size = min(_CHUNK, tokens)
    chunks = -(-tokens // size)

    def cut(x: Shaped[Array, "tokens *rest"]) -> Shaped[Array, "chunks size *rest"]:
        x = jnp.pad(x, [(0, chunks * size - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(chunks, size, *x.shape[1:])

    query, key, value, decay, share = (jnp.moveaxis(cut(x), 2, 1) for x in (query, key, value, decay, share))
    total = jnp.cumsum(decay, axis=-1)  # (chunks, heads, size)
    text = jnp.cumsum(cut(jnp.zeros(tokens, bool) if first is None else first), axis=-1)
    # Mask the exponent rather than the exponential. The exponent is positive for later tokens, so the
    # exponential could overflow there. The gradient would then be NaN even with the infinity masked out.
    sees = jnp.tril(text[:, :, None] == text[:, None, :])[:, None]
    fade = jnp.exp(jnp.where(sees, total[..., :, None] - total[..., None, :], -jnp.inf))
    since_start = jnp.where((text == 0)[:, None], jnp.exp(total), 0)
    to_end = jnp.where((text == text[:, -1:])[:, None], jnp.exp(total[..., -1:] - total), 0)
    # The corrections in a chunk depend on each other (via a unit triangular system) and on the state at the
    # start of the chunk. The latter dependence is affine, so solve for its offset `new` and its matrix `read`
    # in parallel over all chunks. Then just scan over the chunks to obtain their states.
    shared = share[..., None] * key
    system = (shared @ jnp.swapaxes(key, -1, -2)) * fade
    sides = jnp.concatenate([share[..., None] * value, since_start[..., None] * shared], axis=-1)
    solved = solve_triangular(system, sides, lower=True, unit_diagonal=True)
    new, read = jnp.split(solved, [value.shape[-1]], axis=-1)
    within = (query @ jnp.swapaxes(key, -1, -2)) * fade
    query, key = since_start[..., None] * query, to_end[..., None] * key

    def step(state: Array, part: Any) -> tuple[Array, Array]:
        query, key, within, new, read, kept = part
        new = new - read @ state
        out = query @ state + within @ new
        return kept[:, None, None] * state + jnp.swapaxes(key, -1, -2) @ new, out

    state, out = lax.scan(step, state, (query, key, within, new, read, since_start[..., -1]))
    return jnp.moveaxis(out, 1, 2).reshape(chunks * size, *out.shape[1::2])[:tokens], state


def _of_one(
    query: Array, key: Array, value: Array, decay: Array, share: Array, state: Array
) -> tuple[Array, Array]:
    state = jnp.exp(decay)[:, None, None] * state
    wrong = value - jnp.sum(state * key[:, :, None], axis=1)
    state = state + key[:, :, None] * (share[:, None] * wrong)[:, None, :]
    return jnp.sum(state * query[:, :, None], axis=1), state
