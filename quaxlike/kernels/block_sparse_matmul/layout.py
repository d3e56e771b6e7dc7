"""The index of a block-sparse weight by block columns, from the one by block rows, and back.

The blocks of a weight are numbered as they are stored, row by row: slot `j` of block row `n` is
number `n · slots + j`. Rows and columns that hold fewer blocks than others are padded with an index
one past the last, as in JAX's BCOO.
"""

import numpy as np
from jaxtyping import Int

from ..._checked import checked


@checked
def transposed_index(
    col_idx: Int[np.ndarray, "rows slots"], columns: int
) -> Int[np.ndarray, "columns slots_transposed"]:
    """Which blocks stand in each block column, from which block column each block stands in.

    The result's width is the number of blocks in the fullest column, which depends on the values of
    `col_idx`: they must be known, not traced.

    **Arguments:**

    - `col_idx`: block column of each block; `columns` for padding.
    - `columns`: number of block columns, K / b.

    **Returns:** numbers of the blocks of each block column, in increasing order;
    `rows · slots` for padding. int32.

    **Raises:** `ValueError` for an index outside `[0, columns]`.
    """
    flat = np.asarray(col_idx).reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() <= columns:
        raise ValueError(f"col_idx must lie in [0, {columns}], got values in [{flat.min()}, {flat.max()}]")
    order = np.argsort(flat, kind="stable")
    column = flat[order]
    first = np.searchsorted(column, np.arange(columns + 1))
    width = np.diff(first).max(initial=0)
    transposed = np.full((columns + 1, width), flat.size, np.int32)
    order, column = order[: first[-1]], column[: first[-1]]
    transposed[column, np.arange(column.size) - first[column]] = order
    return transposed[:-1]


def column_index(
    transposed: Int[np.ndarray, "columns slots_transposed"], rows: int, slots: int
) -> Int[np.ndarray, "rows slots"]:
    """The inverse of `transposed_index`.

    **Arguments:**

    - `transposed`: numbers of the blocks of each block column; `rows · slots` for padding.
    - `rows`, `slots`: the shape of the result.
    """
    columns = transposed.shape[0]
    col_idx = np.full(rows * slots + 1, columns, np.int32)
    col_idx[transposed] = np.arange(columns, dtype=np.int32)[:, None]
    return col_idx[:-1].reshape(rows, slots)
