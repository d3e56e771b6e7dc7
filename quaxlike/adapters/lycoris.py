"""Code shared between LoHa and LoKr, which both originate from LyCORIS."""

import math
from typing import Any

import jax.numpy as jnp

from .record import DROPOUT, RANK, Layer, by_pattern, flag, number

OPTIONS = {
    **RANK, "alpha": number(8), "alpha_pattern": by_pattern(number(8)), "rank_dropout": DROPOUT,
    "module_dropout": DROPOUT, "use_effective_conv2d": flag(),
}  # fmt: skip
PATTERNS = {"r": "rank_pattern", "alpha": "alpha_pattern"}
KINDS = ("linear", "matrix", "conv", "grouped conv")


def is_effective(layer: Layer) -> bool:
    """Returns whether the change to a convolution kernel is stored in Tucker form."""
    return layer.option("use_effective_conv2d") and math.prod(layer.window) > 1


def tucker(core: Any, a: Any, b: Any) -> Any:
    """Computes `a @ b`, or the kernel with this Tucker decomposition if there is a core.

    The core should be of shape `(r, s, *window)`. In either case, the result is a matrix with flattened input
    axes.
    """
    if core is None:
        return jnp.matmul(a, b, precision="highest")
    kernel = jnp.einsum("ijkl,...pi,...jq->...pqkl", core, a, b, precision="highest")
    return jnp.reshape(kernel, (*kernel.shape[:-3], -1))
