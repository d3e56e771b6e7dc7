"""The product with a stored weight on GPUs, fused for few activation rows and chunked for many.

A large weight is never materialised in full. Chunks are limited to 128 MiB, and optimisation barriers prevent
XLA from decoding them all in advance.
"""

import dataclasses
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
from .nested_scales import NestedScales, dense_scales
from .product import Decode, Product
from .reference import scaled_outside, times, times_scaled, whole
from .tilings import Problem, blocks, tiling_for

_Weight = TypeVar("_Weight")

# Up to this many rows of activations, use the fused kernel. The keys are False for `x @ W.T` and True for
# `x @ W`. The kernel reads all codes again for every 64 rows (or 32 rows for `x @ W`), so for more rows it's
# cheaper to decode the weight once and then call cuBLAS.
FUSED_ROWS = {False: 128, True: 64}
# Up to this many rows of activations, compute `x @ W` as a reduction, decoding the weight once per row.
REDUCED_ROWS = 2
# The maximum number of bytes to decode at a time. Smaller chunks use less memory, but were slower on an H200.
_MOST = 1 << 27
# The minimum number of activations to scale at a time, to keep the GPU busy.
_LEAST = 1 << 22


def choose(platform: str, x: Any, *, product: Product, low_rank: Any = None, **params: Any) -> Choice | str:
    """Returns a fused kernel, or why there isn't one. Here `low_rank` is `b` for all adapters."""
    rows, most = math.prod(x.shape[:-1]), FUSED_ROWS[product.transpose]
    if not 0 < rows <= most:
        return f"the fused kernel takes 1 to {most} rows of x, not {rows}"
    refusal = fused_refusal(platform, x, product, low_rank=low_rank, **params)
    return Choice("gpu", "one fused kernel", fused) if refusal is None else refusal


def fused_refusal(
    platform: str,
    x: Any,
    product: Product,
    *,
    partitioned: bool,
    low_rank: Any = None,
) -> str | None:
    """Returns why the fused kernel does not support an operation, or `None` if it does.

    This ignores `x`'s row count.
    """
    (n, k), block = product.shape, product.block_size
    # All codes decoded together by a thread must share a scale: 16 for `x @ W.T` (or 64 if scaling the
    # accumulator), and 8 for `x @ W`.
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


def fused(
    x: Array,
    packed: Array,
    scales: Array | NestedScales,
    table: Array,
    *low_rank: Array,
    product: Product,
    zeros: Array | None = None,
) -> Array:
    """Computes the product using a single kernel.

    **Arguments:**

    - `packed`, `scales`, `zeros`: stored as described by `product`, with any shape.
    - `table`: the code values.
    - `low_rank`: either empty, or `t` and `b` as in `times_adapters`.
    """
    lead, x = x.shape[:-1], x.reshape(-1, product.contracted)
    adapters = rank = 0
    if low_rank:
        t, b = map(_padded, low_rank)
        adapters, _, rank = b.shape
        low_rank = t.reshape(x.shape[0], adapters, rank), b
    of_scales, of_zeros = _kinds(product, scales, zeros)
    problem = Problem(
        product,
        m=x.shape[0],
        dtype=str(x.dtype),
        out_dtype=str(product.out_dtype),
        adapters=adapters,
        rank=rank,
        scales=of_scales,
        zeros=of_zeros,
    )
    tiling = tiling_for(problem)
    if tiling.splits > 1:
        # The partial sums of all splits are added up below, so don't round them to 16 bits yet.
        problem = problem._replace(out_dtype="float32")
    if low_rank:
        low_rank = *low_rank, *adapters_in_use(low_rank[0], problem.groups, 8 * problem.token_tiles)
    y = pallas_kernel(problem, tiling)(x, packed.reshape(-1), *_numbers(scales, zeros), table, *low_rank)
    y = functools.reduce(operator.add, y) if tiling.splits > 1 else y[0]
    return y.astype(product.out_dtype).reshape(*lead, product.free)


def _kinds(product: Product, scales: Any, zeros: Array | None) -> tuple[str, str]:
    """Returns how the scales and zero points are stored, in the terms used by `Problem`."""
    of_scales = "nested" if isinstance(scales, NestedScales) else str(scales.dtype)
    of_scales = of_scales if product.scales == "float" else product.scales
    return of_scales, "float32" if zeros is None else str(zeros.dtype)


def _numbers(scales: Any, zeros: Array | None) -> list[Array]:
    """Returns the arrays for scales and zero points, in the order expected by kernels."""
    arrays = [
        *(scales.operands() if isinstance(scales, NestedScales) else (scales,)),
        *(() if zeros is None else (zeros,)),
    ]
    return [_in_words(z.reshape(-1)) for z in arrays]


def _in_words(numbers: Array) -> Array:
    """Pads an array to whole 32-bit words, because the kernel can only load whole words."""
    return jnp.pad(numbers, (0, -numbers.size % (4 // min(numbers.dtype.itemsize, 4))))


def adapters_in_use(t: Array, groups: int, size: int) -> tuple[Array, Array]:
    """Returns the adapters used by each group of rows, along with how many there are.

    The shapes are (groups, adapters) and (groups,). This is used to skip the other adapters.
    """
    adapters = t.shape[1]
    number = jnp.arange(adapters, dtype=np.uint32)
    if adapters == 1:
        return jnp.zeros((groups, 1), np.uint32), jnp.ones(groups, np.uint32)
    taken = jnp.any(t != 0, axis=2)
    taken = (
        jnp.pad(taken, ((0, groups * size - len(taken)), (0, 0))).reshape(groups, size, adapters).any(axis=1)
    )
    place = jnp.cumsum(taken, axis=1, dtype=np.uint32) - np.uint32(1)
    # Move the numbers of all used adapters to the front, by summing one-hot encodings of their new positions
    # rather than by sorting.
    found = taken[:, :, None] & (place[:, :, None] == number[None, None])
    order = jnp.sum(jnp.where(found, number[None, :, None], np.uint32(0)), axis=1, dtype=np.uint32)
    return order, jnp.sum(taken, axis=1, dtype=np.uint32)


def pallas_kernel(problem: Any, tiling: Any) -> Callable[..., Array]:
    """Returns the fused kernel, mapping the operands of `mosaic.emit` to terms (splits, m, features)."""
    from .. import lanes
    from . import mosaic

    return lanes.kernel(
        functools.partial(mosaic.emit, p=problem, tiling=tiling),
        name="stored_matmul",
        out=jax.ShapeDtypeStruct((tiling.splits, problem.m, problem.product.free), problem.out_dtype),
        shared_words=mosaic.shared_words(problem, tiling),
        blocks=blocks(problem, tiling),
        threads=tiling.threads,
    )


def _decoding_kernel(problem: Problem, start: int, stop: int) -> Callable[..., Array]:
    """Returns the kernel decoding rows, as a function of the operands of `decode_rows.emit`."""
    from .. import lanes
    from . import decode_rows

    return lanes.kernel(
        functools.partial(decode_rows.emit, p=problem, first=start, rows=stop - start),
        name="decoded_rows",
        out=jax.ShapeDtypeStruct((stop - start, problem.product.shape[1]), problem.dtype),
        shared_words=decode_rows.shared_words(problem),
        blocks=decode_rows.BLOCKS,
        threads=decode_rows.THREADS,
    )


def decodes(platform: str, x: Any, product: Product, *, partitioned: bool) -> bool:
    """Returns whether there is a kernel to decode this weight's rows."""
    return (
        fused_refusal(platform, x, dataclasses.replace(product, transpose=False), partitioned=partitioned)
        is None
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
    """Computes `x @ W` for one or two rows, as a sum over rows of `W`, into which XLA can fuse decoding."""
    n, k = product.shape
    lead = x.shape[:-1]
    dtype = accumulator_dtype(x.dtype)
    packed = packed.reshape(n, k // 2)
    scales = jnp.repeat(
        dense_scales(absmax).reshape(n, product.row_blocks), product.block_size // 2, axis=1
    ).astype(dtype)
    # The first code in each byte belongs to an even column and the second code to an odd column. Compute
    # these separately, to only interleave the sums.
    halves = [codebook[codes].astype(dtype) * scales for codes in (packed >> 4, packed & 15)]
    rows = x.reshape(math.prod(lead), n).astype(dtype)
    sums = [[jnp.sum(row[:, None] * half, axis=0) for half in halves] for row in rows]
    y = jnp.stack([jnp.stack(of_row, axis=-1).reshape(k) for of_row in sums])
    return y.astype(product.out_dtype).reshape(*lead, k)


def chunked(
    x: Array,
    leaves: Sequence[Any],
    *low_rank: Array,
    decode: Decode,
    product: Product,
    kernel: bool = False,
) -> Array:
    """Decodes `W` to `x`'s dtype, in chunks of rows if it is large, and uses a dense matmul for each.

    Every weight is only rounded once, from its exact float32 value. If the scales can be applied outside the
    product, `x` or the result is scaled rather than the weight. `x` is scaled in chunks if copying it would
    be expensive.

    **Arguments:**

    - `low_rank`: either empty, or `t` and `b` as in `times_adapters`, appended to the columns of `x` and `W`
        respectively.
    - `kernel`: whether to decode using the kernel in `decode_rows`.
    """
    (n, k), m, transpose = product.shape, math.prod(x.shape[:-1]), product.transpose
    if (parts := scaled_outside(x, leaves, decode, product)) is not None:
        if not transpose or m == 0:
            return whole(x, leaves, *low_rank, decode=decode, product=product)
        rows = x.reshape(m, n)

        def part(w: Any, start: Any, stop: Any) -> Any:
            return times_scaled(rows[start:stop], w[0], w[1], product)

        y = join_chunks(part, parts, m, scaled_at_once(m, n, k), axis=0)
        return y.reshape(*x.shape[:-1], k)
    b = None
    if low_rank:
        t, b = map(_padded, low_rank)
        # Appending `t` and `b` makes the low-rank term a part of the same contraction.
        x = jnp.concatenate([x, lax.collapse(t, x.ndim - 1)], axis=-1)
        b = lax.collapse(jnp.moveaxis(b, 0, 1), 1)
    # Without this barrier, XLA would keep the decoded weight alive until the other product in the backward
    # pass.
    weight, x = lax.optimization_barrier((list(leaves), x))
    if not kernel:
        weight = [dense_scales(leaf) if isinstance(leaf, NestedScales) else leaf for leaf in weight]
    step = chunk_size(n, k * x.dtype.itemsize, aligned=decode.aligned(product))
    # If the result is a sum over several chunks, only round it after adding them up.
    of_terms = product.out_dtype if step >= n else accumulator_dtype(x.dtype)

    def decoded(weight: list[Any], start: int, stop: int) -> Array:
        if kernel:
            return decoded_rows(weight, start, stop, decode=decode, product=product, dtype=str(x.dtype))
        return decode.matrix(weight, product, rows=slice(start, stop)).astype(x.dtype)

    def terms(weight: list[Any], start: int, stop: int) -> Array:
        return times(x[..., start:stop], decoded(weight, start, stop), product, of_terms)

    def features(weight: list[Any], start: int, stop: int) -> Array:
        w = decoded(weight, start, stop)
        w = w if b is None else jnp.concatenate([w, b[start:stop]], axis=1)
        return times(x, w, product, product.out_dtype)

    if transpose:
        return add_chunks(terms, weight, n, step).astype(product.out_dtype)
    return join_chunks(features, weight, n, step)


def decoded_rows(
    leaves: Sequence[Any], start: int, stop: int, *, decode: Decode, product: Product, dtype: str
) -> Array:
    """Decodes rows of `W` to a 16-bit dtype using a single kernel."""
    packed, scales, table, zeros = decode.operands(leaves, decoded=False)
    stored = decode.stored(product, decoded=False)
    assert stored is not None  # Already checked by `choose`.
    of_scales, of_zeros = _kinds(stored, scales, zeros)
    problem = Problem(stored, m=0, dtype=dtype, scales=of_scales, zeros=of_zeros)
    return _decoding_kernel(problem, start, stop)(packed.reshape(-1), *_numbers(scales, zeros), table)


def _padded(z: Array) -> Array:
    """Pads columns with zeros to a multiple of 16. Our kernel requires this, and cuBLAS is faster with it."""
    return jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 16)])


def chunk_size(rows: int, row_bytes: int, *, aligned: int = 1) -> int:
    """Returns how many rows of a weight to decode at a time.

    Large weights are split into chunks, so that there is never a dense copy. All chunks have the same
    (nonzero) length, a multiple of `aligned`.
    """
    most = max(1, _MOST // max(row_bytes, 1) // aligned) * aligned
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // (chunks * aligned))) * aligned


def scaled_at_once(m: int, n: int, k: int) -> int:
    """Returns how many of the `m` activation rows to scale at a time.

    This limits the scaled copy to a quarter of an (n, k) weight's size, unless that is small. All chunks have
    the same length.
    """
    rows = max(k // 4, _LEAST // max(n, 1), 1)
    return -(-m // max(1, -(-m // rows)))


def join_chunks(
    part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int, *, axis: int = -1
) -> Array:
    """Computes a product with `size` columns, `step` columns at a time.

    **Arguments:**

    - `part`: `part(weight, start, stop)` computes columns `start` to `stop`.
    - `weight`: the arrays decoded by `part`. These are threaded through the chunks, forcing them to be
        decoded sequentially, reusing the same memory.
    - `axis`: the result's axis to chunk over. Can also be rows rather than columns.
    """
    columns = part(weight, 0, min(step, size))
    if step >= size:
        return columns
    aval = jax.typeof(columns)
    axis %= columns.ndim
    shape = (*aval.shape[:axis], size, *aval.shape[axis + 1 :])
    # Every element is overwritten below, so don't spend another pass on initialising them.
    y = lax.empty(shape, aval.dtype, out_sharding=aval.sharding)
    y = compat.vary_over(y, compat.varying_axes(columns))

    def put(y: Any, columns: Any, start: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(y, columns, start, axis=axis)

    y = put(y, columns, 0)
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y = put(y, part(weight, start, min(start + step, size)), start)
    return y


def add_chunks(part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int) -> Array:
    """Sums products over `size` rows of a weight, `step` rows at a time.

    `part` computes the term for a range of rows. See `join_chunks` for `weight`.
    """
    y = part(weight, 0, min(step, size))
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y += part(weight, start, min(start + step, size))
    return y
