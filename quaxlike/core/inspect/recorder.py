"""The recorder behind `explain`: creates one event for each primitive called with a Value.

The body of a loop may be traced several times, until its carry no longer changes. Only the last trace is part
of the program, so events are stored by jaxpr, and each trace replaces the previous one.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ..recording import describe, user_source
from ..rules import Checked, Rule, RulesByOperands

Outcome = Literal["rule", "default", "built-in", "materialised"]


@dataclasses.dataclass(eq=False)
class Event:
    """A primitive called with Values."""

    primitive: str
    operands: tuple[str, ...]
    source: str  # the line of the user's own code
    through: str  # if the user's code called a library: the line in the library
    outcome: Outcome = "built-in"
    rule: Rule | None = None
    results: tuple[str, ...] = ()
    size: int = 0  # bytes materialised
    hint: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    # Events inside this one, either directly or in a jaxpr of the primitive. The latter are stored by jaxpr:
    # if it is traced several times (like the body of a loop), only the last trace is kept.
    inside: dict[Any, tuple[str, list["Event"]]] = dataclasses.field(default_factory=dict)

    @property
    def is_inlined_jit(self) -> bool:
        """Whether this is an inlined jit. If so, its equations are shown in its place."""
        return self.outcome == "built-in" and self.primitive in ("jit", "pjit") and [*self.inside] == [None]

    def events_inside(self, key: Any, what: str) -> list["Event"]:
        return self.inside.setdefault(key, (what, []))[1]


class Recorder:
    """Collects a run's events as a tree."""

    def __init__(self) -> None:
        self.root = self._open = Event("", (), "", "")
        self._events = self.root.events_inside(None, "")
        self._traced: dict[Any, tuple[Any, list[Event]]] = {}

    def follow(
        self, handler: Callable[..., Any], primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Calls `handler` and records the event, unless the handler declines by returning
        `NotImplemented`."""
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
        """Calls `tracing` only once for each key, but records its events every time.

        Used for cached jaxprs.
        """
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
        """Records that operands were materialised.

        Added to the current primitive's event if this asked for it, otherwise to a separate event.
        """
        event = self._open
        # With `startswith`, because the name may be e.g. "shard_map (out_specs)".
        asks = event is not self.root and primitive.startswith(event.primitive)
        if not asks or event.outcome == "rule":
            event = self._new(primitive, operands)
            self._events.append(event)
        event.outcome = "materialised"
        event.size += size
        event.hint = event.hint or hint
        event.notes += notes

    def by_default_of(self, cls: type) -> None:
        """Records that the current primitive used a type's own `default`."""
        self._open.outcome = "default"
        self._open.notes.append(f"{cls.__name__}.default")

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Shows the events recorded in this block inside `what`."""
        before, self._events = self._events, self._open.events_inside(what, what)
        try:
            yield
        finally:
            self._events = before

    def unseen(self) -> "Recorder":
        """A separate recorder for anything only traced to find something out, which shouldn't be shown."""
        return Recorder()

    def note(self, text: str) -> None:
        if self._open is not self.root:
            self._open.notes.append(text)

    def _new(self, primitive: str, operands: Sequence[Any]) -> Event:
        source, through = user_source()
        return Event(primitive, tuple(map(describe, operands)), str(source), str(through or ""))

    def events(self) -> Iterator[tuple[tuple[str, ...], Event]]:
        """Lists every event in program order, with a path to where it occurred."""
        return _walk((), self.root)


def _walk(where: tuple[str, ...], event: Event) -> Iterator[tuple[tuple[str, ...], Event]]:
    for what, events in event.inside.values():
        inner = (*where, what) if what else where
        for e in events:
            if not e.is_inlined_jit:
                yield inner, e
            yield from _walk(inner, e)
