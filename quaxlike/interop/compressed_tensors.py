"""compressed-tensors, vLLM's format: packed and plain integers, FP8, NVFP4, MXFP4, MXFP8, sparse masks.

Source: the layouts of <https://github.com/vllm-project/compressed-tensors>.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays.quantized import CODECS
from ..surgery.patterns import PatternError, startmatch
from .blocks import (
    E4M3,
    FLOATS,
    INT8,
    INT32,
    UINT8,
    Layer,
    Weight,
    integers,
    layers,
    num_words,
    per_row,
    settings,
    small_floats,
    spread_tiles,
    stream,
    unpack,
    weight,
)
from .compressed_tensors_writer import is_held, tensors_of
from .errors import complain, quoted
from .float8 import read_float8, read_nvfp4
from .format import Format
from .sparse_masks import dense_weights
from .tensors import Tensors, are_sizes

_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
)
_INT64 = np.dtype(np.int64)

_Scheme = Mapping[str, Any]


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Weight]:
    """The quantised and the sparse weights of a checkpoint, by name."""
    out = dense_weights(tensors, settings(config, "sparsity_config", tensors.path))
    groups = settings(config, "config_groups", tensors.path)
    if not all(isinstance(g, dict) and _are_targets(g.get("targets") or []) for g in groups.values()):
        raise complain(tensors.path, "config_groups", "must map names to settings, `targets` a list of texts")
    for layer in layers(tensors, *_PARTS[1:], dtypes=[INT8, E4M3]):
        if f"{layer.name}.weight" in out:
            continue
        group = _group_of(layer, groups)
        kind = group.get("format") or config.get("format")
        if not isinstance(kind, str) or kind not in _READERS:
            known = ", ".join(_READERS)
            raise layer.bad(None, f"its format must be one of {known}; found {quoted(kind)}")
        scheme = group.get("weights")
        if not isinstance(scheme, dict):
            raise layer.bad(None, "its group of the configuration does not say how weights are quantised")
        read = lambda layer=layer, kind=kind, scheme=scheme: _READERS[kind](layer, scheme)
        out |= weight(layer, _PARTS, read)
    return out


def _are_targets(targets: Any) -> bool:
    return isinstance(targets, list) and all(isinstance(target, str) for target in targets)


def _group_of(layer: Layer, groups: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group whose targets name the layer, or else the first one that names a class of layers."""
    by_class = None
    for group in groups.values():
        for target in group.get("targets") or []:
            if target.startswith("re:"):
                try:
                    if startmatch(target[3:], layer.name):
                        return group
                except PatternError as error:
                    raise layer.bad(None, f"a target is {quoted(target)}: {error}") from None
            elif target == layer.name:
                return group
            elif by_class is None and target[:1].isupper():
                by_class = group
    if by_class is None:
        raise layer.bad(None, "no group in the configuration names it, though it is quantised")
    return by_class


def _bits(layer: Layer, scheme: _Scheme, kind: str, among: tuple[int, ...]) -> int:
    bits = scheme.get("num_bits")
    if scheme.get("type") != kind or bits not in among:
        raise layer.bad(
            None,
            f"expected type {kind!r} of {among} bits; found {quoted(scheme.get('type'))} of {quoted(bits)}",
        )
    return bits


def _block(layer: Layer, scheme: _Scheme, k: int) -> int | None:
    """The number of columns that share a scale; None for all of them."""
    size = scheme.get("group_size")
    if scheme.get("strategy") in ("group", "tensor_group"):
        if type(size) is not int or size < 1 or k % size:
            raise layer.bad(None, f"its group_size must divide the {k} inputs; found {quoted(size)}")
        return size
    return None


def _packed_integers(layer: Layer, scheme: _Scheme) -> Any:
    bits = _bits(layer, scheme, "int", (2, 3, 4, 5, 6, 7, 8))
    n, k = (int(size) for size in layer.get("weight_shape", [_INT64, INT32], (2,)))
    rows, words = layer.shape("weight_packed", 2)
    per_word = 32 // bits
    dense, whole = num_words(k, bits), -(-k // per_word)
    if rows != n or k < 1 or words not in (dense, whole):
        raise layer.bad(
            "weight_packed",
            f"a weight of shape {(n, k)} takes {dense} words in each of {n} rows; found {words} in {rows}",
        )
    block = _block(layer, scheme, k)
    groups = 1 if block is None else k // block
    packed = layer.get("weight_packed", [INT32])
    if words == dense:
        codes = unpack(stream(packed), bits, k)
    else:  # older releases: as many whole codes as a word holds
        shifts = (np.arange(per_word) * bits).astype(np.uint32)
        parts = packed.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
        codes = parts.astype(np.uint8).reshape(n, -1)[:, :k]
    scale = layer.scales("weight_scale", (n, groups))
    symmetric = scheme.get("symmetric", True)
    if symmetric == ("weight_zero_point" in layer):
        there = "has" if symmetric else "lacks"
        raise layer.bad(
            "weight_zero_point", f"the scheme says symmetric={symmetric}, the file {there} zero points"
        )
    zero = None
    if not symmetric:  # packed along the outputs
        zeros = layer.get("weight_zero_point", [INT32], (num_words(n, bits), groups))
        zero = unpack(stream(zeros.T), bits, n).T
    order = _order(layer, scheme, k, block)
    codes = codes if order is None else codes[:, order]
    return integers(codes, scale, zero, bits=bits, block=block, order=order)


def _order(layer: Layer, scheme: _Scheme, k: int, block: int | None) -> np.ndarray | None:
    """The columns by groups; None if they are in order."""
    if "weight_g_idx" not in layer:
        kind = scheme.get("actorder")  # by "weight" and "static", columns are in order
        if (kind is True or str(kind).lower() in ("group", "dynamic")) and block not in (None, k):
            raise layer.bad("weight_g_idx", f"is missing, though the scheme says actorder={kind!r}")
        return None
    index = layer.get("weight_g_idx", [INT32], (k,))
    if block is None or not np.array_equal(np.sort(index), np.arange(k) // block):
        raise layer.bad("weight_g_idx", f"must name each group of {block or k} of the {k} columns so often")
    return np.argsort(index, kind="stable")


def _plain_integers(layer: Layer, scheme: _Scheme) -> Any:
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
        raise layer.bad("weight_zero_point", "is missing, though the scheme says symmetric=False")
    codes = layer.get("weight", [INT8]).view(np.uint8) ^ np.uint8(128)
    order = _order(layer, scheme, k, block)
    codes = codes if order is None else codes[:, order]
    return integers(codes, scale, zero, bits=8, block=block, order=order)


def _scales(layer: Layer, suffix: str, scheme: _Scheme, n: int, k: int) -> tuple[np.ndarray, int | None]:
    strategy, block = scheme.get("strategy"), _block(layer, scheme, k)
    if strategy == "block":
        tile = _tile(layer, scheme)
        shape, block = (-(-n // tile[0]), -(-k // tile[1])), tile[1]
        return _rows(layer.scales(suffix, shape), n, scheme), block
    shapes = {"tensor": [(1,), ()], "channel": [(n, 1)]}.get(str(strategy), [(n, k // (block or k))])
    return _rows(layer.scales(suffix, *shapes), n, scheme), block


def _rows(x: np.ndarray, n: int, scheme: _Scheme) -> np.ndarray:
    """The scale of a tensor or the scales of tiles, repeated for each row."""
    if scheme.get("strategy") == "block":
        return np.ascontiguousarray(spread_tiles(x, n, scheme["block_structure"][0]))
    return np.ascontiguousarray(per_row(x, n)) if x.size == 1 else x


def _tile(layer: Layer, scheme: _Scheme) -> list[int]:
    tile = scheme.get("block_structure")
    if not (are_sizes(tile) and len(tile) == 2 and min(tile) > 0):
        raise layer.bad(None, f"block_structure must be two positive sizes; found {tile!r}")
    return tile


def _plain_floats(layer: Layer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (8,))
    _, k = layer.shape("weight", 2)
    tile = _tile(layer, scheme) if scheme.get("strategy") == "block" else None
    if _order(layer, scheme, k, _block(layer, scheme, k)) is not None:
        raise layer.bad("weight_g_idx", "is of a weight of 8-bit floats, whose columns must be in order")
    return read_float8(layer, "weight_scale", tile, column_block=_block(layer, scheme, k))


def _nvfp4(layer: Layer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (4,))
    return read_nvfp4(layer, "weight_packed", layer.get("weight_global_scale", FLOATS, (1,), ()), over=True)


def _mxfp4(layer: Layer, scheme: _Scheme) -> Any:
    _bits(layer, scheme, "float", (4,))
    n, half = layer.shape("weight_packed", 2)
    if half % 16:
        raise layer.bad("weight_packed", f"blocks of 32 do not divide the {2 * half} inputs")
    scale = layer.get("weight_scale", [UINT8], (n, half // 16))
    if (scale == 255).any():
        raise layer.bad("weight_scale", "has a scale of 255, which is NaN")
    raw = layer.get("weight_packed", [UINT8])
    return small_floats(raw, scale, codec=CODECS["mxfp4"], block=32, count=2 * half)


_READERS: dict[str, Callable[[Layer, _Scheme], Any]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain_integers,
    "naive-quantized": _plain_integers,
    "float-quantized": _plain_floats,
    "mxfp8-quantized": _plain_floats,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


FORMAT = Format(
    ("compressed-tensors",), weights, codes=(".weight_packed", ".weight_zero_point"),
    written=tensors_of, takes=is_held,
)  # fmt: skip
