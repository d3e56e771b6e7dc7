"""The block-sparse matmul on TPUs, where a prefetched index determines which tiles are loaded."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, pallas_tpu_refusal

_LANES = 128
_ROWS_OF_X = 512  # in a tile


def choose(platform: str, x: Any, blocks: Any, *index: Any, **params: Any) -> Choice | str:
    """Returns how to run the product on a TPU, or why this is not supported."""
    return _choice(matmul, platform, x, blocks, blocks.shape[-1], blocks.size, **params)


def choose_sampled(
    platform: str, y: Any, x: Any, col_idx: Any, *index: Any, block_size: int, **params: Any
) -> Choice | str:
    """Returns how to run the sampled product on a TPU, or why this is not supported."""
    return _choice(sampled, platform, x, y, block_size, col_idx.size, **params)


def _choice(
    kernel: Any, platform: str, x: Any, other: Any, b: int, slots: int, *, partitioned: bool, **params: Any
) -> Choice | str:
    refusal = PARTITIONED if partitioned else pallas_tpu_refusal(platform)
    if refusal is not None:
        return refusal
    if b % _LANES:
        return f"the TPU kernel takes blocks of a multiple of 128, not {b}"
    if x.dtype not in (jnp.bfloat16, jnp.float32) or other.dtype != x.dtype:
        return f"the TPU kernel takes bfloat16 or float32, not {x.dtype} and {other.dtype}"
    if x.size == 0 or slots == 0:
        return "the TPU kernel takes at least one row of x and one slot"
    interpret = platform != "tpu"
    how = "a Pallas kernel" + (", interpreted" if interpret else "")
    return Choice("tpu", how, functools.partial(kernel, interpret=interpret))


def matmul(
    x: Array,
    blocks: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    transpose: bool,
    out_dtype: np.dtype,
    interpret: bool = False,
) -> Array:
    """Computes the product using the Pallas kernel. Both contractions use the same tiles and numbering."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    rows, slots, b, _ = blocks.shape
    index = transposed_idx if transpose else col_idx
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    tile_m = min(_ROWS_OF_X, -(-m // 16) * 16)
    x = jnp.pad(x.reshape(m, x.shape[-1]), ((0, -m % tile_m), (0, 0)))
    weight = blocks.reshape(rows * slots, b, b)
    absent = rows * slots if transpose else transposed_idx.shape[0]

    # Slots without a block have an out-of-bounds index, clamped for loads. The product is skipped.
    def x_at(i: Any, feature: Any, slot: Any, index: Any) -> tuple[Any, Any]:
        number = lax.min(index[feature, slot], absent - 1)
        return i, number // slots if transpose else number  # the block row containing this block

    def weight_at(i: Any, feature: Any, slot: Any, index: Any) -> tuple[Any, Any, Any]:
        number = feature * slots + slot
        return lax.min(index[feature, slot], absent - 1) if transpose else number, 0, 0

    def kernel(index: Any, x: Any, w: Any, out: Any, acc: Any) -> None:
        feature, slot = pl.program_id(1), pl.program_id(2)

        @pl.when(slot == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        @pl.when(index[feature, slot] < absent)
        def _() -> None:
            acc[...] += _dot(x[...], w[0], (1, 0 if transpose else 1))

        @pl.when(slot == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = acc[...].astype(out.dtype)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(x.shape[0] // tile_m, *index.shape),
        in_specs=[pl.BlockSpec((tile_m, b), x_at), pl.BlockSpec((1, b, b), weight_at)],
        out_specs=pl.BlockSpec((tile_m, b), lambda i, feature, slot, index: (i, feature)),
        scratch_shapes=[pltpu.VMEM((tile_m, b), jnp.float32)],
    )
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], index.shape[0] * b), out_dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="block_sparse_matmul",
    )(index, x, weight)
    return out[:m].reshape(*lead, out.shape[1])


def sampled(
    y: Array,
    x: Array,
    col_idx: Array,
    transposed_idx: Array,
    *,
    block_size: int,
    out_dtype: np.dtype,
    interpret: bool = False,
) -> Array:
    """Computes the blocks of `y.T @ x` at `col_idx`, accumulating each one over tiles of tokens."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    (rows, slots), b, columns = col_idx.shape, block_size, transposed_idx.shape[0]
    m = math.prod(x.shape[:-1])
    tile_m = min(_ROWS_OF_X, -(-m // 16) * 16)
    y, x = (jnp.pad(z.reshape(m, z.shape[-1]), ((0, -m % tile_m), (0, 0))) for z in (y, x))

    def x_at(row: Any, slot: Any, tile: Any, index: Any) -> tuple[Any, Any]:
        return tile, lax.min(index[row, slot], columns - 1)

    def kernel(index: Any, y: Any, x: Any, out: Any, acc: Any) -> None:
        row, slot, tile = (pl.program_id(i) for i in range(3))

        @pl.when(tile == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        @pl.when(index[row, slot] < columns)
        def _() -> None:
            acc[...] += _dot(y[...], x[...], (0, 0))

        @pl.when(tile == pl.num_programs(2) - 1)
        def _() -> None:
            out[0] = acc[...].astype(out.dtype)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(rows, slots, x.shape[0] // tile_m),
        in_specs=[
            pl.BlockSpec((tile_m, b), lambda row, slot, tile, index: (tile, row)),
            pl.BlockSpec((tile_m, b), x_at),
        ],
        out_specs=pl.BlockSpec((1, b, b), lambda row, slot, tile, index: (row * slots + slot, 0, 0)),
        scratch_shapes=[pltpu.VMEM((b, b), jnp.float32)],
    )
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows * slots, b, b), out_dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="block_sparse_sampled_matmul",
    )(col_idx, y, x)
    return out.reshape(rows, slots, b, b)


def _dot(x: Array, w: Array, axes: tuple[int, int]) -> Array:
    """Contracts one axis from each operand, accumulating in float32."""
    return lax.dot_general(
        x,
        w,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,  # by default, rounds to bfloat16
        preferred_element_type=jnp.float32,
    )
