"""Searches for the block scales minimising the quantisation error.

Start from the scale covering the block's range, and try several others around it. For each candidate, compute
the codes, and then fit the scale (and the minimum, if the codec has one) to these codes by least squares,
keeping the best result. For codecs with outer scales, the same search is used when rounding the scales.
llama.cpp does the same, using slightly different candidates.

Every scale must be fitted to the very codes it is going to be stored with. Otherwise its actual error is
larger than the one compared to those of other candidates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ...kernels.block_matmul import CODECS, Codec

#: Codecs that search for scales. llama.cpp does so for all of these except `q8_0`, for which it covers the
#: range.
SEARCHED: frozenset[Codec] = frozenset(
    CODECS[name]
    for name in (
        *("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
        *("mxfp4", "mxfp4_gguf"),
    )
)
# Dividing the range by these gives candidate scales. A factor above 1 reduces the scale, so that the largest
# values are clipped: worthwhile if they have small weights. For a factor below 1, some codes remain unused.
_SHRINKS = np.append(np.linspace(0.85, 1.3, 20), 1).astype(np.float32)
# For blocks with a minimum, candidates stretch the range by this many codes.
_STRETCHES = np.linspace(-1, 1, 21, dtype=np.float32)
_TINY = np.float32(np.finfo(np.float32).tiny)
# A sentinel candidate: fit the best scale so far once more. (Doing this as just another candidate, rather
# than after the loop, is faster to compile.)
_AGAIN = np.zeros(2, np.float32)


class FittedScales(NamedTuple):
    """Scales, minima, and the weights of their squared rounding errors (i.e. how much rounding them increases
    the total error).

    All of these have shape `(*lead, blocks)`.
    """

    scale: Array
    minimum: Array | None
    scale_weight: Array
    minimum_weight: Array


def fitted(
    blocks: Float32[Array, "*lead blocks block"], codec: Codec, weights: Float32[Array, "..."]
) -> FittedScales:
    """Finds the best scales, prior to rounding them to the codec's format.

    `weights` must broadcast against the elements.
    """
    # Normalise by the largest magnitude. Otherwise the squares of small values could underflow to zero.
    unit = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    x = _ratio(blocks, unit)
    total = jnp.sum(jnp.broadcast_to(weights, x.shape), axis=-1, keepdims=True)
    if codec.scales in ("e8m0", "e8m0_half"):
        scale = _power_of_two(blocks, unit, codec, weights)
        return FittedScales(scale[..., 0], None, total[..., 0], total[..., 0])
    if codec.zeros is None:
        scale, weight = _symmetric(x, weights, _rounding(codec), codec.range())
        return FittedScales((scale * unit)[..., 0], None, weight[..., 0], total[..., 0])
    scale, minimum, weight = _with_minimum(x, weights, total, codec)
    return FittedScales((scale * unit)[..., 0], (minimum * unit)[..., 0], weight[..., 0], total[..., 0])


def best_minimum(
    blocks: Float32[Array, "*lead blocks block"], scale: Array, minimum: Array, codec: Codec, weights: Any
) -> Array:
    """Finds the best minimum for each block, given an already rounded scale."""
    scale, minimum = scale[..., None], minimum[..., None]
    rest = blocks - scale * _rounding(codec)(_ratio(blocks - minimum, scale))
    weights = jnp.broadcast_to(weights, blocks.shape)
    return _allowed(jnp.sum(weights * rest, axis=-1) / jnp.sum(weights, axis=-1), codec)


def multiples(x: Array, weight: Array, limits: tuple[int, int]) -> Array:
    """Finds outer scales `(..., 1)` such that the `x` in each group are as close as possible to integer
    multiples.

    The integers must be within `limits`.
    """
    unit = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    weight = _ratio(weight, jnp.max(weight, axis=-1, keepdims=True))

    def rounded(y: Array) -> Array:
        return jnp.clip(jnp.round(y), *limits)

    return _symmetric(_ratio(x, unit), weight, rounded, limits)[0] * unit


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def _rounding(codec: Codec) -> Callable[[Array], Array]:
    """Returns a function rounding to the values of codes.

    For a table, this adds up steps, which is faster than indexing.
    """
    if codec.codes == "integer":
        return lambda y: jnp.clip(jnp.round(y), *codec.range())
    table = np.unique(codec.all_values)
    steps = list(zip((table[1:] + table[:-1]) / 2, np.diff(table), strict=True))
    return lambda y: sum((jnp.where(y > middle, step, 0) for middle, step in steps), start=table[0])


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _better(old: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
    """Selects the better fit for each block. The first array of each fit is its loss."""
    is_better = new[0] < old[0]
    return tuple(jnp.where(is_better, b, a) for a, b in zip(old, new, strict=True))


def _symmetric(
    x: Array, weights: Any, rounded: Callable[[Array], Array], limits: tuple[float | int, float | int]
) -> tuple[Array, Array]:
    """Finds scales for blocks without minima, and their weights."""
    place = jnp.argmax(jnp.abs(x), axis=-1, keepdims=True)
    largest = jnp.take_along_axis(x, place, axis=-1)  # the first candidates map this to an extreme code

    def fit(scale: Array) -> tuple[Array, ...]:
        values = rounded(_ratio(x, scale))
        product, square = _sum(weights * x * values), _sum(weights * values * values)
        best = _ratio(product, square)
        # The loss leaves out the squared norm of `x`, which is the same for every scale.
        return -best * product, best, square

    ends = [end for end in limits if end]
    divisors = np.concatenate([end * _SHRINKS for end in ends] + [_AGAIN])

    def tried(best: tuple[Array, ...], divisor: Array) -> tuple[tuple[Array, ...], None]:
        scale = jnp.where(divisor == 0, best[1], largest / divisor)
        return _better(best, fit(scale)), None

    nothing = jnp.full_like(largest, np.inf), largest / ends[0], jnp.zeros_like(largest)
    (_, scale, square), _ = lax.scan(tried, nothing, jnp.asarray(divisors, jnp.float32))
    return scale, square


def _with_minimum(x: Array, weights: Any, total: Array, codec: Codec) -> tuple[Array, Array, Array]:
    """Finds scales and minima for blocks that have both. Also returns weights for the scales."""
    rounded, (_, high) = _rounding(codec), codec.range()
    least = _allowed(jnp.min(x, axis=-1, keepdims=True), codec)
    above = x - least
    span, mass = jnp.max(above, axis=-1, keepdims=True), _sum(weights * above)

    def fit(scale: Array, minimum: Array) -> tuple[Array, ...]:
        values = rounded(_ratio(x - minimum, scale))
        first, square = _sum(weights * values), _sum(weights * values * values)
        product = _sum(weights * above * values)
        # Fit both by least squares. If the minimum isn't allowed, clip it and fit the scale again.
        best = _ratio(total * product - mass * first, total * square - first * first)
        free = least + (mass - best * first) / total
        minimum = _allowed(free, codec)
        best = jnp.where(minimum == free, best, _ratio(product + least * first, square))
        return _sum(weights * (best * values + minimum - x) ** 2), best, minimum, square

    def tried(best: tuple[Array, ...], divisor: Array) -> tuple[tuple[Array, ...], None]:
        first = divisor != 0
        scale, minimum = jnp.where(first, span / divisor, best[1]), jnp.where(first, least, best[2])
        return _better(best, fit(scale, minimum)), None

    divisors = np.concatenate([high + _STRETCHES, _AGAIN])
    nothing = jnp.full_like(span, np.inf), span / high, least, jnp.zeros_like(span)
    (_, scale, minimum, square), _ = lax.scan(tried, nothing, jnp.asarray(divisors, jnp.float32))
    return scale, minimum, square


def _allowed(minimum: Array, codec: Codec) -> Array:
    """Clips minima to the codec's range: some codecs store them negated and unsigned."""
    return jnp.minimum(minimum, 0) if codec.zeros == "minus" else minimum


def _power_of_two(blocks: Array, unit: Array, codec: Codec, weights: Any) -> Array:
    """Returns the smallest power of two covering the range, or half of this if its error is smaller."""
    rounded, covering = _rounding(codec), power_of_two_above(unit / codec.range()[1])

    def fit(scale: Array) -> tuple[Array, Array]:
        error = _ratio(rounded(_ratio(blocks, scale)) * scale - blocks, unit)
        return _sum(weights * error * error), scale

    return _better(fit(covering), fit(jnp.maximum(covering / 2, _TINY)))[1]


def power_of_two_above(x: Array) -> Array:
    """Rounds up to a power of two, via the bits: `exp2` isn't exact on all platforms."""
    raw = lax.bitcast_convert_type(jnp.maximum(x, _TINY), jnp.uint32)
    # Increment the exponent unless the mantissa is zero.
    up = (raw & np.uint32(0x7FFFFF) != 0).astype(jnp.uint32)
    return lax.bitcast_convert_type((raw >> 23) + up << 23, jnp.float32)
