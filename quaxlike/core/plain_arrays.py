"""Two hooks for types whose rules depend on the contents of plain arrays next to them.

Zeros are zeros in any unit, and a library starting a loop from zeros does not say which unit they have. So
quantities with units follow the numbers that fill plain arrays (arrays/unitful/placeholders.py). Both hooks
are empty until a type is defined whose `promote` works without `like`. Until then, all this costs a few
`if`s.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def takes_no_like(cls: Any) -> bool:
    """Returns whether the class's `promote` may be called without `like`: see `Value.promote`."""
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


@dataclasses.dataclass(frozen=True)
class Following:
    """The trace's hook: it sees each primitive on plain arrays, in a level where a Value asks for it."""

    asked_for_by: Callable[[Any], bool]  # a Value from outside, or one inside it
    asked_for_by_type: Callable[[Any], bool]
    follow: Callable[[Any, Any, dict[str, Any], Any], None]  # primitive, operands, params, result


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The slots' hook: tracks what fills a plain array through branches and loops.

    This is the `constant` of the array's slot, which is None as long as nobody asks.
    """

    marked: Callable[..., tuple[Any, ...]]  # operands' slots, with what fills them
    starts: Callable[..., tuple[Any, ...]]  # a loop's carry, when only its start is known
    start: Callable[[Any, Any], Any]  # one slot of the carry, and its initial array
    revealed: Callable[..., tuple[Any, ...] | None]  # a carry, as one iteration shows it to be
    without_guess: Callable[[Any], Any]
    either: Callable[[Any, Any], Any]
    note: Callable[[Any, Any], None]  # records what fills an array


class _Hooks:
    following: Following | None = None
    placeholders: Placeholders | None = None


hooks = _Hooks()


def either(a: Any, b: Any) -> Any:
    """Returns the constant for an array that may be either of two, with constants `a` and `b`."""
    if a is None or b is None or hooks.placeholders is None:
        return None
    return hooks.placeholders.either(a, b)


def without_guess(slot: Any) -> Any:
    """Replaces a guessed slot by the slot of a plain array; returns others unchanged."""
    return hooks.placeholders.without_guess(slot) if hooks.placeholders else slot
