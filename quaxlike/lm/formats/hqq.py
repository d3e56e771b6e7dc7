"""HQQ, i.e. 1- to 8-bit codes packed as slabs, in groups along either axis, with floating-point zero points.

Source: the layouts in <https://github.com/mobiusml/hqq>.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.quantized import BlockArray
from ...arrays.quantized.shape import reshaped
from ...files.tensors import Tensors
from .format import FLOATS, INT32, UINT8, Format, StoredLayer, StoredWeight, integers, layers, weights_of

# From bits to the packing's name, the dtype of each word, and the number of slabs per word.
_PACKINGS = {
    8: ("8bit_u8", UINT8, 1),
    4: ("4bit_u8", UINT8, 2),
    3: ("3bit_32", INT32, 10),
    2: ("2bit_u8", UINT8, 4),
    1: ("1bit_u8", UINT8, 8),
}
_META = [
    *("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "view_as_float"),
    *("channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale"),
    *("quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype"),
]
_COMMON = ("scale", "zero", "shape")  # other layers may also have tensors with these names
_INTEGERS = [np.dtype(t) for t in (np.int32, np.int64, np.uint8)]


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    found = layers(tensors, *(part for part in _META if part not in _COMMON))
    return weights_of(found, _META, _read)


def _scalar(layer: StoredLayer, name: str) -> int:
    return int(layer.get(name, _INTEGERS, (), (1,)).reshape(()))


def _read(layer: StoredLayer) -> Any:
    bits, axis = _scalar(layer, "nbits"), _scalar(layer, "axis")
    n, k = (int(size) for size in layer.get("shape", _INTEGERS, (2,)))
    if bits not in _PACKINGS or axis not in (0, 1) or min(n, k) < 1:
        raise layer.error(None, f"expected 8, 4, 3, 2 or 1 bits along axis 0 or 1; found {bits} along {axis}")
    name, dtype, slabs = _PACKINGS[bits]
    if "packing" in layer and (found := layer.get("packing", [UINT8]).tobytes()) != name.encode():
        raise layer.error("packing", f"{bits} bits are packed as {name}; found {found!r}")
    groups = math.prod(layer.shape("scale", 2))
    size = _scalar(layer, "group_size") if "group_size" in layer else n * k // groups
    if size < 1 or n * k % size:
        raise layer.error("group_size", f"groups of {size} do not divide a weight of shape {(n, k)}")
    groups = n * k // size
    rows, columns = (groups, size) if axis == 1 else (size, groups)
    as_floats = _scalar(layer, "view_as_float") if "view_as_float" in layer else layer.dtype("W_q") in FLOATS
    packed = layer.get("W_q", FLOATS if as_floats else [dtype])
    if as_floats and packed.ndim == 2:
        packed = packed.view(dtype)
    if packed.dtype != dtype or packed.shape != (-(-rows // slabs), columns):
        raise layer.error(
            "W_q", f"expected {dtype}{[-(-rows // slabs), columns]}; found {packed.dtype}{list(packed.shape)}"
        )
    top = (slabs - 1) * bits
    mask = 2**bits - 1
    codes = np.concatenate([packed >> (top - bits * i) & mask for i in range(slabs)])[:rows].astype(np.uint8)
    shape = (groups, 1) if axis == 1 else (1, groups)
    scale, zero = layer.scales("scale", shape), layer.scales("zero", shape)
    if axis == 1:
        return _in_rows(codes, scale, zero, bits, (n, k), size)
    return _in_columns(codes, scale, zero, bits, (n, k), size)


def _in_rows(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, shape: tuple[int, int], size: int
) -> BlockArray:
    """Creates an array with groups along rows. If a group spans several rows, then all rows are stored as
    one.
    """
    n, k = shape
    whole = k % size == 0
    as_stored = (lambda x: x.reshape(n, -1)) if whole else (lambda x: x.reshape(-1))
    out = integers(as_stored(codes), as_stored(scale), as_stored(zero), bits=bits, block=size)
    in_shape = out if whole else reshaped(out, shape)
    assert in_shape is not None  # it's always possible to split the last axis
    return in_shape


def _in_columns(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, shape: tuple[int, int], size: int
) -> BlockArray:
    """Creates an array with groups along columns: once flattened, group j is elements j, j + groups, ….

    This stores the transpose, so each row of codes is a column of the weight, sorted by group.
    """
    n, k = shape
    groups, turned = n * k // size, np.ascontiguousarray(codes.reshape(n, k).T)
    if k % groups == 0:  # each column belongs to a single group

        def in_rows(x: Any) -> Any:
            return x.reshape(-1)[np.arange(k) % groups, None]

        return integers(turned, in_rows(scale), in_rows(zero), bits=bits, block=None).with_axes((1, 0))
    if groups % k:  # neighbours along either axis belong to different groups, so use one scale per element
        index = np.arange(n * k).reshape(n, k) % groups
        each = scale.reshape(-1)[index], zero.reshape(-1)[index]
        return integers(codes.reshape(n, k), *each, bits=bits, block=1)
    per_column = groups // k
    index = np.arange(n) % per_column
    order = None if per_column == 1 else np.argsort(index, kind="stable")

    def in_columns(x: Any) -> Any:
        return np.ascontiguousarray(x.reshape(per_column, k).T)

    turned = turned if order is None else turned[:, order]
    numbers = in_columns(scale), in_columns(zero)
    return integers(turned, *numbers, bits=bits, block=size, order=order).with_axes((1, 0))


# Each layer's tensors hold all of the settings, too.
FORMAT = Format(("hqq",), weights, codes=(".W_q",), without_effect=("quant_config", "weights", "layers"))
