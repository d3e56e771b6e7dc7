"""Shared code for the LyCORIS methods, LoHa and LoKr."""

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
    """Returns whether a kernel's change has Tucker form."""
    return layer.option("use_effective_conv2d") and math.prod(layer.window) > 1


def tucker(core: Any, a: Any, b: Any) -> Any:
    """`a @ b`, or with a core of shape `(r, s, *window)` in between, as a matrix with flattened inputs."""
    if core is None:
        return jnp.matmul(a, b, precision="highest")
    kernel = jnp.einsum("ijkl,...pi,...jq->...pqkl", core, a, b, precision="highest")
    return jnp.reshape(kernel, (*kernel.shape[:-3], -1))
