"""Mixtures of experts: a router, and the matrices of all experts in stacks."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..kernels.multilinear import varying_zeros
from ..sharding.meshes import expert_axis, mesh_of
from .families import DecoderConfig


class Experts(eqx.Module):
    """All experts of a layer: stacks of matrices, stored as `(experts, out, in)` or, by GPT-OSS,
    `(experts, in, out)`."""

    gate_up_proj: Float[Array, "experts rows columns"]
    down_proj: Float[Array, "experts rows columns"]
    gate_up_proj_bias: Float[Array, "experts wide"] | None
    down_proj_bias: Float[Array, "experts hidden"] | None
    config: DecoderConfig = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        n, hidden, size = config.num_local_experts, config.hidden_size, config.moe_intermediate_size
        up, down = jax.random.split(key)
        shapes = (n, 2 * size, hidden), (n, hidden, size)
        if config.family.experts == "in_out":
            shapes = tuple((n, columns, rows) for _, rows, columns in shapes)
        self.gate_up_proj = 0.02 * jax.random.normal(up, shapes[0])
        self.down_proj = 0.02 * jax.random.normal(down, shapes[1])
        bias = config.family.expert_bias
        self.gate_up_proj_bias = jnp.zeros((n, 2 * size)) if bias else None
        self.down_proj_bias = jnp.zeros((n, hidden)) if bias else None
        self.config = config

    @property
    def weight_layouts(self) -> dict[str, str]:
        """For `quaxlike.layouts`: how the matrices of the stacks are stored."""
        layout = "io" if self.config.family.experts == "in_out" else "oi"
        return {"gate_up_proj": layout, "down_proj": layout}

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        chosen: Int[Array, "tokens choices"],
        share: Float[Array, "tokens choices"],
    ) -> Float[Array, "tokens hidden"]:
        """Sums what the chosen experts make of each token, by their shares.

        On a mesh whose devices can share the experts evenly ([`quaxlike.sharding.expert_parallel`][]) each
        runs its own, on all tokens, and one sum over devices follows. No weight moves.
        """
        mesh = mesh_of((self, x))
        axis = None if mesh is None else expert_axis(mesh, self._count)
        if axis is None:
            return self._sum(x, chosen, share)

        def of_device(
            own: Experts, numbers: Array, x: Array, chosen: Array, share: Array
        ) -> Float[Array, "tokens hidden"]:
            chosen = chosen - numbers[0]
            is_own = (chosen >= 0) & (chosen < len(numbers))
            y = own._sum(x, jnp.where(is_own, chosen, 0), jnp.where(is_own, share, 0))
            return lax.psum(y, axis)

        whole, cut = jax.P(), jax.P(axis)
        return jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(cut, cut, whole, whole, whole),
            out_specs=whole,
            axis_names={axis},
        )(self, jnp.arange(self._count), x, chosen, share)

    @property
    def _count(self) -> int:
        return self.gate_up_proj.shape[0]

    def _sum(self, x: Array, chosen: Array, share: Array) -> Array:
        """The sum over the experts that are here.

        Few tokens (decoding) look their experts up. Many pass through all experts in turn, those of others
        with a share of 0: no array grows with tokens times experts, whatever type the stacks are of.
        """
        n, (tokens, choices) = self._count, chosen.shape
        zeros = varying_zeros(x.shape, x.dtype, x, share)
        if tokens * choices < n:
            pairs = jnp.repeat(jnp.arange(tokens), choices), chosen.reshape(-1), share.reshape(-1)

            def add_choice(y: Array, pair: Any) -> tuple[Array, None]:
                token, expert, part = pair
                return y.at[token].add(part * self._of(expert)._one(x[token][None])[0]), None

            return lax.scan(add_choice, zeros, pairs)[0]
        shares = jnp.zeros((tokens, n), share.dtype).at[jnp.arange(tokens)[:, None], chosen].add(share)

        def add_expert(y: Array, part: Any) -> tuple[Array, None]:
            expert, share = part
            return y + share[:, None] * expert._one(x), None

        return lax.scan(add_expert, zeros, (self, shares.T))[0]

    def _of(self, i: Any) -> "Experts":
        """The matrices of one expert."""
        return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), self)

    def _one(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """One expert, whose matrices have no leading axis."""
        wide = self._product(x, self.gate_up_proj, self.gate_up_proj_bias)
        if self.config.family.interleaved:  # SwiGLU as GPT-OSS has it
            limit = self.config.swiglu_limit
            gate, up = jnp.minimum(wide[:, ::2], limit), jnp.clip(wide[:, 1::2], -limit, limit)
            wide = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        else:
            gate, up = jnp.split(wide, 2, axis=-1)
            wide = jax.nn.silu(gate) * up
        return self._product(wide, self.down_proj, self.down_proj_bias)

    def _product(self, x: Array, w: Array, bias: Array | None) -> Array:
        y = x @ w if self.config.family.experts == "in_out" else x @ w.T
        return y if bias is None else y + bias[None]


def route(
    logits: Float[Array, "tokens experts"], config: DecoderConfig
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """The experts of each token and their shares.

    Shares that are made to add up to one are the softmax of the chosen logits alone, as GPT-OSS has it.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    share, chosen = lax.top_k(probabilities, config.num_experts_per_tok)
    if config.norm_topk_prob:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    return chosen, share.astype(logits.dtype)
