"""Block-wise quantisation and dequantisation, bitwise identical to bitsandbytes.

The value and threshold tables are precomputed once using NumPy. With JAX, a compiler pass could reassociate
or contract the arithmetic determining a code, and rounding differently just once would make our codes differ
from published checkpoints. XLA only sees constants, so results are the same on every backend.
"""

import functools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Int8, Shaped, UInt8

FloatArray = Float32[np.ndarray, "_"]


def _frozen(values: object) -> FloatArray:
    array = np.asarray(values, np.float32)
    array.flags.writeable = False  # These arrays are cached and shared.
    return array


NF4: FloatArray = _frozen(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
"""The 16 values of 4-bit NormalFloat, which are quantiles of a normal distribution and include an exact zero.

Source: Dettmers et al., QLoRA, <https://arxiv.org/abs/2305.14314>.
"""

FP4: FloatArray = _frozen(
    np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / 12
)
"""The 16 values of a 4-bit float (1 sign bit, 2 exponent bits, 1 mantissa bit), scaled to [-1, 1].

Note that code 8 is a second zero, which we need for consistency with bitsandbytes.
"""

INT4: FloatArray = _frozen(np.arange(16) - 8)
"""The 16 integers from -8 to 7, with code `i` representing `i - 8`. Quantisation never produces -8."""


@functools.cache
def nearest_bounds(codebook: tuple[float, ...]) -> tuple[FloatArray, UInt8[np.ndarray, "_"]]:
    """Returns `bounds` and `codes`, so that the entry nearest to `v` has code `codes[(v > bounds).sum()]`.

    Ties are broken towards the smaller value. FP4 has two zeros: the first for values up to and including
    zero, the second for values above zero.
    """
    values = np.asarray(codebook, np.float32)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    return _frozen((ordered[:-1] + ordered[1:]) / np.float32(2)), order.astype(np.uint8)


@functools.cache
def dynamic_map() -> FloatArray:
    """Returns the 256 values of the signed 8-bit dynamic data type, in ascending order.

    The values span seven decades, each linearly spaced with twice as many steps as the decade below. As a
    result, the absolute error is small for small values, and the relative error is smallest for large ones.
    Source: Dettmers et al., <https://arxiv.org/abs/1511.04561> and <https://arxiv.org/abs/2110.02861>.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace(np.float32(0.1), np.float32(1), 2**decade + 1)
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade - 6)) * means
        values += [*scaled, *-scaled]
    return _frozen(sorted(values))


def _linspace(start: np.float32, stop: np.float32, n: int) -> FloatArray:
    """Replicates `torch.linspace` in float32, as used to generate the published table.

    PyTorch fills the first half starting from `start` and the second half starting from `stop`, using a fused
    multiply-add. To obtain the same rounding, the product is computed in float64, where it is exact.
    """
    step = np.float64((stop - start) / np.float32(n - 1))
    i = np.arange(n)
    return np.where(i < n // 2, start + step * i, stop - step * (n - 1 - i)).astype(np.float32)


@functools.cache
def dynamic_bounds() -> FloatArray:
    """Returns thresholds for which the dynamic code of `v` in [-1, 1] is `(v >= bounds).sum()`.

    bitsandbytes looks up the code in a table with 65,536 equally sized bins. Close to zero, a bin spans
    several codes, so the resulting code isn't always the nearest one, and we need to reproduce this.
    Fortunately, the map from value to bin to code is monotone: thresholds alone can represent it, without the
    table or the arithmetic determining a bin.
    """
    bins = 65536
    midpoints = np.float32(0.5) * (dynamic_map()[:-1] + dynamic_map()[1:])
    centres = np.float32(-1) + np.float32(2) * np.arange(bins, dtype=np.float32) / np.float32(bins - 1)
    # For every c = 1 … 255, find the first bin whose code is at least c.
    first_bins = np.searchsorted(centres, midpoints, side="right")

    def bin_of(v: FloatArray) -> Int[np.ndarray, "_"]:
        half = (v + np.float32(1)) * np.float32(0.5)
        return (half * np.float32(bins - 1) + np.float32(0.5)).astype(np.int64)

    return _frozen(_first_float(lambda v: bin_of(v) >= first_bins, len(first_bins)))


def _first_float(predicate: Callable[[FloatArray], Bool[np.ndarray, "_"]], n: int) -> FloatArray:
    """Returns the smallest float32 in (-1, 1] satisfying each of `n` monotone predicates.

    Uses bisection over the bit patterns of floats.
    """

    def to_float(key: Int[np.ndarray, "_"]) -> FloatArray:
        # Each integer has the float's sign and the bits of its magnitude, so integers are ordered like
        # floats.
        return np.copysign(np.abs(key).astype(np.int32).view(np.float32), key).astype(np.float32)

    one = np.int64(np.float32(1).view(np.int32))
    low, high = np.full(n, -one), np.full(n, one)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        satisfied = predicate(to_float(middle))
        low, high = np.where(satisfied, low, middle), np.where(satisfied, middle, high)
    return to_float(high)


NESTED_BLOCK = 256
"""The number of scales that share a second-level scale in double quantisation."""

_SMALLEST, _LARGEST = 32, 4096

# bitsandbytes's lower bound on an absmax. XLA may flush this subnormal number to zero in arithmetic, so it
# can be selected using `jnp.where`, but not computed with.
_TINY = np.float32(1e-38)


def check_block_size(block_size: int) -> None:
    """Raises a `ValueError` or `TypeError` unless `block_size` is a power of two from 32 to 4096."""
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"block_size must be a whole number, got {block_size!r}.")
    if not (_SMALLEST <= block_size <= _LARGEST and block_size & (block_size - 1) == 0):
        raise ValueError(
            f"block_size must be a power of two from {_SMALLEST} to {_LARGEST}, got {block_size}."
        )


def pad_to_blocks(flat: Shaped[Array, " n"], block_size: int) -> Shaped[Array, "blocks block"]:
    """Reshapes an array into rows of `block_size` elements, padding the last row with zeros."""
    return jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)


def quantize_codebook(
    x: Float[ArrayLike, "..."], codebook: FloatArray, block_size: int
) -> tuple[UInt8[Array, " bytes"], Float32[Array, " blocks"]]:
    """Quantises an array to 4-bit codes, scaling each block by its largest magnitude.

    The array is flattened in row-major order and split into blocks, the last of which can be partial. Each
    byte packs two codes, the first in the high nibble. An odd number of elements is padded with the code for
    zero. Subnormal values are treated as zero, as is usual in XLA.

    **Arguments:**

    - `x`: an array of any shape and floating dtype. Computed in float32.
    - `codebook`: 16 float32 values in [-1, 1].
    - `block_size`: a power of two from 32 to 4096.

    **Returns:** the packed codes (`ceil(x.size / 2)` bytes), and one scale per block.
    """
    check_block_size(block_size)
    return _quantize(jnp.asarray(x), tuple(codebook.tolist()), block_size)


@functools.partial(jax.jit, static_argnames=("codebook", "block_size"), inline=True)
def _quantize(
    x: Float[Array, "..."], codebook: tuple[float, ...], block_size: int
) -> tuple[UInt8[Array, " bytes"], Float32[Array, " blocks"]]:
    flat = x.reshape(-1).astype(jnp.float32)
    whole = flat.size - flat.size % block_size
    blocks = flat[:whole].reshape(-1, block_size)
    absmax = _absmax(blocks)
    normed = (blocks * _reciprocal(absmax)[:, None]).reshape(-1)
    if whole < flat.size:
        # Unlike for all other blocks, bitsandbytes divides by the (clamped) scale here, rather than
        # multiplying by its reciprocal, which can round differently.
        tail = flat[whole:]
        tail_absmax = _floor(_absmax(tail[None]))
        absmax = jnp.concatenate([absmax, tail_absmax])
        divisor = jnp.where(tail_absmax < np.finfo(np.float32).tiny, jnp.float32(1), tail_absmax)
        normed = jnp.concatenate([normed, tail / divisor])
    if flat.size % 2:
        normed = jnp.append(normed, jnp.float32(0))
    codes = _nearest(normed, codebook)
    return codes[::2] << 4 | codes[1::2], absmax


@functools.partial(jax.jit, inline=True)
def quantize_scales(
    absmax: Float32[ArrayLike, " blocks"],
) -> tuple[UInt8[Array, " blocks"], Float32[Array, " nested"], Float32[Array, ""]]:
    """Quantises block scales ("double quantisation"), from 32 bits to 8 bits each.

    Subtracts the mean scale, normalises blocks of 256 by their largest magnitude, then encodes these using
    the signed dynamic 8-bit map. This matches the CPU implementation in bitsandbytes.

    **Returns:** the codes, the second-level scales, and the mean.
    """
    absmax = jnp.asarray(absmax)
    offset = jnp.mean(absmax)
    centred = absmax - offset
    blocks = pad_to_blocks(centred, NESTED_BLOCK)
    nested = _absmax(blocks)
    normed = jnp.clip(blocks * _reciprocal(nested)[:, None], -1, 1)
    codes = jnp.searchsorted(dynamic_bounds(), normed, side="right").astype(jnp.uint8)
    codes = jnp.where(nested[:, None] == 0, jnp.uint8(0), codes)
    return codes.reshape(-1)[: absmax.size], nested, offset


@functools.partial(jax.jit, static_argnames=("largest", "block_size"), inline=True)
def quantize_int(
    x: Float[ArrayLike, "... n"], largest: int, block_size: int | None
) -> tuple[Int8[Array, "... n"], Float32[Array, "... blocks"]]:
    """Quantises to integers in [-largest, largest], with scales along the last axis.

    **Arguments:**

    - `x`: an array of any floating dtype. Computed in float32.
    - `largest`: the integer representing a block's largest magnitude, e.g. 127 for int8.
    - `block_size`: the number of elements sharing a scale; a row's last block can be partial. If `None`,
        there is a single scale per row.

    **Returns:** the integers, and the scales `absmax / largest`, with value = integer · scale.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    n = x.shape[-1]
    block_size = max(n, 1) if block_size is None else block_size
    n_rows = math.prod(x.shape[:-1])
    rows = x.reshape(n_rows, n)
    blocks = jax.vmap(lambda row: pad_to_blocks(row, block_size))(rows)
    absmax = _absmax(blocks)
    scale = absmax / np.float32(largest)
    integers = jnp.round(blocks * jnp.where(absmax > 0, largest / absmax, 0)[..., None])
    integers = jnp.clip(integers, -largest, largest).astype(jnp.int8)
    integers = integers.reshape(n_rows, blocks.shape[1] * block_size)[:, :n].reshape(x.shape)
    return integers, scale.reshape(*x.shape[:-1], blocks.shape[1])


def _absmax(blocks: Float32[Array, "... n"]) -> Float32[Array, "..."]:
    """Returns the largest magnitude in each block, or NaN if any element is NaN."""
    return jnp.max(jnp.abs(blocks), axis=-1, initial=0)


def _reciprocal(absmax: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Computes 1 / absmax, using 1e38 if absmax is too small to divide by."""
    tiny = absmax < np.finfo(np.float32).tiny
    return jnp.where(tiny, np.float32(1e38), 1 / jnp.where(tiny, np.float32(1), absmax))


def _floor(absmax: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.where(absmax < np.finfo(np.float32).tiny, _TINY, absmax)


def _nearest(v: Float32[Array, " n"], codebook: tuple[float, ...]) -> UInt8[Array, " n"]:
    """Returns the codes of the nearest entries.

    Sums comparisons, which XLA can fuse into a single pass.
    """
    bounds, order = nearest_bounds(codebook)
    codes = jnp.full(v.shape, order[0])
    for bound, step in zip(bounds, np.diff(order), strict=True):  # Steps are uint8 and can wrap around.
        codes += jnp.where(v > bound, step, np.uint8(0))
    return codes


def unpack_codes(packed: UInt8[ArrayLike, " bytes"]) -> UInt8[Array, " codes"]:
    """Unpacks each byte into two 4-bit codes, high nibble first."""
    packed = jnp.asarray(packed)
    return jnp.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)


@functools.partial(jax.jit, static_argnames=("n", "block_size", "dtype"), inline=True)
def dequantize_codebook(
    packed: UInt8[ArrayLike, " bytes"],
    absmax: Float32[ArrayLike, " blocks"],
    codebook: Float32[ArrayLike, "16"],
    *,
    n: int,
    block_size: int,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, " n"]:
    """Dequantises `n` values from `quantize_codebook`, multiplying by the scale in float32 before casting."""
    values = pad_to_blocks(jnp.asarray(codebook)[unpack_codes(packed)][:n], block_size)
    return (values * jnp.asarray(absmax)[:, None]).reshape(-1)[:n].astype(dtype)


@functools.partial(jax.jit, inline=True)
def dequantize_scales(
    codes: UInt8[ArrayLike, " blocks"],
    nested: Float32[ArrayLike, " nested"],
    offset: Float32[ArrayLike, ""],
    *,
    quant_map: Float32[ArrayLike, "256"] | None = None,
) -> Float32[Array, " blocks"]:
    """Dequantises block scales from `quantize_scales`, as map · scale + offset.

    Importantly, both operations are rounded separately.

    **Arguments:**

    - `quant_map`: the 256 values of the codes. Defaults to the dynamic map.
    """
    codes = jnp.asarray(codes)
    table = jnp.asarray(dynamic_map() if quant_map is None else quant_map)
    blocks = pad_to_blocks(table[codes], NESTED_BLOCK)
    scaled = blocks * jnp.asarray(nested)[:, None]
    # This clamp is the identity on all finite values. Without it, LLVM could contract the multiplication and
    # the addition into a fused multiply-add, which rounds just once and so wouldn't match the reference.
    largest = np.finfo(np.float32).max
    scaled = lax.clamp(-largest, scaled, largest)
    return scaled.reshape(-1)[: codes.size] + offset
