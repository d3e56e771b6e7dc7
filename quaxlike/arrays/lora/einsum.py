"""Products of two arrays with labelled axes: one `dot_general`, without transposing its result."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core.values import is_value
from ...kernels.multilinear import dot_general

Labels = list[int]


def contract(
    x: Any, x_labels: Sequence[int], y: Any, y_labels: Sequence[int], keep: Collection[int], **params: Any
) -> tuple[Any, Labels]:
    """The product of `x` and `y`, summed over all labels not in `keep`, and the labels of its axes."""
    x, x_labels = _sum_out(x, x_labels, {*y_labels, *keep})
    y, y_labels = _sum_out(y, y_labels, {*x_labels, *keep})
    shared = [i for i in x_labels if i in y_labels]
    summed = [i for i in shared if i not in keep]
    batch = [i for i in shared if i in keep]

    def at(labels: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
        return tuple(labels.index(i) for i in wanted)

    dimension_numbers = (
        (at(x_labels, summed), at(y_labels, summed)),
        (at(x_labels, batch), at(y_labels, batch)),
    )
    out = [*batch, *[i for i in x_labels if i not in shared], *[i for i in y_labels if i not in shared]]
    plain = not is_value(x) and not is_value(y)
    product = dot_general if plain and params.get("out_sharding") is None else jax.lax.dot_general
    return product(x, y, dimension_numbers, **params), out


def _sum_out(x: Any, labels: Sequence[int], wanted: Collection[int]) -> tuple[Any, Labels]:
    gone = tuple(i for i, label in enumerate(labels) if label not in wanted)
    return (jnp.sum(x, gone) if gone else x), [i for i in labels if i in wanted]


def arrange(x: Any, labels: Sequence[int], out: Sequence[int]) -> Any:
    """`x` with its axes in the order `out`, and an axis of size one for each label that it lacks."""
    order = [i for i in out if i in labels]
    if order != list(labels):
        x = jax.lax.transpose(x, [labels.index(i) for i in order])
    missing = [axis for axis, label in enumerate(out) if label not in labels]
    return jax.lax.expand_dims(x, missing) if missing else x


def common_dtype(*arrays: Any) -> Any:
    """The dtype to compute with, by JAX's standard promotion rules whichever are set."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def in_float32(dtype: Any) -> Any:
    """The dtype to compute with in float32 at least."""
    return common_dtype(jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.float32))


def cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)
