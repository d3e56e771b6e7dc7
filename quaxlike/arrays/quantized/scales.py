"""Block scales: how codecs read them, and how quantisation chooses them."""

import dataclasses
import functools
import numbers
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float32, UInt8

from ...kernels.block_matmul import CODECS, Codec
from ...kernels.block_matmul import NestedScales as NestedScales  # pickles name it here

_TINY = np.float32(np.finfo(np.float32).tiny)


class BlockScales(eqx.Module):
    """Block scales and zero points, as a [`Codec`][quaxlike.arrays.quantized.Codec] reads them.

    **Arguments:**

    - `scale`: `(*lead, blocks)`.
    - `outer`: `(*lead, groups)`, a factor for the scales in each group of blocks; or None.
    - `zero`: `(*lead, blocks)`, zero points or minima; or None.
    - `outer_zero`: `(*lead, groups)`, a factor for the minima; or None.
    """

    scale: Array | np.ndarray
    outer: Array | np.ndarray | None = None
    zero: Array | np.ndarray | None = None
    outer_zero: Array | np.ndarray | None = None

    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.scale, self.outer, self.zero, self.outer_zero

    def times(self, factor: Array, codec: Codec) -> "tuple[Codec, BlockScales]":
        """Multiplies by a scalar, or by factors `(*lead, 1)`. Also returns the codec for the result."""

        def wide(x: Any) -> Any:
            return x.astype(jnp.float32)

        scaled = self
        if self.outer is not None:
            outer = self.outer / factor if codec.over else wide(self.outer) * factor
            scaled = dataclasses.replace(self, outer=outer)
        else:
            scale, _ = codec.scales_and_zeros(*self.parts())
            scaled = dataclasses.replace(self, scale=scale * factor)
            codec = dataclasses.replace(codec, scales="float")
        if codec.zeros in ("plus", "minus") and self.outer_zero is not None:
            return codec, dataclasses.replace(scaled, outer_zero=wide(self.outer_zero) * factor)
        if codec.zeros in ("plus", "minus") and self.zero is not None:
            return codec, dataclasses.replace(scaled, zero=wide(self.zero) * factor)
        return codec, scaled


# Quantises values to codes, scales and zeros for any codec, block by block ------------------------


@functools.partial(jax.jit, static_argnames=("codec", "block"), inline=True)
def encode(
    x: Array, codec: Codec, block: int, *, like: BlockScales | None = None, key: Any = None
) -> tuple[UInt8[Array, "*lead n"], BlockScales]:
    """Quantises the last axis in blocks.

    **Arguments:**

    - `x`: `(*lead, n)`, any floating dtype; computed in float32.
    - `codec`: how to store codes, scales and zeros.
    - `block`: how many elements share a scale; a row's last block may be partial.
    - `like`: takes the dtypes of these scales and zeros; the codec's if None.
    - `key`: a PRNG key for stochastic rounding, which makes the mean exact. Default: rounds to nearest.

    **Returns:** the codes, one per byte, and the scales.
    """
    x = x.astype(jnp.float32)
    n = x.shape[-1]
    missing = -n % block
    # Padding repeats the last element, so it does not change the block's minimum or maximum.
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge") if missing else x
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)
    scale, zero = _wanted(blocks, codec)
    parts = _stored(scale, zero, codec, like)
    scale, zero = codec.scales_and_zeros(*parts.parts())
    scale, zero = scale[..., None], None if zero is None else zero[..., None]
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
    return codes.reshape(padded.shape)[..., :n], parts


def _wanted(blocks: Array, codec: Codec) -> tuple[Array, Array | None]:
    """The float32 scales and zeros with which the codes cover the range of each block."""
    low, high = codec.range()
    if codec.zeros is None:
        largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0)
        if low >= 0:
            return largest / high, None
        # If the codes reach further on one side, we map the element with the largest magnitude there.
        if codec.bits <= 3 or (codec.codes == "table" and -low > high):
            at = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
            return jnp.take_along_axis(blocks, at, axis=-1)[..., 0] / low, None
        return largest / min(-low, high), None
    least = jnp.minimum(jnp.min(blocks, axis=-1, initial=np.inf), 0)
    most = jnp.maximum(jnp.max(blocks, axis=-1, initial=-np.inf), 0)
    scale = (most - least) / (high - low)
    if codec.zeros == "points":
        return scale, jnp.round(-least / jnp.where(scale == 0, 1.0, scale))
    return scale, least if codec.zeros == "plus" else -least


def _stored(
    scale: Float32[Array, "*lead blocks"], zero: Any, codec: Codec, like: BlockScales | None
) -> BlockScales:
    """Converts scales and zeros to the codec's storage format."""
    floating = np.dtype(codec.dtype)
    dtypes = [floating] * 4 if like is None else [x if x is None else x.dtype for x in like.parts()]
    outer = outer_zero = None
    if codec.scales in ("integer", "nibbles"):
        scale, outer = _multiples(scale, codec, codec.limits, dtypes[1])
        if codec.zeros is not None:
            zero, outer_zero = _multiples(zero, codec, codec.limits, dtypes[3])
        if codec.scales == "nibbles":
            return BlockScales((scale | zero << 4).astype(jnp.uint8), outer, None, outer_zero)
        small = jnp.int8 if codec.limits[0] < 0 else jnp.uint8
        zero = None if zero is None else zero.astype(small)
        return BlockScales(scale.astype(small), outer, zero, outer_zero)
    if codec.scales in ("e8m0", "e8m0_half"):
        # Rounded up to a power of two, so nothing is clipped.
        raw = lax.bitcast_convert_type(jnp.maximum(scale, _TINY), jnp.uint32)
        up = (raw & np.uint32(0x7FFFFF) != 0).astype(jnp.uint32)
        byte = (raw >> 23) + up + np.uint32(codec.scales == "e8m0_half")
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
        return BlockScales(scale.astype(dtypes[0]), None, zero.astype(small))
    return BlockScales(scale.astype(dtypes[0]), None, None if zero is None else zero.astype(dtypes[2]))


def _multiples(x: Array, codec: Codec, limits: tuple[int, int], dtype: Any) -> tuple[Array, Array]:
    """Splits `x` into integers and one outer scale per group."""
    group = codec.group or max(x.shape[-1], 1)
    missing = -x.shape[-1] % group
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group)
    outer = (jnp.max(jnp.abs(groups), axis=-1, initial=0) / limits[1]).astype(dtype)
    spread = outer.astype(jnp.float32)[..., None]
    whole = jnp.round(jnp.where(spread == 0, 0.0, groups / jnp.where(spread == 0, 1.0, spread)))
    whole = jnp.clip(whole, *limits).astype(jnp.int32)
    return whole.reshape(padded.shape)[..., : x.shape[-1]], outer


def as_floating(cls: type, x: ArrayLike, axis: int, stacked: int) -> tuple[Array, list[int]]:
    """Moves `axis` last, behind stacked axes. Also returns the permutation that moves it back."""
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
    """Raises a `ValueError` unless `block_size` is None or positive, a `TypeError` for other types."""
    if block_size is None:
        return
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"block_size must be a whole number or None, got {block_size!r}.")
    if block_size < 1:
        raise ValueError(f"block_size must be positive or None, got {block_size}.")


def find_codec(cls: type, codec: Any) -> Codec:
    """Looks up a codec by name, for a class that takes any."""
    if all(field.name != "codec" for field in dataclasses.fields(cls)):
        raise ValueError(f"{cls.__name__} has a codec of its own; BlockArray.quantize takes others.")
    if isinstance(codec, str):
        if codec not in CODECS:
            raise ValueError(f"There is no codec {codec!r}; there are {', '.join(CODECS)}.")
        codec = CODECS[codec]
    if not isinstance(codec, Codec):
        raise TypeError(f"{cls.__name__}.quantize takes a codec or the name of one; found {codec!r}.")
    return codec
