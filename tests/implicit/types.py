"""ImplicitArrays that the tests share."""

from typing import Any

import jax
import jax.numpy as jnp

from quaxlike.implicit import ImplicitArray, aux_field, register


class Codes(ImplicitArray, warn_on_materialize=False):
    """8-bit rows, each with a scale: two leaves, and a shape that is given."""

    codes: jax.Array
    scale: jax.Array
    bits: int = aux_field(default=8)

    def materialize(self):
        assert self.codes.shape == self.shape
        return (self.codes.astype(self.dtype) * self.scale[..., None].astype(self.dtype)).reshape(self.shape)

    @classmethod
    def quantize(cls, x: jax.Array, bits: int = 8) -> "Codes":
        scale = jnp.abs(x).max(-1) / (2 ** (bits - 1) - 1)
        codes = jnp.round(x / scale[..., None]).astype(jnp.int8)
        return cls(codes, scale, bits, shape=x.shape, dtype=x.dtype)


@register("dot_general")
def _(x: jax.Array, w: Codes, **params: Any):
    return jax.lax.dot_general_p.bind(x, w.materialize(), **params)


@register("mul")
def _(w: Codes, y: jax.Array, **params: Any):
    return (
        Codes(w.codes, w.scale * y, w.bits, shape=w.shape, dtype=w.dtype) if y.ndim == 0 else NotImplemented
    )


class Strict(Codes):
    """Never materialised: what has no handler is an error."""

    on_materialise = "error"


@register("dot_general")
def _(x: jax.Array, w: Strict, **params: Any):
    dense = w.codes.astype(w.dtype) * w.scale[..., None]
    return jax.lax.dot_general_p.bind(x, dense, **params)
