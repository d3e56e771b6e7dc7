"""The sparse matmul, and the product sampled at the stored elements, which are each other's derivatives."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from ..._checked import checked
from ...primitives import define_primitive
from ..backends import requested
from ..multilinear import check_x, map_rows, sum_tangents
from . import cpu
from .reference import matmul_reference, sampled_reference


class CsrIndex(NamedTuple):
    """The index of an `(N, K)` matrix storing only some elements, in row-major order.

    Besides the usual arrays for CSR, this includes the element order by column, for the transposed product.
    Any elements beyond the last pointer are padding, treated as zero.

    **Attributes:** int32 arrays, optionally with additional leading axes for stacked matrices:

    - `rows`: has shape `(elements,)`. In ascending order, with `N` for padding.
    - `columns`: has shape `(elements,)`. In ascending order within each row, with `K` for padding.
    - `row_ptr`: has shape `(N + 1,)`. Row `n` contains elements `row_ptr[n]` (inclusive) to `row_ptr[n + 1]`
        (exclusive).
    - `by_column`: has shape `(elements,)`. The element indices when sorted by column.
    - `column_ptr`: has shape `(K + 1,)`. Column `k` contains elements `by_column[column_ptr[k]:column_ptr[k +
        1]]`.
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
    """Creates an index from elements sorted by row and then by column.

    **Arguments:**

    - `rows`, `columns`: the row and column of each element. Padding must be at the end, and use `N` and `K`.
    - `shape`: the shape `(N, K)` of the matrix.

    **Raises:** `ValueError` if the elements are not sorted, or are not unique.
    """
    place = rows.astype(np.int64) * (shape[1] + 1) + columns
    inside = (rows < shape[0]) & (columns < shape[1])
    # Kernels rely on this order without checking it, and would silently compute the wrong sums.
    if (np.diff(place[inside]) <= 0).any() or not inside[: inside.sum()].all() or (place < 0).any():
        raise ValueError(
            f"csr_index takes elements of a matrix of shape {shape} sorted by rows, then by columns, without "
            "repetition, and with padding at the end."
        )
    # The transposed product reads elements by column.
    by_column = np.lexsort((rows, columns))
    bounds = [np.arange(size + 1) for size in shape]
    arrays = (
        rows,
        columns,
        np.searchsorted(rows, bounds[0]),  # padding has row N, and so is excluded by the last pointer
        by_column,
        np.searchsorted(columns[by_column], bounds[1]),
    )
    return CsrIndex(*(array.astype(np.int32) for array in arrays))


@checked
def csr_matmul(
    x: Shaped[Array, "*batch contracted"],
    data: Shaped[Array, " elements"],
    index: CsrIndex,
    *,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Shaped[Array, "*batch free"]:
    """Computes `x @ W.T` (or `x @ W` if `transpose`) for a weight storing only some elements.

    Floating-point products are accumulated in at least float32. The result is differentiable with respect to
    `x` and the stored elements.

    !!! example

        ```python
        import jax.numpy as jnp
        import numpy as np
        from quaxlike.kernels import csr_index, csr_matmul

        rows, columns = np.array([0, 0, 2]), np.array([1, 3, 0])
        y = csr_matmul(
            jnp.ones((2, 4)),
            jnp.array([1.0, 2.0, 3.0]),
            csr_index(rows, columns, (3, 4)),
        )
        ```

    **Arguments:**

    - `x`: has shape `(..., K)`, or `(..., N)` if `transpose`.
    - `data`: the stored elements, in row-major order.
    - `index`: the positions of these elements, from [`csr_index`][quaxlike.kernels.csr_index].
    - `transpose`: whether to contract over `N` instead of `K`.
    - `out_dtype`: the dtype of the result. Defaults to `x.dtype`.

    **Returns:** an array of shape `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the shapes of the operands are inconsistent.
    """
    check_x("csr_matmul", x, _shape(index), transpose)
    if data.shape != index.rows.shape:
        raise ValueError(
            f"csr_matmul: data must have the shape {index.rows.shape} of the index, got {data.shape}"
        )
    dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    return csr_matmul_p(x, data, *map(jnp.asarray, index), transpose=transpose, out_dtype=dtype)


@checked
def csr_sampled_matmul(
    by_rows: Shaped[Array, "*batch N"],
    by_columns: Shaped[Array, "*batch K"],
    index: CsrIndex,
    *,
    out_dtype: DTypeLike | None = None,
) -> Shaped[Array, " elements"]:
    """Computes the elements of `by_rows.T @ by_columns` at the positions in an index, with zeros for padding.

    **Arguments:**

    - `by_rows`, `by_columns`: arrays with the same leading axes, to contract over.
    - `index`: the positions, from [`csr_index`][quaxlike.kernels.csr_index].
    - `out_dtype`: the dtype of the result. Defaults to `by_rows.dtype`.
    """
    if (by_rows.shape[-1], by_columns.shape[-1]) != _shape(index) or (
        by_rows.shape[:-1] != by_columns.shape[:-1]
    ):
        raise ValueError(
            f"csr_sampled_matmul takes arrays of shapes (..., N) and (..., K) for a weight of shape "
            f"{_shape(index)}, got {by_rows.shape} and {by_columns.shape}"
        )
    dtype = np.dtype(by_rows.dtype if out_dtype is None else out_dtype)
    return csr_sampled_matmul_p(by_rows, by_columns, *map(jnp.asarray, index), out_dtype=dtype)


def _shape(index: CsrIndex) -> tuple[int, int]:
    return index.row_ptr.shape[-1] - 1, index.column_ptr.shape[-1] - 1


def _matmul_transpose(ct: Any, x: Any, data: Any, *index: Any, transpose: bool, **params: Any) -> Any:
    if ad.is_undefined_primal(x):
        # Cotangents must have the same dtype as the operand, independent of the result's dtype.
        params["out_dtype"] = np.dtype(x.aval.dtype)
        ct_x = csr_matmul_p(ct, data, *index, transpose=not transpose, **params)
        return ct_x, *[None] * (1 + len(index))
    by_rows, by_columns = (x, ct) if transpose else (ct, x)
    params["out_dtype"] = np.dtype(data.aval.dtype)
    return None, csr_sampled_matmul_p(by_rows, by_columns, *index, **params), *[None] * len(index)


def _sampled_transpose(ct: Any, by_rows: Any, by_columns: Any, *index: Any, **params: Any) -> Any:
    to_rows = ad.is_undefined_primal(by_rows)
    wanted, other = (by_rows, by_columns) if to_rows else (by_columns, by_rows)
    # As above, cotangents must have the dtype of their operand.
    params["out_dtype"] = np.dtype(wanted.aval.dtype)
    found = csr_matmul_p(other, ct, *index, transpose=not to_rows, **params)
    return (found, None, *[None] * len(index)) if to_rows else (None, found, *[None] * len(index))


csr_matmul_p = define_primitive(
    "csr_matmul",
    matmul_reference,
    # Bilinear in x and data. (The index is integer-valued, and so has no tangents.)
    jvp=lambda primals, tangents, **params: sum_tangents(csr_matmul_p, primals, tangents, params),
    transpose=_matmul_transpose,
    batching=lambda size, operands, dims, **params: map_rows(
        csr_matmul_p, size, operands, dims, params, rows=(0,)
    ),
)


def _lower_on_cpu(context: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    # JAX refuses to export calls to Eigen: XLA does not guarantee that they remain compatible.
    exported = context.module_context.lowering_parameters.for_export
    plain = exported or requested() == "reference"
    run = matmul_reference if plain else cpu.matmul
    params = csr_matmul_p.plain_params(params)
    return mlir.lower_fun(run, multiple_results=False)(context, *operands, **params)


mlir.register_lowering(csr_matmul_p, _lower_on_cpu, platform="cpu")

csr_sampled_matmul_p = define_primitive(
    "csr_sampled_matmul",
    sampled_reference,
    cpu=cpu.sampled,
    jvp=lambda primals, tangents, **params: sum_tangents(csr_sampled_matmul_p, primals, tangents, params),
    transpose=_sampled_transpose,
    batching=lambda size, operands, dims, **params: map_rows(
        csr_sampled_matmul_p, size, operands, dims, params, rows=()
    ),
)


@csr_matmul_p.slot("flops").register
def _matmul_flops(x: Any, data: Any, *index: Any, **params: Any) -> int:
    return 2 * math.prod(x.shape[:-1]) * data.size


@csr_sampled_matmul_p.slot("flops").register
def _sampled_flops(by_rows: Any, by_columns: Any, rows: Any, *index: Any, **params: Any) -> int:
    return 2 * math.prod(by_rows.shape[:-1]) * rows.size
