"""The kernels against their targets: `python -m benchmarks.gpu`, or with `--cpu` the rows for a CPU.

Every row is measured side by side with its baseline in one run, on weights that are rotated past the
caches; times are medians and half of the range between the quartiles, on a GPU of the kernels alone.
Errors are relative L2 distances from a float32 product with the dequantised weight, on fresh random
inputs; besides ours, that of a product with the weight rounded to bfloat16.
"""

import argparse
import functools
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quaxlike.kernels import NestedScales, blockwise, lora_matmul, nf4_matmul

from . import bitsandbytes, block_sparse
from .timing import Limits, Time, Way, measure, measure_limits, relative_error, rotations

BLOCK = 64
# For numbers of rows of x: baseline, must and goal.
Targets = Mapping[int, Sequence[tuple[str, float | None, float | None]]]


class Row(NamedTuple):
    """A line of the table; `must` and `goal` are the targets for baseline / time."""

    case: str
    time: Time
    baseline: str
    baseline_time: Time | None
    limit: float
    must: float | None = None
    goal: float | None = None
    errors: tuple[float, float] | None = None
    note: str = ""

    def __str__(self) -> str:
        of_baseline = "—"
        verdict = ""
        if self.baseline_time is not None:
            ratio = self.baseline_time.median / self.time.median
            of_baseline = f"{ratio:.2f}×"
            if self.must is not None:
                verdict = "goal" if self.goal and ratio >= self.goal else "must"
                verdict = verdict if ratio >= self.must else "short"
        targets = "/".join("—" if t is None else f"{t:g}×" for t in (self.must, self.goal))
        errors = "—" if self.errors is None else "/".join(f"{e:.1e}" for e in self.errors)
        cells = [
            self.case,
            str(self.time),
            self.baseline,
            str(self.baseline_time or "—"),
            of_baseline,
            targets,
            verdict,
            f"{self.limit / self.time.median:.0%}",
            errors,
            self.note,
        ]
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| case | time | baseline | its time | ratio | must/goal | met | of the limit | "
    "error, ours/bf16 | note |\n" + "| --- " * 10 + "|"
)


class Weights(NamedTuple):
    """Random 4-bit weights of a shape, as many as it takes to rotate."""

    shape: tuple[int, int]
    packed: list[jax.Array]
    absmax: list[jax.Array]

    @classmethod
    def random(cls, shape: tuple[int, int], rng: np.random.Generator) -> "Weights":
        size = shape[0] * shape[1]
        count = rotations(size // 2)
        byte = lambda: jnp.asarray(rng.integers(0, 256, size // 2, np.uint8))
        scale = lambda: jnp.asarray(rng.uniform(0.01, 0.05, size // BLOCK).astype(np.float32))
        return cls(shape, [byte() for _ in range(count)], [scale() for _ in range(count)])

    @property
    def bytes(self) -> int:
        return self.packed[0].nbytes + self.absmax[0].nbytes

    def dense(self, i: int, dtype: Any) -> jax.Array:
        return _dequantize(self.packed[i], self.absmax[i], self.shape, dtype)

    def call(self, **params: Any) -> Callable[..., jax.Array]:
        return functools.partial(
            nf4_matmul, codebook=blockwise.NF4, shape=self.shape, block_size=BLOCK, **params
        )

    def flops(self, m: int) -> float:
        return 2.0 * m * self.shape[0] * self.shape[1]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _dequantize(packed: jax.Array, absmax: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    flat = blockwise.dequantize_codebook(
        packed, absmax, blockwise.NF4, n=shape[0] * shape[1], block_size=BLOCK, dtype=dtype
    )
    return flat.reshape(shape)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def _errors(fn: Callable[..., jax.Array], w: Weights, x: jax.Array) -> tuple[float, float]:
    exact = w.dense(0, jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = x.astype(jnp.float32) @ exact.T
    rounded = _product(x, exact.astype(jnp.bfloat16))
    ours = jax.jit(fn)(x, w.packed[0], w.absmax[0])
    return relative_error(ours, expected), relative_error(rounded, expected)


class Bench:
    """The rows for a device: its limits, and how often to repeat."""

    def __init__(self, limits: Limits, dtype: Any, repeats: int, seed: int) -> None:
        self.limits, self.dtype, self.repeats = limits, dtype, repeats
        self.rng = np.random.default_rng(seed)

    def x(self, m: int, k: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal((m, k), np.float32), self.dtype)

    def rotated(self, m: int, w: Weights) -> list[tuple[Any, ...]]:
        pairs = zip(w.packed, w.absmax, strict=True)
        return [(self.x(m, w.shape[1]), *pair) for pair in pairs]

    def times(self, **ways: Way) -> dict[str, Time]:
        return measure(ways, self.repeats)

    def limit(self, w: Weights, m: int, extra_bytes: float = 0.0) -> float:
        n, k = w.shape
        activations = self.dtype.itemsize * m * (n + k)
        return self.limits.seconds(w.bytes + activations + extra_bytes, w.flops(m))

    def ours(self, w: Weights, m: int) -> Way:
        return Way(w.call(), self.rotated(m, w))

    def dense(self, w: Weights, m: int) -> Way:
        """XLA's product with the weight in the dtype of the activations."""
        count = min(len(w.packed), rotations(w.shape[0] * w.shape[1] * self.dtype.itemsize))
        return Way(_product, [(self.x(m, w.shape[1]), w.dense(i, self.dtype)) for i in range(count)])

    def naive(self, w: Weights, m: int) -> Way:
        """Dequantise, then multiply, as two lines of JAX."""
        fn = lambda x, packed, absmax: _product(x, _dequantize(packed, absmax, w.shape, self.dtype))
        return Way(fn, self.rotated(m, w))

    def nf4(self, shape: tuple[int, int], targets: Targets) -> Iterator[Row]:
        """Rows for a shape."""
        w = Weights.random(shape, self.rng)
        for m, baselines in targets.items():
            times: dict[str, Time | None] = {}
            times |= self.times(ours=self.ours(w, m), XLA=self.dense(w, m), naive=self.naive(w, m))
            if any(name == "bitsandbytes" for name, _, _ in baselines):
                times["bitsandbytes"] = bitsandbytes.time(m, shape, self.repeats)
            errors = _errors(w.call(), w, self.x(m, shape[1]))
            note = self._extra_memory(w.call(), m, w)
            case, limit = f"NF4 {shape[0]}×{shape[1]}, M = {m}", self.limit(w, m)
            for name, must, goal in baselines:
                yield Row(case, times["ours"], name, times[name], limit, must, goal, errors, note)

    def _extra_memory(self, fn: Callable[..., Any], m: int, w: Weights) -> str:
        compiled = jax.jit(fn).lower(self.x(m, w.shape[1]), w.packed[0], w.absmax[0]).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return f"temporaries {temporary / 2**20:.2g} MiB, {temporary / w.bytes:.1%} of the weight"

    def nested(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """Double-quantised scales against float32 scales."""
        w = Weights.random(shape, self.rng)
        quant_map = jnp.asarray(blockwise.dynamic_map())
        scales = [NestedScales(*blockwise.quantize_scales(a), quant_map) for a in w.absmax]
        pairs = zip(w.packed, scales, strict=True)
        nested = Way(w.call(), [(self.x(m, shape[1]), *pair) for pair in pairs])
        times = self.times(ours=nested, own=self.ours(w, m))
        case = f"double-quantised scales {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "own f32", times["own"], self.limit(w, m), 0.95, 1.05)

    def lora(self, shape: tuple[int, int], m: int, must: float, goal: float) -> Iterator[Row]:
        """An adapter of rank 16 against none."""
        w = Weights.random(shape, self.rng)
        times = self.times(ours=self._adapters(w, m, None), own=self.ours(w, m))
        case = f"NF4 + LoRA r = 16 {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "own", times["own"], self._limit(w, m, 1), must, goal)

    def adapters(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """Thirty-two adapters, one for each row, against one."""
        w = Weights.random(shape, self.rng)
        times = self.times(ours=self._adapters(w, m, 32), one=self._adapters(w, m, None))
        case = f"32 adapters r = 16 {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "one", times["one"], self._limit(w, m, 32), 0.6, 0.85)

    def _limit(self, w: Weights, m: int, adapters: int) -> float:
        return self.limit(w, m, adapters * 16 * sum(w.shape) * self.dtype.itemsize)

    def _adapters(self, w: Weights, m: int, count: int | None) -> Way:
        n, k = w.shape
        lead = () if count is None else (count,)
        params: dict[str, Any] = {"shape": w.shape, "block_size": BLOCK}
        if count is not None:
            params["adapter_index"] = jnp.arange(m) % count
        matrix = lambda *shape: jnp.asarray(self.rng.standard_normal((*lead, *shape), np.float32), self.dtype)
        fn = lambda x, packed, absmax, a, b: lora_matmul(x, packed, absmax, blockwise.NF4, a, b, **params)
        return Way(fn, [(*each, matrix(16, k), matrix(n, 16)) for each in self.rotated(m, w)])


def gpu_rows(bench: Bench) -> Iterator[Row]:
    for shape in ((14336, 4096), (4096, 14336)):
        yield from bench.nf4(
            shape,
            {
                1: [("XLA", 1.8, 2.7)],
                16: [("XLA", 1.8, 2.7), ("bitsandbytes", 1.0, 2.0)],
                64: [("XLA", 1.3, 2.2), ("bitsandbytes", 1.5, 2.2)],
                512: [("XLA", 0.75, 0.95), ("naive", None, None)],
                4096: [("XLA", 0.88, 0.95)],
            },
        )
    targets = {m: [("bitsandbytes", 2.0, 4.0), ("XLA", None, None)] for m in (16, 64)}
    yield from bench.nf4((4096, 4096), targets)
    yield from bench.nested((14336, 4096), 16)
    yield from bench.lora((14336, 4096), 1, 0.7, 0.9)
    yield from bench.lora((14336, 4096), 4096, 0.9, 0.97)
    yield from bench.adapters((14336, 4096), 64)
    for density, must, goal in ((0.1, 4.0, 7.0), (0.5, 1.2, 1.7)):
        yield from block_sparse_rows(bench, density, 4096, must, goal)


def cpu_rows(bench: Bench) -> Iterator[Row]:
    yield from bench.nf4(
        (4096, 4096),
        {
            1: [("naive", None, None), ("XLA", None, None)],
            16: [("naive", 3.0, None), ("XLA", None, None)],
            64: [("naive", None, None), ("XLA", None, None)],
        },
    )
    yield from bench.lora((4096, 4096), 16, 0.7, 0.9)
    yield from block_sparse_rows(bench, 0.1, 128, 3.0, None)


def block_sparse_rows(
    bench: Bench, density: float, m: int, must: float, goal: float | None, size: int = 4096
) -> Iterator[Row]:
    """A weight with blocks of 128, against its dense form and, on a CPU, against BCOO."""
    case = block_sparse.Case(size, 128, density, m, bench.dtype, bench.rng)
    for way in ("forward", "forward and backward"):
        ways = {
            "ours": Way(case.ours(way), case.operands()),
            "XLA dense": Way(case.dense(way), case.dense_operands()),
        }
        targets = {"XLA dense": (must, goal)}
        if jax.default_backend() == "cpu":
            ways["BCOO"] = Way(case.bcoo(way), case.bcoo_operands())
            targets["BCOO"] = (10.0, None)
        times = measure(ways, bench.repeats)
        limit = bench.limits.seconds(*case.costs(way))
        name = f"block-128 sparse {size}², {density:.0%} dense, M = {m}, {way}"
        for baseline, (must_, goal_) in targets.items():
            yield Row(name, times["ours"], baseline, times[baseline], limit, must_, goal_)


def tune(bench: Bench) -> None:
    """Prints the fastest tilings of the fused kernel, for the table in `nf4_matmul/mosaic.py`."""
    from quaxlike.kernels.nf4_matmul import gpu
    from quaxlike.kernels.nf4_matmul.mosaic import Problem, Tiling

    candidates = [
        Tiling(*sizes)
        for sizes in itertools.product((1, 2), (1, 2, 4), (1, 2, 4, 8, 16), (1, 2))
        if sizes[1] * sizes[2] in (4, 8, 16)
    ]
    for shape, m in itertools.product(((14336, 4096), (4096, 14336), (4096, 4096)), (8, 16, 32, 64)):
        w, times = Weights.random(shape, bench.rng), {}
        problem = Problem(m, *shape, BLOCK, 0, 0, False, "bfloat16", "bfloat16")
        operands = [(*each, jnp.asarray(blockwise.NF4)) for each in bench.rotated(m, w)]
        for tiling in candidates:
            try:
                way = Way(gpu.pallas_kernel(problem, tiling), operands)
                times[tiling] = bench.times(way=way)["way"]
            except Exception as error:  # a tiling that the device's shared memory does not hold
                print(f"{shape}, M = {m}, {tiling}: {error}")
        for tiling in sorted(times, key=lambda t: times[t].median)[:3]:
            print(f"{shape}, M = {m}: {times[tiling]}, {tiling}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the rows for a CPU")
    parser.add_argument("--tune", action="store_true", help="measure tilings instead of the table")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    if arguments.cpu:
        jax.config.update("jax_platforms", "cpu")
    device, seed = jax.devices()[0], secrets.randbits(32)
    dtype, size = (jnp.float32, 2048) if arguments.cpu else (jnp.bfloat16, 8192)
    limits = measure_limits(dtype, size, arguments.repeats)
    bench = Bench(limits, jnp.dtype(dtype), arguments.repeats, seed)
    print(f"{device.device_kind}, JAX {jax.__version__}, seed {seed}; measured limits: ", end="")
    print(f"{limits.bytes_per_second / 1e9:.0f} GB/s, {limits.flops_per_second / 1e12:.3g} TFLOP/s\n")
    if arguments.tune:
        tune(bench)
        return
    print(HEADER)
    for row in cpu_rows(bench) if arguments.cpu else gpu_rows(bench):
        print(row, flush=True)


if __name__ == "__main__":
    main()
