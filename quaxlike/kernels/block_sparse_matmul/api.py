"""The block-sparse matmul, as a primitive with derivatives and several backends."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int32

from ..._checked import checked
from ..backends import Backend, Choice, bind, first_choice, kernel_primitive
from ..multilinear import check_x, map_rows, sum_tangents
from . import hopper, mma, tpu
from .reference import matmul_reference, matmul_sliced, sampled_reference, sampled_sliced

_GPUS = ("cuda", "rocm")


@checked
def block_sparse_matmul(
    x: Float[Array, "*batch contracted"],
    blocks: Float[Array, "..."],
    col_idx: Int32[ArrayLike, "..."],
    transposed_idx: Int32[ArrayLike, "columns slots"],
    *,
    transpose: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch free"]:
    """Computes `x @ W.T` (or `x @ W` if `transpose`) for a weight with only some square blocks stored.

    `W` has shape `(N, K)` and is zero outside its blocks. These are stored as block-ELL: every block row has
    as many slots as the fullest row needs. Products are accumulated in float32, in time proportional to the
    number of slots, so this works best if blocks are spread evenly over rows. The result is differentiable
    with respect to `x` and the stored blocks.

    !!! example

        ```python
        import jax.numpy as jnp
        import numpy as np
        from quaxlike.kernels import block_sparse_matmul, transposed_index

        # (256, 192), in block rows of one, one, two and no blocks.
        col_idx = np.array([[0, 3], [2, 3], [0, 1], [3, 3]], np.int32)
        blocks = jnp.ones((4, 2, 64, 64))
        x = jnp.ones((8, 192))
        y = block_sparse_matmul(x, blocks, col_idx, transposed_index(col_idx, 3))
        ```

    **Arguments:**

    - `x`: has shape `(..., K)`, or `(..., N)` if `transpose`.
    - `blocks`: has shape `(N / b, slots, b, b)`. `blocks[n, j]` starts at row `n·b` and column
        `col_idx[n, j]·b` of `W`.
    - `col_idx`: the block column of every block, in `[0, K / b)`, or `K / b` for a slot without a block.
    - `transposed_idx`: the numbers of the blocks in each block column, from
        [`transposed_index`][quaxlike.kernels.transposed_index].
    - `transpose`: whether to contract over `N` instead of `K`.
    - `out_dtype`: the dtype of the result. Defaults to `x.dtype`.

    **Returns:** an array of shape `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if the shapes of the operands are inconsistent.
    """
    col_idx, transposed_idx = jnp.asarray(col_idx), jnp.asarray(transposed_idx)
    _check(x, blocks, col_idx, transposed_idx, transpose)
    return bind(
        block_sparse_matmul_p,
        x,
        blocks,
        col_idx,
        transposed_idx,
        transpose=transpose,
        out_dtype=np.dtype(x.dtype if out_dtype is None else out_dtype),
    )


def _check(x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, transpose: bool) -> None:
    if blocks.ndim != 4 or blocks.shape[2] != blocks.shape[3]:
        raise ValueError(
            f"block_sparse_matmul: blocks must have shape (N / b, slots, b, b), got {blocks.shape}"
        )
    if col_idx.shape != blocks.shape[:2]:
        raise ValueError(
            f"block_sparse_matmul: col_idx must have the shape {blocks.shape[:2]} of the first two "
            f"axes of blocks, got {col_idx.shape}"
        )
    rows, _, b, _ = blocks.shape
    check_x("block_sparse_matmul", x, (rows * b, transposed_idx.shape[0] * b), transpose)


def _either(
    first: Callable[..., Choice | str], second: Callable[..., Choice | str]
) -> Callable[..., Choice | str]:
    """Chooses the second kernel for operations not supported by the first one."""

    def choose(*operands: Any, **params: Any) -> Choice | str:
        choice = first(*operands, **params)
        return choice if isinstance(choice, Choice) else second(*operands, **params)

    return choose


def _choose(
    platform: str, *operands: Any, backend: Backend | None = None, partitioned: bool = False, **params: Any
) -> Choice:
    # `mma` also supports devices, block sizes and numbers of rows that `hopper` doesn't.
    kernels = {"gpu": _either(hopper.choose, mma.choose), "tpu": tpu.choose}
    reference = matmul_sliced if platform in _GPUS else matmul_reference
    return first_choice(platform, backend, reference, kernels, *operands, partitioned=partitioned, **params)


def _transpose(
    ct: Any,
    x: Any,
    blocks: Any,
    col_idx: Any,
    transposed_idx: Any,
    *,
    transpose: bool,
    **params: Any,
) -> Any:
    if ad.is_undefined_primal(x):
        params["out_dtype"] = np.dtype(x.aval.dtype)  # as for all cotangents, regardless of the result
        ct_x = block_sparse_matmul_p(ct, blocks, col_idx, transposed_idx, transpose=not transpose, **params)
        return ct_x, None, None, None
    # Only the stored blocks have cotangents. The sparsity pattern is fixed, and a dense cotangent would
    # defeat the purpose of having a sparse weight.
    by_rows, by_columns = (x, ct) if transpose else (ct, x)
    ct_blocks = sampled_matmul_p(
        by_rows,
        by_columns,
        col_idx,
        transposed_idx,
        block_size=blocks.aval.shape[-1],
        out_dtype=np.dtype(blocks.aval.dtype),
        backend=params["backend"],
    )
    return None, ct_blocks, None, None


def _choose_sampled(
    platform: str, *operands: Any, backend: Backend | None = None, partitioned: bool = False, **params: Any
) -> Choice:
    kernels = {"gpu": _either(hopper.choose_sampled, mma.choose_sampled), "tpu": tpu.choose_sampled}
    reference = sampled_sliced if platform in _GPUS else sampled_reference
    return first_choice(platform, backend, reference, kernels, *operands, partitioned=partitioned, **params)


def _sampled_transpose(
    ct: Any, y: Any, x: Any, col_idx: Any, transposed_idx: Any, *, backend: Any, **params: Any
) -> Any:
    # The cotangent consists of blocks, so transposing with respect to either operand is a product with these.
    to_x = ad.is_undefined_primal(x)
    known, wanted = (y, x) if to_x else (x, y)
    out = block_sparse_matmul_p(
        known,
        ct.astype(known.dtype),
        col_idx,
        transposed_idx,
        transpose=to_x,
        out_dtype=np.dtype(wanted.aval.dtype),
        backend=backend,
    )
    return (None, out, None, None) if to_x else (out, None, None, None)


def _sampled_batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    # For the reference, a batch of products is just a product of larger arrays.
    del params["backend"]
    return jax.vmap(functools.partial(sampled_reference, **params), dims)(*operands), 0


block_sparse_matmul_p = kernel_primitive(
    "block_sparse_matmul",
    _choose,
    matmul_reference,
    # Bilinear in x and blocks. (The indices are integer-valued, and so have no tangents.)
    jvp=lambda primals, tangents, **params: sum_tangents(block_sparse_matmul_p, primals, tangents, params),
    transpose=_transpose,
    batching=lambda size, operands, dims, **params: map_rows(
        block_sparse_matmul_p, size, operands, dims, params, rows=(0,)
    ),
)

sampled_matmul_p = kernel_primitive(
    "block_sparse_sampled_matmul",
    _choose_sampled,
    sampled_reference,
    jvp=lambda primals, tangents, **params: sum_tangents(sampled_matmul_p, primals, tangents, params),
    transpose=_sampled_transpose,
    batching=_sampled_batching,
)
