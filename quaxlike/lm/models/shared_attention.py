"""Gemma 4's attention.

This differs from the usual attention in two ways. Firstly, the last layers only compute queries, and read the
keys and values of an earlier layer. Secondly, layers without a window ("global" ones) have a different head
size, and may lack a projection for values. The values are then the keys before normalisation and rotation.
"""

from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from .attention import Memory, attend, hadamard
from .decoder_config import DecoderConfig
from .layers import Hidden, Part, each, linears, norm, normalised
from .mixer import AbstractMixer, Context
from .rope import rotate

_AXES = (0, 1, 2)


class AbstractSharedAttention(Part, AbstractMixer, roles="q_proj k_proj v_proj o_proj q_norm k_norm"):
    role: ClassVar = "self_attn"
    is_global: ClassVar[bool]
    reads: ClassVar[bool]
    """Whether this layer reads the keys and values of an earlier one. They are in its memory, so there has to
    be one even when not generating."""

    def __init__(self, config: DecoderConfig, key: Any) -> None:
        c, (heads, size) = config, self._heads(config)
        sizes = {"q_proj": c.num_attention_heads * size}
        norms = {"q_norm": norm(c, size)}
        if not self.reads:
            sizes["k_proj"] = heads * size
            norms["k_norm"] = norm(c, size)
            if not (self.is_global and c.attention_k_eq_v):
                sizes["v_proj"] = heads * size
        first, last = jax.random.split(key)
        parts = linears(c, c.hidden_size, sizes, c.attention_bias, first)
        parts |= linears(c, sizes["q_proj"], {"o_proj": c.hidden_size}, c.attention_bias, last)
        self._fill(c, **parts, **norms)

    @classmethod
    def _heads(cls, config: DecoderConfig) -> tuple[int, int]:
        """Returns the number of key heads and their size."""
        if cls.is_global:
            return config.num_global_key_value_heads, config.global_head_dim
        return config.num_key_value_heads, config.head_dim

    def __call__(
        self, x: Hidden, context: Context, memory: Memory | None, start: Any
    ) -> tuple[Hidden, Memory | None]:
        c, size = self.config, self._heads(self.config)[1]

        def heads_of(name: str) -> Float[Array, "tokens heads size"]:
            return each(self.part(name), x).reshape(len(x), -1, size)

        query = jax.vmap(lambda x: self.normed("q_norm", x))(heads_of("q_proj"))
        query = rotate(query, context.rotation)
        if memory is not None and memory.rotates:
            query = hadamard(query)
        if self.reads:
            # The earlier layer's memory, passed on even if there's no cache.
            assert memory is not None
            key, value = memory.read(query.dtype)
        else:
            key = heads_of("k_proj")
            value = key if self.part("v_proj") is None else heads_of("v_proj")
            value = normalised(value, c.rms_norm_eps)
            key = rotate(jax.vmap(lambda x: self.normed("k_norm", x))(key), context.rotation)
            if memory is not None:
                key = hadamard(key) if memory.rotates else key
                memory, key, value = memory.write(key, value, start, query.dtype)
            elif c.num_kv_shared_layers:
                memory = Memory(key, value, _AXES, _AXES)
        out = attend(query, key, value, context.sight, scale=1.0)
        return each(self.part("o_proj"), out), memory

    @classmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> Memory:
        return Memory.empty(room, *cls._heads(config), dtype, cache)


class LocalAttention(AbstractSharedAttention):
    is_global, reads = False, False


class GlobalAttention(AbstractSharedAttention):
    is_global, reads = True, False


class LocalQueries(AbstractSharedAttention):
    is_global, reads = False, True


class GlobalQueries(AbstractSharedAttention):
    is_global, reads = True, True
