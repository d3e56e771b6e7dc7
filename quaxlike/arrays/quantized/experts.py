"""`ragged_dot`: rows of `x` in groups, each multiplied by the weight of its expert."""

from typing import Any

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
    """One expert after the other, on all rows; those of other groups are left out of the sum."""
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

    # Names of axes in the weight of one expert: the stack's, without its first axis.
    x_names = name_axes(inputs, x_contract, [stored[axis] - 1 for axis in w_contract])
    x_free = [name for name in x_names if name < 0]
    w_free = [name - 1 for name in stored if name > 0 and name - 1 not in x_names]
    out_names = (*x_free, *w_free)
    ends = jnp.cumsum(counts)
    row_axis = x_free.index(-1 - rows[0])

    def add_expert(y: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        i, start, end = group
        part = contract(inputs, x_names, stack.stored_slice(i), out_names, np.dtype(np.float32))
        row = lax.broadcasted_iota(ends.dtype, part.shape, row_axis)
        return y + jnp.where((start <= row) & (row < end), part, 0), None

    sizes = [inputs.shape[-1 - name] for name in x_free] + [stack.stored_shape[name + 1] for name in w_free]
    groups = (jnp.arange(len(counts)), ends - counts, ends)
    y, _ = lax.scan(add_expert, jnp.zeros_like(inputs, np.float32, shape=sizes), groups)
    return y.astype(product_dtype(inputs, w, params))
