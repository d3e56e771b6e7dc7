"""Differences between a GGUF file's tensors and transformers' arrays.

Rows and columns can be in a different order, and the numbers themselves can be transformed. For example,
llama.cpp stores `-exp(A_log)` rather than `A_log`. Reading inverts all orders in here: these are for writing,
i.e. `tensor = array[order]`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...files.errors import file_error
from ..families import Family, TensorLayout


def layout_of(tensor: str, family: Family | None) -> TensorLayout:
    """Looks up the layout of a tensor from its name in llama.cpp."""
    own = family.gguf if family else None
    if family is None or own is None:
        return TensorLayout()
    inner = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
    if inner in own.layouts:
        return own.layouts[inner]
    if inner == "ffn_gate_inp_shexp.weight":
        return TensorLayout(is_row=True)
    if own.permuted and inner in _ROTATED:
        return TensorLayout(rows=_ROTATED[inner])
    if family.norm_offset and inner.endswith("norm.weight"):
        return TensorLayout(numbers="offset")
    return TensorLayout()


_ROTATED = {f"attn_{x}.{kind}": f"rotated_{x}" for x in ("q", "k") for kind in ("weight", "bias")}


# Orders -------------------------------------------------------------------------------------------

_LARGEST = 1 << 24  # no model has as many heads, or heads as large
#: A function looking up a size in the metadata.
_Size = Callable[[str], int]


def _rotated(key: str) -> Callable[[_Size, int], list[np.ndarray]]:
    """Interleaves the two halves of each head.

    This is because llama.cpp rotates pairs of neighbours, whereas transformers rotates a head's first half
    together with the second.
    """

    def order(size: _Size, count: int) -> list[np.ndarray]:
        heads = size(key)
        if count % (2 * heads):
            raise ValueError(f"{heads} heads do not divide its {count} rows into pairs")
        return [np.arange(count).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)]

    return order


class _Heads(NamedTuple):
    """The sizes of a Gated DeltaNet layer.

    **Attributes:**

    - `key_heads`: the number of heads for keys (and queries).
    - `heads`: the number of heads for values, a multiple of this.
    - `keys`: the total size of all key heads.
    """

    key_heads: int
    heads: int
    keys: int

    @classmethod
    def of(cls, size: _Size) -> "_Heads":
        key_heads, heads = size("ssm.group_count"), size("ssm.time_step_rank")
        if heads % key_heads:
            raise ValueError(f"{key_heads} heads of keys do not divide {heads} heads of values")
        return cls(key_heads, heads, key_heads * size("ssm.state_size"))

    def tiled(self, count: int) -> np.ndarray:
        """Returns llama.cpp's order for the value heads.

        Several value heads share each key head. In transformers these are next to each other, but llama.cpp
        starts with the first value head of every key head, followed by all second ones, and so on.
        """
        if count < 1 or count % self.heads:
            raise ValueError(f"{self.heads} heads do not divide {count} values")
        shared = self.heads // self.key_heads
        return np.arange(count).reshape(self.key_heads, shared, -1).swapaxes(0, 1).reshape(-1)


def _values(size: _Size, count: int) -> list[np.ndarray]:
    return [_Heads.of(size).tiled(count)]


def _queries_keys_values(size: _Size, count: int) -> list[np.ndarray]:
    heads = _Heads.of(size)
    first = 2 * heads.keys
    values = heads.tiled(count - first)
    return [np.concatenate([np.arange(first), first + values])]


def _by_key_head(size: _Size, count: int) -> list[np.ndarray]:
    """Splits the rows of Qwen3-Next's fused projection into llama.cpp's two tensors.

    In transformers, the rows are grouped by key head: its queries, keys, values and gates. llama.cpp has one
    tensor for all queries, keys and values, and another one for the gates.
    """
    heads = _Heads.of(size)
    values = (count - 2 * heads.keys) // 2
    heads.tiled(values)  # checks the sizes
    ends = np.cumsum([heads.keys, heads.keys, values]) // heads.key_heads
    rows = np.arange(2 * (heads.keys + values)).reshape(heads.key_heads, -1)
    parts = [part.reshape(-1) for part in np.split(rows, ends, axis=1)]
    return [np.concatenate(parts[:3]), parts[3]]


ORDERS: dict[str, Callable[[_Size, int], list[np.ndarray]]] = {
    "rotated_q": _rotated("attention.head_count"),
    "rotated_k": _rotated("attention.head_count_kv"),
    "value_heads": _values,
    "queries_keys_values": _queries_keys_values,
    "by_key_head": _by_key_head,
}


def orders(path: Path, name: str, order: str, count: int, metadata: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the rows (or columns) of an array for each of its tensors.

    **Raises:** `CheckpointError` if any sizes are missing from the metadata, or don't fit the array.
    """
    prefix = f"{metadata.get('general.architecture')}."

    def size(key: str) -> int:
        found = metadata.get(prefix + key)
        if found is None and key.endswith("_kv"):
            found = metadata.get(prefix + key.removesuffix("_kv"))
        if type(found) is not int or not 1 <= found < _LARGEST:
            raise ValueError(f"expected a size as {prefix}{key}; found {found!r}")
        return found

    try:
        found = ORDERS[order](size, count)
    except ValueError as error:
        raise file_error(path, name, str(error)) from None
    if sum(map(len, found)) != count:
        raise file_error(path, name, f"the sizes of its heads do not fit its {count} rows")
    return found


def order_of(path: Path, name: str, order: str, count: int, metadata: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the order of a single tensor, or None if there is nothing to reorder."""
    if not order:
        return None
    (found,) = orders(path, name, order, count, metadata)
    return None if np.array_equal(found, np.arange(count)) else found


# Functions ----------------------------------------------------------------------------------------


class _Function(NamedTuple):
    """A function applied to all numbers when writing an array, along with its inverse.

    Both are also passed the family's offset for norm weights, but most ignore this.
    """

    written: Callable[[np.ndarray, float | int], np.ndarray]
    read: Callable[[np.ndarray, float | int], np.ndarray]


def _same(x: np.ndarray, offset: float | int) -> np.ndarray:
    return x


def _added(x: np.ndarray, offset: float | int) -> np.ndarray:
    return x + x.dtype.type(offset)


def _taken(x: np.ndarray, offset: float | int) -> np.ndarray:
    return x - x.dtype.type(offset)


def _negative_exponential(x: np.ndarray, offset: float | int) -> np.ndarray:
    return -np.exp(x)


def _logarithm(x: np.ndarray, offset: float | int) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(-x)


FUNCTIONS = {
    "": _Function(_same, _same),
    "offset": _Function(_added, _taken),
    "negative_exponential": _Function(_negative_exponential, _logarithm),
}
