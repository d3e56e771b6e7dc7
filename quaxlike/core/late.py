"""Late Values: closed over, built in the body of a quaxified function, or used inside a rule."""

from typing import Any

import jax
import jax.core
import jax.tree_util as jtu

from . import compat, values
from .policy import dense
from .trace import QuaxTrace
from .tracer import ValueTracer
from .values import Value, aval_of, check_whole


def innermost(trace: Any) -> QuaxTrace | None:
    """The quaxify level that code running under `trace` is in, if any."""
    while trace is not None and type(trace) is not QuaxTrace:
        trace = getattr(trace, "parent_trace", None)
    return trace


class _Adopt:
    """Turns a Value that is used as an operand without having been passed in into a tracer."""

    def level_of(self, value: Value) -> QuaxTrace | None:
        """The innermost level that dispatches on `value`, if any."""
        level = innermost(compat.current_trace())
        while level is not None and not (level.tag.takes is None or level.tag.takes(value)):
            level = innermost(level.parent_trace)
        return level

    def behind(self, x: Any) -> Any:
        """The Value that a tracer of any level stands for; anything else as it is."""
        return x.quax_value if type(x) is ValueTracer else x

    def __call__(self, value: Value) -> Any:
        check_whole(value)
        level = self.level_of(value)
        if level is None:
            left_out = innermost(compat.current_trace()) is not None
            raise RuntimeError(
                f"A {type(value).__name__} was given to a JAX primitive "
                + ("that no `filter_spec` selects it for. " if left_out else "outside `quaxlike.quaxify`. ")
                + "Wrap the function that uses it in `quaxify` (inside a rule: call `quaxify` on the "
                "parts), or use `quaxlike.materialise` to make it a dense array."
            )
        if _lives_below(level, value):
            return ValueTracer(level, level.unwrap_tree(value))
        # A transform inside the quaxified function traced its arrays: built there, or passed to a jitted
        # function, which takes a Value that is not traced apart. This level would leave that transform out.
        hint = "Pass it into that transform as a traced Value, or call `quaxify` inside of it."
        return dense(value, "a Value that an inner transform took apart", hint=hint)


def _lives_below(level: QuaxTrace, value: Value) -> bool:
    tracers = [x for x in jtu.tree_leaves(value) if isinstance(x, jax.core.Tracer)]
    below, trace = [level.tag], level.parent_trace
    while trace is not None:
        below += [trace, getattr(trace, "tag", trace)]
        trace = getattr(trace, "parent_trace", None)
    at = [(x._trace, getattr(x._trace, "tag", None)) for x in tracers]  # pyright: ignore[reportPrivateUsage]
    return all(any(y is z for y in pair for z in below) for pair in at)


_adopt = _Adopt()
values.adopters.append(_adopt)
compat.register_late_values(Value, _adopt, aval_of)
