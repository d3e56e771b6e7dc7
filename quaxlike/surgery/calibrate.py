"""Codes that are chosen by what goes into a layer: GPTQ.

The columns of a weight are rounded one after the other. What rounding one of them adds to the outputs is
taken back by the columns that are still to come, as far as the inputs are correlated.

Source: Frantar et al., GPTQ, <https://arxiv.org/abs/2210.17323>.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..arrays.quantized import AbstractQuantizedArray, AbstractScaledArray, BlockArray, NestedScales
from ..arrays.quantized.grid import Grid

_DAMPING = 0.01  # of the mean of the diagonal
_AT_ONCE = 128  # columns whose errors are handed on together
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def fit(name: str, dense: Any, like: AbstractQuantizedArray, moments: Any) -> AbstractQuantizedArray:
    """A matrix, quantised as `like` is, so that its products with inputs of these moments come close.

    **Arguments:**

    - `name`: what errors call the weight.
    - `dense`: the matrix that is to be met.
    - `like`: says type, codec and block size.
    - `moments`: the sum of `x xᵀ` over inputs, `(in, in)`.
    """
    stored = jnp.transpose(dense, [like.permutation.index(i) for i in range(dense.ndim)])
    w = np.asarray(stored, np.float64)
    h = np.asarray(moments, np.float64)
    start = like.requantized(dense)
    grid = start.grid()
    if w.ndim != 2 or grid is None:
        raise ValueError(
            f"{name}: calibration takes a matrix whose blocks lie along its inputs; found a "
            f"{type(like).__name__} of shape {tuple(dense.shape)}. Leave it out, or quantise it otherwise."
        )
    if h.shape != (w.shape[1], w.shape[1]):
        raise ValueError(f"{name}: moments must have shape {(w.shape[1],) * 2}; found {h.shape}.")
    order = None if not isinstance(start, BlockArray) or start.order is None else np.asarray(start.order)
    if order is not None:
        w, h = w[:, order], h[np.ix_(order, order)]
    best, least = start, np.inf
    for scales in (like, _with_best_scales(start, w, np.diag(h))):  # those that there were may fit already
        grid = scales.grid()
        assert grid is not None
        places = _rounded(w, h, grid)
        error = grid.values(places) - w
        if (cost := float(np.sum(error @ h * error))) < least:
            best, least = scales.with_codes(grid.codes[places]), cost
    return best


def _rounded(w: np.ndarray, h: np.ndarray, grid: Grid) -> np.ndarray:
    """Where in the table of the grid the chosen values stand."""
    w, n = w.copy(), len(h)
    h = h + np.diag(np.full(n, _DAMPING * max(float(np.mean(np.diag(h))), 1e-12)))
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    places = np.empty(w.shape, np.int64)
    for first in range(0, n, _AT_ONCE):
        last = min(first + _AT_ONCE, n)
        errors = np.empty((len(w), last - first))
        for i in range(first, last):
            places[:, i] = grid.places(w[:, i], i)
            error = (w[:, i] - grid.values(places[:, i], i)) / factor[i, i]
            w[:, i + 1 : last] -= error[:, None] * factor[i, i + 1 : last]
            errors[:, i - first] = error
        w[:, last:] -= errors @ factor[first:last, last:]
    return places


def _with_best_scales(start: Any, w: np.ndarray, weight: np.ndarray) -> Any:
    """`start` with each scale shrunk by the factor that costs least, where scales are free floats."""
    nested = isinstance(start, AbstractScaledArray) and isinstance(start.scale, NestedScales)
    if nested or isinstance(start, BlockArray):
        free = not nested and start.codec.scales == "float" and start.codec.zeros is None
        if not free or start.codec.group is not None:
            return start
    best, least = None, None
    for shrink in _SHRINKS:
        candidate = _shrunk(start, shrink)
        grid = candidate.grid()
        cost = (grid.values(grid.places(w)) - w) ** 2 * weight
        blocks = -(-w.shape[1] // start.block)
        cost = np.pad(cost, [(0, 0), (0, blocks * start.block - w.shape[1])])
        cost = cost.reshape(len(w), blocks, -1).sum(-1)
        if best is None or least is None:
            best, least = np.full(cost.shape, shrink), cost
        else:
            best, least = np.where(cost < least, shrink, best), np.minimum(cost, least)
    return _shrunk(start, jnp.asarray(best, jnp.float32))


def _shrunk(w: Any, factor: Any) -> Any:
    if not isinstance(w, BlockArray):
        factor = factor if np.ndim(factor) == 0 else factor.reshape(w.scale.shape)
        return dataclasses.replace(w, scale=w.scale * factor)
    scale = w.scale.scale
    factor = factor if np.ndim(factor) == 0 else factor.reshape(scale.shape)
    scaled = (jnp.asarray(scale, jnp.float32) * factor).astype(scale.dtype)
    return dataclasses.replace(w, scale=dataclasses.replace(w.scale, scale=scaled))
