"""The running levels of `quaxify`, and which one dispatches on a Value.

A level is found by walking up JAX's own chain of traces. The list `running` is only needed where JAX breaks
this chain. It is thread-local: threads never see each other's levels.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from . import compat


def level_of(value: Any | None = None) -> Any:
    """Returns the innermost running level, or None. If `value` is given, the level must dispatch on it."""

    def ours(trace: Any) -> bool:
        return hasattr(trace, "dispatches_on") and (value is None or trace.dispatches_on(value))

    trace = last = compat.current_trace()
    while trace is not None:
        if ours(trace):
            return trace
        trace, last = getattr(trace, "parent_trace", None), trace
    # JAX traces the functions of custom derivatives under a trace without a parent. Only later is the
    # resulting jaxpr evaluated under a running level.
    cut = last is not None and not compat.is_eval_trace(last)
    if not cut:
        return None
    return next(
        (level for level in reversed(running.levels) if ours(level) and not _waits_for_rule(level)), None
    )


def _waits_for_rule(level: Any) -> bool:
    """Returns whether a rule is running at this level, or at one further out.

    If so, current operations are the rule's, and only levels further out dispatch on them.
    """
    while level is not None and not getattr(level, "in_rule", False):
        level = getattr(level, "parent_trace", None)
    return level is not None


def might_be_value(tracer: Any) -> bool:
    """Returns whether a tracer of one of JAX's transforms may stand for a Value.

    Only a running level outside the transform knows. A rule's operations are not its level's.
    """
    return any(not level.holds(tracer) and not _waits_for_rule(level) for level in running.levels)


class _Running(threading.local):
    """The traces of all `quaxify` calls running in this thread, outermost first."""

    def __init__(self) -> None:
        self.levels: list[Any] = []


running = _Running()


@contextlib.contextmanager
def running_rule(level: Any) -> Iterator[None]:
    """Marks a level inside the block: it does not dispatch on operations there."""
    within, level.in_rule = level.in_rule, True
    try:
        yield
    finally:
        level.in_rule = within


def has_operators(value: Any) -> bool:
    """Returns whether this Value has operators here, even though its type doesn't define any.

    It does if a running level dispatches on it. Inside a rule, so does any Value nested inside the operands.
    """
    if level_of(value) is not None:
        return True
    rules = [i for i, level in enumerate(running.levels) if level.in_rule]
    if not rules:
        return False
    # A rule runs below its level. If the level, or one started by the rule, is among the current traces, then
    # we're not in the rule itself.
    others = [level.tag for level in running.levels[rules[-1] :]]
    trace = compat.current_trace()
    while trace is not None and getattr(trace, "tag", None) not in others:
        trace = getattr(trace, "parent_trace", None)
    return trace is None


def not_dispatched(value: Any, what: str) -> str:
    """Returns the error message for using a Value outside any `quaxify`."""
    return (
        f"{type(value).__name__} was passed to {what} "
        + ("outside `quaxlike.quaxify`. " if level_of() is None else "but no `filter_spec` selects it. ")
        + "Wrap the function that uses it in `quaxify` (inside a rule: call `quaxify` on the parts), or use "
        "`quaxlike.materialise` to make it a dense array."
    )


def name_the_mixin(value: Any) -> str:
    """Returns a hint for messages on an operator or a NumPy function for a type without `ArrayOperators`."""
    return (
        " For operators and methods everywhere, name `quaxlike.ArrayOperators` before `ArrayValue` among the "
        f"bases of {type(value).__name__}."
    )
