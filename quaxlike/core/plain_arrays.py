"""Hooks for types with rules depending on the values of the plain arrays beside them.

For example, zeros are the same in any unit, and a library initialising a loop with zeros doesn't specify
their unit. To support this, quantities keep track of which plain arrays are filled with a constant (see
arrays/unitful/placeholders.py).

Most users don't need any of this, so these hooks aren't set until a type defines a `promote` callable without
`like`. Until then the only overhead is a few `if`s.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def takes_no_like(cls: Any) -> bool:
    """Returns whether `promote` of this class can be called without `like`.

    See `Value.promote`.
    """
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


@dataclasses.dataclass(frozen=True)
class Following:
    """The hook of the trace.

    Called with primitives on plain arrays, if any Value requires it.
    """

    asked_for_by: Callable[[Any], bool]  # whether a Value, or one nested inside it, requires this
    asked_for_by_type: Callable[[Any], bool]
    follow: Callable[[Any, Any, dict[str, Any], Any], None]  # primitive, operands, params, result


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The hook of the slots. Propagates the constants filling some plain arrays through branches and loops.

    Stored as the `constant` of the array's slot, which is None unless some Value requires it.
    """

    marked: Callable[..., tuple[Any, ...]]  # the slots of the operands, with their constants
    starts: Callable[..., tuple[Any, ...]]  # the carry of a loop, given only its initial value
    start: Callable[[Any, Any], Any]  # takes one slot of the carry, and its initial array
    # The carry of a loop, after tracing one iteration to find out more.
    revealed: Callable[..., tuple[Any, ...] | None]
    without_guess: Callable[[Any], Any]
    either: Callable[[Any, Any], Any]
    note: Callable[[Any, Any], None]  # records that an array is filled with a constant


class _Hooks:
    following: Following | None = None
    placeholders: Placeholders | None = None


hooks = _Hooks()


def either(a: Any, b: Any) -> Any:
    """Returns the constant of an array that may be either of two, given both their constants."""
    if a is None or b is None or hooks.placeholders is None:
        return None
    return hooks.placeholders.either(a, b)


def without_guess(slot: Any) -> Any:
    """Replaces a slot of a guessed type by the slot of a plain array.

    Any other is returned unchanged.
    """
    return hooks.placeholders.without_guess(slot) if hooks.placeholders else slot
