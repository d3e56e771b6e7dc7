"""The time that a function takes on the device, and the time it would take at the device's limits."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Programs that are started before the first has ended, so that the device does not wait for the host.
_PROGRAMS = 4
# Operands are rotated until together they are this much larger than the caches.
CACHE_BYTES = {"gpu": 3 * 50 * 2**20, "tpu": 2 * 128 * 2**20, "cpu": 64 * 2**20}


class Time(NamedTuple):
    """Seconds a call: the median over repetitions and half of the range between the quartiles."""

    median: float
    spread: float

    def __str__(self) -> str:
        scale, unit = (1e6, "µs") if self.median < 1e-3 else (1e3, "ms")
        return f"{self.median * scale:.3g} ± {self.spread * scale:.2g} {unit}"


class Limits(NamedTuple):
    """What the device did at best, in this run."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, bytes_: float, flops: float) -> float:
        """The least time that so much traffic and arithmetic can take."""
        return max(bytes_ / self.bytes_per_second, flops / self.flops_per_second)


def summarise(times: Sequence[float]) -> Time:
    quartiles = statistics.quantiles(times, n=4)
    return Time(statistics.median(times), (quartiles[2] - quartiles[0]) / 2)


class Way(NamedTuple):
    """A function to time, and several operands for it to be called on in turn."""

    fn: Callable[..., Any]
    operands: Sequence[tuple[Any, ...]]


def measure(ways: Mapping[str, Way], repeats: int, *, chained: bool | None = None) -> dict[str, Time]:
    """The time of a call of each way by the clock, interleaved.

    `chained`, as on accelerators if None, calls run one after the other on the device, as a program of all
    operands: a call finds the caches filled by the others, and the device does not wait for the host between
    them.
    """
    chained = jax.default_backend() != "cpu" if chained is None else chained
    runs = {name: (_chained if chained else _turns)(way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run())
    return {name: summarise(of_way) for name, of_way in times.items()}


def _turns(way: Way) -> Callable[[], float]:
    """The seconds of a call, on one of the operands after the other."""
    compiled, turn = jax.jit(way.fn), itertools.cycle(way.operands)
    jax.block_until_ready(compiled(*way.operands[0]))
    return lambda: _clock(lambda: compiled(*next(turn)))


def _chained(way: Way) -> Callable[[], float]:
    """The seconds of a call among calls on all operands in turn."""

    # Each tuple once: to hand a program hundreds of arrays takes the host longer than the device to multiply.
    distinct = {id(each): each for each in way.operands}
    places = {name: i for i, name in enumerate(distinct)}

    def program(operands: Sequence[tuple[Any, ...]]) -> list[Any]:
        out: list[Any] = []
        for each in way.operands:
            each = operands[places[id(each)]]
            # In turn: XLA would merge products that share a weight, or run them side by side.
            each = jax.lax.optimization_barrier((each, out[-1]))[0] if out else each
            out.append(way.fn(*each))
        return out

    compiled, operands = jax.jit(program), list(distinct.values())
    jax.block_until_ready(compiled(operands))

    programs = lambda: [compiled(operands) for _ in range(_PROGRAMS)]
    return lambda: _clock(programs) / _PROGRAMS / len(way.operands)


def _clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def in_turn(operands: Iterable[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """`count` operands, the given ones one after the other."""
    return list(itertools.islice(itertools.cycle(list(operands)), count))


def rotations(bytes_: int) -> int:
    """How many operands of a size it takes for none of them to stay in the caches."""
    return max(2, math.ceil(CACHE_BYTES[jax.default_backend()] / bytes_))


def measure_limits(dtype: Any, size: int, repeats: int) -> Limits:
    """Reading a large array, and a square product in a dtype."""
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.standard_normal(max(2**24, 16 * size**2 // 4), np.float32))
    square = jnp.asarray(rng.standard_normal((size, size), np.float32), dtype)
    ways = {"read": Way(jnp.sum, [(array,)]), "multiply": Way(jnp.matmul, [(square, square)])}
    times = measure(ways, repeats)
    return Limits(array.nbytes / times["read"].median, 2 * size**3 / times["multiply"].median)


def relative_error(y: Any, expected: Any) -> float:
    y, expected = np.float64(y), np.float64(expected)
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
