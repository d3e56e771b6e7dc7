"""What the codes of a quantised matrix may stand for, with its scales as they are."""

from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """Values `scale * table + shift`, for each element of the rows of codes of a matrix.

    **Attributes:**

    - `table`: sorted values; `codes`: the code of each.
    - `scale`, `shift`: `(rows, columns)`.
    """

    table: np.ndarray
    codes: np.ndarray
    scale: np.ndarray
    shift: np.ndarray

    def places(self, w: np.ndarray, columns: slice | int = slice(None)) -> np.ndarray:
        """Where in the table the nearest value of each element of these columns stands."""
        scale, shift = self.scale[:, columns], self.shift[:, columns]
        safe = np.where(scale == 0, 1, scale)
        middles = (self.table[:-1] + self.table[1:]) / 2
        return np.searchsorted(middles, np.where(scale == 0, 0, (w - shift) / safe))

    def values(self, places: np.ndarray, columns: slice | int = slice(None)) -> np.ndarray:
        return self.table[places] * self.scale[:, columns] + self.shift[:, columns]


def sorted_table(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The finite values of codes 0, 1, …, each once and in order, and their codes."""
    values = np.asarray(values, np.float64)
    table, codes = np.unique(np.where(np.isfinite(values), values, np.nan), return_index=True)
    return table[np.isfinite(table)], codes[np.isfinite(table)].astype(np.uint8)
