"""Pruned weights of compressed-tensors: a bitmask, and the values that it keeps.

Source: the layouts of <https://github.com/vllm-project/compressed-tensors>.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .blocks import E4M3, FLOATS, INT8, UINT8, Layer, Weight, layers, per_row, small_floats, weight
from .errors import complain
from .tensors import Tensors

_PARTS = ("compressed", "bitmask", "shape", "row_offsets", "weight_scale")
_FORMATS = ("sparse-24-bitmask", "sparse-bitmask", "dense")


def dense_weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Weight]:
    """The weights that have a mask, made dense; 8-bit weights become block arrays."""
    out: dict[str, Weight] = {}
    for layer in layers(tensors, "bitmask", "compressed", "row_offsets"):
        kind = config.get("format")
        if kind not in _FORMATS:
            raise complain(tensors.path, "sparsity_config", f"expected one of {_FORMATS}; found {kind!r}")
        out |= weight(layer, _PARTS, lambda layer=layer, kind=kind: _read(layer, kind))
    return out


def _read(layer: Layer, kind: str) -> Any:
    int64 = np.dtype(np.int64)
    n, k = (int(size) for size in layer.get("shape", [int64], (2, 1), (2,)).reshape(-1))
    if n < 1 or k < 1 or n * k > 16 * math.prod(layer.shape("bitmask", 2)):
        raise layer.bad("shape", f"does not fit the bitmask; found {(n, k)}")
    mask = layer.get("bitmask", [UINT8], (n, -(-k // 8)))
    kept = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
    if kept[:, k:].any():
        raise layer.bad("bitmask", "has bits set beyond the last column")
    kept = kept[:, :k]
    count = int(kept.sum())
    if kind == "sparse-24-bitmask":
        if k % 4 or (kept.reshape(n, -1, 4).sum(-1) != 2).any():
            raise layer.bad("bitmask", "must keep two of every four columns")
        shape = (n, k // 2)
    else:
        shape = (count,)
        offsets = layer.get("row_offsets", [int64], (n,))
        if not np.array_equal(offsets, np.concatenate([[0], np.cumsum(kept.sum(1))[:-1]])):
            raise layer.bad("row_offsets", "must count the values of the rows before")
    values = layer.get("compressed", [*FLOATS, E4M3, INT8], shape)
    dense = np.zeros((n, k), values.dtype)
    dense[kept] = values.reshape(-1)
    if values.dtype == E4M3:
        scale = layer.scales("weight_scale", (n, 1), (1,), ())
        return small_floats(dense, np.ascontiguousarray(per_row(scale, n)), codec="fp8", block=None)
    if values.dtype == INT8:
        raise layer.bad("compressed", "pruned weights in int8 cannot be read")
    return jnp.asarray(dense)
