"""Timing of the same work done several ways: interleaved in one run, so that only ratios are compared."""

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
    """Seconds per operation of each way: medians over the repeats, and the spread between quartiles."""

    case: Case
    median: dict[str, float]
    spread: dict[str, float]

    def ratio(self, of: str, to: str) -> float | None:
        if of not in self.median or to not in self.median:
            return None
        return self.median[of] / self.median[to]

    def as_json(self) -> dict[str, Any]:
        return {"case": self.case.name, "median_us": _micro(self.median), "spread_us": _micro(self.spread)}


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
    quartiles = {way: statistics.quantiles(s, n=4) for way, s in seconds.items()}
    return Measured(
        case,
        {way: statistics.median(s) for way, s in seconds.items()},
        {way: q[2] - q[0] for way, q in quartiles.items()},
    )
