"""Regular expressions from untrusted files, matched in time linear in the text.

`re` tries alternatives one after another, and takes exponential time for expressions such as `(.*)*!`. Here
an expression becomes a graph of states, each of which is visited once per position in the text (K. Thompson,
"Regular expression search algorithm", 1968). The grammar is Python's own, without backreferences.
"""

import functools
import importlib
import re
from typing import Any, NamedTuple

_MOST_STATES = 2_000
_MOST_STEPS = 50_000  # states that one text visits; names of layers visit some hundreds
_MOST_CHARACTERS = 10_000
# The parser of the standard library, which `re` does not expose.
_sre: Any = importlib.import_module("re._parser")


class PatternError(ValueError):
    """A regular expression that is malformed, too long, or cannot be matched in linear time."""


class _State(NamedTuple):
    """One step: `argument` is a character or set of characters, an assertion, or nothing for a fork."""

    kind: str
    argument: Any
    after: tuple[int, ...]


def fullmatch(pattern: str, text: str) -> bool:
    """Whether an expression matches the whole of a text, like `re.fullmatch`.

    **Raises:** `PatternError`, a `ValueError`, for an expression that cannot be matched in linear time.
    """
    return len(text) in _ends(pattern, text)


def startmatch(pattern: str, text: str) -> bool:
    """Whether an expression matches the beginning of a text, like `re.match`.

    **Raises:** as `fullmatch`.
    """
    return bool(_ends(pattern, text))


@functools.lru_cache(maxsize=4096)
def _ends(pattern: str, text: str) -> frozenset[int]:
    graph = compiled(pattern)
    try:
        return frozenset(graph.ends(text, graph.start, 0, _Matching()))
    except RecursionError:
        raise PatternError("assertions are nested too deeply") from None


@functools.lru_cache(maxsize=512)
def compiled(pattern: str) -> "_Graph":
    """The graph of an expression. Raises `PatternError` if there is none."""
    if len(pattern) > _MOST_CHARACTERS:
        raise PatternError(
            f"expressions have at most {_MOST_CHARACTERS:,} characters; this one has {len(pattern):,}"
        )
    try:
        graph = _Graph(pattern)
        re.compile(pattern)  # after `_Graph` has refused flags: with these, it may take long
        return graph
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"not a regular expression: {error}") from None


class _Matching:
    """What is known while a text is matched: which assertions hold where, and the number of steps."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], bool] = {}
        self.steps = 0


class _Graph:
    """The states of an expression."""

    def __init__(self, pattern: str) -> None:
        parsed = _sre.parse(pattern)
        if parsed.state.flags & ~re.UNICODE.value:
            raise PatternError("flags within expressions are not supported")
        self.states: list[_State] = []
        self.start = self._sequence(parsed, self._add("end", None))

    def _add(self, kind: str, argument: Any, *after: int) -> int:
        if len(self.states) >= _MOST_STATES:
            raise PatternError(f"takes more than {_MOST_STATES:,} states")
        self.states.append(_State(kind, argument, after))
        return len(self.states) - 1

    def _sequence(self, items: Any, after: int) -> int:
        for kind, argument in reversed(list(items)):
            after = self._item(str(kind), argument, after)
        return after

    def _item(self, kind: str, argument: Any, after: int) -> int:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "RANGE" | "CATEGORY":
                return self._add("character", (kind, argument), after)
            case "SUBPATTERN":
                _, added, removed, inner = argument
                if added or removed:
                    raise PatternError("flags within expressions are not supported")
                return self._sequence(inner, after)
            case "BRANCH":
                return self._add("fork", None, *(self._sequence(branch, after) for branch in argument[1]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return self._repeat(least, most, inner, after)
            case "AT":
                return self._add("at", str(argument), after)
            case "FAILURE":  # `(?!)`
                return self._add("fork", None)
            case "ASSERT" | "ASSERT_NOT":
                direction, inner = argument
                width = inner.getwidth()[0] if direction < 0 else 0
                start = self._sequence(inner, self._add("end", None))
                return self._add("assert", (kind == "ASSERT", start, width, direction < 0), after)
        raise PatternError(f"{kind.lower().replace('_', ' ')} is not supported")

    def _repeat(self, least: int, most: Any, inner: Any, after: int) -> int:
        if most == _sre.MAXREPEAT:
            # A placeholder: the loop back leads to a state that is added after this fork.
            fork = self._add("fork", None)
            first = self._sequence(inner, fork)
            self.states[fork] = _State("fork", None, (first, after))
            after = fork
        else:
            skip = after
            for _ in range(most - least):
                after = self._add("fork", None, self._sequence(inner, after), skip)
        for _ in range(least):
            before, after = after, self._sequence(inner, after)
            if after == before:  # an empty expression, which adds no states however often it is repeated
                break
        return after

    def ends(self, text: str, start: int, at: int, matching: _Matching) -> set[int]:
        """The positions at which a match from state `start` that begins at `at` may end."""
        seen, waiting, found = {(start, at)}, [(start, at)], set[int]()
        while waiting:
            state, place = waiting.pop()
            matching.steps += 1
            if matching.steps > _MOST_STEPS:
                raise PatternError(f"takes more than {_MOST_STEPS:,} steps on {text[:80]!r}")
            kind, argument, after = self.states[state]
            if kind == "end":
                found.add(place)
                continue
            if kind == "character":
                if place == len(text) or not _accepts(argument, text[place]):
                    continue
                place += 1
            elif (kind == "at" and not _holds(argument, text, place)) or (
                kind == "assert" and not self._asserted(state, text, place, matching)
            ):
                continue
            for other in after:
                if (other, place) not in seen:
                    seen.add((other, place))
                    waiting.append((other, place))
        return found

    def _asserted(self, state: int, text: str, at: int, matching: _Matching) -> bool:
        known = matching.known
        if (state, at) not in known:
            wanted, start, width, behind = self.states[state].argument
            if behind:
                found = width <= at and at in self.ends(text, start, at - width, matching)
            else:
                found = bool(self.ends(text, start, at, matching))
            known[state, at] = found == wanted
        return known[state, at]


def _accepts(item: Any, c: str) -> bool:
    kind, argument = item
    match str(kind):
        case "LITERAL":
            return ord(c) == argument
        case "NOT_LITERAL":
            return ord(c) != argument
        case "ANY":
            return c != "\n"
        case "RANGE":
            return argument[0] <= ord(c) <= argument[1]
        case "CATEGORY":
            return _CATEGORIES[str(argument)](c)
    negate = bool(argument) and str(argument[0][0]) == "NEGATE"
    return any(_accepts(member, c) for member in argument[negate:]) != negate


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


_CATEGORIES = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda c: not c.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda c: not c.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda c: not _is_word(c),
}


def _holds(where: str, text: str, at: int) -> bool:
    match where:
        case "AT_BEGINNING" | "AT_BEGINNING_STRING":
            return at == 0
        case "AT_END":
            return at == len(text) or (at == len(text) - 1 and text[at] == "\n")
        case "AT_END_STRING":
            return at == len(text)
    before, behind = at > 0 and _is_word(text[at - 1]), at < len(text) and _is_word(text[at])
    return (before != behind) == (where == "AT_BOUNDARY")
