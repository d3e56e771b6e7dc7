"""Two hooks for types that want to know what fills the plain arrays beside them.

Zeros are zeros in any unit, and a library that starts a loop from them does not say in which: so quantities
in units follow the numbers that fill plain arrays (arrays/unitful/placeholders.py). The hooks are empty until
a type is defined whose `promote` works without `like`; until then all of it costs an `if` here and there.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def takes_no_like(cls: Any) -> bool:
    """Whether `promote` of a class may be called without `like`: see `Value.promote`."""
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


@dataclasses.dataclass(frozen=True)
class Following:
    """The hook of the trace: it sees each primitive on plain arrays in a level with a Value that asks."""

    asked_for_by: Callable[[Any], bool]  # a Value from outside, or one that it holds
    asked_for_by_type: Callable[[Any], bool]
    follow: Callable[[Any, Any, dict[str, Any], Any], None]  # primitive, operands, params, result


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """The hook of slots: what fills a plain array goes into branches and loops, and comes out of them. It is
    the `constant` of its slot, which is None as long as nobody asks."""

    marked: Callable[..., tuple[Any, ...]]  # the slots of operands, with what fills these
    starts: Callable[..., tuple[Any, ...]]  # the same for a loop's carry, of which only the start is known
    start: Callable[[Any, Any], Any]  # the same for one slot of it, and the array that it starts from
    revealed: Callable[..., tuple[Any, ...] | None]  # a carry, with what an iteration shows it to be
    without_guess: Callable[[Any], Any]
    either: Callable[[Any, Any], Any]
    note: Callable[[Any, Any], None]  # records what fills an array


class _Hooks:
    following: Following | None = None
    placeholders: Placeholders | None = None


hooks = _Hooks()


def either(a: Any, b: Any) -> Any:
    """The constant of an array that is one of two."""
    if a is None or b is None or hooks.placeholders is None:
        return None
    return hooks.placeholders.either(a, b)


def without_guess(slot: Any) -> Any:
    """The slot of the plain array for which a guess stands; another slot unchanged."""
    return hooks.placeholders.without_guess(slot) if hooks.placeholders else slot
