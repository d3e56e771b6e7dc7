"""Rotary position embeddings (Su et al., RoFormer, 2021), and methods for scaling them to longer texts.

As in transformers' `modeling_rope_utils`, these include YaRN (Peng et al., 2023), LongRoPE (Ding et al.,
2024) and the scaling in Llama 3.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..folders.model_config import check_numbers, computing, refused

_LARGEST_HEAD = 1 << 16  # far above any real model; stops corrupt files from allocating too much
_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


class Rope(NamedTuple):
    """A rotary embedding: a frequency for each pair of features, and a factor for cosines and sines.

    As in LongRoPE, `long` has the frequencies for texts with more than `switch` tokens (if they differ). If
    `growth` is nonzero, then each query is scaled by the logarithm of its position, increasing every `step`
    tokens. (This is used by Ministral 3.)
    """

    frequencies: tuple[float | int, ...]
    scale: float | int = 1.0
    long: tuple[float | int, ...] | None = None
    switch: int = 0
    growth: float | int = 0
    step: int = 1

    def rotation(self, positions: Int[Array, " tokens"], length: Any, dtype: Any) -> tuple[Array, Array]:
        """Computes the cosines and sines for a text of this length. Each has shape `(tokens, features)`."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        if self.long is not None:
            frequencies = jnp.where(length > self.switch, jnp.asarray(self.long, jnp.float32), frequencies)
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        angles = jnp.concatenate([angles, angles], axis=-1)
        cos, sin = self.scale * jnp.cos(angles), self.scale * jnp.sin(angles)
        # Without this barrier XLA fuses this into each head of each layer, and computes it again there.
        return jax.lax.optimization_barrier((cos.astype(dtype), sin.astype(dtype)))

    def query_factor(self, positions: Int[Array, " tokens"], dtype: Any) -> Array | None:
        """Returns the factor to scale each query by, or None if they aren't scaled."""
        if not self.growth:
            return None
        steps = jnp.floor(positions.astype(jnp.float32) / self.step)
        return (1 + self.growth * jnp.log(1 + steps)).astype(dtype)


_NUMBERS = (
    *("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta"),
)
#: All known entries. (Though not all of them have an effect.)
ENTRIES = (
    *_NUMBERS,
    *("rope_type", "type", "short_factor", "long_factor", "truncate", "attn_factor", "finetuned"),
    "max_position_embeddings",  # the same as the entry of this name for the model itself
    *("mrope_section", "mrope_interleaved"),  # only matter for images: a text token has three equal positions
)


def rope_for(rope: Mapping[str, Any], config: Any, label: str, *, partial: bool = False) -> Rope:
    """Parses an entry in `rope_parameters`, or an older `rope_scaling` with `rope_theta` added.

    The head size and the text lengths are taken from `config`. As in transformers, `partial_rotary_factor` is
    ignored unless `partial` is set.

    **Raises:** `UnsupportedConfigError` if the kind isn't supported or its values give no valid rotation.
    """
    with computing(rope, "rope settings", label):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _TYPES:
            raise refused("rope_type", kind, label, " or ".join(map(repr, _TYPES)))
        check_numbers(rope, _NUMBERS, label)
        share = rope.get("partial_rotary_factor")
        share = 1.0 if share is None else share
        if not 0 < share <= 1:
            raise refused("partial_rotary_factor", share, label, "a share above 0, and up to 1")
        rotated = share if kind == "proportional" else 1.0  # of a whole head: the rest has frequencies of 0
        if kind == "proportional":
            share = 1.0
        if not partial:
            if share != 1 and kind != "default":  # transformers raises too, so there is no behaviour to match
                raise refused("partial_rotary_factor", share, label, f"whole heads beside rope_type={kind!r}")
            share = 1.0
        if config.head_dim > _LARGEST_HEAD:
            raise refused("head_dim", config.head_dim, label, f"heads of {_LARGEST_HEAD:,} numbers at most")
        dim, theta = int(config.head_dim * share), rope["rope_theta"]
        inverse = 1 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        most, given = config.max_position_embeddings, rope.get("original_max_position_embeddings")
        original = given or config.original_max_position_embeddings or most
        if rope.get("attn_factor") not in (None, 1):
            raise refused(
                "attn_factor", rope["attn_factor"], label,
                "`attention_factor` instead, the whole factor of cosines and sines, as transformers does",
            )  # fmt: skip
        scale = rope.get("attention_factor")
        if kind == "longrope":
            factor = rope.get("factor") or most / original
            grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            for name in ("short_factor", "long_factor"):
                numbers = isinstance(rope[name], list) and all(type(x) in (int, float) for x in rope[name])
                if not numbers or len(rope[name]) != len(inverse):
                    raise refused(name, rope[name], label, f"{len(inverse)} factors of each kind")
            short, long = (tuple((inverse / rope[f"{name}_factor"]).tolist()) for name in ("short", "long"))
            return Rope(short, scale or grown, long, original)
        kept: Any = 1.0  # for each frequency: 1 means to keep it and 0 means to scale it
        if kind == "linear":
            kept = 0.0
        elif kind == "llama3":  # scale low frequencies, keep high ones, and interpolate in between
            turns = original * inverse / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0, 1)
        elif kind == "yarn":
            kept = 1 - _yarn_ramp(rope, dim, theta, original)
        elif kind == "proportional":
            inverse = np.where(np.arange(len(inverse)) < int(rotated * dim // 2), inverse, 0.0)
            kept = 0.0
        factor = {"default": 1.0, "proportional": rope.get("factor", 1.0)}.get(kind) or rope["factor"]
        inverse = kept * inverse + (1 - kept) * inverse / factor
        scale = (scale or _yarn_scale(rope)) if kind == "yarn" else 1.0
        growth = rope.get("llama_4_scaling_beta") or 0
        return Rope(tuple(inverse.tolist()), scale, growth=growth, step=original if growth else 1)


def _yarn_scale(rope: Mapping[str, Any]) -> float | int:
    def grown(m: float | int) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * m * math.log(rope["factor"]) + 1

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def _yarn_ramp(rope: Mapping[str, Any], dim: int, theta: float | int, original: int) -> np.ndarray:
    """Returns how much to scale each frequency, from 0 for high ones to 1 for low ones."""

    def at(turns: float | int) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = at(rope.get("beta_fast") or 32), at(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)


def rotate(x: Float[Array, "tokens heads size"], rotation: tuple[Array, Array] | None) -> Array:
    """Rotates each head's features. Any features beyond the size of the rotation are left as they are."""
    if rotation is None:
        return x
    cos, sin = (part[:, None, :] for part in rotation)
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, rest], axis=-1)
