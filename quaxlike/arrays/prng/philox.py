"""Philox4x32-10, a counter-based generator using ten rounds of multiplication.

Each block of random words only depends on the key and a counter, so blocks can be computed in parallel.

Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

# The last word of the counter distinguishes what a block is used for, so that e.g. the keys returned by
# `split` are never the same as any random bits.
_BITS, _SPLIT, _FOLD_IN = 0, 1, 2


def philox4x32_block(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Computes the four random words for a counter.

    **Arguments:**

    - `key`: two uint32 arrays.
    - `counter`: four uint32 arrays, broadcasting with the key.

    **Returns:**

    Four uint32 arrays.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (*key, *counter)))

    def bump_and_mix(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        k0, k1, *counter = state
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
        return k0, k1, *_round(k0, k1, *counter)

    # Each round uses the previous one's result twice, so unrolled rounds would be slow to compile. Use a loop
    # instead.
    k0, k1, *words = (jnp.broadcast_to(x, shape) for x in (*key, *counter))
    state = (k0, k1, *_round(k0, k1, *words))
    _, _, c0, c1, c2, c3 = lax.fori_loop(1, _ROUNDS, bump_and_mix, state)
    return c0, c1, c2, c3


def _round(k0: Any, k1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[Any, Any, Any, Any]:
    high0, low0 = _multiply(np.uint32(_MULTIPLIERS[0]), c0)
    high1, low1 = _multiply(np.uint32(_MULTIPLIERS[1]), c2)
    return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0


def _multiply(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns the high and low words of a product.

    This uses half words, because 64-bit integers may be disabled in JAX.
    """
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    low, middle, other = a0 * b0, a1 * b0, a0 * b1
    carried = (low >> half) + (middle & mask) + (other & mask)
    return a1 * b1 + (middle >> half) + (other >> half) + (carried >> half), a * b


def _words(key: Any, n: int, use: int) -> Any:
    """Generates `n` four-word blocks, with shape (n, 4)."""
    index = lax.iota(jnp.uint32, n)
    zero = jnp.zeros_like(index)
    block = philox4x32_block((key[0], key[1]), (index, zero, zero, jnp.full_like(index, use)))
    return jnp.stack(block, -1)


def _seed(seed: Any) -> Any:
    low = lax.convert_element_type(seed, jnp.uint32)
    wide = jnp.result_type(seed).itemsize > 4
    high = lax.convert_element_type(lax.shift_right_logical(seed, lax.full_like(seed, 32)), jnp.uint32)
    return jnp.stack([high if wide else jnp.zeros_like(low), low])


def _split(key: Any, shape: Sequence[int]) -> Any:
    return jnp.reshape(_words(key, math.prod(shape), _SPLIT)[:, :2], (*shape, 2))


def _fold_in(key: Any, data: Any) -> Any:
    data = lax.convert_element_type(data, jnp.uint32)
    zero = jnp.zeros_like(data)
    block = philox4x32_block((key[0], key[1]), (data, zero, zero, jnp.full_like(data, _FOLD_IN)))
    return jnp.stack(block[:2])


def _random_bits(key: Any, bit_width: int, shape: Sequence[int]) -> Any:
    size = math.prod(shape)
    # Just one word of the counter numbers the blocks, each with 128 bits.
    if size * bit_width > 2**32 * 128:
        raise ValueError(
            f"philox4x32 generates 2**39 bits per key; found a shape of {tuple(shape)}. Split the key."
        )
    words = jnp.ravel(_words(key, -(-size * bit_width // 128), _BITS))
    if bit_width == 64:
        high, low = (lax.convert_element_type(words[i : 2 * size : 2], jnp.uint64) for i in (0, 1))
        return jnp.reshape(lax.shift_left(high, np.uint64(32)) | low, shape)
    if bit_width < 32:
        words = jnp.ravel(lax.bitcast_convert_type(words, {8: jnp.uint8, 16: jnp.uint16}[bit_width]))
    return jnp.reshape(words[:size], shape)


philox4x32 = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="philox4x32",
    tag="phx",
)
"""The generator that's used for JAX's own keys: `jax.random.key(0, impl=philox4x32)`."""
