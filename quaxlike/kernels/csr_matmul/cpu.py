"""The sparse matmul on CPUs.

Products of a few rows use the native library (if compiled). All others use Eigen, as in JAX's BCSR matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..native.library import Library, library
from .reference import features_first, matmul_reference, rows_first, sampled_reference, sum_dtype

_EIGEN_DTYPES = ("float32", "float64", "complex64", "complex128", "int32", "int64")

# Up to this many rows, the native product is faster than Eigen's.
_MOST_ROWS = 32

# Above this density, dense products of whole rows are faster than gathering two vectors for each stored
# element, even though most of their elements are discarded. (We measured 85 ns for an element with 128 terms,
# compared to 1.7 ns for an element of a dense product.)
_DENSE_FROM = 0.02
# The dense product is computed in chunks of at most `_ROWS` rows and `_PRODUCT` elements, each then read
# `_ELEMENTS` elements at a time.
_ROWS = 256
_PRODUCT = 2**22
_ELEMENTS = 2**14


def matmul(x: Array, data: Array, *index: Array, transpose: bool, out_dtype: np.dtype) -> Array:
    rows, columns, row_ptr, by_column, column_ptr = index
    dtype = sum_dtype(out_dtype)
    is_open = not all(isinstance(size, int) for size in x.shape)  # unsupported by `jax.export` for FFI calls
    empty = 0 in (x.size, data.size, row_ptr.size - 1, column_ptr.size - 1)
    if dtype.name not in _EIGEN_DTYPES or is_open or empty:
        return matmul_reference(x, data, *index, transpose=transpose, out_dtype=out_dtype)
    x, lead = features_first(x, dtype)
    csr = (data[by_column], rows[by_column], column_ptr) if transpose else (data, columns, row_ptr)
    if dtype == jnp.float32 and x.shape[1] <= _MOST_ROWS and isinstance(library(), Library):
        out = jax.ShapeDtypeStruct((x.shape[1], csr[2].shape[0] - 1), dtype)
        y = jax.ffi.ffi_call("quaxlike_csr_multiply", out)(x.T, csr[0].astype(dtype), *csr[1:])
        return y.reshape(*lead, out.shape[1]).astype(out_dtype)
    from jax.experimental import sparse

    w = sparse.BCSR((csr[0].astype(dtype), *csr[1:]), shape=(csr[2].shape[0] - 1, x.shape[0]))
    y = sparse.bcsr_dot_general(w, x, dimension_numbers=(((1,), (0,)), ((), ())))
    return rows_first(y, lead).astype(out_dtype)


def sampled(by_rows: Array, by_columns: Array, *index: Array, out_dtype: np.dtype) -> Array:
    rows, columns, row_ptr = index[:3]
    n, k = by_rows.shape[-1], by_columns.shape[-1]
    if rows.shape[0] < _DENSE_FROM * n * k or n * k == 0:
        return sampled_reference(by_rows, by_columns, *index, out_dtype=out_dtype)
    y, _ = features_first(by_rows, sum_dtype(out_dtype))
    x, _ = features_first(by_columns, sum_dtype(out_dtype))
    height = max(1, min(_ROWS, _PRODUCT // k))
    chunks = -(-n // height)
    y = jnp.pad(y, ((0, chunks * height - n), (0, 0)))
    bounds = row_ptr[np.minimum(np.arange(chunks + 1) * height, n)]
    size = rows.shape[0]
    rows, columns = (jnp.pad(array, (0, _ELEMENTS), mode="edge") for array in (rows, columns))

    def chunk(out: Array, of_chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
        i, first, end = of_chunk
        product = (lax.dynamic_slice_in_dim(y, i * height, height) @ x.T).reshape(-1)

        def piece(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            start, out = carry
            row, column = (lax.dynamic_slice_in_dim(a, start, _ELEMENTS) for a in (rows, columns))
            found = product.at[(row - i * height) * k + column].get(mode="clip")
            # Entries written past the end of this chunk will be overwritten by later chunks.
            return start + _ELEMENTS, lax.dynamic_update_slice_in_dim(out, found, start, 0)

        return lax.while_loop(lambda carry: carry[0] < end, piece, (first, out))[1], None

    of_chunks = jnp.arange(chunks, dtype=jnp.int32), bounds[:-1], bounds[1:]
    out = lax.scan(chunk, jnp.zeros(size + _ELEMENTS, y.dtype), of_chunks)[0][:size]
    return jnp.where(jnp.arange(size, dtype=jnp.int32) < row_ptr[-1], out, 0).astype(out_dtype)
