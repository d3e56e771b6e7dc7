"""Feed-forward layers: plain MLPs, gated MLPs, and mixtures of experts.

All experts' matrices are stacked, so that they can be quantised or sharded in a single operation. Never
materialise the features for every (token, expert) pair: these don't fit into memory.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ...core.quaxify import quaxify
from ...kernels.multilinear import varying_zeros
from ...sharding.meshes import divided_along, expert_axis, mesh_of, whole_rows
from .decoder_config import DecoderConfig
from .layers import Hidden, Part, each, linears


def activation(config: DecoderConfig) -> Callable[[Array], Array]:
    return jax.nn.silu if config.family.activation == "silu" else jax.nn.gelu  # the tanh approximation


class MLP(Part, roles="gate_proj up_proj gate_up_proj down_proj"):
    def __init__(self, config: DecoderConfig, size: int, key: Any) -> None:
        c, family = config, config.family
        sizes = {"up_proj": size, "gate_proj": size} if family.gated else {"up_proj": size}
        sizes = {"gate_up_proj": 2 * size} if family.gated and family.fused else sizes
        first, last = jax.random.split(key)
        parts = linears(c, c.hidden_size, sizes, c.mlp_bias, first)
        self._fill(c, **parts, **linears(c, size, {"down_proj": c.hidden_size}, c.mlp_bias, last))

    def __call__(self, x: Hidden) -> Hidden:
        family, act = self.config.family, activation(self.config)
        if not family.gated:
            wide = act(each(self.part("up_proj"), x))
        elif family.fused:
            gate, up = jnp.split(each(self.part("gate_up_proj"), x), 2, axis=-1)
            wide = act(gate) * up
        else:
            wide = act(each(self.part("gate_proj"), x)) * each(self.part("up_proj"), x)
        return each(self.part("down_proj"), wide)


class SparseMLP(Part, roles="gate router experts shared_expert shared_expert_gate"):
    """A mixture of experts, optionally with a shared expert as in Qwen2-MoE."""

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c = config
        router, experts, shared, gate = jax.random.split(key, 4)
        linear = eqx.nn.Linear(c.hidden_size, c.num_local_experts, c.family.expert_bias, key=router)
        parts: dict[str, Any] = {c.family.router: linear, "shared_expert": None}
        if size := c.shared_expert_intermediate_size:
            parts["shared_expert"] = MLP(c, size, shared)
            parts["shared_expert_gate"] = eqx.nn.Linear(c.hidden_size, 1, use_bias=False, key=gate)
        self._fill(c, **parts, experts=Experts(c, experts))

    def __call__(self, x: Hidden) -> Hidden:
        y, shared = self.part("experts")(x, *route(self.logits(x), self.config)), self.part("shared_expert")
        if shared is None:
            return y
        return y + jax.nn.sigmoid(each(self.part("shared_expert_gate"), x)) * shared(x)

    def logits(self, x: Hidden) -> Float[Array, "tokens experts"]:
        """Computes the logits of the router, before any softmax."""
        return each(self.part(self.config.family.router), x)


class Experts(eqx.Module):
    """A layer's experts, stacked as `(experts, out, in)`, or as `(experts, in, out)` for GPT-OSS."""

    gate_up_proj: Float[Array, "experts rows columns"]
    down_proj: Float[Array, "experts rows columns"]
    gate_up_proj_bias: Float[Array, "experts wide"] | None
    down_proj_bias: Float[Array, "experts hidden"] | None
    config: DecoderConfig = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        n, hidden, size = config.num_local_experts, config.hidden_size, config.moe_intermediate_size
        self.config, bias = config, config.family.expert_bias
        up, down = jax.random.split(key)
        order = 1 if self._layout == "oi" else -1

        def make(key: Any, *sizes: Any) -> Any:
            return 0.02 * jax.random.normal(key, (n, *sizes[::order]))

        self.gate_up_proj, self.down_proj = make(up, 2 * size, hidden), make(down, hidden, size)
        self.gate_up_proj_bias = jnp.zeros((n, 2 * size)) if bias else None
        self.down_proj_bias = jnp.zeros((n, hidden)) if bias else None

    @property
    def _layout(self) -> str:
        return "io" if self.config.family.experts == "in_out" else "oi"

    @property
    def weight_layouts(self) -> dict[str, str]:
        """The layout of each stacked weight, for `quaxlike.layouts`."""
        return dict.fromkeys(("gate_up_proj", "down_proj"), self._layout)

    def __call__(
        self, x: Hidden, chosen: Int[Array, "tokens choices"], share: Float[Array, "tokens choices"]
    ) -> Hidden:
        """Applies the chosen experts to each token and computes the weighted sum of their outputs.

        If the experts are sharded evenly over a mesh (see [`quaxlike.lm.expert_parallel`][]), then each
        device applies its own experts to all tokens, followed by a single all-reduce. Only activations are
        communicated, never weights.
        """
        count, mesh = self.gate_up_proj.shape[0], mesh_of((self, x))
        axis = None if mesh is None else expert_axis(mesh, count)
        stacks, numbers = self, jnp.arange(count)
        if mesh is not None and axis is not None and axis in mesh.explicit_axes:
            stacks = divided_along(axis, self)
            numbers = jax.sharding.reshard(numbers, jax.NamedSharding(mesh, jax.P(axis)))
        if axis is None or stacks is None:
            return self._sum(x, chosen, share, count)

        def of_device(own: Experts, numbers: Array, x: Array, chosen: Array, share: Array) -> Array:
            # Index into the experts on this device. Those on other devices get a weight of zero.
            chosen = chosen - numbers[0]
            is_own = (chosen >= 0) & (chosen < len(numbers))
            chosen, share = jnp.where(is_own, chosen, 0), jnp.where(is_own, share, 0)
            return lax.psum(own._sum(x, chosen, share, len(numbers)), axis)

        whole, cut = jax.P(), jax.P(axis)
        specs = (cut, cut, whole, whole, whole)
        mapped = jax.shard_map(
            quaxify(of_device), mesh=mesh, in_specs=specs, out_specs=whole, axis_names={axis}
        )
        return mapped(stacks, numbers, x, chosen, share)

    def _sum(self, x: Array, chosen: Array, share: Array, count: int) -> Array:
        """Computes the weighted sum over the `count` experts on this device.

        For only a few tokens (typically when decoding), this indexes into the stacks once for each (token,
        expert) pair. Otherwise it loops over all experts and applies each one to every token, with a weight
        of 0 if it wasn't chosen. Both work for any type of weight.
        """
        tokens, choices = chosen.shape
        zeros = varying_zeros(x.shape, x.dtype, x, share)
        if tokens * choices < count:
            pairs = jnp.repeat(jnp.arange(tokens), choices), chosen.reshape(-1), share.reshape(-1)

            def add_choice(y: Array, pair: Any) -> tuple[Array, None]:
                token, i, part = pair
                own = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), self)
                return y.at[token].add(part * own._one(x[token][None])[0]), None

            return lax.scan(add_choice, zeros, pairs)[0]
        shares = jnp.zeros((tokens, count), share.dtype)
        shares = shares.at[jnp.arange(tokens)[:, None], chosen].add(share)

        def add_expert(y: Array, part: Any) -> tuple[Array, None]:
            expert, share = part
            return y + share[:, None] * expert._one(x), None

        return lax.scan(add_expert, zeros, (self, shares.T))[0]

    def _one(self, x: Hidden) -> Hidden:
        """Applies a single expert. Weights must not have a leading axis here."""
        wide = self._product(x, self.gate_up_proj, self.gate_up_proj_bias)
        if self.config.family.interleaved:  # the variant of SwiGLU in GPT-OSS
            limit = self.config.swiglu_limit
            gate, up = jnp.minimum(wide[:, ::2], limit), jnp.clip(wide[:, 1::2], -limit, limit)
            wide = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        else:
            gate, up = jnp.split(wide, 2, axis=-1)
            wide = activation(self.config)(gate) * up
        return self._product(wide, self.down_proj, self.down_proj_bias)

    def _product(self, x: Array, w: Array, bias: Array | None) -> Array:
        y = x @ w if self._layout == "io" else x @ w.T
        return y if bias is None else y + bias[None]


def route(
    logits: Float[Array, "tokens experts"], config: DecoderConfig
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """Selects the experts for each token, along with their weights.

    If weights are normalised then the softmax is only over the chosen logits. In particular, all other logits
    have a gradient of zero.
    """
    scores, overall = whole_rows(logits).astype(jnp.float32), not config.norm_topk_prob
    share, chosen = lax.top_k(jax.nn.softmax(scores) if overall else scores, config.num_experts_per_tok)
    return chosen, (share if overall else jax.nn.softmax(share)).astype(logits.dtype)
