"""FP8 with one scale per tensor, row, block or tile (DeepSeek, Qwen, vLLM, fbgemm), and ModelOpt's formats.

Source: the layouts of transformers' `finegrained_fp8`, <https://github.com/huggingface/transformers>, and
ModelOpt, <https://github.com/NVIDIA/TensorRT-Model-Optimizer>.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.quantized import Codec
from ...files.errors import quoted
from ...files.tensors import Tensors, are_sizes
from ...kernels.block_matmul.codecs import E2M1
from .format import (
    E4M3,
    E8M0,
    FLOATS,
    UINT8,
    Format,
    StoredLayer,
    StoredWeight,
    layers,
    per_row,
    settings_in,
    small_floats,
    spread_tiles,
    weights_of,
)

_PARTS = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    tile = config.get("weight_block_size")
    if tile is not None and not (are_sizes(tile) and len(tile) == 2 and min(tile) > 0):
        raise tensors.error("weight_block_size", f"expected two positive sizes; found {quoted(tile)}")

    def read(layer: StoredLayer) -> Any:
        if "weight" in layer and layer.dtype("weight") == UINT8:
            # ModelOpt's format: a scale for the tensor, in addition to those for blocks.
            outer = layer.get("weight_scale_2", FLOATS, (), (1,))
            return read_nvfp4(layer, "weight", outer, over=False)
        return _read(layer, tile)

    return weights_of(layers(tensors, *_PARTS[1:], dtypes=[E4M3, UINT8]), _PARTS, read)


def _read(layer: StoredLayer, tile: list[int] | None) -> Any:
    scales = [suffix for suffix in ("weight_scale_inv", "weight_scale") if suffix in layer]
    if len(scales) != 1:
        found = " and ".join(scales) or "none"
        raise layer.error(None, f"an 8-bit weight takes weight_scale_inv or weight_scale; found {found}")
    return read_float8(layer, scales[0], tile)


def read_float8(
    layer: StoredLayer, suffix: str, tile: list[int] | None, *, column_block: int | None = None
) -> Any:
    """Reads a float8_e4m3fn weight along with its scales.

    There is one scale in total, per row, per `tile` of rows and columns, or per row and `column_block`
    columns.
    """
    n, k = layer.shape("weight", 2)
    shapes: dict[tuple[int, ...], list[int] | None]
    shapes = {(): None, (1,): None, (1, 1): None, (n, 1): None, (n,): None}
    if column_block is not None:
        tile = [1, column_block]
    if tile is not None:
        shapes |= {(-(-n // tile[0]), -(-k // tile[1])): tile}
    found = layer.shape(suffix)
    if tile is not None and found not in ((), (1,)):
        shapes = {(-(-n // tile[0]), -(-k // tile[1])): tile}
    scale = layer.get(suffix, (*FLOATS, E8M0, UINT8), *shapes)
    own = shapes[found]
    exponents = scale.dtype in (E8M0, UINT8)
    if exponents:
        scale = scale.view(np.uint8)
    values = scale.astype(np.float32)
    if not np.isfinite(values).all() or (exponents and (scale == 255).any()):
        raise layer.error(suffix, "has scales that are not finite")
    if not exponents and (values == 0).any():
        raise layer.error(suffix, "has scales that are 0")
    raw = layer.get("weight", [E4M3])
    rows = per_row(scale, n) if own is None else spread_tiles(scale, n, own[0])
    codec = Codec(8, "e4m3", scales="e8m0" if exponents else "float")
    return small_floats(raw, np.ascontiguousarray(rows), codec=codec, block=None if own is None else own[1])


def read_nvfp4(layer: StoredLayer, packed: str, outer: np.ndarray, *, over: bool) -> Any:
    """Reads 4-bit floats in blocks of 16, with float8_e4m3fn scales multiplied (or divided) by `outer`."""
    n, half = layer.shape(packed, 2)
    k = 2 * half
    if k % 16:
        raise layer.error(packed, f"blocks of 16 do not divide the {k} inputs")
    if not np.isfinite(outer.astype(np.float32)).all() or not (outer > 0).all():
        raise layer.error(None, f"the scale of the whole tensor must be finite and positive; found {outer}")
    scale = layer.get("weight_scale", [E4M3], (n, k // 16))
    if np.isnan(scale.astype(np.float32)).any():
        raise layer.error("weight_scale", "has scales that are NaN")
    codec = Codec(4, "table", table=E2M1, block=16, scales="e4m3", group=0, over=over)
    raw = layer.get(packed, [UINT8])
    rows = np.ascontiguousarray(per_row(outer, n))
    return small_floats(raw, scale.view(np.uint8), codec=codec, block=16, outer=rows, count=k)


FORMAT = Format(
    ("fp8", "fbgemm_fp8", "mxfp8", "modelopt"), weights, by_rows=True,
    settings=settings_in("hf_quant_config.json", "modelopt", "quantization"),
    used=("weight_block_size",),
    # About activations and caches, or inferred from the tensors' dtypes.
    without_effect=(
        "activation_scheme", "activation_scale_ub", "kv_cache_quant_algo", "kv_cache_scheme", "fmt",
        "scale_fmt", "quant_algo", "group_size", "producer", "config_groups",
    ),
)  # fmt: skip
