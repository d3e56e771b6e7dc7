"""Two hooks for types whose rules depend on the values of plain arrays that they are combined with.

For example, zeros are the same in any unit, so a library that initialises a loop with zeros doesn't specify
their unit. For this reason, quantities with units keep track of which plain arrays are filled with a constant
(see arrays/unitful/placeholders.py). These hooks aren't set until a type is defined whose `promote` can be
called without `like`, and until then the only overhead is a few `if`s.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def takes_no_like(cls: Any) -> bool:
    """Returns whether `promote` of this class can be called without `like`, see `Value.promote`."""
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


@dataclasses.dataclass(frozen=True)
class Following:
    """The hook of the trace, which is called with primitives on plain arrays if any Value requires this."""

    asked_for_by: Callable[[Any], bool]  # whether a Value, or one nested inside it, requires this
    asked_for_by_type: Callable[[Any], bool]
    follow: Callable[[Any, Any, dict[str, Any], Any], None]  # primitive, operands, params, result


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The hook of the slots, which propagates the constants that fill plain arrays through branches and
    loops.

    This is stored as the `constant` of the array's slot, which is None unless some Value requires it.
    """

    marked: Callable[..., tuple[Any, ...]]  # the slots of the operands, with their constants
    starts: Callable[..., tuple[Any, ...]]  # a loop's carry, when only its initial value is known
    start: Callable[[Any, Any], Any]  # takes one slot of the carry, and its initial array
    revealed: Callable[..., tuple[Any, ...] | None]  # a carry, as determined by tracing one iteration
    without_guess: Callable[[Any], Any]
    either: Callable[[Any, Any], Any]
    note: Callable[[Any, Any], None]  # records the constant that an array is filled with


class _Hooks:
    following: Following | None = None
    placeholders: Placeholders | None = None


hooks = _Hooks()


def either(a: Any, b: Any) -> Any:
    """Returns the constant for an array that is one of two arrays, whose constants are `a` and `b`."""
    if a is None or b is None or hooks.placeholders is None:
        return None
    return hooks.placeholders.either(a, b)


def without_guess(slot: Any) -> Any:
    """Replaces a slot whose type was only guessed by that of a plain array; returns any other unchanged."""
    return hooks.placeholders.without_guess(slot) if hooks.placeholders else slot
