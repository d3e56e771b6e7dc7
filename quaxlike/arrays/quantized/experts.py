"""`ragged_dot`: groups of rows of `x`, each multiplied by the weight of its expert."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core.rules import register
from ...kernels.multilinear import vary_alike
from .base import AbstractQuantizedArray
from .dot import contract, name_axes, product_dtype
from .shape import with_free_axes


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike,
    w: AbstractQuantizedArray,
    group_sizes: ArrayLike,
    *,
    ragged_dot_dimension_numbers: Any,
    group_offset: Any,
    **params: Any,
) -> Any:
    """Goes over the rows, which are sorted by expert, in tiles of one expert each."""
    dims = ragged_dot_dimension_numbers
    (x_contract, w_contract), (x_batch, _) = dims.dot_dimension_numbers
    rows = tuple(dims.lhs_ragged_dimensions)
    inputs, w, counts = vary_alike((jnp.asarray(x), w, jnp.asarray(group_sizes)))
    unusual = x_batch or len(rows) != 1 or rows[0] in x_contract or counts.ndim != 1
    if unusual or group_offset is not None or params.get("out_sharding") is not None:
        return NotImplemented
    (group_axis,) = dims.rhs_group_dimensions
    free = with_free_axes(w, [group_axis])
    stack = w if free is None else free
    stored = stack.permutation
    if stored[group_axis] != 0 or not jnp.issubdtype(inputs.dtype, jnp.floating):
        return NotImplemented

    # The names of the axes in the weight of one expert: those in the stack, less its first axis.
    inputs = jnp.moveaxis(inputs, rows[0], 0)
    x_contract = [axis + 1 if axis < rows[0] else axis for axis in x_contract]
    x_names = name_axes(inputs, x_contract, [stored[axis] - 1 for axis in w_contract])
    x_free = [name for name in x_names if name < 0]
    w_free = [name - 1 for name in stored if name > 0 and name - 1 not in x_names]
    out_names = (*x_free, *w_free)
    sizes = [stack.stored_shape[name + 1] for name in w_free]

    kept = sum(1 for axis in range(rows[0]) if axis + 1 not in x_contract)
    dtype = product_dtype(inputs, w, params)
    if not len(inputs) or not len(counts):
        shape = [inputs.shape[-1 - name] for name in x_free] + sizes
        return jnp.moveaxis(jnp.zeros_like(inputs, dtype, shape=shape), 0, kept)
    tiles = Tiles(counts, len(inputs))

    @jax.checkpoint  # so that the backward pass decodes again
    def product(part: Array, expert: Array) -> Array:
        return contract(part, x_names, stack.stored_slice(expert), out_names, np.dtype(np.float32))

    def of_tile(part: Array, expert: Array) -> Array:
        shape = [*(part.shape[-1 - name] for name in x_free), *sizes]
        nothing = lambda part, expert: jnp.zeros_like(part, np.float32, shape=shape)
        return lax.cond(expert < len(counts), product, nothing, part, expert)

    parts = jnp.where(_beside(tiles.filled, inputs.ndim + 1), inputs[tiles.rows], 0)
    y = lax.map(lambda tile: of_tile(*tile), (parts, tiles.experts))
    y = y.reshape(-1, *y.shape[2:])[tiles.places]
    y = jnp.where(_beside(tiles.grouped, y.ndim), y, 0)
    return jnp.moveaxis(y, 0, kept).astype(dtype)


class Tiles:
    """Groups of rows, cut into tiles of a single group each.

    **Attributes:**

    - `experts`: the group of each tile; past the last group for unused tiles.
    - `rows`, `filled`: the rows of each tile, and which of its slots they fill, `(tiles, rows of a tile)`.
    - `places`, `grouped`: the position of each row in the tiles, and whether it is in any group.
    """

    def __init__(self, counts: Array, num_rows: int) -> None:
        # As many rows as a group has on average: larger groups are cut, and few slots stay empty.
        average = -(-num_rows // len(counts))
        size = min(_LARGEST_TILE, max(_SMALLEST_TILE, 1 << (average - 1).bit_length()))
        most = num_rows // size + min(len(counts), num_rows)
        ends = jnp.cumsum(counts)
        starts, of_group = ends - counts, -(-counts // size)
        last = jnp.cumsum(of_group)
        number = jnp.arange(most, dtype=counts.dtype)
        self.experts = jnp.searchsorted(last, number, side="right").astype(counts.dtype)
        group = jnp.minimum(self.experts, len(counts) - 1)
        first = starts[group] + (number - (last - of_group)[group]) * size
        rows = first[:, None] + jnp.arange(size, dtype=counts.dtype)[None]
        self.filled = (rows < ends[group][:, None]) & (self.experts < len(counts))[:, None]
        self.rows = jnp.clip(rows, 0, num_rows - 1)
        row = jnp.arange(num_rows, dtype=counts.dtype)
        self.grouped = row < ends[-1]
        group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(counts) - 1)
        places = (last - of_group)[group] * size + row - starts[group]
        self.places = jnp.clip(places, 0, most * size - 1)


_SMALLEST_TILE, _LARGEST_TILE = 8, 128


def _beside(x: Array, ndim: int) -> Array:
    """Appends axes of size 1, up to `ndim` axes."""
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))
