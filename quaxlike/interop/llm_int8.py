"""LLM.int8 of bitsandbytes: int8 weights with one scale per row.

Source: Dettmers et al., LLM.int8(), <https://arxiv.org/abs/2208.07339>.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..arrays.quantized import Int8Array
from .blocks import INT8, UINT8, Layer, Weight, layers, weight
from .tensors import Tensors

_OWN = ("SCB", "weight_format")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Weight]:
    """The quantised weights of a checkpoint, by name; none unless its settings or its tensors say so."""
    out: dict[str, Weight] = {}
    for layer in layers(tensors, *_OWN, dtypes=[INT8]) if config or layers(tensors, *_OWN) else ():
        out |= weight(layer, ("weight", *_OWN), lambda layer=layer: _read(layer))
    return out


def _read(layer: Layer) -> Any:
    n, k = layer.shape("weight", 2)
    if "weight_format" in layer:
        found = layer.get("weight_format", [UINT8], (), (1,))
        if found != 0:
            raise layer.bad("weight_format", f"must be 0, row-major; found {found}. Save it again on a CPU")
    scale = layer.scales("SCB", (n,))
    codes = layer.get("weight", [INT8], (n, k))
    rows = (scale / np.float32(127)).astype(np.float32)[:, None]
    return Int8Array(jnp.asarray(codes), jnp.asarray(rows), block_size=None)
