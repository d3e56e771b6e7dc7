"""The results of `check_type` and `check_program`, as tables."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

from .programs import MODES


@dataclasses.dataclass(frozen=True)
class Check:
    """The check of one hook, or of one program in its modes."""

    name: str
    results: Mapping[str, str]
    """For each mode, "ok", "failed", "declined" (the type raised an error for operands that do not fit
    together), or "-" (not tried, since the type does not have the hook, or JAX cannot do it).
    """
    culprit: str = ""
    """What is wrong, if something failed. For a type, this is the first wrong hook, or the file and line of
    the first wrong rule; for a program, the line where Values are treated differently, if known.
    """
    message: str = ""
    """How its result differs from the expected one."""
    dense_at: str = ""
    """The first primitive which materialised the value."""

    @property
    def failed(self) -> bool:
        return "failed" in self.results.values()


class TypeReport:
    """The results of [`quaxlike.testing.check_type`][]. Prints as a table."""

    def __init__(self, subject: str, checks: Sequence[Check], never_met: Sequence[str]) -> None:
        self.subject = subject
        """A description of the value."""
        self.checks = tuple(checks)
        """One [`Check`][quaxlike.testing.Check] for each hook and each program."""
        self.never_met = tuple(never_met)
        """The rules of the type which no program has used."""

    @property
    def failures(self) -> tuple[Check, ...]:
        """The failed checks, hooks first; empty for a correct type."""
        return tuple(check for check in self.checks if check.failed)

    @property
    def summary(self) -> str:
        """The counts, then each culprit with its first message."""
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
        return "\n".join([*_table(head, lines), "", self.summary])

    __repr__ = __str__


class ProgramReport:
    """The results of [`quaxlike.testing.check_program`][]. Prints as a table."""

    def __init__(self, subject: str, transforms: Sequence[str], checks: Sequence[Check]) -> None:
        self.subject = subject
        """The function's name."""
        self.transforms = tuple(transforms)
        """The tried transforms."""
        self.checks = tuple(checks)
        """One [`Check`][quaxlike.testing.Check] for each kind of Values in each argument."""

    @property
    def failures(self) -> tuple[Check, ...]:
        """The failed checks; empty if the function works for any kind of array."""
        return tuple(check for check in self.checks if check.failed)

    @property
    def summary(self) -> str:
        """The counts, then each line with its first message."""
        lines = [f"{self.subject}: {len(self.checks)} checks, {len(self.failures)} failed."]
        return "\n".join(lines + _messages(self.failures))

    def __str__(self) -> str:
        lines = [(c.name, *(c.results.get(t, "") for t in self.transforms), c.culprit) for c in self.checks]
        return "\n".join([*_table(("values", *self.transforms, "at"), lines), "", self.summary])

    __repr__ = __str__


def _messages(failures: Sequence[Check]) -> list[str]:
    """Each culprit with its first message."""
    first: dict[str, str] = {}
    for check in failures:
        first.setdefault(check.culprit or check.name, check.message)
    return [f"{culprit}\n{textwrap.indent(message, '  ')}" for culprit, message in first.items()]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]
