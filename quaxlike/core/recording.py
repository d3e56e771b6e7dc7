"""Recording for `explain`: the active recorder, and how messages describe operands and source lines.

Recording must not change a program's behaviour, nor be defeated by JAX's caches, which skip functions already
traced. So each recording is part of their keys, and everything is traced again.
"""

import collections
import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.core

from . import values
from .hooks import computes_with_itself
from .rules import active_layers
from .scoped import Scoped
from .source_lines import SourceLine, is_library, source_lines
from .values import aval_of, is_value

if TYPE_CHECKING:
    from .inspect.recorder import Recorder  # this is only loaded once something is recorded

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_active = Scoped["Recorder | None"]("quaxlike_recorder", None)
active = _active.get
_recordings = itertools.count(1)


def recording(recorder: "Recorder") -> contextlib.AbstractContextManager[Any]:
    """Records everything dispatched inside this block, in the current thread and context."""
    # A new number each time: on a cache hit, a program traced by an earlier recording would be missing from
    # this one.
    return _active.use(recorder, key=next(_recordings))


def _not_recording() -> contextlib.AbstractContextManager[Any]:
    return _active.use(None)


values.probing.asides.append(_not_recording)


def shown_as(what: str) -> Callable[[_Fn], _Fn]:
    """Decorates a function performing its own dispatch, to show its events inside `what`."""

    def decorator(function: _Fn) -> _Fn:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if (recorder := active()) is None:
                return function(*args, **kwargs)
            with recorder.inside(what):
                return function(*args, **kwargs)

        return cast(_Fn, recorded)

    return decorator


def note(text: str) -> None:
    """Adds a remark to the running rule's row in [`quaxlike.explain`][].

    Call this inside a rule to report what isn't apparent from its signature, such as the kernel selected.
    Does nothing unless `explain` is running.
    """
    if (recorder := active()) is not None:
        recorder.note(text)


# Words for operands and places --------------------------------------------------------------------


def describe(x: Any) -> str:
    """Describes an operand as `LoraArray f32[4,3]`, or `f32[3]` for a plain array."""
    try:
        aval = aval_of(x) if is_value(x) else jax.typeof(x)
    except TypeError:
        return type(x).__name__
    short = aval.str_short(short_dtypes=True) if isinstance(aval, jax.core.ShapedArray) else str(aval)
    return f"{type(x).__name__} {short}" if is_value(x) else short


def user_source() -> tuple[SourceLine, SourceLine | None]:
    """Returns the user's line being executed, and the innermost line in any library it called."""
    first: SourceLine | None = None
    for line in source_lines():
        if not is_library(line.file):
            return line, first
        first = first or line
    return first or SourceLine("<unknown>", 1, "?"), None


# Hooks that may accidentally call themselves. (The core's functions of the same names only call the hooks.)
_HOOKS = frozenset(("aval", "default", "materialise", "promote", "widen"))
_CALLERS = values.__file__


def endless(error: RecursionError) -> str | None:
    """Returns the message for endless recursion of a rule or hook, or None if there isn't any.

    Called close to the recursion limit, this must not call anything that caches errors, as beartype does for
    plum.
    """
    # Endless recursion keeps calling the same few functions, so count how often each one appears.
    codes = collections.Counter(frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    often = {code: n for code, n in codes.items() if n > 5}
    rules = [rule for layer in active_layers.get() for rule in layer.looked_at] if often else []
    found = [rule for rule in rules if rule.written.__code__ in often]
    if found:
        rule = max(found, key=lambda rule: often[rule.written.__code__])
        return (
            f"The rule {rule} calls `{rule.primitive}` on operands that it covers itself, and so never ends. "
            "Call it on their parts: on the arrays or Values that they hold, with `quaxify`."
        )
    hooks = [code for code in often if code.co_name in _HOOKS and code.co_filename != _CALLERS]
    if not hooks:
        return None
    hook = max(hooks, key=lambda code: often[code])
    return computes_with_itself(hook)


def in_bytes(size: int) -> str:
    """`size` in bytes and in a readable unit.

    Just in bytes for a symbolic size from `jax.export`.
    """
    if not isinstance(size, int):
        return f"{size} bytes"
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size:,} bytes ({size / scale:.1f} {unit})"
    return f"{size} bytes"


def leaked(value: values.Value, tracer: Any, is_late: bool) -> Exception:
    """Returns the error for using a Value's tracer after its quaxified function has returned.

    **Arguments:**

    - `is_late`: whether the Value was closed over. If so, a JAX cache holds the tracer.
    """
    kind, at = type(value).__name__, user_source()[0]
    if is_late:
        return jax.errors.UnexpectedTracerError(
            f"{kind} was closed over by a function that JAX traced within `quaxlike.quaxify`, and "
            f"remembers; it is called outside, at {at}. Call it within `quaxify` here, too, or pass the "
            "Value as an argument."
        )
    return jax.errors.UnexpectedTracerError(
        f"{kind} leaked from the quaxified function that it belongs to, through a closure, a global or an "
        f"attribute: {tracer!r} is used at {at}. Return it from the function instead; `quaxify` returns the "
        "Value itself."
    )
