"""The levels of `quaxify` that are running, and the one that dispatches on a Value."""

import threading
from typing import Any

from . import compat


def level_of(value: Any | None = None) -> Any:
    """The trace of the innermost running `quaxify`, or of the innermost that dispatches on `value`; None if
    there is none."""
    ours = lambda trace: hasattr(trace, "dispatches_on") and (value is None or trace.dispatches_on(value))
    trace = last = compat.current_trace()
    while trace is not None:
        if ours(trace):
            return trace
        trace, last = getattr(trace, "parent_trace", None), trace
    # JAX traces the functions of custom derivatives under a trace without a parent; the levels that are
    # running get its program.
    cut = last is not None and not compat.is_eval_trace(last)
    if not cut:
        return None
    return next((level for level in reversed(running.levels) if not level.in_rule and ours(level)), None)


class _Running(threading.local):
    """The traces of the calls of `quaxify` that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.levels: list[Any] = []


running = _Running()


def has_operators(value: Any) -> bool:
    """Whether a Value whose type has no operators of its own has them here: where a level dispatches on it,
    and in rules, for the Values that the operands are made of."""
    if level_of(value) is not None:
        return True
    level = running.levels[-1] if running.levels else None
    if level is None or not level.in_rule:
        return False
    trace = compat.current_trace()
    while trace is not None and getattr(trace, "tag", None) is not level.tag:  # else it runs what is no rule
        trace = getattr(trace, "parent_trace", None)
    return trace is None


def not_dispatched(value: Any, what: str) -> str:
    """The error message for a Value that no `quaxify` dispatches on."""
    return (
        f"{type(value).__name__} was passed to {what} "
        + ("outside `quaxlike.quaxify`. " if level_of() is None else "but no `filter_spec` selects it. ")
        + "Wrap the function that uses it in `quaxify` (inside a rule: call `quaxify` on the parts), or use "
        "`quaxlike.materialise` to make it a dense array."
    )
