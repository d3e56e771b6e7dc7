"""The block-sparse matmul on Hopper GPUs.

A block of threads computes one column of tiles of the result's feature blocks: for each stored block
it multiplies a tile of tokens by that block on the tensor cores. One warpgroup does nothing but ask
for the tiles that the others will need, at the places that the index tells.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal

_DEPTH = 64  # features contracted at a time: 128 bytes, the widest swizzle
_COMPUTE_WARPGROUPS = 2
_STAGES = 3


def choose(platform: str, x: Any, blocks: Any, **params: Any) -> Choice | str:
    """How the product runs on a GPU, or why it does not."""
    refusal = _refusal(platform, x, blocks, blocks.shape[-1], blocks.size, **params)
    return Choice("gpu", "a Mosaic GPU kernel", matmul) if refusal is None else refusal


def choose_sampled(
    platform: str, y: Any, x: Any, col_idx: Any, *index: Any, block_size: int, **params: Any
) -> Choice | str:
    """How the sampled product runs on a GPU, or why it does not."""
    refusal = _refusal(platform, x, y, block_size, col_idx.size, **params)
    return Choice("gpu", "a Mosaic GPU kernel", sampled) if refusal is None else refusal


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
    """The kernel; its operands are cut and numbered alike for both contractions."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    rows, slots, b, _ = blocks.shape
    index, columns = transposed_idx if transpose else col_idx, transposed_idx.shape[0]
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    tile_m = 64 if m <= 64 * _COMPUTE_WARPGROUPS else 128  # tokens of a warpgroup
    block_m = tile_m * _COMPUTE_WARPGROUPS
    x = jnp.pad(x.reshape(m, x.shape[-1]), ((0, -m % block_m), (0, 0)))
    weight = blocks.reshape(rows * slots * b, b)
    parts = b // _DEPTH
    weight_tile = (_DEPTH, b) if transpose else (b, _DEPTH)
    swizzled = (
        plgpu.TilingTransform((8, _DEPTH)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * _DEPTH),  # pyright: ignore[reportAbstractUsage]
    )
    smem = functools.partial(plgpu.BlockSpec, transforms=swizzled, memory_space=plgpu.SMEM)

    def kernel(x_gmem: Any, weight_gmem: Any, index_gmem: Any, out_gmem: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        token_tile, feature_block = lax.axis_index("tokens"), lax.axis_index("features")
        own = pl.ds(warpgroup * tile_m, tile_m)

        # An index past the end is that of a slot without a block: what is loaded from outside of an
        # array is zero.
        def x_at(step: Any) -> tuple[Any, Any]:
            number = index_gmem[feature_block, step // parts]
            column = number // slots if transpose else number
            return token_tile, column * parts + step % parts

        def weight_at(step: Any) -> tuple[Any, Any]:
            if transpose:
                return index_gmem[feature_block, step // parts] * parts + step % parts, 0
            slot = step // parts
            stored = index_gmem[feature_block, slot] < columns
            return jnp.where(stored, feature_block * slots + slot, rows * slots), step % parts

        def pipeline(body: Any, compute_context: Any) -> Any:
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(index.shape[1] * parts,),
                in_specs=[smem((block_m, _DEPTH), x_at), smem(weight_tile, weight_at)],
                max_concurrent_steps=min(_STAGES, index.shape[1] * parts),
                memory_registers=40,
                wg_axis="warpgroup",
                num_compute_wgs=_COMPUTE_WARPGROUPS,
                compute_context=compute_context,
            )

        ignore = lambda *args, **kwargs: None

        @functools.partial(
            pl.run_scoped,
            allocations=pipeline(ignore, ignore).get_allocations(x_gmem, weight_gmem),
            out_smem=plgpu.SMEM((block_m, b), out_dtype, transforms=swizzled),
            collective_axes="warpgroup",
        )
        def scope(allocations: Any, out_smem: Any) -> None:
            def compute(run: Any) -> None:
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((tile_m, b), jnp.float32))
                def result(acc: Any) -> Any:
                    run(acc)
                    return acc[...].astype(out_dtype)

                out_smem[own] = result
                plgpu.commit_smem()
                target = out_gmem.at[
                    pl.ds(token_tile * block_m + warpgroup * tile_m, tile_m),
                    pl.ds(feature_block * b, b),
                ]
                plgpu.copy_smem_to_gmem(out_smem.at[own], target)
                plgpu.wait_smem_to_gmem(0)

            def multiply(_: Any, x_smem: Any, weight_smem: Any, acc: Any) -> Any:
                w = weight_smem if transpose else weight_smem.transpose((1, 0))
                plgpu.wgmma(acc, x_smem.at[own], w)
                plgpu.wgmma_wait(0)
                return acc

            pipeline(multiply, compute)(x_gmem, weight_gmem, allocations=allocations)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], index.shape[0] * b), out_dtype),
        grid=(x.shape[0] // block_m, index.shape[0]),
        grid_names=("tokens", "features"),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(x, weight, index)
    return out[:m].reshape(*lead, out.shape[1])


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
    """The blocks at `col_idx` of `y.T @ x`: a block of threads for each of them, over all tokens."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    del transposed_idx
    (rows, slots), b = col_idx.shape, block_size
    m = math.prod(x.shape[:-1])
    y, x = (jnp.pad(z.reshape(m, z.shape[-1]), ((0, -m % _DEPTH), (0, 0))) for z in (y, x))
    steps, warpgroups = y.shape[0] // _DEPTH, b // 64
    swizzled = (
        plgpu.TilingTransform((8, _DEPTH)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * _DEPTH),  # pyright: ignore[reportAbstractUsage]
    )
    smem = functools.partial(plgpu.BlockSpec, transforms=swizzled, memory_space=plgpu.SMEM)

    def kernel(y_gmem: Any, x_gmem: Any, index_gmem: Any, out_gmem: Any) -> None:
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("blocks")
        own = pl.ds(warpgroup * 64, 64)
        # A slot without a block names a column past the end, where what is loaded is zero.
        column = index_gmem[number // slots, number % slots]

        def pipeline(body: Any, compute_context: Any) -> Any:
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(steps,),
                in_specs=[
                    smem((_DEPTH, b), lambda step: (step, number // slots)),
                    smem((_DEPTH, b), lambda step: (step, column)),
                ],
                max_concurrent_steps=min(_STAGES, steps),
                memory_registers=40,
                wg_axis="warpgroup",
                num_compute_wgs=warpgroups,
                compute_context=compute_context,
            )

        ignore = lambda *args, **kwargs: None

        @functools.partial(
            pl.run_scoped,
            allocations=pipeline(ignore, ignore).get_allocations(y_gmem, x_gmem),
            out_smem=plgpu.SMEM((b, b), out_dtype, transforms=swizzled),
            collective_axes="warpgroup",
        )
        def scope(allocations: Any, out_smem: Any) -> None:
            def compute(run: Any) -> None:
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((64, b), jnp.float32))
                def result(acc: Any) -> Any:
                    run(acc)
                    return acc[...].astype(out_dtype)

                out_smem[own] = result
                plgpu.commit_smem()
                target = out_gmem.at[pl.ds(number * b + warpgroup * 64, 64)]
                plgpu.copy_smem_to_gmem(out_smem.at[own], target)
                plgpu.wait_smem_to_gmem(0)

            def multiply(_: Any, y_smem: Any, x_smem: Any, acc: Any) -> Any:
                plgpu.wgmma(acc, y_smem.at[:, own].transpose((1, 0)), x_smem)
                plgpu.wgmma_wait(0)
                return acc

            pipeline(multiply, compute)(y_gmem, x_gmem, allocations=allocations)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows * slots * b, b), out_dtype),
        grid=(rows * slots,),
        grid_names=("blocks",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(y, x, col_idx)
    return out.reshape(rows, slots, b, b)
