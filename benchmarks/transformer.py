"""The tracing of a 12-layer transformer with weights in LoRA over NF4, and of the same model by hand."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import quaxlike as ql
from quaxlike.kernels import lora_matmul

from .harness import Case

LAYERS, WIDTH, HEADS, TOKENS = 12, 64, 4, 8


class Block(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        linear = lambda i, o, k: eqx.nn.Linear(i, o, use_bias=False, key=k)
        self.query, self.key, self.value, self.output = (linear(WIDTH, WIDTH, k) for k in keys[:4])
        self.up, self.down = linear(WIDTH, 4 * WIDTH, keys[4]), linear(4 * WIDTH, WIDTH, keys[5])


def _block(block: Any, x: jax.Array, linear: Any) -> jax.Array:
    heads = lambda y: y.reshape(TOKENS, HEADS, WIDTH // HEADS)
    q, k, v = (heads(linear(layer, x)) for layer in (block.query, block.key, block.value))
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    mixed = jnp.einsum("hqk,khd->qhd", scores, v).reshape(TOKENS, WIDTH)
    x = x + linear(block.output, mixed)
    return x + linear(block.down, jax.nn.relu(linear(block.up, x)))


def _model(blocks: Any, x: jax.Array, linear: Any) -> jax.Array:
    for block in blocks:
        x = _block(block, x, linear)
    return x


def _ordinary(layer: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    return x @ layer.weight.T


def _by_hand(layer: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    """What the rules of LoraArray and NF4Array come to."""
    lora = layer.weight
    base = lora.w
    return lora_matmul(
        x,
        base.codes.reshape(-1),
        base.scale.reshape(-1),
        jnp.asarray(base.codebook),
        lora.a,
        lora.b,
        shape=base.shape,
        block_size=64,
        scaling=lora.scaling,
    )


def _lora_by_hand(layer: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    lora = layer.weight
    return x @ lora.w.T + lora.scaling * ((x @ lora.a.T) @ lora.b.T)


def traced(*, quantised: bool, by_hand: bool) -> tuple[Any, jax.Array, Any]:
    """The blocks, adapted and perhaps quantised, an input, and the function of both that is traced."""
    blocks = [Block(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    if quantised:
        blocks = ql.quantize(blocks, "nf4", where="all-linear")
    blocks = ql.loraify(blocks, rank=4, where="all-linear", key=jax.random.key(1))
    linear = _ordinary if not by_hand else _by_hand if quantised else _lora_by_hand
    run = lambda blocks, x: _model(blocks, x, linear)
    return blocks, jnp.ones((TOKENS, WIDTH)), run if by_hand else ql.quaxify(run)


def cases() -> list[Case]:
    blocks, x, quaxified = traced(quantised=True, by_hand=False)
    *_, hand = traced(quantised=True, by_hand=True)
    return [
        Case(
            "tracing a 12-layer transformer, LoRA over NF4",
            {
                "by hand": lambda: jax.make_jaxpr(lambda b, x: hand(b, x))(blocks, x),
                "quaxlike": lambda: jax.make_jaxpr(lambda b, x: quaxified(b, x))(blocks, x),
            },
        )
    ]
