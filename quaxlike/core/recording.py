"""Recording for `explain`: one event for each primitive that is applied to a Value."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp

from .._checked import a_or_an
from . import compat, values
from .hooks import computes_with_itself
from .rules import Checked, Rule, RulesByOperands, active_layers
from .values import aval_of, is_value

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

Outcome = Literal["rule", "default", "built-in", "materialised"]


@dataclasses.dataclass(eq=False)
class Event:
    """One primitive that was applied to Values."""

    primitive: str
    operands: tuple[str, ...]
    source: str  # the line of the user's own code
    through: str  # the line of an installed library that the user's code called, if any
    outcome: Outcome = "built-in"
    rule: Rule | None = None
    results: tuple[str, ...] = ()
    size: int = 0  # bytes materialised
    hint: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    # What ran inside, directly or in a jaxpr that the primitive carries. The key is that jaxpr, so that
    # if it is traced several times (the body of a loop, for its carry), the last time counts.
    inside: dict[Any, tuple[str, list["Event"]]] = dataclasses.field(default_factory=dict)

    @property
    def is_inlined_jit(self) -> bool:
        """Whether this is an inlined jit, which its equations replace."""
        return self.outcome == "built-in" and self.primitive in ("jit", "pjit") and [*self.inside] == [None]

    def events_inside(self, key: Any, what: str) -> list["Event"]:
        return self.inside.setdefault(key, (what, []))[1]


class Recorder:
    """Collects the events of one run, as a tree."""

    def __init__(self) -> None:
        self.root = self._open = Event("", (), "", "")
        self._events = self.root.events_inside(None, "")
        self._traced: dict[Any, tuple[Any, list[Event]]] = {}

    def follow(
        self, handler: Callable[..., Any], primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Calls `handler` for the primitive, and records the event unless it returns `NotImplemented`."""
        if isinstance(handler, RulesByOperands):
            outs = (
                self.follow(each, primitive, operands, params)
                for each in handler.matching(primitive, operands)
            )
            return next((out for out in outs if out is not NotImplemented), NotImplemented)
        rule = handler.rule if isinstance(handler, Checked) else handler
        event = self._new(primitive.name, operands)
        what = ""
        if isinstance(rule, Rule):
            event.outcome, event.rule, what = "rule", rule, f"rule of {rule.primitive}"
        before = self._open, self._events
        self._open, self._events = event, event.events_inside(None, what)
        try:
            out = handler(primitive, operands, params)
        finally:
            self._open, self._events = before
        if out is not NotImplemented:
            event.results = tuple(map(describe, out if primitive.multiple_results else [out]))
            self._events.append(event)
        return out

    def trace(self, jaxpr: Any, what: str, key: Any, tracing: Callable[[], Any]) -> Any:
        """Calls `tracing` for a jaxpr once for each key, and records the events that it led to each time."""
        known = self._traced.get((jaxpr, key))
        if known is None:
            events: list[Event] = []
            before, self._events = self._events, events
            try:
                known = self._traced[jaxpr, key] = tracing(), events
            finally:
                self._events = before
        self._open.inside[jaxpr, what] = what, known[1]
        return known[0]

    def record_materialisation(
        self, primitive: str, operands: Sequence[Any], size: int, hint: str, notes: Sequence[str]
    ) -> None:
        """Records that Values among the operands are materialised: in the event of the current primitive, if
        that is what needs them."""
        event = self._open
        asks = event is not self.root and primitive.startswith(event.primitive)
        if not asks or event.outcome == "rule":
            event = self._new(primitive, operands)
            self._events.append(event)
        event.outcome = "materialised"
        event.size += size
        event.hint = event.hint or hint
        event.notes += notes

    def by_default_of(self, cls: type) -> None:
        """Records that the current primitive follows the `default` of a type."""
        self._open.outcome = "default"
        self._open.notes.append(f"{cls.__name__}.default")

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Shows the events that are recorded in the block as inside `what`."""
        before, self._events = self._events, self._open.events_inside(what, what)
        try:
            yield
        finally:
            self._events = before

    def note(self, text: str) -> None:
        if self._open is not self.root:
            self._open.notes.append(text)

    def _new(self, primitive: str, operands: Sequence[Any]) -> Event:
        source, through = user_source()
        return Event(primitive, tuple(map(describe, operands)), str(source), str(through or ""))

    def events(self) -> Iterator[tuple[tuple[str, ...], Event]]:
        """Every event in the order of the program, with the path of what it ran inside."""
        return _walk((), self.root)


def _walk(where: tuple[str, ...], event: Event) -> Iterator[tuple[tuple[str, ...], Event]]:
    for what, events in event.inside.values():
        inner = (*where, what) if what else where
        for e in events:
            if not e.is_inlined_jit:
                yield inner, e
            yield from _walk(inner, e)


_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("quaxlike_recorder", default=None)
active = _active.get

# A setting that is part of the keys of JAX's caches, so that what they hold is traced again, and recorded.
_jit_recording = jax.make_user_context(None)
_recordings = itertools.count(1)


@contextlib.contextmanager
def recording(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Records what is dispatched in the block, in this thread and context."""
    recorder = Recorder() if recorder is None else recorder
    token = _active.set(recorder)
    try:
        with _jit_recording(next(_recordings)):
            yield recorder
    finally:
        _active.reset(token)


@contextlib.contextmanager
def _not_recording() -> Iterator[None]:
    token = _active.set(None)
    try:
        with _jit_recording(None):
            yield
    finally:
        _active.reset(token)


values.probing.asides.append(_not_recording)


def shown_as(what: str) -> Callable[[_Fn], _Fn]:
    """Decorates functions that dispatch on their own: their events are shown as inside `what`."""

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
    """Adds a remark to the row of [`quaxlike.explain`][] for the rule that is running.

    Call it inside a rule, for what the signature does not show: the kernel that was chosen, say.
    It does nothing unless `explain` is running.
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


def user_source() -> tuple[compat.SourceLine, compat.SourceLine | None]:
    """The line of the user's own code that is being executed, and the innermost line of an installed library
    that it called, or None."""
    first: compat.SourceLine | None = None
    for line in compat.source_lines():
        if not compat.is_library(line.file):
            return line, first
        first = first or line
    return first or compat.SourceLine("<unknown>", 1, "?"), None


_JAX_NUMPY = os.path.dirname(inspect.getfile(inspect.unwrap(jnp.isclose))) + os.sep


def functions_of_jax_numpy() -> list[str]:
    """The names of the functions of jax.numpy that are being executed, innermost first.

    A jaxpr that is being interpreted counts as the function that it was traced from.
    """
    found: list[str] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        calls = [(frame.f_code.co_filename, frame.f_code.co_name)]
        if (jaxpr := frame.f_locals.get("jaxpr")) is not None and compat.is_internal(
            frame.f_code.co_filename
        ):
            eqn = frame.f_locals.get("eqn") or getattr(frame.f_locals.get("step"), "eqn", None)
            recorded = getattr(getattr(eqn, "source_info", None), "traceback", None)
            calls = [(f.file_name, f.function_name) for f in recorded.frames] if recorded is not None else []
            own = _function_of(jaxpr)
            # Beyond its own function are the callers that came first: JAX caches what it traces.
            calls = [*calls[: calls.index(own) if own in calls else None], own]
        found += [name for file, name in calls if file and file.startswith(_JAX_NUMPY)]
        frame = frame.f_back
    return found


def is_from_jax_numpy(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr was traced from the function of jax.numpy with this name."""
    file, function = _function_of(jaxpr)
    return function == name and bool(file) and file.startswith(_JAX_NUMPY)


def _function_of(jaxpr: Any) -> tuple[str | None, str]:
    info = compat.debug_info_of(jaxpr)
    return info.func_filename, info.func_name


# The hooks of a type that may end up calling themselves. Functions of the core with the same names only call
# them.
_HOOKS = frozenset(("aval", "default", "materialise", "promote", "widen"))
_CALLERS = values.__file__


def endless(error: RecursionError) -> str | None:
    """The message for a rule or a hook that calls itself endlessly; None if there is none.

    Little of the stack is left here: nothing that memoises errors, as beartype does for plum, may be called.
    """
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
    """`size` in bytes and in a readable unit; a symbolic size of `jax.export` in bytes only."""
    if not isinstance(size, int):
        return f"{size} bytes"
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size:,} bytes ({size / scale:.1f} {unit})"
    return f"{size} bytes"


def leaked(value: values.Value, tracer: Any, is_late: bool) -> Exception:
    """The error for the tracer of a Value that is used after its quaxified function has returned.

    **Arguments:**

    - `is_late`: whether the Value was closed over, so that JAX remembers the tracer.
    """
    kind, at = a_or_an(type(value), capital=True), user_source()[0]
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
