"""The block-sparse matmul on Hopper GPUs.

Each thread block computes a tile of tokens for one of the result's feature blocks, by multiplying activation
tiles with stored blocks on the tensor cores. One warpgroup only prefetches the tiles needed by the others,
from positions given by the index.

Slots without a block have an out-of-bounds index, for which loads return zeros. This avoids any branches for
padding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal

_DEPTH = 64  # features contracted at a time: 128 bytes, i.e. the widest available swizzle
_ROWS = 8  # the rows per tile in the layout of shared memory
_COMPUTE_WARPGROUPS = 2
_STAGES = 3


def choose(
    platform: str, x: Any, blocks: Any, col_idx: Any, transposed_idx: Any, *, transpose: bool, **params: Any
) -> Choice | str:
    """Returns how to run the product on a Hopper GPU, or why this is not supported."""
    slots = (transposed_idx if transpose else col_idx).size
    refusal = _refusal(platform, x, blocks, blocks.shape[-1], slots, **params)
    return Choice("gpu", "a Mosaic GPU kernel, by wgmma", matmul) if refusal is None else refusal


def choose_sampled(
    platform: str, y: Any, x: Any, col_idx: Any, *index: Any, block_size: int, **params: Any
) -> Choice | str:
    """Returns how to run the sampled product on a Hopper GPU, or why this is not supported."""
    refusal = _refusal(platform, x, y, block_size, col_idx.size, **params)
    return Choice("gpu", "a Mosaic GPU kernel, by wgmma", sampled) if refusal is None else refusal


def _refusal(
    platform: str, x: Any, other: Any, b: int, slots: int, *, partitioned: bool, out_dtype: Any, **params: Any
) -> str | None:
    if partitioned:
        return PARTITIONED
    if b not in (64, 128):
        return f"the GPU kernel takes blocks of 64 or 128, not {b}"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or other.dtype != x.dtype:
        return f"the GPU kernel takes bfloat16 or float16, not {x.dtype} and {other.dtype}"
    if out_dtype != x.dtype:
        return f"the GPU kernel's result is of the dtype of x, not {out_dtype}"
    if x.size == 0 or slots == 0:
        return "the GPU kernel takes at least one row of x and one slot"
    if math.prod(x.shape[:-1]) % _ROWS:
        return f"the kernel for Hopper takes a multiple of {_ROWS} rows of x"
    return mosaic_gpu_refusal(platform, lowest=(9, 0), newest=9)


def matmul(
    x: Array,
    blocks: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    transpose: bool,
    out_dtype: np.dtype,
    interpret: Any = None,
) -> Array:
    """Computes the product using the kernel. Both contractions use the same tiles and numbering."""
    rows, slots, b, _ = blocks.shape
    index, columns = transposed_idx if transpose else col_idx, transposed_idx.shape[0]
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    own_rows = 64 if m <= 64 * _COMPUTE_WARPGROUPS else 128  # the number of tokens per warpgroup
    block_m = own_rows * _COMPUTE_WARPGROUPS
    # No padding is needed: out-of-bounds loads return zeros, and out-of-bounds stores are dropped.
    x = x.reshape(m, x.shape[-1])
    parts = b // _DEPTH

    def place(index: Any) -> _Place:
        token_tile, feature_block = lax.axis_index("tokens"), lax.axis_index("features")

        # Slots without a block have an out-of-bounds index, for which loads return zeros.
        def x_at(step: Any) -> tuple[Any, Any]:
            number = index[feature_block, step // parts]
            column = number // slots if transpose else number
            return token_tile, column * parts + step % parts

        def weight_at(step: Any) -> tuple[Any, Any]:
            if transpose:
                return index[feature_block, step // parts] * parts + step % parts, 0
            slot = step // parts
            stored = index[feature_block, slot] < columns
            return jnp.where(stored, feature_block * slots + slot, rows * slots), step % parts

        return _Place(x_at, weight_at, token_tile * block_m, feature_block * b)

    out = _product(
        (x, blocks.reshape(rows * slots * b, b)),
        index,
        tiles=((block_m, _DEPTH), (_DEPTH, b) if transpose else (b, _DEPTH)),
        place=place,
        matrices=lambda x, w, own: (x.at[own], w if transpose else w.transpose((1, 0))),
        own_rows=own_rows,
        width=b,
        warpgroups=_COMPUTE_WARPGROUPS,
        steps=index.shape[1] * parts,
        grid={"tokens": -(-m // block_m), "features": index.shape[0]},
        out=jax.ShapeDtypeStruct((x.shape[0], index.shape[0] * b), out_dtype),
        interpret=interpret,
    )
    return out.reshape(*lead, out.shape[1])


def sampled(
    y: Array,
    x: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    block_size: int,
    out_dtype: np.dtype,
    interpret: Any = None,
) -> Array:
    """Computes the blocks of `y.T @ x` at `col_idx`, using one thread block for each, over all tokens."""
    del transposed_idx
    (rows, slots), b = col_idx.shape, block_size
    m = math.prod(x.shape[:-1])
    y, x = (z.reshape(m, z.shape[-1]) for z in (y, x))

    def place(index: Any) -> _Place:
        number = lax.axis_index("blocks")
        # Slots without a block have an out-of-bounds column, for which loads return zeros.
        column = index[number // slots, number % slots]
        return _Place(lambda step: (step, number // slots), lambda step: (step, column), number * b, 0)

    out = _product(
        (y, x),
        col_idx,
        tiles=((_DEPTH, b), (_DEPTH, b)),
        place=place,
        matrices=lambda y, x, own: (y.at[:, own].transpose((1, 0)), x),
        own_rows=64,  # of a `wgmma` instruction
        width=b,
        warpgroups=b // 64,
        steps=-(-m // _DEPTH),
        grid={"blocks": rows * slots},
        out=jax.ShapeDtypeStruct((rows * slots * b, b), out_dtype),
        interpret=interpret,
    )
    return out.reshape(rows, slots, b, b)


class _Place(NamedTuple):
    """The work of a thread block: the tiles of both operands in each step, and where the result is stored."""

    left_at: Callable[[Any], tuple[Any, Any]]
    right_at: Callable[[Any], tuple[Any, Any]]
    row: Any
    column: Any


def _product(
    operands: tuple[Array, Array],
    index: Array,
    *,
    tiles: tuple[tuple[int, int], tuple[int, int]],
    place: Callable[[Any], _Place],
    matrices: Callable[[Any, Any, Any], tuple[Any, Any]],
    own_rows: int,
    width: int,
    warpgroups: int,
    steps: int,
    grid: dict[str, int],
    out: jax.ShapeDtypeStruct,
    interpret: Any,
) -> Array:
    """Multiplies tiles and sums the products: one warpgroup loads the tiles, the others multiply them.

    **Arguments:**

    - `tiles`: the shapes of each operand's tiles.
    - `place`: returns a thread block's work, given the index in global memory.
    - `matrices`: returns the matrices to be multiplied by a warpgroup, given two tiles in shared memory and
        this warpgroup's rows.
    - `own_rows`, `width`: the result's shape for each of the multiplying `warpgroups`.
    - `steps`: the number of tile pairs to sum over.
    - `grid`: the sizes of the named axes used by `place`.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    swizzled = (
        plgpu.TilingTransform((_ROWS, _DEPTH)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * _DEPTH),  # pyright: ignore[reportAbstractUsage]
    )
    smem = functools.partial(plgpu.BlockSpec, transforms=swizzled, memory_space=plgpu.SMEM)

    def kernel(left_gmem: Any, right_gmem: Any, index_gmem: Any, out_gmem: Any) -> None:
        warpgroup, at = lax.axis_index("warpgroup"), place(index_gmem)
        own = pl.ds(warpgroup * own_rows, own_rows)

        def pipeline(body: Any, compute_context: Any) -> Any:
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(steps,),
                in_specs=[smem(tiles[0], at.left_at), smem(tiles[1], at.right_at)],
                max_concurrent_steps=min(_STAGES, steps),
                memory_registers=40,  # loads need few, leaving more for the warpgroups that multiply
                wg_axis="warpgroup",
                num_compute_wgs=warpgroups,
                compute_context=compute_context,
            )

        def ignore(*args: Any, **kwargs: Any) -> Any:
            return None

        @functools.partial(
            pl.run_scoped,
            allocations=pipeline(ignore, ignore).get_allocations(left_gmem, right_gmem),
            out_smem=plgpu.SMEM((own_rows * warpgroups, width), out.dtype, transforms=swizzled),
            collective_axes="warpgroup",
        )
        def scope(allocations: Any, out_smem: Any) -> None:
            def compute(run: Any) -> None:
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((own_rows, width), jnp.float32))
                def result(acc: Any) -> Any:
                    run(acc)
                    return acc[...].astype(out.dtype)

                out_smem[own] = result
                plgpu.commit_smem()
                rows, columns = pl.ds(at.row + warpgroup * own_rows, own_rows), pl.ds(at.column, width)
                plgpu.copy_smem_to_gmem(out_smem.at[own], out_gmem.at[rows, columns])
                plgpu.wait_smem_to_gmem(0)

            def multiply(_: Any, left_smem: Any, right_smem: Any, acc: Any) -> Any:
                plgpu.wgmma(acc, *matrices(left_smem, right_smem, own))
                plgpu.wgmma_wait(0)
                return acc

            pipeline(multiply, compute)(left_gmem, right_gmem, allocations=allocations)

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*operands, index)
