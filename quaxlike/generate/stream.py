"""Tokens as text that is written as it comes, and the speed at which they come."""

import time
from typing import Any, NamedTuple

from ..interop.text import TextTokenizer


class Count(NamedTuple):
    """The number of tokens, and the time that they took once both programs were compiled."""

    tokens: int
    timed: int
    seconds: float

    def __add__(self, other: "Count") -> "Count":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Count(self.tokens + other.tokens, self.timed + other.timed, self.seconds + other.seconds)


class Clock:
    """Counts tokens by step. The first two steps compile: a prompt's program, and the one for a token."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._counts: list[int] = []

    def tick(self, tokens: int) -> None:
        self._times.append(time.perf_counter())
        self._counts.append(tokens)

    def count(self) -> Count:
        if len(self._times) < 3:
            return Count(sum(self._counts), 0, 0.0)
        return Count(sum(self._counts), sum(self._counts[2:]), self._times[-1] - self._times[1])


class Stream:
    """Turns the tokens of one text into text as they come."""

    def __init__(self, tokenizer: TextTokenizer, out: Any) -> None:
        self._tokenizer, self._out, self._clock = tokenizer, out, Clock()
        self.tokens: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        self._clock.tick(1)
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens)
        # A character may need several tokens, and decodes to U+FFFD until it is complete.
        if not text.endswith("\ufffd") and text.startswith(self.text):
            self._write(text)

    def _write(self, text: str) -> None:
        self._out.write(text.removeprefix(self.text))
        self._out.flush()
        self.text = text

    def finish(self) -> Count:
        """Writes the remaining text."""
        self._write(self._tokenizer.decode(self.tokens))
        self._out.write("\n")
        self._out.flush()
        return self._clock.count()
