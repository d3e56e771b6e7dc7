"""The product with a stored weight on GPUs: fused for few rows of activations, by chunks for many."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ...core import compat
from ..backends import PARTITIONED, Choice, mosaic_gpu_refusal
from ..multilinear import accumulator_dtype
from . import costs
from .product import Decode, NestedScales, Product, dense_scales
from .reference import scaled_outside, times, times_scaled, whole
from .tilings import Problem, blocks, tiling_for

_Weight = TypeVar("_Weight")

# Rows of activations up to which reading the codes again for every 64 of them is cheaper than
# decoding the weight for the library's product. `x @ W` reads them again for every 32.
FUSED_ROWS = {False: 128, True: 64}
# Ranks of all adapters together up to which the kernel of warpgroups takes them: it waits for each 64.
WIDE_RANK = 256
# Rows of activations up to which `x @ W` is a reduction: it decodes the weight anew for each of them.
REDUCED_ROWS = 2
# Rows of activations up to which a chunk is what the L2 cache of an H100 holds.
FEW_ROWS = 1024
# Weights: 8 MiB of bfloat16, as fewer do not keep a GPU busy; 32 MiB; 128 MiB.
_LEAST, _CACHED, _MOST = 1 << 22, 1 << 24, 1 << 26


def choose(platform: str, x: Any, *, product: Product, low_rank: Any = None, **params: Any) -> Choice | str:
    """A fused kernel, or why there is none for an operation. `low_rank`: `b` of all adapters."""
    rows, most = math.prod(x.shape[:-1]), FUSED_ROWS[product.transpose]
    if 0 < rows <= most:
        refusal = fused_refusal(platform, x, product, low_rank=low_rank, **params)
        return Choice("gpu", "one fused kernel", fused) if refusal is None else refusal
    few = f"the fused kernel takes 1 to {most} rows of x, not {rows}"
    refusal = wide_refusal(platform, x, product, low_rank=low_rank, **params) if rows else ""
    if refusal is None:
        return Choice("gpu", "one fused kernel of warpgroups", functools.partial(fused, wide=True))
    return f"{few}; {refusal}" if refusal else few


def fused_refusal(
    platform: str,
    x: Any,
    product: Product,
    *,
    partitioned: bool,
    low_rank: Any = None,
) -> str | None:
    """Why a fused kernel does not take an operation, whatever the rows of `x`; None if it does."""
    (n, k), block = product.shape, product.block_size
    # What a thread decodes together has one scale: 64, 16 or, of a row that is contracted over, 8 codes.
    unit = 8 if product.transpose else 16
    if partitioned:
        return PARTITIONED
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the fused kernel takes bfloat16 and float16, not {x.dtype}"
    if product.bits not in (4, 8):
        return f"the fused kernel takes codes of 4 and 8 bits, not {product.bits}"
    if block == 0 or block % unit or k % block:
        return f"the fused kernel takes blocks of a multiple of {unit} codes within rows, not {block}"
    if k % 64 or (product.transpose and n % 16):
        return f"the fused kernel takes rows of a multiple of 64 columns, and 16 rows at a time, not {(n, k)}"
    if n == 0 or n * product.row_bytes >= 2**31:
        return "the fused kernel addresses up to 2 GiB of codes"
    if low_rank is not None and math.prod(low_rank.shape) * 2 >= 2**31:
        return f"the fused kernel addresses up to 2 GiB of adapters, not those of shape {low_rank.shape}"
    return mosaic_gpu_refusal(platform, lowest=(8, 0))


def wide_refusal(
    platform: str, x: Any, product: Product, *, low_rank: Any = None, **params: Any
) -> str | None:
    """Why the fused kernel for many rows of `x` does not take an operation; None if it does."""
    rows = math.prod(x.shape[:-1])
    if product.transpose:
        return "that of warpgroups computes x @ W.T"
    if low_rank is not None and low_rank.shape[0] * low_rank.shape[2] > WIDE_RANK:
        return f"that of warpgroups takes adapters of up to {WIDE_RANK} ranks together"
    refusal = fused_refusal(platform, x, product, low_rank=low_rank, **params)
    refusal = refusal or mosaic_gpu_refusal(platform, lowest=(9, 0), newest=9)
    if refusal is not None:
        return refusal
    # Of results, in float32, and of `x`, with rows up to a multiple of 32 for each block of 128.
    if max(4 * rows * product.free, 2 * (rows + rows // 4 + 32) * product.contracted) >= 2**31:
        return "that of warpgroups addresses up to 2 GiB of activations"
    if not costs.is_faster(product, rows, str(x.dtype)):
        return "decoding the weight is estimated to be faster than that of warpgroups"
    return None


def fused(
    x: Array,
    packed: Array,
    scales: Array | NestedScales,
    table: Array,
    *low_rank: Array,
    product: Product,
    zeros: Array | None = None,
    wide: bool = False,
) -> Array:
    """One kernel.

    **Arguments:**

    - `packed`, `scales`, `zeros`: as `product` says they are stored, of any shape.
    - `table`: the values of the codes.
    - `low_rank`: nothing, or `t` and `b` as in `times_adapters`.
    - `wide`: whether warpgroups multiply, for many rows of `x`.
    """
    from .wgmma import in_order, of_warpgroups

    lead, x = x.shape[:-1], x.reshape(-1, product.contracted)
    adapters = rank = 0
    if low_rank and wide:
        t, b = _side_by_side(x.shape[0], *low_rank)
        adapters, rank, low_rank = 1, b.shape[1], (in_order(t), b)
    elif low_rank:
        t, b = map(_padded, low_rank)
        adapters, _, rank = b.shape
        low_rank = t.reshape(x.shape[0], adapters, rank), b
    problem = Problem(
        product,
        m=x.shape[0],
        dtype=str(x.dtype),
        out_dtype=str(product.out_dtype),
        adapters=adapters,
        rank=rank,
        scales=_kind(scales) if product.scales == "float" else product.scales,
        zeros="float32" if zeros is None else str(zeros.dtype),
    )
    problem, tiling = of_warpgroups(problem) if wide else (problem, tiling_for(problem))
    if tiling.splits > 1:
        problem = problem._replace(out_dtype="float32")
    operands = scales if isinstance(scales, NestedScales) else (scales,)
    numbers = [_in_words(z.reshape(-1)) for z in (*operands, *(() if zeros is None else (zeros,)))]
    if low_rank and not wide:
        low_rank = *low_rank, *adapters_in_use(low_rank[0], problem.groups, 8 * problem.token_tiles)
    x = in_order(x) if wide else x
    y = pallas_kernel(problem, tiling)(x, packed.reshape(-1), *numbers, table, *low_rank)
    y = functools.reduce(operator.add, y) if tiling.splits > 1 else y[0]
    return y.astype(product.out_dtype).reshape(*lead, product.free)


def _side_by_side(m: int, t: Array, b: Array) -> tuple[Array, Array]:
    """The ranks of all adapters beside each other, `(m, ranks)` and `(n, ranks)`, and zeros up to whole steps
    of the kernel of warpgroups."""
    t, b = t.reshape(m, -1), jnp.moveaxis(b, 0, 1).reshape(b.shape[1], -1)
    pad = lambda z: jnp.pad(z, ((0, 0), (0, -z.shape[1] % 64)))
    return pad(t), pad(b)


def _kind(scales: Array | NestedScales) -> str:
    return "nested" if isinstance(scales, NestedScales) else str(scales.dtype)


def _in_words(numbers: Array) -> Array:
    """Filled up to whole words of 32 bits, of which the kernel reads scales."""
    return jnp.pad(numbers, (0, -numbers.size % (4 // min(numbers.dtype.itemsize, 4))))


def adapters_in_use(t: Array, groups: int, size: int) -> tuple[Array, Array]:
    """For each group of rows of `t`, the adapters that any of them takes, `(groups, adapters)`, and how many
    these are, `(groups,)`; uint32."""
    adapters = t.shape[1]
    number = jnp.arange(adapters, dtype=np.uint32)
    if adapters == 1:
        return jnp.zeros((groups, 1), np.uint32), jnp.ones(groups, np.uint32)
    taken = jnp.any(t != 0, axis=2)
    taken = (
        jnp.pad(taken, ((0, groups * size - len(taken)), (0, 0))).reshape(groups, size, adapters).any(axis=1)
    )
    place = jnp.cumsum(taken, axis=1, dtype=np.uint32) - np.uint32(1)
    found = taken[:, :, None] & (place[:, :, None] == number[None, None])
    order = jnp.sum(jnp.where(found, number[None, :, None], np.uint32(0)), axis=1, dtype=np.uint32)
    return order, jnp.sum(taken, axis=1, dtype=np.uint32)


def pallas_kernel(problem: Any, tiling: Any) -> Callable[..., Array]:
    """The fused kernel for a problem: a function of the arrays in `mosaic.emit`'s order to the terms of the
    product, (splits, m, features)."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from . import mosaic, wgmma

    of_problem = wgmma if problem.wide else mosaic

    def stored_matmul(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def program(context: Any, *refs: Any) -> None:
            of_problem.emit(refs, problem, tiling)

        program(*refs)

    return plgpu.kernel(
        stored_matmul,
        out_type=jax.ShapeDtypeStruct((tiling.splits, problem.m, problem.product.free), problem.out_dtype),
        scratch_types=[plgpu.SMEM((of_problem.shared_words(problem, tiling),), jnp.uint32)],
        grid=(blocks(problem, tiling),),
        grid_names=("block",),
        num_threads=tiling.threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def is_reduced(x: Any, product: Product) -> bool:
    few = 0 < math.prod(x.shape[:-1]) <= REDUCED_ROWS
    return product.transpose and few and product.shape[1] % product.block_size == 0


def reduced(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    *,
    product: Product,
) -> Array:
    """`x @ W` for a row or two of `x`, as sums over the rows of `W` that XLA fuses the decoding into."""
    n, k = product.shape
    lead = x.shape[:-1]
    dtype = accumulator_dtype(x.dtype)
    packed = packed.reshape(n, k // 2)
    scales = jnp.repeat(dense_scales(absmax).reshape(n, -1), product.block_size // 2, axis=1).astype(dtype)
    # Even and odd columns.
    halves = [codebook[codes].astype(dtype) * scales for codes in (packed >> 4, packed & 15)]
    rows = x.reshape(-1, n).astype(dtype)
    sums = [[jnp.sum(row[:, None] * half, axis=0) for half in halves] for row in rows]
    y = jnp.stack([jnp.stack(of_row, axis=-1).reshape(k) for of_row in sums])
    return y.astype(product.out_dtype).reshape(*lead, k)


def chunked(x: Array, leaves: Sequence[Any], *low_rank: Array, decode: Decode, product: Product) -> Array:
    """Decodes some rows or columns of `W` to the dtype of `x`, multiplies them by the library, and so on.

    Each weight is rounded once, from its exact float32 value. `low_rank` is nothing, or `t` and `b` as in
    `times_adapters`: more columns of `x` and of `W`. Where scales stay outside of the product, parts of `x`
    are scaled instead, if that would be a large copy.
    """
    (n, k), m, transpose = product.shape, math.prod(x.shape[:-1]), product.transpose
    if (parts := scaled_outside(x, leaves, decode, product)) is not None:
        if not transpose or m == 0:
            return whole(x, leaves, *low_rank, decode=decode, product=product)
        rows = x.reshape(m, n)
        part = lambda w, start, stop: times_scaled(rows[start:stop], w[0], w[1], product)
        y = join_chunks(part, parts, m, scaled_at_once(m, n, k), axis=0)
        return y.reshape(*x.shape[:-1], k)
    weight, b = [dense_scales(leaf) for leaf in leaves], None
    if low_rank:
        t, b = map(_padded, low_rank)
        x = jnp.concatenate([x, t.reshape(*x.shape[:-1], -1)], axis=-1)
        b = jnp.moveaxis(b, 0, 1).reshape(n, -1)

    def terms(weight: list[Array], start: int, stop: int) -> Array:
        w = decode.matrix(weight, product, rows=slice(start, stop))
        return times(x[..., start:stop], w, product, accumulator_dtype(x.dtype))

    def columns(weight: list[Array], start: int, stop: int) -> Array:
        along = {"columns" if transpose else "rows": slice(start, stop)}
        w = decode.matrix(weight, product, **along).astype(x.dtype)
        w = w if b is None else jnp.concatenate([w, b[start:stop]], axis=1)
        return times(x, w, product, product.out_dtype)

    rows_at_once, columns_at_once = decode.aligned(product)
    step = chunk_size(n, k, m, aligned=rows_at_once)
    if transpose and step < n:
        if m <= FEW_ROWS or rows_at_once > 1:
            return add_chunks(terms, weight, n, step).astype(product.out_dtype)
        # The sum would be as large as the weight.
        return join_chunks(columns, weight, k, chunk_size(k, n, m, aligned=columns_at_once))
    return join_chunks(columns, weight, product.free, k if transpose else step)


def _padded(z: Array) -> Array:
    """Zeros after the last columns: the kernel takes 16 at a time, the library's prefer as many."""
    return jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 16)])


def chunk_size(size: int, other: int, m: int, *, aligned: int = 1) -> int:
    """The length of chunks along an axis of `size`, for `m` rows of activations; the weight's other axis has
    `other` entries. Large weights are split, so that no dense copy exists. All chunks have the same length, a
    multiple of `aligned`."""
    least_chunks, most = (2, _CACHED) if m <= FEW_ROWS else (4, _MOST)
    weights = min(most, max(_LEAST, -(-size * other // least_chunks)))
    rows = max(1, weights // max(other, 1) // aligned) * aligned
    chunks = max(1, -(-size // rows))
    return -(-size // (chunks * aligned)) * aligned


def scaled_at_once(m: int, n: int, k: int) -> int:
    """How many of `m` rows of activations are scaled at a time, so that a copy takes at most a quarter of a
    weight of `n` rows and `k` columns, unless that is little. All chunks have the same length."""
    rows = max(k // 4, _LEAST // max(n, 1), 1)
    return -(-m // max(1, -(-m // rows)))


def join_chunks(
    part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int, *, axis: int = -1
) -> Array:
    """A product of `size` columns, `step` of them at a time, each written to its place.

    **Arguments:**

    - `part`: `part(weight, start, stop)` computes columns.
    - `weight`: arrays that `part` decodes. They are handed on from chunk to chunk, so that one is decoded
        after the other, in the same memory.
    - `axis`: that of the columns in the result; or that of rows, which are computed instead.
    """
    columns = part(weight, 0, min(step, size))
    if step >= size:
        return columns
    aval = jax.typeof(columns)
    axis %= columns.ndim
    shape = (*aval.shape[:axis], size, *aval.shape[axis + 1 :])
    y = lax.empty(shape, aval.dtype, out_sharding=aval.sharding)
    y = compat.vary_over(y, compat.varying_axes(columns))
    put = lambda y, columns, start: lax.dynamic_update_slice_in_dim(y, columns, start, axis=axis)
    y = put(y, columns, 0)
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y = put(y, part(weight, start, min(start + step, size)), start)
    return y


def add_chunks(part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int) -> Array:
    """A sum over `size` rows of a weight, `step` of them at a time; `part` computes terms, `weight` is as for
    `join_chunks`."""
    y = part(weight, 0, min(step, size))
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y += part(weight, start, min(start + step, size))
    return y
