"""Calibrated quantisation: minimises the error in a layer's outputs by GPTQ and coordinate descent.

GPTQ rounds a weight's columns sequentially, starting with those that multiply the largest inputs. As far as
inputs are correlated, adjusting the remaining columns compensates for each rounding error. Coordinate descent
over columns and scales then refines the result. We only accept steps that don't increase the cost, so this is
never worse than GPTQ or plain rounding.

Source: Frantar et al., GPTQ, <https://arxiv.org/abs/2210.17323>.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays.quantized import AbstractQuantizedArray, BlockArray, NestedScales
from ..arrays.quantized.grid import Grid, grid_of, with_codes
from ..arrays.quantized.search import SEARCHED

# Relative to the mean of the diagonal. The first keeps the matrix from being singular for correlated inputs;
# the second avoids a division by zero for an input that is always zero.
_DAMPING = 0.01
_SMALLEST = 1e-6
# Columns per block. For efficiency, errors only propagate to other blocks once per block.
_AT_ONCE = 64
# Sweeps of coordinate descent over the columns.
_SWEEPS = 2
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def fit(name: str, dense: Any, like: AbstractQuantizedArray, moments: Any) -> AbstractQuantizedArray:
    """Quantises a matrix to the format of `like`, minimising the error in its products with the inputs.

    `moments` is the sum of `x xᵀ` over these inputs, of shape `(in, in)`. For codecs that search for their
    scales, its diagonal alone is enough, of shape `(in,)`, i.e. each input's importance.
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
    # Also try the existing scales: they may already be the best.
    candidates = [like, _with_best_scales(start, w, np.diag(h))]
    if searches and order is None:
        candidates.append(like.requantized(dense, jnp.asarray(np.diag(h), jnp.float32)))
    layer = _Layer.of(w, h)
    return min((_fitted(layer, scales, w, h) for scales in candidates), key=lambda pair: pair[1])[0]


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


class _Columns(NamedTuple):
    """A `Grid` on the device, with its matrices transposed to make the weight's columns contiguous."""

    table: jax.Array
    scale: jax.Array
    shift: jax.Array

    @classmethod
    def of(cls, grid: Grid) -> "_Columns":
        return cls(*(jnp.asarray(x.T, jnp.float32) for x in (grid.table, grid.scale, grid.shift)))

    def nearest(self, w: jax.Array) -> jax.Array:
        safe = jnp.where(self.scale == 0, 1, self.scale)
        middles = (self.table[:-1] + self.table[1:]) / 2
        found = jnp.where(self.scale == 0, 0, (w - self.shift) / safe)
        return jnp.searchsorted(middles, found, method="scan_unrolled").astype(jnp.int32)

    def values(self, indices: jax.Array) -> jax.Array:
        return self.table[indices] * self.scale + self.shift


class _Layer(NamedTuple):
    """A weight and its moments.

    Given an error `e` in column `k`, the best value for column `j` is smaller by `e * pulls[k, j]`. In
    coordinate descent every other column is fixed, and the pulls are the moments divided by their diagonal.
    In GPTQ only the columns before it are fixed, and those behind it make up for errors: if the moments are
    factorised as `r rᵀ`, with `r` upper triangular, then the pulls are `r` divided by its diagonal.
    """

    w: jax.Array
    diagonal: jax.Array
    pulls: jax.Array
    order: jax.Array
    """The order in which GPTQ visits the columns."""
    ordered_pulls: jax.Array
    """GPTQ's pulls, in its order."""

    @classmethod
    def of(cls, w: np.ndarray, h: np.ndarray) -> "_Layer":
        h = h / max(float(np.mean(np.diag(h))), 1e-12)
        order = np.argsort(-np.diag(h), kind="stable")
        last_first = h[np.ix_(order[::-1], order[::-1])] + _DAMPING * np.eye(len(h))
        factor = np.linalg.cholesky(last_first)[::-1, ::-1]
        h = h + _SMALLEST * np.eye(len(h))
        pulls, ordered = (jnp.asarray(x / np.diag(x), jnp.float32) for x in (h, factor))
        columns, diagonal = (jnp.asarray(x, jnp.float32) for x in (w.T, np.diag(h)[:, None]))
        return cls(columns, diagonal, pulls, jnp.asarray(order), ordered)


class _Fit(NamedTuple):
    """Codes, the sum of all errors' pulls on each element, and the cost."""

    indices: jax.Array
    pulled: jax.Array
    cost: jax.Array


def _fitted(layer: _Layer, scales: Any, w: np.ndarray, h: np.ndarray) -> tuple[Any, float]:
    """Optimises codes, then scales, and then codes again. Returns the best result and its cost."""
    grid = _Columns.of(grid_of(scales))
    # Also try plain rounding: it can beat GPTQ if `w` is almost on the grid already.
    first = _improved(layer, grid, min(_first(layer, grid), key=lambda fit: float(fit.cost)))
    rescaled = _with_fitting_scales(scales, np.asarray(first.indices).T, w, h)
    grid = _Columns.of(grid_of(rescaled))
    second = _improved(layer, grid, _evaluated(layer, grid, first.indices))
    fits = (scales, first), (rescaled, second)
    best, fit = min(fits, key=lambda pair: float(pair[1].cost))
    return with_codes(best, grid_of(best).codes[np.asarray(fit.indices).T]), float(fit.cost)


@jax.jit
def _first(layer: _Layer, grid: _Columns) -> tuple[_Fit, _Fit]:
    """Rounds by GPTQ, starting with the largest inputs, and also to the nearest values."""
    order = layer.order
    ordered = _Columns(grid.table, grid.scale[order], grid.shift[order])
    w = layer.w[order]
    indices, *_ = _swept(ordered, layer.ordered_pulls, w, jnp.zeros_like(w))
    gptq = indices[jnp.argsort(order)]
    return _evaluated(layer, grid, gptq), _evaluated(layer, grid, grid.nearest(layer.w))


@jax.jit
def _evaluated(layer: _Layer, grid: _Columns, indices: jax.Array) -> _Fit:
    error = grid.values(indices) - layer.w
    pulled = _product(layer.pulls.T, error)
    return _Fit(indices, pulled, jnp.sum(layer.diagonal * error * pulled))


@jax.jit
def _improved(layer: _Layer, grid: _Columns, fit: _Fit) -> _Fit:
    """Performs coordinate descent over the columns (QuantEase).

    Each column is rounded optimally with all others held fixed, so the cost never increases.

    Source: Behdin et al., QuantEase, <https://arxiv.org/abs/2309.01885>.
    """
    found = grid.values(fit.indices), fit.pulled
    indices = fit.indices
    for _ in range(_SWEEPS):
        indices, *found = _swept(grid, layer.pulls, *found)
    values, pulled = found
    return _Fit(indices, pulled, jnp.sum(layer.diagonal * (values - layer.w) * pulled))


def _swept(
    grid: _Columns, pulls: jax.Array, current: jax.Array, pulled: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds all columns one after the other, each to the value nearest to where the others pull it.

    Returns the indices, the values, and the sum of their pulls. `pulled` is this sum for `current`.
    """
    n = len(current)
    block = min(_AT_ONCE, n)
    more = [(0, -n % block), (0, 0)]
    scale, shift, current, pulled = (jnp.pad(x, more) for x in (grid.scale, grid.shift, current, pulled))
    pulls = jnp.pad(pulls, [more[0], more[0]])

    def rounded_block(i: Any, carry: Any) -> Any:
        indices, current, pulled = carry
        first = i * block
        part = _cut(pulls, first, block)
        own = lax.dynamic_slice_in_dim(part, first, block, 1)
        columns = _Columns(grid.table, _cut(scale, first, block), _cut(shift, first, block))
        before = _cut(current, first, block)
        wanted = before - _cut(pulled, first, block)

        def rounded_column(j: Any, carry: Any) -> Any:
            found, change = carry
            column = _Columns(grid.table, columns.scale[j], columns.shift[j])
            index = column.nearest(wanted[j] - _product(own[:, j], change))
            return found.at[j].set(index), change.at[j].set(column.values(index) - before[j])

        none = jnp.zeros(before.shape, jnp.int32), jnp.zeros_like(before)
        found, change = lax.fori_loop(0, block, rounded_column, none)
        indices = lax.dynamic_update_slice_in_dim(indices, found, first, 0)
        current = lax.dynamic_update_slice_in_dim(current, columns.values(found), first, 0)
        return indices, current, pulled + _product(part.T, change)

    start = jnp.zeros(current.shape, jnp.int32), current, pulled
    found = lax.fori_loop(0, len(current) // block, rounded_block, start)
    indices, values, pulled = (x[:n] for x in found)
    return indices, values, pulled


def _cut(x: jax.Array, first: Any, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, count)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _with_fitting_scales(start: Any, indices: np.ndarray, w: np.ndarray, h: np.ndarray) -> Any:
    """Performs coordinate descent over the scales, with codes held fixed, if the scales are free."""
    # (Without one row of codes per row of the matrix, blocks may cross rows.)
    if not _are_free(start) or start.codes.ndim < 2 or start.codes.shape[0] != len(w):
        return start
    grid, block = grid_of(start), start.block
    columns, moments = jnp.asarray(w.T, jnp.float32), jnp.asarray(h, jnp.float32)
    steps = _scale_steps(_Columns.of(grid), columns, moments, jnp.asarray(indices.T, jnp.int32), block)
    return _scaled(start, jnp.asarray(grid.scale[:, ::block], jnp.float32) + steps.T)


@functools.partial(jax.jit, static_argnames="block")
def _scale_steps(grid: _Columns, w: jax.Array, h: jax.Array, indices: jax.Array, block: int) -> jax.Array:
    """Returns the change in each block's and row's scale, block by block."""
    more = (0, -len(w) % block)
    slope = jnp.pad(_product(h, grid.values(indices) - w), [more, (0, 0)])
    values, h = jnp.pad(grid.table[indices], [more, (0, 0)]), jnp.pad(h, [more, more])

    def step(slope: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, part = _cut(values, first, block), _cut(h, first, block)
        curvature = jnp.sum(own * _product(lax.dynamic_slice_in_dim(part, first, block, 1), own), axis=0)
        gradient = jnp.sum(_cut(slope, first, block) * own, axis=0)
        change = -gradient / jnp.where(curvature > 0, curvature, jnp.inf)
        return slope + _product(part.T, own * change[None]), change

    return lax.scan(step, slope, jnp.arange(0, len(values), block))[1]


def _with_best_scales(start: Any, w: np.ndarray, weight: np.ndarray) -> Any:
    """Shrinks each scale by whichever factor minimises the cost, if the scales are free."""
    if not _are_free(start):
        return start
    # 1 for formats whose blocks can span several rows of the matrix.
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

    If so, scales can be optimised independently.
    """
    if not isinstance(w, BlockArray):
        return not isinstance(w.scale, NestedScales)
    return w.codec.scales == "float" and w.codec.zeros is None and w.codec.group is None


def _scaled(w: Any, scale: Any) -> Any:
    """Replaces the scales of `w`, keeping their format."""
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
