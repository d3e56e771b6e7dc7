"""MXFP4, used by GPT-OSS for its experts: 4-bit floats, in blocks of 32 with a power-of-two scale.

Source: OCP Microscaling Formats specification,
<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.quantized import CODECS, BlockArray
from ...core.values import is_value
from ...files.errors import file_error
from ...files.tensors import Tensors
from .format import UINT8, Format, StoredLayer, StoredWeight, layers, small_floats, weight

_PARTS = ("blocks", "scales")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Finds the quantised weights in a checkpoint, keyed by name, all with shape (experts, out, in)."""
    out: dict[str, StoredWeight] = {}
    for layer in layers(tensors, *_PARTS, separator="_"):
        out |= weight(layer, _PARTS, partial(_read, layer), field="")
    return out


def _read(layer: StoredLayer) -> Any:
    shape = layer.shape("blocks")
    if len(shape) < 2 or shape[-1] != 16 or 0 in shape:
        raise layer.error("blocks", f"expected blocks of 16 bytes on the last axis; found the shape {shape}")
    scale = layer.get("scales", [UINT8], shape[:-1])
    if (scale == 255).any():
        raise layer.error("scales", "has a scale of 255, which is NaN")
    raw = layer.get("blocks", [UINT8]).reshape(*shape[:-2], -1)
    return small_floats(raw, scale, codec="mxfp4", block=32, count=2 * raw.shape[-1])


def in_published_layout(name: str, w: Any) -> Any:
    """Transposes expert weights between the layouts of quantised and unquantised checkpoints.

    Quantised checkpoints use (experts, out, in), and unquantised ones (experts, in, out). Other weights are
    returned unchanged.
    """
    is_expert = isinstance(w, BlockArray) and w.codec == CODECS["mxfp4"] and len(w.shape) == 3
    if not is_expert or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return w
    first, *rest = w.permutation
    return w.with_axes((first, *rest[::-1]))


def _written(path: Path, mapping: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    tensors: dict[str, np.ndarray] = {}
    for name, value in mapping.items():
        if isinstance(value, BlockArray):
            tensors |= _tensors_of(path, name, value)
        elif is_value(value):
            kind = type(value).__name__
            raise file_error(path, name, f"{kind} has no place in the file; quantise to 'mxfp4'")
        else:
            tensors[name] = np.asarray(value)
    return tensors, {"quant_method": "mxfp4"}


def _tensors_of(path: Path, name: str, w: BlockArray) -> dict[str, np.ndarray]:
    if w.codec != CODECS["mxfp4"] or w.block != 32 or w.axes or len(w.inner_shape) != 1:
        raise file_error(path, name, "is not an array of the codec mxfp4 in blocks of 32 along its last axis")
    if w.inner_shape[0] % 32:
        raise file_error(path, name, f"blocks of 32 do not divide the last axis of {w.inner_shape[0]}")
    codes = np.asarray(w.codes)
    blocks = codes.reshape(*codes.shape[:-1], -1, 16)
    return {name + "_blocks": blocks, name + "_scales": np.asarray(w.scale.scale)}


FORMAT = Format(
    ("mxfp4",), weights, codes=("_blocks", "_scales"), by_rows=True, write=_written,
    types=(BlockArray,), codec="mxfp4",
)  # fmt: skip
