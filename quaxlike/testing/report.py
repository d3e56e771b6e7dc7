"""The reports returned by `check_type` and `check_program`."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

from ..core.inspect.page import plain_table
from .programs import MODES


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of checking a single hook, or a single program in all its modes."""

    name: str
    results: Mapping[str, str]
    """Maps each mode to "ok", "failed", "declined" (the type raised an error because the operands are
    incompatible), or "-" (not tried, because the type doesn't have this hook or JAX doesn't support this).
    """
    culprit: str = ""
    """The cause of a failure. For a type, this is the first incorrect hook, or the line of the first
    incorrect rule. For a program, this is the line at which Values are treated differently (if we know it).
    """
    message: str = ""
    """How the result is different from the expected result."""
    dense_at: str = ""
    """The first primitive that has materialised the value."""

    @property
    def failed(self) -> bool:
        return "failed" in self.results.values()


class TypeReport:
    """The results of [`quaxlike.testing.check_type`][], which print as a table."""

    def __init__(self, subject: str, checks: Sequence[Check], never_met: Sequence[str]) -> None:
        self.subject = subject
        """A description of the value."""
        self.checks = tuple(checks)
        """One [`Check`][quaxlike.testing.Check] per hook and per program."""
        self.never_met = tuple(never_met)
        """Any rules for the type that weren't used by a single program."""

    @property
    def failures(self) -> tuple[Check, ...]:
        """All failed checks, starting with hooks. If the type is correct then this is empty."""
        return tuple(check for check in self.checks if check.failed)

    @property
    def summary(self) -> str:
        """A summary, with the number of checks followed by each culprit and its first message."""
        kept = [c for c in self.checks if "ok" in c.results.values() and not c.dense_at]
        lines = [
            f"{self.subject}: {len(self.checks)} checks, {len(self.failures)} failed; "
            f"{len(kept)} kept the type or do not need to."
        ]
        lines += _messages(self.failures)
        if self.never_met:
            lines.append("Rules that no program used:\n" + textwrap.indent("\n".join(self.never_met), "  "))
        return "\n".join(lines)

    def __str__(self) -> str:
        head = ("check", *MODES, "first failing hook or rule", "made dense at")
        lines = [(c.name, *(c.results.get(m, "") for m in MODES), c.culprit, c.dense_at) for c in self.checks]
        return f"{plain_table([head, *lines])}\n\n{self.summary}"

    __repr__ = __str__


class ProgramReport:
    """The results of [`quaxlike.testing.check_program`][], which print as a table."""

    def __init__(self, subject: str, transforms: Sequence[str], checks: Sequence[Check]) -> None:
        self.subject = subject
        """The name of the function."""
        self.transforms = tuple(transforms)
        """The transforms that were tried."""
        self.checks = tuple(checks)
        """One [`Check`][quaxlike.testing.Check] per kind of Value and argument."""

    @property
    def failures(self) -> tuple[Check, ...]:
        """All failed checks. If the function works with any kind of array then this is empty."""
        return tuple(check for check in self.checks if check.failed)

    @property
    def summary(self) -> str:
        """A summary, with the number of checks followed by each line and its first message."""
        lines = [f"{self.subject}: {len(self.checks)} checks, {len(self.failures)} failed."]
        return "\n".join(lines + _messages(self.failures))

    def __str__(self) -> str:
        lines = [(c.name, *(c.results.get(t, "") for t in self.transforms), c.culprit) for c in self.checks]
        return f"{plain_table([('values', *self.transforms, 'at'), *lines])}\n\n{self.summary}"

    __repr__ = __str__


def _messages(failures: Sequence[Check]) -> list[str]:
    """Returns each culprit together with its first message."""
    first: dict[str, str] = {}
    for check in failures:
        first.setdefault(check.culprit or check.name, check.message)
    return [f"{culprit}\n{textwrap.indent(message, '  ')}" for culprit, message in first.items()]
