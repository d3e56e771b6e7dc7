"""Each axis's role in `dot_general`, and products between arrays with labelled axes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.quaxify import value_of
from ..core.values import is_value
from ..kernels import dense_matmul
from ..kernels.multilinear import dot_general

_Axes = tuple[int, ...]


class DotAxes(NamedTuple):
    """One operand's axes in `dot_general`. Each axis belongs to exactly one of the first three fields."""

    __module__ = "quaxlike"

    contracting: _Axes
    """The axes that are summed over, in the order in which they're paired with the other operand's."""
    batch: _Axes
    """The axes that both operands share with the result, in which they come first. These are paired in the
    same way.
    """
    free: _Axes
    """The remaining axes, which this operand shares with the result only."""
    in_result: Mapping[int, int]
    """Maps each batch and free axis to its index in the result."""


def dot_axes(w: Any, x: Any, dimension_numbers: Any, *, on_left: bool = True) -> tuple[DotAxes, DotAxes]:
    """Determines each operand axis's role in `dot_general`, for use in rules.

    Even for a product written as `w @ x`, a rule may be called with many different `dimension_numbers`, as a
    result of transposes, `jax.vmap` and `jax.grad`.

    **Arguments:**

    - `w`, `x`: the operands, arrays or Values.
    - `dimension_numbers`: the parameter of `dot_general`, `((lhs contracting axes, rhs contracting axes),
        (lhs batch axes, rhs batch axes))`.
    - `on_left`: whether `w` is the left operand and `x` the right one, rather than vice versa.

    **Returns:**

    The [`quaxlike.DotAxes`][] for `w`, and for `x`.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        w, x = jnp.ones((4, 3)), jnp.ones((5, 3))
        of_w, of_x = ql.dot_axes(w, x, (((1,), (1,)), ((), ())))  # w @ x.T
        assert of_w.contracting == of_x.contracting == (1,)
        assert of_w.in_result == {0: 0} and of_x.in_result == {0: 1}
        ```
    """
    axes: list[DotAxes] = []
    start = len(dimension_numbers[1][0])
    for operand, contracting, batch in zip((w, x) if on_left else (x, w), *dimension_numbers, strict=True):
        free = tuple(axis for axis in range(np.ndim(operand)) if axis not in (*contracting, *batch))
        places = (*range(len(batch)), *range(start, start + len(free)))
        in_result = dict(zip((*batch, *free), places, strict=True))
        axes.append(DotAxes(tuple(contracting), tuple(batch), free, in_result))
        start += len(free)
    first, second = axes
    return (first, second) if on_left else (second, first)


def in_order(on_left: bool, own: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the free axes in the product's order: the left operand's axes come first."""
    return [*own, *other] if on_left else [*other, *own]


def placed(y: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """Shards a product as specified by its `out_sharding`."""
    sharding = params.get("out_sharding")
    return y if sharding is None else jax.sharding.reshard(y, sharding)


Labels = list[int]


def contract(
    x: Any, x_labels: Sequence[int], y: Any, y_labels: Sequence[int], keep: Collection[int], **params: Any
) -> tuple[Any, Labels]:
    """Multiplies `x` and `y`, summing over labels not in `keep`. Also returns the result's labels."""
    # If a label only occurs in one operand, sum over it beforehand: this makes the product smaller.
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


def weight_product(x: Any, y: Any, dimension_numbers: Any, **params: Any) -> Any:
    """Multiplies by a weight, using `dense_matmul` if both operands are arrays.

    Values are dispatched unchanged, because some only have rules for one side.
    """
    plain = not any(is_value(value_of(each)) for each in (x, y))
    product = dense_matmul.dot_general if plain else jax.lax.dot_general
    return product(x, y, dimension_numbers, **params)


def _sum_out(x: Any, labels: Sequence[int], wanted: Collection[int]) -> tuple[Any, Labels]:
    gone = tuple(i for i, label in enumerate(labels) if label not in wanted)
    return (jnp.sum(x, gone) if gone else x), [i for i in labels if i in wanted]


def arrange(x: Any, labels: Sequence[int], out: Sequence[int]) -> Any:
    """Transposes `x` to the order `out`, adding axes of size one for any missing labels."""
    order = [i for i in out if i in labels]
    if order != list(labels):
        x = jax.lax.transpose(x, [labels.index(i) for i in order])
    missing = [axis for axis, label in enumerate(out) if label not in labels]
    return jax.lax.expand_dims(x, missing) if missing else x


def common_dtype(*arrays: Any) -> Any:
    """Returns the dtype to compute with, by JAX's standard promotion rules (even if others are set)."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    # Rules run under the user's settings. If these ask for strict promotion, our own computations would raise
    # errors without this.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def product_dtype(x: Any, y: Any, preferred_element_type: Any) -> np.dtype:
    """Returns the dtype of `dot_general(x, y)`."""
    return np.dtype(common_dtype(x, y) if preferred_element_type is None else preferred_element_type)


def in_float32(dtype: Any) -> Any:
    """Returns the dtype to compute in, with at least float32 precision."""
    return common_dtype(jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), jnp.float32))


def cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)
