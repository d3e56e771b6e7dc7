"""The writer of compressed-tensors: packed integers, int8 and FP8, one scheme for each kind of weight."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .._checked import a_or_an
from ..arrays.quantized import CODECS, BlockArray, Codec, Int8Array
from ..core.values import is_value
from ..kernels import bits as bitstream
from .errors import complain


def is_held(value: Any) -> bool:
    """Whether a Value is of a type that the format has a place for."""
    return isinstance(value, Int8Array) or (isinstance(value, BlockArray) and value.codec != CODECS["mxfp4"])


def tensors_of(path: Path, mapping: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a checkpoint, and its `quantization_config`."""
    tensors: dict[str, np.ndarray] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in mapping.items():
        if not is_value(value):
            tensors[name] = np.asarray(value)
            continue
        if not name.endswith(".weight") and name != "weight":
            raise complain(path, name, "quantised weights must be called ….weight")
        kind, scheme, parts = _parts(path, name, value)
        for suffix, array in parts.items():
            tensors[name.removesuffix("weight") + suffix] = array
        key = json.dumps([kind, scheme])
        group = groups.setdefault(key, {"format": kind, "weights": scheme, "targets": []})
        group["targets"].append(name.removesuffix(".weight"))
    kinds = {group["format"] for group in groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _group(group) for i, group in enumerate(groups.values())},
        "ignore": [],
    }
    return tensors, config


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "input_activations": None, "output_activations": None}


def _parts(path: Path, name: str, w: Any) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """The format of a weight, its scheme, and its tensors by their suffixes."""
    if len(w.shape) != 2 or getattr(w, "axes", ()):
        raise complain(path, name, "is not a matrix quantised along its last axis; materialise it")
    if isinstance(w, Int8Array):
        scale = np.asarray(w.scale)
        scheme = _scheme("int", 8, w.block if scale.shape[1] > 1 else None, True)
        return "int-quantized", scheme, {"weight": np.asarray(w.codes), "weight_scale": scale}
    floating = isinstance(w, BlockArray) and w.codec.scales == "float" and w.codec.group is None
    if not floating or w.codec.zeros in ("plus", "minus") or len(w.inner_shape) != 1:
        raise complain(
            path,
            name,
            f"{a_or_an(type(w))} of this kind has no place in the file: quantise to 'int4_block', "
            "'uint4_block', 'int8_block' or 'fp8', or materialise it",
        )
    n, k = w.shape
    scale = np.asarray(w.scale.scale)
    grouped = None if scale.shape[1] == 1 else w.block
    if grouped is not None and k % grouped:
        raise complain(path, name, f"blocks of {grouped} do not divide its {k} columns")
    if w.codec.codes == "e4m3":
        raw = np.asarray(w.codes).view(ml_dtypes.float8_e4m3fn)
        scheme = _scheme("float", 8, grouped, True)
        return "float-quantized", scheme, {"weight": raw, "weight_scale": scale}
    if w.codec.codes != "integer" or not _is_packable(w.codec):
        raise complain(path, name, f"the codec has no place in the file: {dataclasses.asdict(w.codec)}")
    bits, words = w.codec.bits, -(-k * w.codec.bits // 32)
    parts = {
        "weight_packed": _words(np.asarray(w.codes), words),
        "weight_shape": np.array([n, k], np.int64),
        "weight_scale": scale,
    }
    if w.scale.zero is not None:
        points = np.asarray(w.scale.zero)
        if not np.issubdtype(points.dtype, np.integer) or points.max(initial=0) >= 1 << bits:
            raise complain(path, name, f"zero points must be integers of {bits} bits; found {points.dtype}")
        along_outputs = bitstream.pack(np.ascontiguousarray(points.T.astype(np.uint8)), bits)
        parts["weight_zero_point"] = np.ascontiguousarray(_words(along_outputs, -(-n * bits // 32)).T)
    if w.order is not None:
        index = np.empty(k, np.int32)
        index[np.asarray(w.order)] = np.arange(k) // w.block
        parts["weight_g_idx"] = index
    return "pack-quantized", _scheme("int", bits, grouped, w.scale.zero is None), parts


def _is_packable(codec: Codec) -> bool:
    return codec.zeros == "points" if codec.bias == 0 else codec.bias == 1 << (codec.bits - 1)


def _words(packed: np.ndarray, words: int) -> np.ndarray:
    """Bytes as 32-bit words, the last one padded with zeros."""
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
