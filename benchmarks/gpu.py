"""The kernels against their targets, on a GPU or a TPU: `python -m benchmarks.gpu`, or `--cpu` for CPU rows.

Every row is measured alternately with its baseline in one run, on rotating weights, so that caches are cold.
Times are medians and half the interquartile range; on accelerators, they are device times only. Errors are
relative L2 distances from a float32 product with the dequantised weight, on fresh random inputs: our error,
and that of a product with the weight rounded to bfloat16. Wrong results give no row.

It is made for a single visit to a machine: a failure costs only its own row, each row is written to a file as
soon as it is measured (`--json`), and after `--minutes` the remaining rows are skipped and listed. The file
has the commit, the versions, the driver and the clocks, too; without a name it is `benchmarks/gpu.json`, from
which a page of the documentation is made. `--add FILE` takes in what was measured elsewhere.
"""

import argparse
import datetime
import functools
import itertools
import math
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quaxlike.kernels import NestedScales, blockwise, int8_matmul, lora_matmul, nf4_matmul

from . import bitsandbytes, block_sparse, gpu_record, provenance
from .timing import Limits, Time, Way, in_turn, measure, measure_limits, relative_error, rotations

BLOCK = 64
_WEIGHT_FIRST = "XLA, W @ x"
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
    errors: tuple[float, ...] | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.baseline_time is None else self.baseline_time.median / self.time.median

    def as_json(self) -> dict[str, Any]:
        """As `gpu_record` keeps it."""
        return {
            "case": self.case, "seconds": self.time, "baseline": self.baseline,
            "baseline seconds": self.baseline_time, "ratio": self.ratio, "must": self.must,
            "goal": self.goal, "limit": self.limit, "errors": self.errors,
        }  # fmt: skip

    def __str__(self) -> str:
        of_baseline = "—"
        verdict = ""
        if (ratio := self.ratio) is not None:
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
        self._weights: Weights | None = None

    def x(self, m: int, k: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal((m, k), np.float32), self.dtype)

    def rotated(self, m: int, w: Weights, transpose: bool = False) -> list[tuple[Any, ...]]:
        pairs = zip(w.packed, w.absmax, strict=True)
        return in_turn(((self.x(m, w.shape[not transpose]), *pair) for pair in pairs), self.calls(w, m))

    def calls(self, w: Weights, m: int) -> int:
        """How many calls a program makes: on accelerators so many that it is not the host that is timed."""
        calls = 0 if jax.default_backend() == "cpu" else math.ceil(1e-3 / self.limit(w, m))
        return max(len(w.packed), min(calls, 64))

    def checked(self, way: Way, expected: Any) -> tuple[float]:
        """The error of a way on the first of its operands; a tree's is that of its worst leaf.

        **Raises:** `AssertionError` where it is more than rounding explains.
        """
        leaves = zip(*map(jax.tree.leaves, (jax.jit(way.fn)(*way.operands[0]), expected)), strict=True)
        error = max(relative_error(*pair) for pair in leaves)
        tolerance = 1e-2 if self.dtype.itemsize < 4 else 1e-5
        if not error <= tolerance:
            raise AssertionError(f"the result is wrong: relative error {error:.2e}, allowed is {tolerance}")
        return (error,)

    def times(self, **ways: Way) -> dict[str, Time]:
        return measure(ways, self.repeats)

    def limit(self, w: Weights, m: int, extra_bytes: float = 0.0) -> float:
        n, k = w.shape
        activations = self.dtype.itemsize * m * (n + k)
        return self.limits.seconds(w.bytes + activations + extra_bytes, w.flops(m))

    def ours(self, w: Weights, m: int) -> Way:
        return Way(w.call(), self.rotated(m, w))

    def dense(self, w: Weights, m: int, transpose: bool = False) -> Way:
        """XLA's product with the weight in the dtype of the activations."""
        count = min(len(w.packed), rotations(w.shape[0] * w.shape[1] * self.dtype.itemsize))
        weights = [w.dense(i, self.dtype) for i in range(count)]
        fn = (lambda x, w: _product(x, w.T)) if transpose else _product
        operands = ((self.x(m, w.shape[not transpose]), weight) for weight in weights)
        return Way(fn, in_turn(operands, max(count, self.calls(w, m))))

    def weight_first(self, w: Weights, m: int) -> Way:
        """The same with the weight as the left operand, `W @ x.T`, as XLA is faster for one row on a CPU."""
        first = lambda x, w: lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
        return Way(first, self.dense(w, m).operands)

    def exact(self, x: Any, w: Any, transpose: bool = False) -> jax.Array:
        """The product in float32."""
        with jax.default_matmul_precision("highest"):
            x, w = x.astype(jnp.float32), w.astype(jnp.float32)
            return x @ (w if transpose else w.T)

    def naive(self, w: Weights, m: int) -> Way:
        """Dequantise, then multiply, as two lines of JAX."""
        fn = lambda x, packed, absmax: _product(x, _dequantize(packed, absmax, w.shape, self.dtype))
        return Way(fn, self.rotated(m, w))

    def nf4(self, shape: tuple[int, int], targets: Targets) -> Iterator[Row]:
        """Rows for a shape."""
        w = self.weights(shape)
        for m, baselines in targets.items():
            times: dict[str, Time | None] = {}
            ways = {"ours": self.ours(w, m), "XLA": self.dense(w, m), "naive": self.naive(w, m)}
            if any(name == _WEIGHT_FIRST for name, _, _ in baselines):
                ways[_WEIGHT_FIRST] = self.weight_first(w, m)
            times |= self.times(**ways)
            if any(name == "bitsandbytes" for name, _, _ in baselines):
                times["bitsandbytes"] = bitsandbytes.time(m, shape, self.repeats)
            ours = self.ours(w, m)
            self.checked(ours, self.exact(ours.operands[0][0], w.dense(0, jnp.float32)))
            errors = _errors(w.call(), w, self.x(m, shape[1]))
            note = self._extra_memory(w.call(), m, w)
            case, limit = f"NF4 {shape[0]}×{shape[1]}, M = {m}", self.limit(w, m)
            for name, must, goal in baselines:
                yield Row(case, times["ours"], name, times[name], limit, must, goal, errors, note)

    def weights(self, shape: tuple[int, int]) -> Weights:
        """The weights of a shape; those of the last one are kept."""
        if self._weights is None or self._weights.shape != shape:
            self._weights = None  # freed before others are made
            self._weights = Weights.random(shape, self.rng)
        return self._weights

    def transposed(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """`x @ W`, which is the backward pass of `x @ W.T`."""
        w = self.weights(shape)
        ours = Way(w.call(transpose=True), self.rotated(m, w, transpose=True))
        expected = self.exact(ours.operands[0][0], w.dense(0, jnp.float32), transpose=True)
        errors = self.checked(ours, expected)
        times = self.times(ours=ours, XLA=self.dense(w, m, transpose=True))
        case = f"NF4, x @ W {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "XLA", times["XLA"], self.limit(w, m), errors=errors)

    def half(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """Activations in float16."""
        bench = Bench(self.limits, np.dtype(np.float16), self.repeats, seed=0)
        w = self.weights(shape)
        ours = bench.ours(w, m)
        errors = bench.checked(ours, bench.exact(ours.operands[0][0], w.dense(0, jnp.float32)))
        times = bench.times(ours=ours, XLA=bench.dense(w, m))
        case = f"NF4, float16 {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "XLA", times["XLA"], bench.limit(w, m), errors=errors)

    def int8(self, shape: tuple[int, int], m: int, transpose: bool = False) -> Iterator[Row]:
        """Integers of 8 bits with a scale for each row."""
        w = self.weights(shape)  # for the baseline, and as random bytes
        codes = [jax.lax.bitcast_convert_type(packed, jnp.int8) for packed in w.packed]
        codes = [jnp.concatenate([c, c]).reshape(shape) for c in codes]
        scale = jnp.asarray(self.rng.uniform(0.01, 0.05, (shape[0], 1)).astype(np.float32))
        x = lambda: self.x(m, shape[not transpose])
        operands = in_turn(((x(), c, scale) for c in codes), self.calls(w, m))
        ours = Way(functools.partial(int8_matmul, transpose=transpose), operands)
        expected = self.exact(ours.operands[0][0], codes[0].astype(jnp.float32) * scale, transpose)
        errors = self.checked(ours, expected)
        times = self.times(ours=ours, XLA=self.dense(w, m, transpose))
        bytes_ = shape[0] * shape[1] + self.dtype.itemsize * m * sum(shape)
        case = f"int8{', x @ W' * transpose} {shape[0]}×{shape[1]}, M = {m}"
        limit = self.limits.seconds(bytes_, w.flops(m))
        yield Row(case, times["ours"], "XLA", times["XLA"], limit, 1.0, 1.8, errors=errors)

    def _extra_memory(self, fn: Callable[..., Any], m: int, w: Weights) -> str:
        compiled = jax.jit(fn).lower(self.x(m, w.shape[1]), w.packed[0], w.absmax[0]).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return f"temporaries {temporary / 2**20:.2g} MiB, {temporary / w.bytes:.1%} of the weight"

    def nested(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """Double-quantised scales against float32 scales."""
        w = self.weights(shape)
        quant_map = jnp.asarray(blockwise.dynamic_map())
        scales = [NestedScales(*blockwise.quantize_scales(a), quant_map) for a in w.absmax]
        pairs = zip(w.packed, scales, strict=True)
        nested = Way(w.call(), in_turn(((self.x(m, shape[1]), *pair) for pair in pairs), self.calls(w, m)))
        absmax = blockwise.dequantize_scales(*scales[0][:3])
        exact = _dequantize(w.packed[0], absmax, shape, np.dtype(np.float32))
        errors = self.checked(nested, self.exact(nested.operands[0][0], exact))
        times = self.times(ours=nested, own=self.ours(w, m))
        case = f"NF4, double {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "float32 scales", times["own"], self.limit(w, m), 0.95, 1.05, errors)

    def lora(self, shape: tuple[int, int], m: int, must: float, goal: float) -> Iterator[Row]:
        """An adapter of rank 16 against none."""
        w = self.weights(shape)
        ours = self._adapters(w, m, None)
        errors = self.checked(ours, self._adapted(w, ours.operands[0], None))
        times = self.times(ours=ours, own=self.ours(w, m))
        case = f"NF4 + LoRA of rank 16 {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "without LoRA", times["own"], self._limit(w, m, 1), must, goal, errors)

    def adapters(self, shape: tuple[int, int], m: int) -> Iterator[Row]:
        """Thirty-two adapters, one for each row, against one."""
        w = self.weights(shape)
        ours = self._adapters(w, m, 32)
        errors = self.checked(ours, self._adapted(w, ours.operands[0], 32))
        times = self.times(ours=ours, one=self._adapters(w, m, None))
        case = f"NF4 + 32 LoRAs of rank 16 {shape[0]}×{shape[1]}, M = {m}"
        yield Row(case, times["ours"], "one LoRA", times["one"], self._limit(w, m, 32), 0.6, 0.85, errors)

    def _adapted(self, w: Weights, operands: tuple[Any, ...], count: int | None) -> jax.Array:
        """The product of `_adapters` in float32."""
        x, _, _, a, b = (z.astype(jnp.float32) for z in operands)
        a, b = (a[None], b[None]) if count is None else (a, b)
        chosen = jax.nn.one_hot(jnp.arange(len(x)) % len(a), len(a))
        with jax.default_matmul_precision("highest"):
            low_rank = jnp.einsum("mk,ark,anr,ma->mn", x, a, b, chosen)
        return self.exact(x, w.dense(0, jnp.float32)) + low_rank

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
        pairs = zip(w.packed, w.absmax, strict=True)
        operands = ((self.x(m, k), *pair, matrix(16, k), matrix(n, 16)) for pair in pairs)
        return Way(fn, in_turn(operands, self.calls(w, m)))


Job = tuple[str, Callable[[], Iterator[Row]]]
_LARGE, _WIDE = (14336, 4096), (4096, 14336)
NF4_TARGETS: Targets = {
    1: [("XLA", 1.8, 2.7)],
    16: [("XLA", 1.8, 2.7), ("bitsandbytes", 1.0, 2.0)],
    64: [("XLA", 1.3, 2.2), ("bitsandbytes", 1.5, 2.2)],
    512: [("XLA", 0.75, 0.95), ("naive", None, None)],
    4096: [("XLA", 0.88, 0.95)],
}
SMALL_NF4_TARGETS: Targets = {m: [("bitsandbytes", 2.0, 4.0), ("XLA", None, None)] for m in (16, 64)}


def accelerator_jobs(bench: Bench) -> Iterator[Job]:
    """The rows with targets, then those between; jobs of one shape after each other, which share weights."""
    for shape in (_LARGE, _WIDE):
        yield from _nf4_jobs(bench, shape, NF4_TARGETS)
    yield from _nf4_jobs(bench, (4096, 4096), SMALL_NF4_TARGETS)
    yield "double-quantised scales", lambda: bench.nested(_LARGE, 16)
    for m, must, goal in ((1, 0.7, 0.9), (64, 0.9, 0.95), (4096, 0.9, 0.97)):
        yield f"LoRA, M = {m}", functools.partial(bench.lora, _LARGE, m, must, goal)
    yield "32 adapters", lambda: bench.adapters(_LARGE, 64)
    for m, transpose in itertools.product((1, 16, 64, 4096), (False, True)):
        yield f"int8, M = {m}", functools.partial(bench.int8, _LARGE, m, transpose)
    for m in (1, 16, 512, 4096):
        yield f"NF4, x @ W, M = {m}", functools.partial(bench.transposed, _LARGE, m)
    for density, must, goal in ((0.1, 4.0, 7.0), (0.5, 1.2, 1.7)):
        job = functools.partial(block_sparse_rows, bench, density, 4096, must, goal)
        yield f"block-sparse, {density:.0%}", job
    between: Targets = {m: [("XLA", None, None)] for m in (8, 32, 128, 256)}
    yield from _nf4_jobs(bench, _LARGE, between)
    yield "float16", lambda: bench.half(_LARGE, 16)
    yield from _nf4_jobs(bench, (4120, 4160), {m: [("XLA", None, None)] for m in (3, 77)})  # ragged tiles


def _nf4_jobs(bench: Bench, shape: tuple[int, int], targets: Targets) -> Iterator[Job]:
    for m, baselines in targets.items():
        yield f"NF4 {shape[0]}×{shape[1]}, M = {m}", functools.partial(bench.nf4, shape, {m: baselines})


def cpu_jobs(bench: Bench) -> Iterator[Job]:
    baselines = {1: None, 16: 3.0, 64: None}
    others = [(name, None, None) for name in ("XLA", _WEIGHT_FIRST)]
    targets: Targets = {m: [("naive", t, None), *others] for m, t in baselines.items()}
    yield from _nf4_jobs(bench, (4096, 4096), targets)
    yield "LoRA, M = 16", lambda: bench.lora((4096, 4096), 16, 0.7, 0.9)
    yield "block-sparse, 10%", lambda: block_sparse_rows(bench, 0.1, 128, 3.0, None)


def run_jobs(
    jobs: Iterator[Job], seconds: float, tell: Callable[[list[dict[str, Any]]], object] = lambda rows: None
) -> list[dict[str, Any]]:
    """Measures jobs until the time is up; prints each row, and tells all of them each time."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + seconds

    def add(entry: dict[str, Any], line: str) -> None:
        found.append(entry)
        print(line, flush=True)
        tell(found)

    def fail(case: str, error: str) -> None:
        add({"case": case, "error": error}, f"| {case} | {error} |")

    for case, job in jobs:
        if time.monotonic() > end:
            fail(case, "left out: the time was up")
            continue
        try:
            for row in job():
                add(row.as_json(), str(row))
        except Exception as error:  # whatever it is: the other rows are worth having
            fail(case, f"{type(error).__name__}: {error}")
    return found


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
        errors = bench.checked(ways["ours"], case.expected(way))
        times = measure(ways, bench.repeats)
        limit = bench.limits.seconds(*case.costs(way))
        name = f"block-sparse, {density:.0%}, {way} {size}×{size}, M = {m}"
        for baseline, (must_, goal_) in targets.items():
            yield Row(name, times["ours"], baseline, times[baseline], limit, must_, goal_, errors)


def tune(bench: Bench, only: str | None = None) -> None:
    """Prints the fastest tilings of the fused kernel: for the table in `block_matmul/tilings.py`."""
    from quaxlike.kernels.block_matmul import gpu
    from quaxlike.kernels.block_matmul.product import Product
    from quaxlike.kernels.block_matmul.tilings import Problem, Tiling

    candidates = [
        Tiling(*sizes)
        for sizes in itertools.product((1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2), (1, 2))
        if sizes[1] * sizes[2] in (4, 8)
    ]
    sizes = [(*shape, m) for shape in (_LARGE, _WIDE, (4096, 4096)) for m in (8, 16, 32, 64)]
    for n, k, m in sizes if only is None else [tuple(map(int, only.split(",")))]:
        shape = n, k
        w, times = bench.weights(shape), {}
        operands = [(*each, jnp.asarray(blockwise.NF4)) for each in bench.rotated(m, w)]
        for tiling in candidates:
            try:
                dtype = "bfloat16" if tiling.splits == 1 else "float32"
                kernel = gpu.pallas_kernel(Problem(Product(shape, BLOCK), m, "bfloat16", dtype), tiling)
                way = Way(lambda *args, kernel=kernel: jnp.sum(kernel(*args), axis=0), operands)
                times[tiling] = bench.times(way=way)["way"]
            except Exception as error:  # a tiling that the device's shared memory does not hold
                print(f"{shape}, M = {m}, {tiling}: {error}")
        for tiling in sorted(times, key=lambda t: times[t].median)[:3]:
            print(f"{shape}, M = {m}: {times[tiling]}, {tiling}", flush=True)


def record_of(limits: Limits, rows: list[dict[str, Any]]) -> gpu_record.Record:
    """What was measured here, with the commit, the packages and the device."""
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "bitsandbytes", "torch")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": provenance.commit(),
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "versions": provenance.versions(packages),
        "driver": provenance.driver(),
        "clocks": provenance.clocks(),
        "limits": limits._asdict(),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the rows for a CPU")
    parser.add_argument("--tune", action="store_true", help="measure tilings instead of the table")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no row is begun")
    parser.add_argument(
        "--json", type=pathlib.Path, nargs="?", const=gpu_record.RECORD, metavar="FILE",
        help="write the rows as they are measured, to FILE or to benchmarks/gpu.json, with its page",
    )  # fmt: skip
    parser.add_argument("--add", type=pathlib.Path, metavar="FILE", help="take in the rows of a file alone")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--shape", help="for --tune: N,K,M alone")
    arguments = parser.parse_args()
    if arguments.add:
        records = gpu_record.read() | gpu_record.read(arguments.add)
        gpu_record.write(records, gpu_record.RECORD)
        return
    if arguments.cpu:
        jax.config.update("jax_platforms", "cpu")
    device, seed = jax.devices()[0], secrets.randbits(32)
    if device.platform == "cpu" and not arguments.cpu:
        parser.error("there is no GPU and no TPU: the rows for a CPU are measured with --cpu")
    dtype, size = (jnp.float32, 2048) if arguments.cpu else (jnp.bfloat16, 8192)
    limits = measure_limits(dtype, size, arguments.repeats)
    bench = Bench(limits, jnp.dtype(dtype), arguments.repeats, seed)
    print(f"{device.device_kind}, JAX {jax.__version__}, seed {seed}; measured limits: ", end="")
    print(f"{limits.bytes_per_second / 1e9:.0f} GB/s, {limits.flops_per_second / 1e12:.3g} TFLOP/s\n")
    if arguments.tune:
        tune(bench, arguments.shape)
        return
    print(HEADER)
    jobs = cpu_jobs(bench) if arguments.cpu else accelerator_jobs(bench)
    chosen = (job for job in jobs if arguments.only in job[0])
    kept = gpu_record.read(arguments.json) if arguments.json else {}

    def keep(rows: list[dict[str, Any]]) -> None:
        if arguments.json:
            gpu_record.write(kept | {device.device_kind: record_of(limits, rows)}, arguments.json)

    run_jobs(chosen, 60 * arguments.minutes, keep)


if __name__ == "__main__":
    main()
