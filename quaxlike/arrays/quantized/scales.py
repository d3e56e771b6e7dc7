"""Block scales, and how to choose them when quantising."""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, UInt8

from ...kernels.block_matmul import CODECS, Codec
from ...kernels.block_matmul import NestedScales as NestedScales  # pickles name it here
from ...kernels.block_matmul.codecs import scaled
from . import search


class BlockScales(eqx.Module):
    """Block scales and zero points, as used by a [`Codec`][quaxlike.arrays.quantized.Codec].

    **Arguments:**

    - `scale`: `(*lead, blocks)`.
    - `outer`: `(*lead, groups)`, factors for the scales in each group of blocks; or None.
    - `zero`: `(*lead, blocks)`, zero points or minima; or None.
    - `outer_zero`: `(*lead, groups)`, factors for the minima in each group; or None.
    """

    scale: Array | np.ndarray
    outer: Array | np.ndarray | None = None
    zero: Array | np.ndarray | None = None
    outer_zero: Array | np.ndarray | None = None

    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.scale, self.outer, self.zero, self.outer_zero

    def times(self, factor: Array, codec: Codec) -> "tuple[Codec, BlockScales]":
        """Multiplies by a scalar, or by factors `(*lead, 1)`. Also returns the result's codec."""

        def wide(x: Any) -> Any:
            return x.astype(jnp.float32)

        scaled = self
        if self.outer is not None:
            # Some codecs divide by the outer scale rather than multiplying by it.
            outer = self.outer / factor if codec.over else wide(self.outer) * factor
            scaled = dataclasses.replace(self, outer=outer)
        else:
            scale, _ = codec.scales_and_zeros(*self.parts())
            scaled = dataclasses.replace(self, scale=scale * factor)
            # The codec's own format for scales may not be able to represent the product.
            codec = dataclasses.replace(codec, scales="float")
        if codec.zeros in ("plus", "minus") and self.outer_zero is not None:
            return codec, dataclasses.replace(scaled, outer_zero=wide(self.outer_zero) * factor)
        if codec.zeros in ("plus", "minus") and self.zero is not None:
            return codec, dataclasses.replace(scaled, zero=wide(self.zero) * factor)
        return codec, scaled


# Quantises values to codes, scales and zeros for any codec, block by block ------------------------


@functools.partial(jax.jit, static_argnames=("codec", "block", "searches"), inline=True)
def encode(
    x: Array,
    codec: Codec,
    block: int,
    *,
    like: BlockScales | None = None,
    key: Any = None,
    searches: bool = False,
    importance: Array | None = None,
) -> tuple[UInt8[Array, "*lead n"], BlockScales]:
    """Quantises blocks along the last axis.

    **Arguments:**

    - `x`: `(*lead, n)`, any floating dtype. Computed in float32, but without codes that are infinite in this
        dtype.
    - `codec`: the format of codes, scales and zeros.
    - `block`: the number of elements sharing a scale; the last block of each row can be smaller.
    - `like`: scales and zeros with the dtypes to use. Default: the codec's dtypes.
    - `key`: a PRNG key for stochastic rounding, which is unbiased. Default: round to nearest.
    - `searches`: whether to search for the scales with the smallest error, rather than covering each block's
        range. This is slower, but more accurate. Default: False.
    - `importance`: weights for the squared errors in this search, `(n,)` or `(*lead, n)`. Default: all equal.

    **Returns:** the codes (one per byte), and the scales.
    """
    dtype = x.dtype
    x = x.astype(jnp.float32)
    n = x.shape[-1]
    missing = -n % block
    # Pad with the last element. Unlike zeros, this doesn't affect the block's minimum and maximum.
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge") if missing else x
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)
    if searches:
        weights = _weights(importance, n, block)
        weights = weights.reshape(*[1] * (blocks.ndim - weights.ndim), *weights.shape)
        parts = _searched(blocks, weights, codec, like)
    else:
        parts = _stored(*_wanted(blocks, codec), codec, like)
    scale, zero = codec.scales_and_zeros(*parts.parts())
    scale, zero = scale[..., None], None if zero is None else zero[..., None]
    # A block of zeros has scale zero, so avoid dividing by it.
    inverse = jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))
    if zero is None:
        wanted = blocks * inverse
    elif codec.zeros == "points":
        wanted = blocks * inverse + zero
    else:
        wanted = (blocks - zero if codec.zeros == "plus" else blocks + zero) * inverse
    if key is None:
        codes = codec.nearest(wanted)
    else:
        codes = codec.at_random(wanted, jax.random.uniform(key, wanted.shape))
    # Rounding can take the largest numbers beyond the dtype's range. No weight gets that large in float32 or
    # bfloat16, so don't spend time on these.
    if jnp.finfo(dtype).max < jnp.finfo(jnp.bfloat16).max:
        values = scaled(codec.values(codes), scale, zero, zeros=codec.zeros)
        too_large = ~jnp.isfinite(values.astype(dtype)) & jnp.isfinite(blocks)
        codes = jnp.where(too_large, codec.beside(codes, up=(values < 0) ^ (scale < 0)), codes)
    return codes.reshape(padded.shape)[..., :n], parts


def _weights(importance: Array | None, n: int, block: int) -> Array:
    """Divides the weights into blocks.

    Zero weights become slightly positive. Otherwise the best codes for these elements are arbitrary.
    """
    if importance is None:
        if not n % block:
            return jnp.ones((), jnp.float32)
        importance = jnp.ones(n, jnp.float32)
    importance = importance.astype(jnp.float32)
    mean = jnp.mean(importance, axis=-1, keepdims=True)
    weights = jnp.where(mean == 0, 1.0, jnp.maximum(importance / jnp.where(mean == 0, 1.0, mean), 1e-4))
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -n % block)])
    return weights.reshape(*weights.shape[:-1], weights.shape[-1] // block, block)


def _searched(blocks: Array, weights: Array, codec: Codec, like: BlockScales | None) -> BlockScales:
    """Searches for the scales with the smallest error."""
    fit = search.fitted(blocks, codec, weights)
    sign = -1 if codec.zeros == "minus" else 1
    zero = None if fit.minimum is None else sign * fit.minimum

    def minimum(scale: Array) -> Array:
        assert fit.minimum is not None
        return sign * search.best_minimum(blocks, scale, fit.minimum, codec, weights)

    return _stored(fit.scale, zero, codec, like, fit, minimum)


def _wanted(blocks: Array, codec: Codec) -> tuple[Array, Array | None]:
    """Computes float32 scales and zeros covering each block's range."""
    low, high = codec.range()
    if codec.zeros is None:
        largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0)
        if low >= 0:
            return largest / high, None
        # If the codes reach further on one side, map the element with the largest magnitude there.
        if codec.bits <= 3 or (codec.codes == "table" and -low > high):
            at = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
            return jnp.take_along_axis(blocks, at, axis=-1)[..., 0] / low, None
        return largest / min(-low, high), None
    least = jnp.minimum(jnp.min(blocks, axis=-1, initial=np.inf), 0)
    most = jnp.maximum(jnp.max(blocks, axis=-1, initial=-np.inf), 0)
    width = high - low
    # `most - least` can overflow.
    scale = jnp.where(jnp.isinf(most - least), most / width - least / width, (most - least) / width)
    if codec.zeros == "points":
        return scale, jnp.round(-least / jnp.where(scale == 0, 1.0, scale))
    return scale, least if codec.zeros == "plus" else -least


def _stored(
    scale: Any,
    zero: Any,
    codec: Codec,
    like: BlockScales | None,
    fit: search.FittedScales | None = None,
    minimum: Callable[[Array], Array] | None = None,
) -> BlockScales:
    """Rounds scales and zeros to the codec's format.

    After a search, this also searches for the outer scales. `minimum` then recomputes the minima, because the
    best minimum depends on the rounded scale.
    """
    floating = np.dtype(codec.dtype)
    dtypes = [floating] * 4 if like is None else [x if x is None else x.dtype for x in like.parts()]
    outer = outer_zero = None
    if codec.scales in ("integer", "nibbles"):
        scale, outer = _multiples(scale, codec, dtypes[1], fit and fit.scale_weight)
        if codec.zeros is not None:
            if minimum is not None:
                zero = minimum(codec.scales_and_zeros(scale.astype(jnp.uint8), outer, None, None)[0])
            zero, outer_zero = _multiples(zero, codec, dtypes[3], fit and fit.minimum_weight)
        if codec.scales == "nibbles":
            return BlockScales((scale | zero << 4).astype(jnp.uint8), outer, None, outer_zero)
        small = jnp.int8 if codec.limits[0] < 0 else jnp.uint8
        zero = None if zero is None else zero.astype(small)
        return BlockScales(scale.astype(small), outer, zero, outer_zero)
    if codec.scales in ("e8m0", "e8m0_half"):
        # Round up to a power of two, so that nothing is clipped.
        up = lax.bitcast_convert_type(search.power_of_two_above(scale), jnp.uint32)
        byte = (up >> 23) + np.uint32(codec.scales == "e8m0_half")
        return BlockScales(jnp.minimum(byte, 254).astype(jnp.uint8))
    if codec.scales == "e4m3":
        if codec.group is not None:
            largest = jnp.max(scale, axis=-1, keepdims=True, initial=0)[..., : scale.shape[-1]]
            largest = jnp.where(largest == 0, 1.0, largest)
            outer = 448 / largest if codec.over else largest / 448
            scale = scale * outer if codec.over else scale / outer
        narrow = jnp.minimum(scale, 448).astype(jnp.float8_e4m3fn)
        return BlockScales(lax.bitcast_convert_type(narrow, jnp.uint8), outer)
    if codec.zeros == "points":
        small = jnp.uint8 if like is None else dtypes[2]
        return BlockScales(_narrowed(scale, dtypes[0]), None, zero.astype(small))
    scale = _narrowed(scale, dtypes[0])
    if minimum is not None and zero is not None:
        zero = minimum(scale.astype(jnp.float32))
    return BlockScales(scale, None, None if zero is None else _narrowed(zero, dtypes[2]))


def _narrowed(x: Array, dtype: Any) -> Array:
    """Casts scales, clipping those that are too large to the dtype's largest number."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return x.astype(dtype)
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def _multiples(x: Array, codec: Codec, dtype: Any, weight: Array | None) -> tuple[Array, Array]:
    """Splits `x` into integers and one outer scale per group (searched for if weights are given)."""
    group, limits = codec.group or max(x.shape[-1], 1), codec.limits
    missing = -x.shape[-1] % group

    def grouped(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        return padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group)

    groups = grouped(x)
    if weight is None:
        outer = jnp.max(jnp.abs(groups), axis=-1, initial=0) / limits[1]
    else:
        outer = search.multiples(groups, grouped(weight), limits)[..., 0]
    outer = _narrowed(outer, dtype)
    spread = outer.astype(jnp.float32)[..., None]
    whole = jnp.round(jnp.where(spread == 0, 0.0, groups / jnp.where(spread == 0, 1.0, spread)))
    whole = jnp.clip(whole, *limits).astype(jnp.int32)
    return lax.collapse(whole, x.ndim - 1)[..., : x.shape[-1]], outer


def as_floating(cls: type, x: ArrayLike, axis: int, stacked: int) -> tuple[Array, list[int]]:
    """Moves `axis` last, after the stacked axes. Also returns the permutation moving it back."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{cls.__name__}.quantize takes a floating array; found dtype {x.dtype}.")
    if x.ndim == 0 and not stacked:
        return x, []
    if not -x.ndim <= axis < x.ndim or axis % x.ndim < stacked:
        whole = f"one of the arrays in {stacked} axes of stacks, found the" if stacked else "an array of"
        raise ValueError(f"{cls.__name__}.quantize: axis {axis} is not an axis of {whole} shape {x.shape}.")
    axis %= x.ndim
    return jnp.moveaxis(x, axis, -1), [*range(axis), x.ndim - 1, *range(axis, x.ndim - 1)]


def check_block_size(block_size: Any) -> None:
    """Raises a `TypeError` or `ValueError` unless `block_size` is None or a positive integer."""
    if block_size is None:
        return
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"block_size must be a whole number or None, got {block_size!r}.")
    if block_size < 1:
        raise ValueError(f"block_size must be positive or None, got {block_size}.")


def check_importance(
    cls: type, importance: ArrayLike | None, codec: Codec, stored: tuple[int, ...], stacked: int
) -> Array | None:
    """Checks the error weights passed by the user. Returns them with the stored array's axes."""
    if importance is None:
        return None
    if codec not in search.SEARCHED:
        known = ", ".join(sorted(codec.name for codec in search.SEARCHED))
        raise ValueError(
            f"{cls.__name__}.quantize: `importance` is for codecs whose scales are searched for, {known}; "
            f"found {codec.name!r}."
        )
    weights, last = jnp.asarray(importance), stored[-1:]
    if tuple(weights.shape) not in (last, stored[:stacked] + last):
        raise ValueError(
            f"{cls.__name__}.quantize: `importance` must have one entry for each of the {last[0]} elements "
            f"that blocks run along; found the shape {tuple(weights.shape)}."
        )
    lead = weights.shape[:-1]
    return weights.reshape(*lead, *[1] * (len(stored) - len(lead) - 1), *last) if lead else weights


def find_codec(cls: type, codec: Any) -> Codec:
    """Looks up a codec by name, for classes that support any codec."""
    if all(field.name != "codec" for field in dataclasses.fields(cls)):
        raise ValueError(f"{cls.__name__} has a codec of its own; BlockArray.quantize takes others.")
    if isinstance(codec, str):
        if codec not in CODECS:
            raise ValueError(f"There is no codec {codec!r}; there are {', '.join(CODECS)}.")
        codec = CODECS[codec]
    if not isinstance(codec, Codec):
        raise TypeError(f"{cls.__name__}.quantize takes a codec or the name of one; found {codec!r}.")
    return codec
