"""Timing of the same work done in several ways, interleaved in one run, so that ratios can be compared."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work, done several ways; `operations` of it in each run."""

    name: str
    ways: dict[str, Callable[[], Any]]
    operations: int = 1


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds per operation of each way, in each repeat."""

    case: Case
    seconds: dict[str, list[float]]

    @property
    def median(self) -> dict[str, float]:
        return {way: statistics.median(s) for way, s in self.seconds.items()}

    @property
    def spread(self) -> dict[str, float]:
        """Between the quartiles."""
        quartiles = {way: statistics.quantiles(s, n=4) for way, s in self.seconds.items()}
        return {way: q[2] - q[0] for way, q in quartiles.items()}

    def ratio(self, of: str, to: str) -> float | None:
        """The median of the ratios within a repeat, where both saw the machine in the same state."""
        if of not in self.seconds or to not in self.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds[of], self.seconds[to], strict=True))

    def as_json(self) -> dict[str, Any]:
        ratios = {way: self.ratio("quaxlike", way) for way in self.seconds if way != "quaxlike"}
        return {
            "case": self.case.name,
            "median_us": _micro(self.median),
            "spread_us": _micro(self.spread),
            "quaxlike_to": {way: ratio and round(ratio, 3) for way, ratio in ratios.items()},
        }


def _micro(seconds: dict[str, float]) -> dict[str, float]:
    return {way: round(1e6 * s, 3) for way, s in seconds.items()}


def measure(case: Case, repeats: int) -> Measured:
    """Runs every way twice to warm up, then all of them in turn, `repeats` times.

    Each time in another order: what ran before leaves its mark on caches and heap.
    """
    for run in case.ways.values():
        run()
        run()
    seconds: dict[str, list[float]] = {way: [] for way in case.ways}
    order = random.Random(0)
    for _ in range(repeats):
        for way, run in order.sample(list(case.ways.items()), len(case.ways)):
            start = time.perf_counter()
            run()
            seconds[way].append((time.perf_counter() - start) / case.operations)
    return Measured(case, seconds)
