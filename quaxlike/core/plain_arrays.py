"""Two hooks for types whose rules depend on the values of plain arrays that they are combined with.

For example, zeros are the same in any unit, and if a library initialises a loop with zeros then it doesn't
specify their unit. To support this, quantities with units keep track of which plain arrays are filled with a
constant (see arrays/unitful/placeholders.py).

Most users don't need any of this. So we don't set these hooks until a type is defined whose `promote` can be
called without `like`; until then the only overhead is a few `if`s.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def takes_no_like(cls: Any) -> bool:
    """Returns whether `promote` of this class can be called without `like`.

    See `Value.promote` for what this means.
    """
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


@dataclasses.dataclass(frozen=True)
class Following:
    """The hook of the trace.

    If there is any Value that requires this, it is called with primitives on plain arrays.
    """

    asked_for_by: Callable[[Any], bool]  # whether a Value, or one nested inside it, requires this
    asked_for_by_type: Callable[[Any], bool]
    follow: Callable[[Any, Any, dict[str, Any], Any], None]  # primitive, operands, params, result


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The hook of the slots. Some plain arrays are filled with a constant, and this propagates these
    constants through branches and loops.

    A constant is stored as the `constant` of the array's slot. This is None unless some Value requires it.
    """

    marked: Callable[..., tuple[Any, ...]]  # the slots of the operands, with their constants
    starts: Callable[..., tuple[Any, ...]]  # the carry of a loop for which we only know the initial value
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
    """Returns the constant for an array that might be either of two arrays, given both constants."""
    if a is None or b is None or hooks.placeholders is None:
        return None
    return hooks.placeholders.either(a, b)


def without_guess(slot: Any) -> Any:
    """If a slot's type was only guessed, then returns the slot of a plain array.

    Any other is returned unchanged.
    """
    return hooks.placeholders.without_guess(slot) if hooks.placeholders else slot
