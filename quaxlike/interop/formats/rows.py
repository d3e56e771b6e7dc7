"""Weights of checkpoints by rows, so that a process reads only those that its devices store."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...sharding.reading import Rows
from ..files.tensors import TensorInfo, Tensors
from .format import Weight


def dense_rows(tensors: Any, name: str) -> Rows:
    """The rows of a plain tensor."""
    shape = tensors.info[name].shape

    def read(start: int = 0, stop: int | None = None) -> np.ndarray:
        return tensors.mapped(name)[start:stop]

    return Rows(shape[0], read) if shape else Rows(None, lambda: tensors[name])


def rows_of_weight(
    tensors: Tensors,
    name: str,
    weight: Weight,
    reader: Callable[[Tensors, Mapping[str, Any]], Mapping[str, Weight]],
    settings: Mapping[str, Any],
) -> Rows:
    """The rows of a weight in a format whose reader reads windows as if they were files."""
    names, read = weight.tensors, weight.read
    count = max((tensors.info[part].shape or (1,))[0] for part in names)
    tile = settings.get("weight_block_size")
    each = {part: _rows_an_entry(tensors.info[part], count, tile[0] if tile else 1) for part in names}
    if None in each.values():
        return Rows(None, read)

    def part(start: int = 0, stop: int | None = None) -> Any:
        if stop is None or (start, stop) == (0, count):
            return read()
        info = {part: _cut(tensors.info[part], each[part] or 0, start, stop) for part in names}
        window = Tensors(tensors.path, info, tensors.metadata)
        return reader(window, settings)[name].read()

    return Rows(count, part, math.lcm(*(n for n in each.values() if n)))


def _rows_an_entry(info: TensorInfo, count: int, tile: int) -> int | None:
    """The number of rows that share an entry of a tensor, 0 for all of them; None if it cannot be told."""
    if math.prod(info.shape) == 1 < count:
        return 0
    entries = info.shape[0] if info.shape else 1
    return next((rows for rows in (1, tile) if -(-count // rows) == entries), None)


def _cut(info: TensorInfo, each: int, start: int, stop: int) -> TensorInfo:
    """The part of a tensor with the entries for rows `start` to `stop`."""
    if each == 0:
        return info
    first, last = start // each, -(-stop // each)
    size = info.nbytes // info.shape[0]
    return info._replace(shape=(last - first, *info.shape[1:]), offset=info.offset + first * size)
