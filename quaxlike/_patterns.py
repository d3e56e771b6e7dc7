"""Matches regular expressions from untrusted files, in bounded time.

Python's `re` uses backtracking, which takes exponential time for patterns like `(.*)*!`. Instead, this tracks
all alternatives at the same time (K. Thompson, "Regular expression search algorithm", 1968). Each part of a
pattern is a function from a set of start positions to a set of end positions, and `re` only matches
individual characters.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

_MOST_STEPS = 50_000  # number of (part, position) pairs; typical layer names need a few hundred
_MOST_CHARACTERS = 10_000
_TOKEN = re.compile(
    r"""(?P<open>\((?:\?(?:[:=!]|<[=!]|P<\w+>)|(?!\?)))
    | (?P<close>\))
    | (?P<bar>\|)
    | (?P<repeat>(?:[*+?]|\{(?:\d{1,10}(?:,\d{0,10})?|,\d{0,10})\})\??)(?![*+?])
    | (?P<place>[\^$]|\\[AZbB])
    | (?P<one>\[\^?\]?(?:\\.|[^\]\\])*\]|\\x..|\\u.{4}|\\U.{8}|\\[^xuUN\d]|[^()|*+?^$\[\\])""",
    re.VERBOSE | re.DOTALL,
)

_Positions = set[int]
_Part = str | Callable[["_Text", _Positions], _Positions]


class PatternError(ValueError):
    """Raised if a regular expression is malformed, too long, or needs too many steps to match."""


class _Text(str):
    steps = 0


def fullmatch(pattern: str, text: str) -> bool:
    """Returns whether a pattern matches the entire text. As `re.fullmatch`, but in bounded time.

    **Raises:** `PatternError` (a `ValueError`) if the pattern uses backreferences, flags or atomic groups, or
    if it takes too many steps to match.
    """
    return _matches(pattern, text)[0]


def startmatch(pattern: str, text: str) -> bool:
    """Returns whether a pattern matches at the start of the text. As `re.match`, but in bounded time.

    **Raises:** as `fullmatch`.
    """
    return _matches(pattern, text)[1]


@functools.lru_cache(maxsize=4096)
def _matches(pattern: str, text: str) -> tuple[bool, bool]:
    """Returns whether a pattern matches the entire text, and whether it matches at the start."""
    try:
        ends = _run(compiled(pattern), _Text(text), {0})
    except RecursionError:
        raise PatternError("groups are nested too deeply") from None
    return len(text) in ends, bool(ends)


@functools.lru_cache(maxsize=512)
def compiled(pattern: str) -> _Part:
    """Compiles a pattern. Raises `PatternError` if it isn't supported."""
    if len(pattern) > _MOST_CHARACTERS:
        raise PatternError(
            f"expressions have at most {_MOST_CHARACTERS:,} characters; this one has {len(pattern):,}"
        )
    tokens, at = list[tuple[str | None, str]](), 0
    while found := _TOKEN.match(pattern, at):
        tokens.append((found.lastgroup, found[0]))
        at = found.end()
    if at < len(pattern):
        raise PatternError(f"{pattern[at : at + 20]!r} is not supported in regular expressions here")
    try:
        part = _either(tokens[::-1])
        re.compile(pattern)  # only checks the syntax; cheap, for there are no flags
        return part
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"not a regular expression: {error}") from None


def _either(tokens: list[tuple[str | None, str]]) -> _Part:
    """Parses alternatives up to the closing bracket. `tokens` is in reverse, for popping."""
    branches: list[list[_Part]] = [[]]
    while tokens and tokens[-1][0] != "close":
        kind, token = tokens.pop()
        parts = branches[-1]
        match kind:
            case "bar":
                branches.append([])
            case "open":
                inner = _either(tokens)
                del tokens[-1:]
                parts.append(_assertion(inner, token) if token[-1] in "=!" else inner)
            case "repeat":
                last = parts.pop() if parts else ""
                if isinstance(last, str) and len(last) > 1:
                    parts.append(last[:-1])
                    last = last[-1]
                parts.append(_repeated(last, token))
            case "one" if token[0] not in ".[\\":
                last = parts[-1] if parts else ""
                parts[-1:] = [last + token] if isinstance(last, str) else [last, token]
            case _:
                parts.append(_at(re.compile(token), kind == "one"))

    def either(text: _Text, starts: _Positions) -> _Positions:
        return set().union(*(functools.reduce(lambda at, x: _run(x, text, at), b, starts) for b in branches))

    return either


def _run(part: _Part, text: _Text, starts: _Positions) -> _Positions:
    """Returns the positions at which a part can end, starting from any of `starts`."""
    text.steps += len(starts)
    if text.steps > _MOST_STEPS:
        raise PatternError(f"takes more than {_MOST_STEPS:,} steps on {text[:80]!r}")
    if isinstance(part, str):
        return {i + len(part) for i in starts if text.startswith(part, i)}
    return part(text, starts)


def _at(pattern: re.Pattern[str], one: bool) -> _Part:
    """Builds a part matching a single character, or a zero-width position if `one` is False."""
    if one:
        return lambda text, starts: {i + 1 for i in starts if pattern.fullmatch(text, i, i + 1)}
    return lambda text, starts: {i for i in starts if pattern.match(text, i)}


def _assertion(part: _Part, token: str) -> _Part:
    """Builds a positive or negative lookahead or lookbehind."""

    def holds(text: _Text, starts: _Positions) -> _Positions:
        if "<" in token:
            # A lookbehind succeeds if any match ends here, wherever it starts.
            found = _run(part, text, set(range(len(text) + 1))) & starts
        else:
            found = {i for i in starts if _run(part, text, {i})}
        return found if token.endswith("=") else starts - found

    return holds


def _repeated(part: _Part, token: str) -> _Part:
    usual: dict[str, Any] = {"*": (0, sys.maxsize), "+": (1, sys.maxsize), "?": (0, 1)}
    least, comma, most = token.strip("{}?").partition(",")
    most = most or (sys.maxsize if comma else least)
    least, most = usual.get(token[0]) or (int(least or 0), int(most))

    def repeated(text: _Text, starts: _Positions) -> _Positions:
        for _ in range(least):
            before, starts = starts, _run(part, text, starts)
            if starts == before:  # a fixed point, so repeating this again wouldn't change it
                break
        reached, new = set(starts), starts
        for _ in range(most - least):
            new = _run(part, text, new) - reached
            if not new:
                break
            reached |= new
        return reached

    return repeated


def is_pattern(x: Any) -> bool:
    """Returns whether `x` is a supported pattern."""
    try:
        return isinstance(x, str) and compiled(x) is not None
    except PatternError:
        return False


def matches_layer(pattern: str, layer: str) -> bool:
    """Returns whether a layer's name matches a key from PEFT's `rank_pattern` or `alpha_pattern`."""
    return fullmatch(rf"(.*\.)?({pattern})$", layer)


def value_for(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """Returns the value for the first pattern matching a layer's name, or else `otherwise`."""
    return next((value for pattern, value in patterns.items() if matches_layer(pattern, layer)), otherwise)


def value_by_end(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """As `value_for`, but matching like PEFT's FourierFT and C³A.

    A pattern describes what follows some dot in a layer's name, or it is the whole name. It has no brackets,
    so the end of the name only belongs to the last alternative.
    """
    found = next((p for p in patterns if startmatch(rf".*\.{p}$", layer)), layer)
    return patterns.get(found, otherwise)
