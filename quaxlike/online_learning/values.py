"""ETP primitives on Values: adapters are trained online over weights of any type."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ..arrays.lora import LoraArray
from ..core.quaxify import quaxify
from ..core.rules import register
from .ops.dense import etp_mm_p, etp_mv_p, matmul
from .ops.elementwise import elementwise
from .ops.lora import lora_matmul


@register([etp_mm_p, etp_mv_p])
def _matmul_lora(primitive: Primitive, x: jax.Array, w: LoraArray, *bias: Any, has_bias: bool = False):
    plain = w.magnitude is None and (w.key is None or w.dropout == 0)
    if w.ndim != 2 or w.a.ndim != 2 or w.b.ndim != 2 or not plain:
        return NotImplemented

    def product(x: Any, base: Any, a: Any, b: Any) -> jax.Array:
        y = matmul(x, base) if w.train_base else jnp.matmul(x, base)
        # The rows of w are either the rows of `b` or the columns of `a`.
        first, then = (b, a) if w.out_axes == (-2,) else (a.T, b.T)
        return y + lora_matmul(x, first, then, scale=w.scaling).astype(y.dtype)

    y = quaxify(product)(x, w.base, w.a, w.b)
    return y + jnp.broadcast_to(elementwise(bias[0]), y.shape) if has_bias else y
