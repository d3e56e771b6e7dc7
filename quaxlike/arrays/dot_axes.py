"""The axes of `dot_general` from the point of view of one operand, on the left or on the right."""

from collections.abc import Sequence
from typing import Any

_Axes = tuple[int, ...]
_Pair = tuple[_Axes, _Axes]


def seen_from(on_left: bool, dimension_numbers: Any) -> tuple[_Pair, _Pair]:
    """Returns `((own summed, other's summed), (own batch, other's batch))` for one operand.

    **Arguments:**

    - `on_left`: whether the operand is the first one of `dot_general`.
    - `dimension_numbers`: the parameter of `dot_general`.
    """
    own = slice(None) if on_left else slice(None, None, -1)
    summed, batch = (tuple(map(tuple, pair[own])) for pair in dimension_numbers)
    return summed, batch  # pyright: ignore[reportReturnType]


def free_axes(ndim: int, *used: Sequence[int]) -> list[int]:
    """The axes of an operand that are neither summed nor batch axes."""
    return [axis for axis in range(ndim) if not any(axis in axes for axes in used)]


def in_order(on_left: bool, own: Sequence[int], other: Sequence[int]) -> list[int]:
    """The free axes of both operands in the order of the product: those of the left one come first."""
    return [*own, *other] if on_left else [*other, *own]
