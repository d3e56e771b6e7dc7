"""torchao, i.e. int4, int8 and float8 weights, with their classes in the file's header.

Source: torchao's tensor subclasses, <https://github.com/pytorch/ao>.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...files.tensors import Tensors, read_json
from .format import E4M3, INT8, Format, StoredLayer, StoredWeight, integers, small_floats, weight

_CLASSES = ("IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor")
_PARTS = ("qdata", "scale", "zero_point")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    out: dict[str, StoredWeight] = {}
    for name, text in tensors.metadata.items():
        if not name.endswith(".weight") or not text.startswith("{"):
            continue
        node = read_json(tensors.path, text, f"the metadata of {name!r}")
        kind, narrow = node.get("_type"), '"int4"' in text
        if kind not in _CLASSES:
            raise tensors.error(name, f"{', '.join(_CLASSES)} can be read; found {kind!r}")
        layer = StoredLayer(tensors, name.removesuffix(".weight"), "._weight_")
        named = node.get("_tensor_data_names")
        named = [part for part in named if part in _PARTS] if isinstance(named, list) else ()
        out |= weight(layer, _PARTS, partial(_read, layer, kind, narrow, named))
    return out


def _read(layer: StoredLayer, kind: str, narrow: bool, named: Iterable[str]) -> Any:
    for part in named:
        layer.shape(part)  # raises an error if this part is missing
    n, k = layer.shape("qdata", 2)
    groups = layer.shape("scale", 2)[1]
    if k % groups:
        raise layer.error("scale", f"{groups} blocks do not divide the {k} inputs")
    scale = layer.scales("scale", (n, groups))
    block = k // groups if groups > 1 else None
    if kind == "Float8Tensor":
        return small_floats(layer.get("qdata", [E4M3]), scale, codec="fp8", block=block)
    bits = 4 if narrow else 8  # even 4-bit codes take up a whole byte
    middle = np.int16(1 << (bits - 1))
    codes = layer.get("qdata", [INT8]).astype(np.int16) + middle
    if codes.min() < 0 or codes.max() >= 1 << bits:
        raise layer.error("qdata", f"has codes that {bits} bits do not hold")
    zero = None
    if "zero_point" in layer:
        points = layer.get("zero_point", [INT8], (n, groups)).astype(np.int16) + middle
        zero = points if points.min() < 0 or points.max() > 255 else points.astype(np.uint8)
    return integers(codes.astype(np.uint8), scale, zero, bits=bits, block=block)


FORMAT = Format(
    ("torchao",), weights, codes=("._weight_qdata", "._weight_scale"),
    # The header already describes how each weight is stored.
    without_effect=(
        "quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights",
    ),
)  # fmt: skip
