"""MLX, i.e. affine 2- to 8-bit codes, along with its variants of mxfp4, nvfp4 and mxfp8.

Source: MLX's layouts, <https://github.com/ml-explore/mlx>.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.quantized import CODECS, BlockArray, BlockScales, Codec
from ...files.errors import file_error
from ...files.tensors import Tensors
from ...kernels.block_matmul.codecs import E2M1
from ..folders.entries import warn_of_unknown
from .format import UINT8, Format, StoredLayer, StoredWeight, integer, layers, stream, weights_of

_MODES: dict[str, Codec] = {
    "mxfp4": CODECS["mxfp4"],
    "mxfp8": CODECS["mxfp8"],
    "nvfp4": Codec(4, "table", table=E2M1, block=16, scales="e4m3"),
}
_PARTS = ("weight", "scales", "biases")
_WORDS = np.dtype(np.uint32)


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    found = layers(tensors, "scales", "biases", dtypes=[_WORDS])
    return weights_of(found, _PARTS, lambda layer: _read(layer, config))


def _read(layer: StoredLayer, config: Mapping[str, Any]) -> Any:
    path, own = layer.tensors.path, config.get(layer.name)
    if isinstance(own, dict):
        warn_of_unknown(f"The quantisation config of {path}, {layer.name},", own, FORMAT.used)
        config = {**config, **own}
    bits = integer(config, "bits", path, among=(2, 3, 4, 5, 6, 8))
    group = integer(config, "group_size", path)
    mode = config.get("mode") or "affine"
    if mode not in ("affine", *_MODES):
        raise file_error(path, "mode", f"affine, {', '.join(_MODES)} can be read; found {mode!r}")
    n, words = layer.shape("weight", 2)
    k = words * 32 // bits
    if group < 1 or k % group or k * bits != words * 32:
        raise layer.error("weight", f"{words} words of {bits} bits do not make groups of {group}")
    packed = stream(layer.get("weight", [_WORDS]))
    if mode == "affine":
        scale = layer.scales("scales", (n, k // group))
        scales = BlockScales(scale, zero=layer.scales("biases", (n, k // group)))
        codec = Codec(bits, zeros="plus")
    else:
        codec = _MODES[mode]
        if bits != codec.bits or "biases" in layer:
            raise layer.error(None, f"the mode {mode} takes {codec.bits} bits, and no biases")
        scales = BlockScales(layer.get("scales", [UINT8], (n, k // group)))
    return BlockArray.from_codes(packed, scales, codec=codec, block_size=group, count=k)


def _settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """Reads the settings from MLX's own entry. (`quantization_config` may duplicate them.)"""
    own, other = config.get("quantization"), config.get("quantization_config") or {}
    if not isinstance(own, dict) or "quant_method" in other:
        return None
    return {**other, "quant_method": "mlx", **own}


FORMAT = Format(
    ("mlx",),
    weights,
    by_rows=True,
    quantises_embeddings=True,
    settings=_settings,
    used=("bits", "group_size", "mode"),
)
