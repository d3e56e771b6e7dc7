"""The values a quantised matrix can represent without changing its scales.

Calibration uses this to choose codes other than the nearest ones.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from .base import AbstractQuantizedArray

_Q = TypeVar("_Q", bound=AbstractQuantizedArray)


class Grid(NamedTuple):
    """The representable values of each element, `scale * table + shift`.

    **Attributes:**

    - `table`, `codes`: sorted values, and the corresponding codes.
    - `scale`, `shift`: `(rows, columns)`; each matrix row is a row of codes.
    """

    table: np.ndarray
    codes: np.ndarray
    scale: np.ndarray
    shift: np.ndarray

    def nearest(self, w: np.ndarray, columns: slice | int = slice(None)) -> np.ndarray:
        """Returns the indices of the table entries nearest to the elements in these columns."""
        scale, shift = self.scale[:, columns], self.shift[:, columns]
        safe = np.where(scale == 0, 1, scale)
        middles = (self.table[:-1] + self.table[1:]) / 2
        return np.searchsorted(middles, np.where(scale == 0, 0, (w - shift) / safe))

    def values(self, indices: np.ndarray, columns: slice | int = slice(None)) -> np.ndarray:
        return self.table[indices] * self.scale[:, columns] + self.shift[:, columns]


def grid_of(w: AbstractQuantizedArray) -> Grid:
    """Returns the grid of a quantised array stored as a matrix."""
    shape, codec, (_, count) = w.stored_shape, w.codec, w.matrix
    scale, zero = codec.scales_and_zeros(*w.rows_of_codes()[1].parts())

    def spread(x: Any) -> np.ndarray:
        each = np.repeat(np.asarray(x, np.float64), max(w.block, 1), axis=-1)[..., :count]
        return np.ascontiguousarray(np.broadcast_to(each, (*each.shape[:-1], count))).reshape(shape)

    each = spread(scale)
    signs = {"points": -each, "minus": -1.0, "plus": 1.0, None: 0.0}
    shift = np.zeros_like(each) if zero is None else spread(zero) * signs[codec.zeros]
    # Never round to infinities, which tables can contain. Also, several codes may have the same value.
    values = codec.all_values.astype(np.float64)
    low, high = codec.range()
    table, codes = np.unique(np.where((values >= low) & (values <= high), values, np.nan), return_index=True)
    finite = np.isfinite(table)
    return Grid(table[finite], codes[finite].astype(np.uint8), each, shift)


def with_codes(w: _Q, codes: np.ndarray) -> _Q:
    """Replaces the codes (one per byte, with the grid's rows and columns) without changing the scales."""
    rows, count = w.matrix
    lead = w.codes.shape[:-1]
    packed = w.codec.pack(codes.astype(np.uint8).reshape(*lead, *([] if w.order is None else [rows]), count))
    return dataclasses.replace(w, codes=jnp.asarray(packed.reshape(w.codes.shape)))
