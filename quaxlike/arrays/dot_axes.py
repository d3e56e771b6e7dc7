"""The axes of the operands of `dot_general`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_Axes = tuple[int, ...]


class DotAxes(NamedTuple):
    """The axes of one operand of `dot_general`: every axis is in one of the first three."""

    __module__ = "quaxlike"

    contracting: _Axes
    """The axes that are summed over. They are paired with those of the other operand, in this order."""
    batch: _Axes
    """The axes that both operands and the result have. They are paired likewise, and come first in the
    result."""
    free: _Axes
    """The other axes, which only this operand and the result have."""
    in_result: Mapping[int, int]
    """For each batch and free axis, which axis of the result it becomes."""


def dot_axes(w: Any, x: Any, dimension_numbers: Any, *, on_left: bool = True) -> tuple[DotAxes, DotAxes]:
    """Says what `dot_general` does with each axis of its two operands, for use in rules.

    A product that is written as `w @ x` reaches a rule with many `dimension_numbers`: the transpose of an
    operand, `jax.vmap` and `jax.grad` choose them.

    **Arguments:**

    - `w`, `x`: the operands, arrays or Values.
    - `dimension_numbers`: the parameter of `dot_general`:
        `((contracting axes of the first, of the second), (batch axes of the first, of the second))`.
    - `on_left`: whether `w` is the first operand, and `x` the second. Otherwise it is the other way round.

    **Returns:**

    The [`quaxlike.DotAxes`][] of `w`, and those of `x`.

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
    """The free axes of both operands in the order of the product: those of the left one come first."""
    return [*own, *other] if on_left else [*other, *own]
