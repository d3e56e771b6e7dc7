"""Checks indices into Values when using `jax.experimental.checkify`.

Rules may clamp and shift a program's indices, and index into leaves of other shapes than the array's. Seeing
only this, checkify would miss out-of-bounds indices, or complain about valid ones. So we insert an equation
before the rule, which just returns the indices and compiles to nothing. For this equation, checkify reports
the same errors as for the dense array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from . import compat
from .values import aval_of, is_value

# Returns its only operand, unchanged: indices `(..., len(axes))` of slices of these `sizes`, into an array of
# this `shape`. If `axes` is a single axis, these are indices along it.
index_p = jexc.Primitive("quaxlike_index")
index_p.def_impl(lambda indices, **params: indices)
index_p.def_abstract_eval(lambda indices, **params: indices)
mlir.register_lowering(index_p, lambda ctx, indices, **params: [indices])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    # Bind it again, to check the indices in the differentiated program, too.
    out = index_p.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batching(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    return index_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **params), 0


ad.primitive_jvps[index_p] = _jvp
batching.primitive_batchers[index_p] = _batching


def _as_gather(indices: Any, *, shape: Sequence[int], axes: Any, sizes: Sequence[int]) -> Any:
    """Returns the operands and parameters of a `gather` with these indices, which checkify can check."""
    if isinstance(axes, int):
        indices, axes = jnp.expand_dims(indices, -1), (axes,)
    num_batch = indices.ndim - 1
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(num_batch, num_batch + len(shape))),
        collapsed_slice_dims=(),
        start_index_map=axes,
    )
    params = {
        "dimension_numbers": dimension_numbers,
        "slice_sizes": sizes,
        "unique_indices": False,
        "indices_are_sorted": False,
        "mode": lax.GatherScatterMode.CLIP,
        "fill_value": None,
    }
    return (jnp.zeros(shape, bool), indices), params


compat.check_errors_like(index_p, lax.gather_p, _as_gather)


def with_checks(primitive: jexc.Primitive, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Adds checks to a primitive's indices into its first operand, unless they are known to be in bounds."""
    first, *rest = operands
    shape = tuple(aval_of(first).shape if is_value(first) else np.shape(first))
    if primitive is lax.gather_p:
        axes = tuple(params["dimension_numbers"].start_index_map)
        return [first, _checked(rest[0], shape, axes, tuple(params["slice_sizes"]))]
    update = [] if primitive is lax.dynamic_slice_p else rest[:1]
    sizes = tuple(params["slice_sizes"]) if not update else tuple(jnp.shape(update[0]))
    starts = rest[len(update) :]
    return [first, *update, *(_checked(start, shape, axis, sizes) for axis, start in enumerate(starts))]


def _checked(indices: Any, shape: tuple[int, ...], axes: Any, sizes: tuple[int, ...]) -> Any:
    if is_value(indices):
        return indices
    if not isinstance(indices, jax.core.Tracer):
        last = np.asarray(shape)[np.asarray(axes, int)] - np.asarray(sizes)[np.asarray(axes, int)]
        # Static indices within bounds don't need a check, which would only clutter the user's jaxpr.
        known = np.asarray(indices)
        if ((known >= 0) & (known <= last)).all():
            return indices
    return index_p.bind(indices, shape=shape, axes=axes, sizes=sizes)
