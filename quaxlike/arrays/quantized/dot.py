"""Products with codes: `dot_general` with any dimension numbers, `ragged_dot`, and convolutions.

The dense weight must never be stored as a residual: training would then use up all the memory saved by
quantising. Instead, the backward pass decodes the codes again, using `jax.checkpoint`.

Each axis of the stored weight is named by its index, and the other operand's corresponding axis has the same
name. All other (free) axes of the other operand have negative names.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core.jaxprs.evaluate import cached_trace
from ...core.rules import register, register_on_either_side
from ...kernels.multilinear import vary_alike
from ..batch_axes import mapped
from ..dot_axes import dot_axes, in_order, placed, product_dtype
from .base import AbstractQuantizedArray
from .shape import with_free_axes

_Names = tuple[int, ...]


@register_on_either_side("dot_general", AbstractQuantizedArray, other=ArrayLike)
@cached_trace
def _dot_general(primitive: Primitive, lhs: Any, rhs: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    on_left = isinstance(lhs, AbstractQuantizedArray)
    w, x = (lhs, rhs) if on_left else (rhs, lhs)
    if isinstance(x, AbstractQuantizedArray):
        return NotImplemented
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    of_w, of_x = dot_axes(w, x, dimension_numbers, on_left=on_left)

    def stored(axes: Any) -> Any:
        return [w.permutation[axis] for axis in axes]

    x_names = name_axes(x, (*of_x.contracting, *of_x.batch), stored((*of_w.contracting, *of_w.batch)))
    x_free = [name for name in x_names if name < 0]
    out_names = (*stored(of_w.batch), *in_order(on_left, stored(of_w.free), x_free))
    dtype = product_dtype(x, w, params.get("preferred_element_type"))
    return placed(contract(x, x_names, w, out_names, dtype), params)


def name_axes(x: Array, axes: Sequence[int], names: Sequence[int]) -> _Names:
    """Names each axis of `x`, using `names` for `axes`, and negative numbers for all others."""
    given = dict(zip(axes, names, strict=True))
    return tuple(given.get(axis, -1 - axis) for axis in range(x.ndim))


def contract(
    x: Array, x_names: _Names, w: AbstractQuantizedArray | Array, out_names: _Names, dtype: np.dtype
) -> Array:
    """Multiplies `x` by the stored (or dense) weight, summing over all names not in `out_names`."""
    if not isinstance(w, AbstractQuantizedArray):
        return _einsum(x, x_names, w, out_names, dtype)
    shared = [name for name in x_names if name >= 0]
    plan = _plan(w, [n for n in shared if n not in out_names], [n for n in shared if n in out_names])
    if plan is None:
        return _contract_slices(x, x_names, w, out_names, dtype)

    x_free = [name for name in x_names if name < 0]
    x = x.transpose([x_names.index(name) for name in (*plan.batch, *x_free, *plan.contracted)])
    kept = len(plan.batch) + len(x_free)
    x = x.reshape(*x.shape[:kept], math.prod(x.shape[kept:]))

    lead = plan.lead_order(w.num_lead)
    # The plan merges some leading axes into the matrix, so first convert to a form allowing this.
    if len(lead) > len(plan.batch) + len(plan.mapped):
        w = w.joined()
    parts = jax.tree.map(lambda leaf: leaf.transpose(*lead, *range(w.num_lead, leaf.ndim)), w.parts)
    sizes = w.stored_shape
    rows, columns = (plan.contracted, plan.free) if plan.transpose else (plan.free, plan.contracted)
    shape = (math.prod(sizes[name] for name in rows), math.prod(sizes[name] for name in columns))

    def matmul(x: Array, parts: Any) -> Array:
        return w.matmul(x, parts, shape=shape, transpose=plan.transpose, out_dtype=dtype)

    for _ in plan.mapped:
        matmul = jax.vmap(matmul, in_axes=(None, 0))
    y = mapped(matmul, len(plan.batch))(x, parts)
    y = y.reshape(*y.shape[:-1], *(sizes[name] for name in plan.free))
    return _reorder(y, (*plan.batch, *plan.mapped, *x_free, *plan.free), out_names)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How to treat the stored weight as a stack of matrices, with axes `batch`, `mapped`, rows and columns.

    Kernels multiply by a single matrix, so products are mapped over the `batch` axes, which `x` also has, and
    over the `mapped` axes, which it doesn't have. Contracting columns computes `x @ W.T`, whereas contracting
    rows computes `x @ W` (`transpose`).
    """

    batch: _Names
    mapped: _Names
    contracted: _Names
    free: _Names
    transpose: bool

    def lead_order(self, num_lead: int) -> _Names:
        """Returns the order of leading axes giving the stored weight this form."""
        matrix = (*self.contracted, *self.free) if self.transpose else (*self.free, *self.contracted)
        return tuple(name for name in (*self.batch, *self.mapped, *matrix) if name < num_lead)


def _plan(w: AbstractQuantizedArray, contracted: Sequence[int], batch: Sequence[int]) -> _Plan | None:
    """Chooses how to treat `w` as a stack of matrices. None if this cuts blocks."""
    lead, inner = range(w.num_lead), range(w.num_lead, len(w.stored_shape))
    # Only leading axes can be mapped over.
    if any(name in inner for name in batch):
        return None
    lead_contracted = tuple(name for name in lead if name in contracted)
    lead_free = tuple(name for name in lead if name not in contracted and name not in batch)
    inner_contracted = tuple(name for name in inner if name in contracted)
    inner_free = tuple(name for name in inner if name not in contracted)
    # Inner axes have to be rows followed by columns, with all rows or all columns contracted.
    if inner_contracted and inner_free + inner_contracted == tuple(inner):
        transpose, inner_rows = False, inner_free
    elif inner_contracted + inner_free == tuple(inner):
        transpose, inner_rows = True, inner_contracted
    else:
        return None
    # If possible, free leading axes become rows or columns of one large matrix, which is faster. Otherwise
    # map over them.
    for joined, over in [(lead_free, ()), ((), lead_free)]:
        lead_columns = joined if transpose else lead_contracted
        # With rows in between, leading and inner columns aren't contiguous.
        cut = lead_columns and inner_rows
        if not cut and (w.joins(in_columns=bool(lead_columns)) or not (joined or lead_contracted)):
            contracted = (*lead_contracted, *inner_contracted)
            return _Plan(tuple(batch), over, contracted, (*joined, *inner_free), transpose)
    return None


def _contract_slices(
    x: Array, x_names: _Names, w: AbstractQuantizedArray, out_names: _Names, dtype: np.dtype
) -> Array:
    """Multiplies by each slice of the stored weight along its first axis.

    This is the fallback for weights that can't be treated as a stack of matrices. Slices are decoded one by
    one, so the whole dense weight is still never in memory.
    """
    if len(w.stored_shape) == 1:
        return _einsum(x, x_names, w.stored(), out_names, dtype)
    # Without slices, the empty sum is zero.
    if not w.stored_shape[0]:
        sizes = dict(enumerate(w.stored_shape)) | dict(zip(x_names, x.shape, strict=True))
        return jnp.zeros([sizes[name] for name in out_names], dtype)
    rest = tuple(_without_first(name) for name in out_names if name != 0)
    in_x, in_out = 0 in x_names, 0 in out_names

    @jax.checkpoint  # the backward pass decodes again
    def product(x: Array, w: AbstractQuantizedArray, i: Array) -> Array:
        if in_x:
            x = lax.dynamic_index_in_dim(x, i, x_names.index(0), keepdims=False)
        names = tuple(_without_first(name) for name in x_names if name != 0)
        return contract(x, names, w.stored_slice(i), rest, np.dtype(np.float32))

    # If the first axis occurs in the result, stack the products of all slices. Otherwise sum them.
    if in_out:
        _, y = lax.scan(lambda _, i: (None, product(x, w, i)), None, jnp.arange(w.stored_shape[0]))
        names = (0, *(name for name in out_names if name != 0))
        return _reorder(jnp.asarray(y, dtype), names, out_names)
    x, w = vary_alike((x, w))
    total = jnp.zeros_like(x, np.float32, shape=jax.eval_shape(product, x, w, jnp.int32(0)).shape)

    def step(total: Any, i: Any) -> Any:
        return (total + product(x, w, i), None)

    total, _ = lax.scan(step, total, jnp.arange(w.stored_shape[0]))
    return total.astype(dtype)


def _without_first(name: int) -> int:
    """Returns an axis's name in a slice along the first stored axis, which removes that axis."""
    return name if name < 0 else name - 1


def _einsum(x: Array, x_names: _Names, w: Array, out_names: _Names, dtype: np.dtype) -> Array:
    offset = x.ndim + 1  # einsum requires names to be nonnegative
    sublists = [[name + offset for name in names] for names in (x_names, range(w.ndim), out_names)]
    y = jnp.einsum(
        x.astype(jnp.float32),
        sublists[0],
        w.astype(jnp.float32),
        sublists[1],
        sublists[2],
        precision=lax.Precision.HIGHEST,
    )
    return y.astype(dtype)


def _reorder(y: Array, names: _Names, wanted: _Names) -> Array:
    return y.transpose([names.index(name) for name in wanted])


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
    """Processes rows (sorted by expert) in tiles, each using a single expert.

    This way, only one expert's weights are decoded at a time, and none for experts without any rows.
    """
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
    # Slices are taken along the first stored axis, so this must be the axis of experts.
    if stored[group_axis] != 0 or not jnp.issubdtype(inputs.dtype, jnp.floating):
        return NotImplemented

    # Name the axes of a single expert's weight: those of the stack except for the first one.
    inputs = jnp.moveaxis(inputs, rows[0], 0)
    x_contract = [axis + 1 if axis < rows[0] else axis for axis in x_contract]
    x_names = name_axes(inputs, x_contract, [stored[axis] - 1 for axis in w_contract])
    x_free = [name for name in x_names if name < 0]
    w_free = [name - 1 for name in stored if name > 0 and name - 1 not in x_names]
    out_names = (*x_free, *w_free)
    sizes = [stack.stored_shape[name + 1] for name in w_free]

    kept = sum(1 for axis in range(rows[0]) if axis + 1 not in x_contract)
    dtype = product_dtype(inputs, w, params.get("preferred_element_type"))
    # Without rows or experts there are no tiles to map over, and all outputs are zero.
    if not len(inputs) or not len(counts):
        shape = [inputs.shape[-1 - name] for name in x_free] + sizes
        return jnp.moveaxis(jnp.zeros_like(inputs, dtype, shape=shape), 0, kept)
    tiles = Tiles(counts, len(inputs))

    @jax.checkpoint  # the backward pass decodes again
    def product(part: Array, expert: Array) -> Array:
        return contract(part, x_names, stack.stored_slice(expert), out_names, np.dtype(np.float32))

    def of_tile(part: Array, expert: Array) -> Array:
        shape = [*(part.shape[-1 - name] for name in x_free), *sizes]

        def nothing(part: Any, expert: Any) -> Any:
            return jnp.zeros_like(part, np.float32, shape=shape)

        # Decode nothing for unused tiles.
        return lax.cond(expert < len(counts), product, nothing, part, expert)

    parts = jnp.where(_beside(tiles.filled, inputs.ndim + 1), inputs[tiles.rows], 0)
    y = lax.map(lambda tile: of_tile(*tile), (parts, tiles.experts))
    y = y.reshape(-1, *y.shape[2:])[tiles.positions]
    y = jnp.where(_beside(tiles.grouped, y.ndim), y, 0)
    return jnp.moveaxis(y, 0, kept).astype(dtype)


class Tiles:
    """Groups of rows split into tiles. Each tile belongs to a single group.

    **Attributes:**

    - `experts`: each tile's group. For unused tiles this is the number of groups.
    - `rows`, `filled`: the rows in each tile, and which of its slots are filled, `(tiles, rows per tile)`.
    - `positions`, `grouped`: each row's position in the tiles, and whether it belongs to any group.
    """

    def __init__(self, counts: Array, num_rows: int) -> None:
        # Tiles are as large as the average group, so few slots are left empty. Larger groups are split.
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
        positions = (last - of_group)[group] * size + row - starts[group]
        self.positions = jnp.clip(positions, 0, most * size - 1)


_SMALLEST_TILE, _LARGEST_TILE = 8, 128


def _beside(x: Array, ndim: int) -> Array:
    """Appends axes of size 1, for `ndim` axes in total."""
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


@register("conv_general_dilated")
def _conv(primitive: Primitive, x: ArrayLike, w: AbstractQuantizedArray, **params: Any) -> Any:
    """Decodes the kernel. The backward pass decodes it again, so that only codes are stored as residuals."""

    @jax.checkpoint
    def product(x: Array, w: AbstractQuantizedArray) -> Array:
        return primitive.bind(x, w.materialise(), **params)

    return product(jnp.asarray(x), w)


@register("rev")
def _rev(w: AbstractQuantizedArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    """Reverses a kernel's window. JAX does this to compute the gradient of a convolution."""
    dimensions = [axis for axis in dimensions if w.shape[axis] != 1]
    free = with_free_axes(w, dimensions)
    if free is None:
        return NotImplemented
    return jax.tree.map(lambda leaf: lax.rev(leaf, [free.permutation[axis] for axis in dimensions]), free)
