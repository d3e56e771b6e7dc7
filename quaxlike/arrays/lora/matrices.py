"""Converts weights to and from matrices of shape (..., out, in), and computes their best low-rank factors."""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..dot_axes import in_float32

if TYPE_CHECKING:
    from .array import LoraArray


def in_size(lora: "LoraArray") -> int:
    return math.prod(lora.shape[axis] for axis in lora.in_axes)


def _order(lora: "LoraArray") -> list[int]:
    n = lora.ndim
    matrix = [n + axis for axis in (*lora.out_axes, *lora.in_axes)]
    return [*(i for i in range(n) if i not in matrix), *matrix]


def as_matrix(lora: "LoraArray", w: jax.Array) -> jax.Array:
    """Converts an array with the axes of `lora` to a matrix with at least float32 precision."""
    w = jnp.transpose(w, _order(lora)).astype(in_float32(w.dtype))
    batch = w.shape[: w.ndim - len(lora.out_axes) - len(lora.in_axes)]
    return w.reshape(*batch, -1, in_size(lora))


def as_array(lora: "LoraArray", w: jax.Array) -> jax.Array:
    """Inverts `as_matrix`."""
    order = _order(lora)
    w = w.reshape([lora.shape[i] for i in order]).transpose([order.index(i) for i in range(lora.ndim)])
    return w.astype(lora.dtype)


def with_factors(lora: "LoraArray", a: jax.Array, b: jax.Array) -> "LoraArray":
    """Replaces the factors by matrices of shape (..., rank, in) and (..., out, rank)."""
    out, into = ([lora.shape[axis] for axis in axes] for axes in (lora.out_axes, lora.in_axes))
    a, b = a.reshape(*a.shape[:-1], *into), b.reshape(*b.shape[:-2], *out, b.shape[-1])
    return lora.replace(a=a.astype(lora.a.dtype), b=b.astype(lora.b.dtype))


def scaling_of(lora: "LoraArray", x: jax.Array, ndim: int = 1) -> jax.Array:
    """Returns each matrix's scaling in a stack, for an `x` with `ndim` axes after the batch axes."""
    scaling = jnp.asarray(lora.scaling_in(x.dtype))
    lacked = max(x.ndim - ndim - scaling.ndim, 0)  # batch axes missing from `alpha`
    return scaling.reshape((1,) * lacked + scaling.shape + (1,) * ndim)


def factored(lora: "LoraArray", delta: jax.Array, rank: int) -> "LoraArray":
    """Returns the adapter with `scaling` 1 closest to `delta`, which has the same axes."""
    return from_svd(lora, *svd(as_matrix(lora, delta), rank))


def from_svd(lora: "LoraArray", u: jax.Array, s: jax.Array, vt: jax.Array) -> "LoraArray":
    """Returns the adapter with `scaling` 1 and these singular vectors and values."""
    factors = with_factors(lora, *halves(u, s, vt))
    return factors.replace(alpha=float(factors.rank), rslora=False)


def svd(
    w: jax.Array, rank: int | None, randomised: tuple[Any, int] | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the leading singular vectors and values of a stack of matrices (all if `rank` is None).

    Given a key and a number of iterations, these are found by subspace iteration (Halko et al., 2011).
    """
    if randomised is not None:
        assert rank is not None
        key, iterations = randomised
        # More columns than necessary make the leading singular vectors more accurate.
        size = min(*w.shape[-2:], 2 * rank)
        wt = jnp.swapaxes(w, -1, -2)
        q = jnp.linalg.qr(w @ jax.random.normal(key, (*w.shape[:-2], w.shape[-1], size), w.dtype))[0]
        # Orthogonalise after every product. Otherwise all columns converge to the same vector.
        for _ in range(iterations):
            q = jnp.linalg.qr(w @ jnp.linalg.qr(wt @ q)[0])[0]
        u, s, vt = jnp.linalg.svd(jnp.swapaxes(q, -1, -2) @ w, full_matrices=False)
        u = q @ u
    else:
        u, s, vt = jnp.linalg.svd(w, full_matrices=False)
    return u[..., :, :rank], s[..., :rank], vt[..., :rank, :]


def halves(u: jax.Array, s: jax.Array, vt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits an SVD into factors `a` and `b` of equal norm: `b @ a` is the original matrix."""
    root = jnp.sqrt(s)
    return root[..., :, None] * vt, u * root[..., None, :]
