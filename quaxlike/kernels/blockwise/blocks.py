"""Cutting arrays into blocks."""

import numbers

import jax.numpy as jnp
from jaxtyping import Array, Shaped

NESTED_BLOCK = 256
"""The number of scales that share a scale in double quantisation."""

_SMALLEST, _LARGEST = 32, 4096


def check_block_size(block_size: int) -> None:
    """Raises a `ValueError` or `TypeError` unless `block_size` is a power of two from 32 to 4096."""
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"block_size must be a whole number, got {block_size!r}.")
    if not (_SMALLEST <= block_size <= _LARGEST and block_size & (block_size - 1) == 0):
        raise ValueError(
            f"block_size must be a power of two from {_SMALLEST} to {_LARGEST}, got {block_size}."
        )


def pad_to_blocks(flat: Shaped[Array, " n"], block_size: int) -> Shaped[Array, "blocks block"]:
    """Cuts an array into rows of `block_size` elements; the last one is padded with zeros."""
    return jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)
