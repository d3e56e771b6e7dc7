"""AWQ, i.e. 4-bit codes packed along the outputs in an interleaved order (GEMM), or along the inputs (GEMV).

Source: AutoAWQ's layouts, <https://github.com/casper-hansen/AutoAWQ>.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...files.tensors import Tensors
from ...kernels.bits import unpack
from .format import (
    INT32,
    Format,
    StoredLayer,
    StoredWeight,
    group_size,
    integer,
    integers,
    layers,
    num_words,
    stream,
    weights_of,
)

# Nibble i of each word corresponds to output 8·word + _ORDER[i].
_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_PARTS = ("qweight", "qzeros", "scales")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    integer(config, "bits", tensors.path, among=(4,))
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "gemv"):
        raise tensors.error("version", f"gemm and gemv can be read; found {version!r}")
    group = group_size(config, tensors.path)
    read = _read_gemm if version == "gemm" else _read_gemv
    return weights_of(layers(tensors, *_PARTS), _PARTS, lambda layer: read(layer, group))


def _read_gemm(layer: StoredLayer, group: int | None) -> Any:
    k, words = layer.shape("qweight", 2)
    n, block = 8 * words, group or k
    if k % block:
        raise layer.error("qweight", f"groups of {block} do not divide the {k} inputs")
    packed = layer.get("qweight", [INT32])
    zeros = layer.get("qzeros", [INT32], (k // block, words))
    scale = layer.scales("scales", (k // block, n))
    return integers(_in_order(packed).T, scale.T, _in_order(zeros).T, bits=4, block=block)


def _in_order(packed: np.ndarray) -> np.ndarray:
    nibbles = unpack(stream(packed), 4, 8 * packed.shape[1]).reshape(*packed.shape, 8)
    return nibbles[..., np.argsort(_ORDER)].reshape(packed.shape[0], -1)


def _read_gemv(layer: StoredLayer, group: int | None) -> Any:
    n, words = layer.shape("qweight", 2)
    k = 8 * words
    block = group or k
    if k % block:
        raise layer.error("qweight", f"groups of {block} do not divide the {k} inputs")
    groups, multiple = k // block, {64: 2, 32: 4}.get(block, 1)
    width = -(-num_words(groups, 4) // multiple) * multiple
    packed = layer.get("qweight", [INT32])
    zeros = layer.get("qzeros", [INT32], (n, width))
    scale = layer.scales("scales", (n, 8 * width))
    zero = unpack(stream(zeros), 4, groups)
    return integers(stream(packed), scale[:, :groups], zero, bits=4, block=block, count=k)


FORMAT = Format(
    ("awq",), weights, codes=(".qweight", ".qzeros"), used=("bits", "group_size", "version"),
    # Zero points are always stored, and all other entries are about kernels.
    without_effect=(
        "zero_point", "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config",
        "lm_head",
    ),
)  # fmt: skip
