"""A small vision transformer in plain Equinox. Note that there is no quaxlike in this file."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Block(eqx.Module):
    """Attention followed by a two-layer MLP, both pre-norm and with a residual connection."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 2 * width, key=up_key)
        self.down = eqx.nn.Linear(2 * width, width, key=down_key)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.mlp_norm)(x)
        h = jax.nn.gelu(jax.vmap(self.up)(h))
        return x + jax.vmap(self.down)(h)


class VisionTransformer(eqx.Module):
    """A vision transformer: its tokens are image patches, averaged to compute ten logits."""

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: tuple[int, int] = eqx.field(static=True)

    def __init__(
        self,
        *,
        image: tuple[int, int] = (8, 8),
        patch: tuple[int, int] = (4, 2),
        width: int = 128,
        depth: int = 3,
        heads: int = 4,
        classes: int = 10,
        key: PRNGKeyArray,
    ):
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        pixels = patch[0] * patch[1]
        tokens = image[0] * image[1] // pixels
        self.patch = patch
        self.embed = eqx.nn.Linear(pixels, width, key=embed_key)
        self.position = 0.5 * jax.random.normal(position_key, (tokens, width))
        self.blocks = [Block(width, heads, key=k) for k in block_keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=head_key)

    def __call__(self, image: Float[Array, "height width"]) -> Float[Array, " classes"]:
        height, width = self.patch
        rows, columns = image.shape[0] // height, image.shape[1] // width
        patches = image.reshape(rows, height, columns, width).transpose(0, 2, 1, 3)
        x = jax.vmap(self.embed)(patches.reshape(rows * columns, height * width)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(jnp.mean(x, axis=0)))
