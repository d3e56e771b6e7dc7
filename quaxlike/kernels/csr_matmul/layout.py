"""Positions of the elements of a sparse matrix: by rows (CSR), and by columns for the same elements."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..._checked import checked


class CsrIndex(NamedTuple):
    """The index of a matrix `(N, K)` of which only some elements are stored, in the order of their rows.

    Elements past the last pointers are padding; they count as zeros.

    **Attributes:** int32 arrays, with more leading axes for stacks of matrices:

    - `rows`: `(elements,)`, ascending; `N` for padding.
    - `columns`: `(elements,)`, ascending within a row; `K` for padding.
    - `row_ptr`: `(N + 1,)`: the elements of row `n` are those from `row_ptr[n]` up to `row_ptr[n + 1]`.
    - `by_column`: `(elements,)`: the indices of the elements in the order of their columns.
    - `column_ptr`: `(K + 1,)`: those of column `k` are `by_column[column_ptr[k]:column_ptr[k + 1]]`.
    """

    rows: Any
    columns: Any
    row_ptr: Any
    by_column: Any
    column_ptr: Any


@checked
def csr_index(
    rows: Int[np.ndarray, " elements"], columns: Int[np.ndarray, " elements"], shape: tuple[int, int]
) -> CsrIndex:
    """Makes the index of elements that are sorted by rows, and by columns within each row.

    **Arguments:**

    - `rows`, `columns`: the row and column of each element; `N` and `K` for padding, at the end.
    - `shape`: the shape of the matrix, `(N, K)`.

    **Raises:** `ValueError` if the elements are in another order, or if one occurs twice.
    """
    place = rows.astype(np.int64) * (shape[1] + 1) + columns
    inside = (rows < shape[0]) & (columns < shape[1])
    if (np.diff(place[inside]) <= 0).any() or not inside[: inside.sum()].all() or (place < 0).any():
        raise ValueError(
            f"csr_index takes elements of a matrix of shape {shape} sorted by rows, then by columns, without "
            "repetition, and with padding at the end."
        )
    by_column = np.lexsort((rows, columns))
    bounds = [np.arange(size + 1) for size in shape]
    arrays = (
        rows,
        columns,
        np.searchsorted(rows, bounds[0]),
        by_column,
        np.searchsorted(columns[by_column], bounds[1]),
    )
    return CsrIndex(*(array.astype(np.int32) for array in arrays))
