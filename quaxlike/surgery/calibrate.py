"""Calibrated quantisation, which uses GPTQ and coordinate descent to minimise the error in a layer's outputs.

GPTQ rounds a weight's columns sequentially, starting with the ones that multiply the largest inputs. To the
extent that the inputs are correlated, each rounding error can be compensated for by adjusting the remaining
columns. We then refine the result by coordinate descent over both columns and scales. Importantly, we only
accept steps that don't increase the cost, which means that the result is never worse than GPTQ or plain
rounding.

Source: Frantar et al., GPTQ, <https://arxiv.org/abs/2210.17323>.
"""

import dataclasses
import math
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from ..arrays.quantized import AbstractQuantizedArray, BlockArray, NestedScales
from ..arrays.quantized.grid import Grid, grid_of, with_codes
from ..arrays.quantized.search import SEARCHED

# This is relative to the mean of the diagonal. Without it, the matrix can be singular if inputs are
# correlated.
_DAMPING = 0.01
# The number of columns per block. For efficiency, errors are only propagated to other blocks once per block.
_AT_ONCE = 128
# The number of sweeps of coordinate descent over the columns.
_SWEEPS = 2
# The number of rounds, each of which optimises first the scales and then the codes.
_ROUNDS = 2
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def fit(name: str, dense: Any, like: AbstractQuantizedArray, moments: Any) -> AbstractQuantizedArray:
    """Quantises a matrix to the format of `like`, minimising the error in its products with the inputs.

    `moments` is the sum of `x xᵀ` over these inputs, of shape `(in, in)`. For codecs that search for their
    scales, it can also be just the diagonal of this sum, of shape `(in,)`, i.e. each input's importance.
    """
    searches = isinstance(like, BlockArray) and like.codec in SEARCHED
    if not isinstance(moments, jax.core.Tracer):
        squares = np.asarray(moments)
        squares = np.diagonal(squares) if squares.ndim == 2 else squares
        if not np.all((squares >= 0) & np.isfinite(squares)):
            raise ValueError(
                f"{name}: moments are sums of squares, which are finite and not negative; found "
                f"{squares.min()} to {squares.max()}. Look for NaN or infinity among the inputs."
            )
    if jnp.ndim(moments) < 2:
        return _by_importance(name, dense, like, moments, searches)
    stored = jnp.transpose(dense, [like.permutation.index(i) for i in range(dense.ndim)])
    w = np.asarray(stored, np.float64)
    h = np.asarray(moments, np.float64)
    start = like.requantized(dense)
    if w.ndim != 2:
        raise ValueError(
            f"{name}: calibration takes a matrix; found a "
            f"{type(like).__name__} of shape {tuple(dense.shape)}. Leave it out, or quantise it otherwise."
        )
    if h.shape != (w.shape[1], w.shape[1]):
        raise ValueError(_shapes(name, w.shape[1], h.shape))
    order = None if not isinstance(start, BlockArray) or start.order is None else np.asarray(start.order)
    if order is not None:
        w, h = w[:, order], h[np.ix_(order, order)]
    # Also try the existing scales, as they might already be the best ones.
    candidates = [like, _with_best_scales(start, w, np.diag(h))]
    if searches and order is None:
        candidates.append(like.requantized(dense, jnp.asarray(np.diag(h), jnp.float32)))
    return min((_fitted(scales, w, h) for scales in candidates), key=lambda pair: pair[1])[0]


def _by_importance(name: str, dense: Any, like: Any, importance: Any, searches: bool) -> Any:
    if not searches:
        kind = like.codec.name
        raise ValueError(
            f"{name}: an importance matrix is for schemes whose scales are searched for, those of llama.cpp; "
            f"found {kind!r}. Pass the whole moments, of shape (in, in)."
        )
    inputs = like.inner_shape[-1]
    if jnp.shape(importance) != (inputs,) or like.order is not None:
        raise ValueError(_shapes(name, inputs, jnp.shape(importance)))
    return like.requantized(dense, jnp.asarray(importance))


def _shapes(name: str, inputs: int, found: tuple[int, ...]) -> str:
    wanted = f"{(inputs, inputs)}, or {(inputs,)} for their diagonal"
    return f"{name}: moments must have shape {wanted}; found {found}."


def _fitted(start: Any, w: np.ndarray, h: np.ndarray) -> tuple[Any, float]:
    """Alternates between optimising codes and scales, and returns the best result along with its cost."""
    grid = grid_of(start)
    # Also try plain rounding, which can be better than GPTQ if `w` is almost on the grid already.
    firsts = [_rounded(w, h, grid), grid.nearest(w)]
    firsts = [_improved(indices, w, h, grid) for indices in firsts]
    indices = min(firsts, key=lambda indices: _cost(grid.values(indices) - w, h))
    best, least = start, np.inf
    for _ in range(_ROUNDS):
        cost = _cost(grid.values(indices) - w, h)
        if cost < least:
            best, least = with_codes(start, grid.codes[indices]), cost
        start = _with_fitting_scales(start, indices, w, h)
        grid = grid_of(start)
        indices = _improved(indices, w, h, grid)
    return best, least


def _cost(error: np.ndarray, h: np.ndarray) -> float:
    return float(np.sum(error @ h * error))


def _rounded(w: np.ndarray, h: np.ndarray, grid: Grid) -> np.ndarray:
    """Rounds by GPTQ, starting with the largest inputs. Returns indices into the grid's table."""
    order = np.argsort(-np.diag(h), kind="stable")
    w, n, h = w[:, order], len(h), h[np.ix_(order, order)]
    grid = grid._replace(scale=grid.scale[:, order], shift=grid.shift[:, order])
    h = h + np.diag(np.full(n, _DAMPING * max(float(np.mean(np.diag(h))), 1e-12)))
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    indices = np.empty(w.shape, np.int64)
    for first in range(0, n, _AT_ONCE):
        last = min(first + _AT_ONCE, n)
        errors = np.empty((len(w), last - first))
        for i in range(first, last):
            indices[:, i] = grid.nearest(w[:, i], i)
            error = (w[:, i] - grid.values(indices[:, i], i)) / factor[i, i]
            w[:, i + 1 : last] -= error[:, None] * factor[i, i + 1 : last]
            errors[:, i - first] = error
        w[:, last:] -= errors @ factor[first:last, last:]
    return indices[:, np.argsort(order)]


def _improved(indices: np.ndarray, w: np.ndarray, h: np.ndarray, grid: Grid) -> np.ndarray:
    """Performs coordinate descent over the columns (QuantEase).

    Each column is rounded optimally whilst all others are held fixed, which means that the cost never
    increases.

    Source: Behdin et al., QuantEase, <https://arxiv.org/abs/2309.01885>.
    """
    indices = indices.copy()
    h = h + np.diag(np.full(len(h), 1e-6 * max(float(np.mean(np.diag(h))), 1e-12)))
    error = grid.values(indices) - w
    slope = error @ h
    for first in list(range(0, len(h), _AT_ONCE)) * _SWEEPS:
        part = slice(first, first + _AT_ONCE)
        before, own = error[:, part].copy(), h[part, part]
        for j in range(len(own)):
            i = first + j
            wanted = w[:, i] + error[:, i] - slope[:, i] / h[i, i]
            indices[:, i] = grid.nearest(wanted, i)
            change = grid.values(indices[:, i], i) - w[:, i] - error[:, i]
            error[:, i] += change
            slope[:, part] += change[:, None] * own[j]
        rest = np.ones(len(h), bool)
        rest[part] = False
        slope[:, rest] += (error[:, part] - before) @ h[part][:, rest]
    return indices


def _with_fitting_scales(start: Any, indices: np.ndarray, w: np.ndarray, h: np.ndarray) -> Any:
    """Performs coordinate descent over the scales whilst the codes are held fixed.

    This does nothing unless the scales are free.
    """
    rows, count = w.shape
    # (If there isn't one row of codes for each row of the matrix, then blocks might cross rows.)
    if not _are_free(start) or start.codes.ndim < 2 or start.codes.shape[0] != rows:
        return start
    grid, block = grid_of(start), start.block
    values, scale = grid.table[indices], grid.scale[:, ::block].copy()
    slope = (grid.values(indices) - w) @ h
    for i, first in enumerate(range(0, count, block)):
        part = slice(first, first + block)
        own = values[:, part]
        curvature = np.sum(own @ h[part, part] * own, axis=1)
        step = -np.sum(slope[:, part] * own, axis=1) / np.where(curvature > 0, curvature, np.inf)
        scale[:, i] += step
        slope += (step[:, None] * own) @ h[part]
    return _scaled(start, jnp.asarray(scale, jnp.float32))


def _with_best_scales(start: Any, w: np.ndarray, weight: np.ndarray) -> Any:
    """Shrinks each scale by whichever factor minimises the cost, if the scales are free."""
    if not _are_free(start):
        return start
    # This is 1 for formats whose blocks can span several rows of the matrix.
    rows = math.prod(start.codes.shape[:-1])
    if isinstance(start, BlockArray):
        rows = len(w)
    best, least = None, None
    for shrink in _SHRINKS:
        candidate = _shrunk(start, shrink)
        grid = grid_of(candidate)
        cost = (grid.values(grid.nearest(w)) - w) ** 2 * weight
        cost = cost.reshape(rows, -1)
        cost = np.pad(cost, [(0, 0), (0, -cost.shape[1] % start.block)])
        cost = cost.reshape(rows, -1, start.block).sum(-1)
        if best is None or least is None:
            best, least = np.full(cost.shape, shrink), cost
        else:
            best, least = np.where(cost < least, shrink, best), np.minimum(cost, least)
    return _shrunk(start, jnp.asarray(best, jnp.float32))


def _are_free(w: Any) -> bool:
    """Returns whether each block's only metadata is a single floating-point scale.

    If so, scales can be optimised independently of each other.
    """
    if not isinstance(w, BlockArray):
        return not isinstance(w.scale, NestedScales)
    return w.codec.scales == "float" and w.codec.zeros is None and w.codec.group is None


def _scaled(w: Any, scale: Any) -> Any:
    """Replaces the scales of `w`, which are stored in the same format as before."""
    if not isinstance(w, BlockArray):
        return dataclasses.replace(w, scale=scale.reshape(w.scale.shape))
    old = w.scale.scale
    return dataclasses.replace(
        w, scale=dataclasses.replace(w.scale, scale=scale.reshape(old.shape).astype(old.dtype))
    )


def _shrunk(w: Any, factor: Any) -> Any:
    old = w.scale.scale if isinstance(w, BlockArray) else w.scale
    factor = factor if np.ndim(factor) == 0 else factor.reshape(old.shape)
    return _scaled(w, jnp.asarray(old, jnp.float32) * factor)
