"""compressed-tensors, used by vLLM for packed and plain integers, FP8, NVFP4, MXFP4, MXFP8 and sparse masks.

Source: the layouts in <https://github.com/vllm-project/compressed-tensors>.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..._patterns import PatternError, startmatch
from ...arrays.quantized import CODECS, BlockArray, Codec, Int8Array
from ...core.values import is_value
from ...files.errors import file_error, quoted
from ...files.tensors import Tensors, are_sizes
from ...kernels.bits import pack, unpack
from ..folders.entries import warn_of_unknown
from .float8 import read_float8, read_nvfp4
from .format import (
    E4M3,
    FLOATS,
    INT8,
    INT32,
    UINT8,
    Format,
    StoredLayer,
    StoredWeight,
    integers,
    layers,
    num_words,
    per_row,
    settings,
    small_floats,
    spread_tiles,
    stream,
    weight,
)

_PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight_global_scale",
)
_INT64 = np.dtype(np.int64)

# The entries of a group. The ones about activations don't affect the weights.
_OF_GROUPS = ("format", "weights", "targets", "input_activations", "output_activations")
# The entries for the weights in a group. Some (such as dtypes) can be inferred from the tensors.
_OF_SCHEMES = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)

_Scheme = Mapping[str, Any]


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Finds the quantised and sparse weights in a checkpoint, keyed by name."""
    out = _masked_weights(tensors, settings(config, "sparsity_config", tensors.path))
    groups = settings(config, "config_groups", tensors.path)
    if not all(isinstance(g, dict) and _are_targets(g.get("targets") or []) for g in groups.values()):
        raise tensors.error("config_groups", "must map names to settings, `targets` a list of texts")
    place = f"The quantisation config of {tensors.path}"
    for name, group in groups.items():
        warn_of_unknown(f"{place}, config_groups, {name},", group, _OF_GROUPS)
        if isinstance(scheme := group.get("weights"), dict):
            warn_of_unknown(f"{place}, config_groups, {name}, weights,", scheme, _OF_SCHEMES)
    for layer in layers(tensors, *_PARTS[1:], dtypes=[INT8, E4M3]):
        if f"{layer.name}.weight" in out:
            continue
        group = _group_of(layer, groups)
        kind = group.get("format") or config.get("format")
        if not isinstance(kind, str) or kind not in _READERS:
            known = ", ".join(_READERS)
            raise layer.error(None, f"its format must be one of {known}; found {quoted(kind)}")
        scheme = group.get("weights")
        if not isinstance(scheme, dict):
            raise layer.error(None, "its group of the configuration does not say how weights are quantised")

        def read(layer: Any = layer, kind: Any = kind, scheme: Any = scheme) -> Any:
            return _READERS[kind](layer, scheme)

        out |= weight(layer, _PARTS, read)
    return out


def _are_targets(targets: Any) -> bool:
    return isinstance(targets, list) and all(isinstance(target, str) for target in targets)


def _group_of(layer: StoredLayer, groups: Mapping[str, Any]) -> Mapping[str, Any]:
    """Finds the group targeting this layer, or else the first group targeting a class of layers."""
    by_class = None
    for group in groups.values():
        for target in group.get("targets") or []:
            if _is_target(target, layer):
                return group
            if by_class is None and target[:1].isupper():
                by_class = group
    if by_class is None:
        raise layer.error(None, "no group in the configuration names it, though it is quantised")
    return by_class


def _is_target(target: str, layer: StoredLayer) -> bool:
    if not target.startswith("re:"):
        return target == layer.name
    try:
        return bool(startmatch(target[3:], layer.name))
    except PatternError as error:
        raise layer.error(None, f"a target is {quoted(target)}: {error}") from None


def _bits(layer: StoredLayer, scheme: _Scheme, kind: str, among: tuple[int, ...]) -> int:
    bits = scheme.get("num_bits")
    if scheme.get("type") != kind or bits not in among:
        raise layer.error(
            None,
            f"expected type {kind!r} of {among} bits; found {quoted(scheme.get('type'))} of {quoted(bits)}",
        )
    return bits


def _block(layer: StoredLayer, scheme: _Scheme, k: int) -> int | None:
    """Returns the number of columns per scale, or None if all columns share a scale."""
    size = scheme.get("group_size")
    if scheme.get("strategy") in ("group", "tensor_group"):
        if type(size) is not int or size < 1 or k % size:
            raise layer.error(None, f"its group_size must divide the {k} inputs; found {quoted(size)}")
        return size
    return None


def _packed_integers(layer: StoredLayer, scheme: _Scheme) -> Any:
    bits = _bits(layer, scheme, "int", (2, 3, 4, 5, 6, 7, 8))
    n, k = (int(size) for size in layer.get("weight_shape", [_INT64, INT32], (2,)))
    rows, words = layer.shape("weight_packed", 2)
    per_word = 32 // bits
    dense, whole = num_words(k, bits), -(-k // per_word)
    if rows != n or k < 1 or words not in (dense, whole):
        raise layer.error(
            "weight_packed",
            f"a weight of shape {(n, k)} takes {dense} words in each of {n} rows; found {words} in {rows}",
        )
    block = _block(layer, scheme, k)
    groups = 1 if block is None else k // block
    packed = layer.get("weight_packed", [INT32])
    if words == dense:
        codes = unpack(stream(packed), bits, k)
    else:  # older releases only store whole codes in each word
        shifts = (np.arange(per_word) * bits).astype(np.uint32)
        parts = packed.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
        codes = parts.astype(np.uint8).reshape(n, -1)[:, :k]
    scale = layer.scales("weight_scale", (n, groups))
    symmetric = scheme.get("symmetric", True)
    if symmetric == ("weight_zero_point" in layer):
        there = "has" if symmetric else "lacks"
        raise layer.error(
            "weight_zero_point", f"the scheme says symmetric={symmetric}, the file {there} zero points"
        )
    zero = None
    if not symmetric:  # these are packed along the outputs
        zeros = layer.get("weight_zero_point", [INT32], (num_words(n, bits), groups))
        zero = unpack(stream(zeros.T), bits, n).T
    order = _order(layer, scheme, k, block)
    codes = codes if order is None else codes[:, order]
    return integers(codes, scale, zero, bits=bits, block=block, order=order)


def _order(layer: StoredLayer, scheme: _Scheme, k: int, block: int | None) -> np.ndarray | None:
    """Returns the permutation sorting the columns by group. This is None if they are already sorted."""
    if "weight_g_idx" not in layer:
        kind = scheme.get("actorder")  # for "weight" and "static", the columns are already sorted
        if (kind is True or str(kind).lower() in ("group", "dynamic")) and block not in (None, k):
            raise layer.error("weight_g_idx", f"is missing, though the scheme says actorder={kind!r}")
        return None
    index = layer.get("weight_g_idx", [INT32], (k,))
    if block is None or not np.array_equal(np.sort(index), np.arange(k) // block):
        raise layer.error("weight_g_idx", f"must name each group of {block or k} of the {k} columns so often")
    return np.argsort(index, kind="stable")


def _plain_integers(layer: StoredLayer, scheme: _Scheme) -> Any:
    if scheme.get("type") == "float":
        return _plain_floats(layer, scheme)
    _bits(layer, scheme, "int", (8,))
    n, k = layer.shape("weight", 2)
    scale, block = _scales(layer, "weight_scale", scheme, n, k)
    zero = None
    if "weight_zero_point" in layer:
        shape = layer.shape("weight_scale")
        point = layer.get("weight_zero_point", [INT8], shape)
        zero = _rows(point, n, scheme).view(np.uint8) ^ np.uint8(128)
    elif not scheme.get("symmetric", True):
        raise layer.error("weight_zero_point", "is missing, though the scheme says symmetric=False")
    codes = layer.get("weight", [INT8]).view(np.uint8) ^ np.uint8(128)
    order = _order(layer, scheme, k, block)
    codes = codes if order is None else codes[:, order]
    return integers(codes, scale, zero, bits=8, block=block, order=order)


def _scales(
    layer: StoredLayer, suffix: str, scheme: _Scheme, n: int, k: int
) -> tuple[np.ndarray, int | None]:
    strategy, block = scheme.get("strategy"), _block(layer, scheme, k)
    if strategy == "block":
        tile = _tile(layer, scheme)
        shape, block = (-(-n // tile[0]), -(-k // tile[1])), tile[1]
        return _rows(layer.scales(suffix, shape), n, scheme), block
    shapes = {"tensor": [(1,), ()], "channel": [(n, 1)]}.get(str(strategy), [(n, k // (block or k))])
    return _rows(layer.scales(suffix, *shapes), n, scheme), block


def _rows(x: np.ndarray, n: int, scheme: _Scheme) -> np.ndarray:
    """Broadcasts per-tensor or per-tile scales to one scale (per block) for each row."""
    if scheme.get("strategy") == "block":
        return np.ascontiguousarray(spread_tiles(x, n, scheme["block_structure"][0]))
    return np.ascontiguousarray(per_row(x, n)) if x.size == 1 else x


def _tile(layer: StoredLayer, scheme: _Scheme) -> list[int]:
    tile = scheme.get("block_structure")
    if not (are_sizes(tile) and len(tile) == 2 and min(tile) > 0):
        raise layer.error(None, f"block_structure must be two positive sizes; found {tile!r}")
    return tile


def _plain_floats(layer: StoredLayer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (8,))
    _, k = layer.shape("weight", 2)
    tile = _tile(layer, scheme) if scheme.get("strategy") == "block" else None
    if _order(layer, scheme, k, _block(layer, scheme, k)) is not None:
        raise layer.error("weight_g_idx", "is of a weight of 8-bit floats, whose columns must be in order")
    return read_float8(layer, "weight_scale", tile, column_block=_block(layer, scheme, k))


def _nvfp4(layer: StoredLayer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (4,))
    return read_nvfp4(layer, "weight_packed", layer.get("weight_global_scale", FLOATS, (1,), ()), over=True)


def _mxfp4(layer: StoredLayer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (4,))
    n, half = layer.shape("weight_packed", 2)
    if half % 16:
        raise layer.error("weight_packed", f"blocks of 32 do not divide the {2 * half} inputs")
    scale = layer.get("weight_scale", [UINT8], (n, half // 16))
    if (scale == 255).any():
        raise layer.error("weight_scale", "has a scale of 255, which is NaN")
    raw = layer.get("weight_packed", [UINT8])
    return small_floats(raw, scale, codec=CODECS["mxfp4"], block=32, count=2 * half)


_READERS: dict[str, Callable[[StoredLayer, _Scheme], Any]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain_integers,
    "naive-quantized": _plain_integers,
    "float-quantized": _plain_floats,
    "mxfp8-quantized": _plain_floats,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


_MASKED_PARTS = ("compressed", "bitmask", "shape", "row_offsets", "weight_scale")
_MASKED_FORMATS = ("sparse-24-bitmask", "sparse-bitmask", "dense")


def _masked_weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Finds masked weights. 8-bit floats are read as block arrays, and all others as plain arrays."""
    out: dict[str, StoredWeight] = {}
    for layer in layers(tensors, "bitmask", "compressed", "row_offsets"):
        kind = config.get("format")
        if kind not in _MASKED_FORMATS:
            raise tensors.error("sparsity_config", f"expected one of {_MASKED_FORMATS}; found {kind!r}")
        out |= weight(layer, _MASKED_PARTS, lambda layer=layer, kind=kind: _read_masked(layer, kind))
    return out


def _read_masked(layer: StoredLayer, kind: str) -> Any:
    int64 = np.dtype(np.int64)
    n, k = (int(size) for size in layer.get("shape", [int64], (2, 1), (2,)).reshape(-1))
    if n < 1 or k < 1 or n * k > 16 * math.prod(layer.shape("bitmask", 2)):
        raise layer.error("shape", f"does not fit the bitmask; found {(n, k)}")
    mask = layer.get("bitmask", [UINT8], (n, -(-k // 8)))
    kept = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
    if kept[:, k:].any():
        raise layer.error("bitmask", "has bits set beyond the last column")
    kept = kept[:, :k]
    count = int(kept.sum())
    if kind == "sparse-24-bitmask":
        if k % 4 or (kept.reshape(n, -1, 4).sum(-1) != 2).any():
            raise layer.error("bitmask", "must keep two of every four columns")
        shape = (n, k // 2)
    else:
        shape = (count,)
        offsets = layer.get("row_offsets", [int64], (n,))
        if not np.array_equal(offsets, np.concatenate([[0], np.cumsum(kept.sum(1))[:-1]])):
            raise layer.error("row_offsets", "must count the values of the rows before")
    values = layer.get("compressed", [*FLOATS, E4M3, INT8], shape)
    dense = np.zeros((n, k), values.dtype)
    dense[kept] = values.reshape(-1)
    if values.dtype == E4M3:
        scale = layer.scales("weight_scale", (n, 1), (1,), ())
        return small_floats(dense, np.ascontiguousarray(per_row(scale, n)), codec="fp8", block=None)
    if values.dtype == INT8:
        raise layer.error("compressed", "pruned weights in int8 cannot be read")
    return jnp.asarray(dense)


def _written(path: Path, mapping: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    tensors: dict[str, np.ndarray] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in mapping.items():
        if not is_value(value):
            tensors[name] = np.asarray(value)
            continue
        if not name.endswith(".weight") and name != "weight":
            raise file_error(path, name, "quantised weights must be called ….weight")
        kind, scheme, parts = _parts(path, name, value)
        for suffix, array in parts.items():
            tensors[name.removesuffix("weight") + suffix] = array
        key = json.dumps([kind, scheme])
        group = groups.setdefault(key, {"format": kind, "weights": scheme, "targets": []})
        group["targets"].append(name.removesuffix(".weight"))
    kinds = {group["format"] for group in groups.values()}
    weights_only = {"input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group | weights_only for i, group in enumerate(groups.values())},
        "ignore": [],
    }
    return tensors, config


def _parts(path: Path, name: str, w: Any) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Returns the format of a weight, its scheme, and its tensors keyed by suffix."""
    if len(w.shape) != 2 or getattr(w, "axes", ()):
        raise file_error(path, name, "is not a matrix quantised along its last axis; materialise it")
    if isinstance(w, Int8Array):
        scale = np.asarray(w.scale)
        scheme = _scheme("int", 8, w.block if scale.shape[1] > 1 else None, True)
        return "int-quantized", scheme, {"weight": np.asarray(w.codes), "weight_scale": scale}
    floating = isinstance(w, BlockArray) and w.codec.scales == "float" and w.codec.group is None
    if not floating or w.codec.zeros in ("plus", "minus") or len(w.inner_shape) != 1:
        raise file_error(
            path,
            name,
            f"{type(w).__name__} of this kind has no place in the file: quantise to 'int4_block', "
            "'uint4_block', 'int8_block' or 'fp8', or materialise it",
        )
    n, k = w.shape
    scale = np.asarray(w.scale.scale)
    grouped = None if scale.shape[1] == 1 else w.block
    if grouped is not None and k % grouped:
        raise file_error(path, name, f"blocks of {grouped} do not divide its {k} columns")
    if w.codec.codes == "e4m3":
        raw = np.asarray(w.codes).view(ml_dtypes.float8_e4m3fn)
        scheme = _scheme("float", 8, grouped, True)
        return "float-quantized", scheme, {"weight": raw, "weight_scale": scale}
    if w.codec.codes != "integer" or not _is_packable(w.codec):
        raise file_error(path, name, f"the codec has no place in the file: {dataclasses.asdict(w.codec)}")
    bits = w.codec.bits
    parts = {
        "weight_packed": _words(np.asarray(w.codes), num_words(k, bits)),
        "weight_shape": np.array([n, k], np.int64),
        "weight_scale": scale,
    }
    if w.scale.zero is not None:
        points = np.asarray(w.scale.zero)
        if not np.issubdtype(points.dtype, np.integer) or points.max(initial=0) >= 1 << bits:
            raise file_error(path, name, f"zero points must be integers of {bits} bits; found {points.dtype}")
        along_outputs = pack(np.ascontiguousarray(points.T.astype(np.uint8)), bits)
        parts["weight_zero_point"] = np.ascontiguousarray(_words(along_outputs, num_words(n, bits)).T)
    if w.order is not None:
        index = np.empty(k, np.int32)
        index[np.asarray(w.order)] = np.arange(k) // w.block
        parts["weight_g_idx"] = index
    return "pack-quantized", _scheme("int", bits, grouped, w.scale.zero is None), parts


def _is_packable(codec: Codec) -> bool:
    return codec.zeros == "points" if codec.bias == 0 else codec.bias == 1 << (codec.bits - 1)


def _words(packed: np.ndarray, words: int) -> np.ndarray:
    """Views bytes as 32-bit words, padded with zeros if there aren't enough."""
    missing = 4 * words - packed.shape[-1]
    return np.ascontiguousarray(np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])).view(np.int32)


def _scheme(kind: str, bits: int, group: int | None, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "group_size": group,
        "strategy": "channel" if group is None else "group",
        "dynamic": False,
    }


FORMAT = Format(
    ("compressed-tensors",), weights, codes=(".weight_packed", ".weight_zero_point"),
    write=_written, types=(BlockArray, Int8Array), used=("config_groups", "format", "sparsity_config"),
    # About caches, or the progress of compression.
    without_effect=(
        "kv_cache_scheme", "global_compression_ratio", "moe_sparsity_config", "quantization_status",
        "run_compressed", "use_optimized_inference",
    ),
)  # fmt: skip
