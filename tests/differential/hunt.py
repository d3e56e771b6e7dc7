"""Rounds of random programs, and what they found."""

import collections
import dataclasses
import itertools
import time
import warnings
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from .compare import Finding, outcomes
from .program import Program, of_each_rule, programs

Key = tuple[str, ...]


@dataclasses.dataclass
class Tally:
    """How many programs ran, by their type and by each transform, and how each of them ended."""

    types: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    transforms: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    findings: dict[Key, str] = dataclasses.field(default_factory=dict)

    def add(self, program: Program, status: str) -> None:
        self.types[program.type, status] += 1
        for where, names in (("inside", program.inner), ("outside", program.outer)):
            for name in names or ("-",):
                self.transforms[f"{where} {name}", status] += 1

    def merge(self, other: "Tally") -> None:
        self.types += other.types
        self.transforms += other.transforms
        self.findings = other.findings | self.findings

    def __str__(self) -> str:
        return "\n\n".join(map(_table, (self.transforms, self.types)))


def _table(counts: collections.Counter[tuple[str, str]]) -> str:
    columns = ["equal", "declined", "rejected", "finding"]
    rows = sorted({name for name, _ in counts})
    lines = [f"{'':60}" + "".join(f"{column:>10}" for column in columns)]
    lines += [f"{row:60}" + "".join(f"{counts[row, column]:10}" for column in columns) for row in rows]
    total = [sum(counts[row, column] for row in rows) for column in columns]
    return "\n".join([*lines, f"{'':60}" + "".join(f"{n:10}" for n in total)])


def hunt_for(names: tuple[str, ...], **options: Any) -> Tally:
    """A round of programs of both kinds, on values of these types."""
    return hunt(programs(names) | of_each_rule(names, 1, 4), **options)


def hunt(
    drawn: SearchStrategy[tuple[Program, ...]],
    *,
    seed_: int,
    examples: int,
    known: frozenset[Key] = frozenset(),
    until: float = float("inf"),
    shrink: bool = True,
) -> Tally:
    """Runs programs; each finding that is not `known` is kept, made smaller first if it shall `shrink`."""
    tally, known_here = Tally(), set(known)
    numbers = itertools.count()

    @settings(
        max_examples=examples + 1,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def each(programs: tuple[Program, ...]) -> None:
        # The first draw is the simplest that there is, whatever the seed.
        if next(numbers) == 0 or time.monotonic() > until:
            return
        for program, outcome in outcomes(programs):
            tally.add(program, outcome.status)
            if isinstance(outcome, Finding) and outcome.key not in known_here:
                if len(programs) == 1:
                    raise outcome
                tally.findings.setdefault(outcome.key, str(outcome))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seed(seed_)(each)()
        except Finding as finding:
            tally.findings[finding.key] = str(finding)
    return tally
