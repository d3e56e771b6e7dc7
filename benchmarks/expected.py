"""A model of the time that the products with targets take on an H100, for the page of the compile check.

It takes bytes and tilings from the library; registers, shared memory and the instructions of a kernel's loop
from the record of the compiler. Nothing of it was measured.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quaxlike.kernels.block_matmul import costs, tilings
from quaxlike.kernels.block_matmul.product import Product
from quaxlike.kernels.block_matmul.tilings import Problem

from .compiled_rows import SHAPES
from .gpu import NF4_TARGETS, SMALL_NF4_TARGETS
from .targets import TARGETS

_GPU = TARGETS["h100"]
_SMS = 132
_DRAM = 0.9 * _GPU.bytes_per_second  # what copies reach
_L2 = 5.5e12  # bytes a second in all
_L2_OF_ONE = 64 * _GPU.clock  # bytes a second that a multiprocessor can take
_LIBRARY = 0.7 * _GPU.flops_per_second  # what XLA's products reach
_MMA = 6.5  # cycles of a tensor core for an `mma.sync` of 16 × 8 × 16
_NEAR, _FAR = 500, 1000  # cycles from a load to its data, from the L2 cache and from DRAM
_LOST = 1.1  # factor for waits
_LAUNCH = 2.5e-6  # to begin and to end a kernel
_LARGE, _WIDE, _SMALL = SHAPES
_RANK = 16
UNITS = "DRAM", "L2", "shared memory", "instructions", "tensor cores", "latency"

Shape = tuple[int, int]
Record = Mapping[str, Mapping[str, Any]]


class Estimate(NamedTuple):
    """Of a product in seconds: the least time by each unit of the GPU, and what it takes."""

    limits: Mapping[str, float]
    seconds: float


class Row(NamedTuple):
    """A target: the product, what it is compared to, and the least ratio of their times."""

    case: str
    ours: Estimate
    baseline: str
    baseline_seconds: float
    must: float

    @property
    def ratio(self) -> float:
        return self.baseline_seconds / self.ours.seconds


def rows(recorded: Record) -> Iterator[Row]:
    """The targets, by the record of the compile check for an H100 (its figures by name)."""
    of_shapes = {_LARGE: NF4_TARGETS, _WIDE: NF4_TARGETS, _SMALL: SMALL_NF4_TARGETS}
    for shape, of_shape in of_shapes.items():
        for m, targets in of_shape.items():
            ours = few_rows(recorded, shape, m) if m <= 64 else many_rows(shape, m)
            for baseline, must, _ in targets:
                if must is not None:
                    name, seconds = _BASELINES[baseline]
                    yield Row(_name("NF4", shape, m), ours, name, seconds(shape, m), must)
    plain = few_rows(recorded, _LARGE, 16)
    ours = few_rows(recorded, _LARGE, 16, nested=True)
    yield Row(_name("NF4, double", _LARGE, 16), ours, "float32 scales", plain.seconds, 0.95)
    for m, must in ((1, 0.7), (4096, 0.9)):
        plain = few_rows(recorded, _LARGE, m) if m == 1 else many_rows(_LARGE, m)
        ours = few_rows(recorded, _LARGE, m, adapters=1) if m == 1 else _with_columns(plain, _LARGE, m)
        yield Row(_name(_lora(1), _LARGE, m), ours, "no adapter", plain.seconds, must)
    one, ours = (few_rows(recorded, _LARGE, 64, adapters=n) for n in (1, 32))
    yield Row(_name(_lora(32), _LARGE, 64), ours, "one adapter", one.seconds, 0.6)
    for density, must in ((0.1, 4.0), (0.5, 1.2)):
        case = _name(f"block-sparse, {density:.0%}, forward", _SMALL, 4096)
        yield Row(case, block_sparse(4096, 4096, density), "bfloat16", dense(_SMALL, 4096), must)


def few_rows(recorded: Record, shape: Shape, m: int, *, nested: bool = False, adapters: int = 0) -> Estimate:
    """A product by the kernel for few rows of `x` (`block_matmul/mosaic.py`)."""
    p = Problem(Product(shape, 64), m, adapters=adapters, rank=_RANK * bool(adapters))
    tiling = tilings.tiling_for(p)
    kind = _lora(adapters) if adapters else "NF4, double" if nested else "NF4"
    compiled = recorded[_name(kind, shape, m)]
    blocks = tilings.blocks(p, tiling)
    of_one = -(-blocks // _SMS)  # blocks of the busiest multiprocessor
    resident = min(
        2**16 // (compiled["registers"] * tiling.threads), 227 * 1024 // (compiled["shared"] + 1024)
    )
    share = shape[1] // tiling.splits  # columns that a block contracts
    steps = -(-share // (tilings.BLOCK * tiling.k_warps))
    warps = tiling.threads // 32
    of_weight = 0.5 + (0.2539 if nested else 4) / 64  # bytes of a weight and its share of a scale
    terms = 8 * m * shape[0] * tiling.splits if tiling.splits > 1 else 0  # written, and read again
    of_adapters = 2 * adapters * _RANK * (shape[0] + shape[1])
    of_block = share * (2 * 8 * p.token_tiles + tiling.rows * of_weight)
    of_scheduler = of_one * warps / 4 * steps / _GPU.clock
    # Cycles of a warp's step: activations, which take the same way (those of one tile in twice the time, see
    # `_activations`), entries of the table, and codes and scales, which are written and read.
    of_step = 8 * max(2, p.token_tiles) + 16 * tiling.row_tiles * (1 + 2 * 36 / 128)
    limits = {
        "DRAM": (_traffic(shape, m, of_weight) + of_adapters) / _DRAM,
        "L2": max((blocks * of_block + terms) / _L2, of_one * of_block / _L2_OF_ONE),
        "shared memory": 4 * of_scheduler * of_step,
        "instructions": of_scheduler * compiled["loop"],
        "tensor cores": of_scheduler * 4 * tiling.row_tiles * p.token_tiles * _MMA,
        "latency": -(-of_one // resident) * steps * (compiled["loop"] + _NEAR) / _GPU.clock,
    }
    # XLA adds terms, multiplies by `a`, and finds which of several adapters are in use.
    kernels = 1 + (tiling.splits > 1) + (adapters > 0) + 2 * (adapters > 1)
    waits = -(-adapters // (tiling.k_warps * tiling.splits)) * _FAR / _GPU.clock
    return Estimate(limits, _LOST * max(limits.values()) + waits + kernels * _LAUNCH)


def many_rows(shape: Shape, m: int) -> Estimate:
    """A product as the library's own model has it (`block_matmul/costs.py`)."""
    product = Product(shape, 64)
    if not costs.is_faster(product, m, "bfloat16"):
        limits = {"tensor cores": 2 * m * shape[0] * shape[1] / _LIBRARY}
        return Estimate(limits, costs.library(product, m) / _GPU.clock)
    plan = costs.plan(product, m, "bfloat16")
    tokens = -(-m // (32 * -(-m // plan.tokens))) * 32
    blocks = -(-shape[0] // (128 * plan.row_tiles)) * -(-m // tokens) * plan.splits
    steps = -(-blocks // _SMS) * -(-shape[1] // (64 * plan.splits))
    of_step = costs.step_limits(4, tokens, plan.row_tiles, fixed=True)
    limits = {unit: steps * cycles / _GPU.clock for unit, cycles in of_step.items()}
    return Estimate(limits, plan.cycles / _GPU.clock)


def _with_columns(plain: Estimate, shape: Shape, m: int) -> Estimate:
    """With an adapter, as more columns of `x` and of the weight; and the product by `a`."""
    product_by_a = 2 * m * shape[1] / _DRAM + _LAUNCH
    copied = 4 * m * shape[1] / _DRAM + _LAUNCH
    seconds = plain.seconds + product_by_a + copied + 2 * m * shape[0] * _RANK / _LIBRARY
    return Estimate(plain.limits, seconds)


def block_sparse(size: int, m: int, density: float) -> Estimate:
    """A product with blocks of 128 and 256 rows of `x` for each block of threads
    (`block_sparse_matmul/hopper.py`)."""
    b, tokens = 128, 256
    slots = round(density * (size // b))
    blocks = -(-m // tokens) * (size // b)
    of_block = 2 * slots * b * (tokens + b)
    waves = -(-blocks // _SMS)
    limits = {
        "DRAM": (2 * size * b * slots + 4 * m * size) / _DRAM,
        "L2": waves * of_block / (_L2 / _SMS),
        "tensor cores": waves * slots * tokens * b * b / 2048 / _GPU.clock,
        "latency": waves * 2 * _FAR / _GPU.clock,  # to begin and to end a block of threads
    }
    return Estimate(limits, max(limits["L2"], limits["tensor cores"]) + limits["latency"] + _LAUNCH)


def dense(shape: Shape, m: int) -> float:
    """XLA's product with a weight in bfloat16."""
    return max(_traffic(shape, m, 2) / _DRAM, 2 * m * shape[0] * shape[1] / _LIBRARY) + _LAUNCH


def decoded(shape: Shape, m: int) -> float:
    """The same, after decoding the weight to memory, as bitsandbytes does for more than a few rows."""
    return dense(shape, m) + shape[0] * shape[1] * (2 + 0.5 + 4 / 64) / _DRAM + _LAUNCH


_BASELINES = {"XLA": ("bfloat16", dense), "bitsandbytes": ("decoded to memory", decoded)}


def _traffic(shape: Shape, m: int, of_weight: float) -> float:
    """Bytes of the operands and the result."""
    return shape[0] * shape[1] * of_weight + 2 * m * (shape[0] + shape[1])


def _name(kind: str, shape: Shape, m: int) -> str:
    return f"{kind} {shape[0]}×{shape[1]}, M = {m}"


def _lora(adapters: int) -> str:
    return f"NF4 + {'LoRA' if adapters == 1 else f'{adapters} LoRAs'} of rank {_RANK}"


def table(recorded: Record) -> str:
    """The targets in markdown, times in µs."""
    head = ["product", *UNITS, "expected", "baseline", "its time", "ratio", "must", "met"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    of = lambda seconds: "" if seconds is None else f"{1e6 * seconds:.1f}"
    for row in rows(recorded):
        limits = map(of, map(row.ours.limits.get, UNITS))
        cells = [row.case, *limits, of(row.ours.seconds), row.baseline, of(row.baseline_seconds)]
        met = "yes" if row.ratio >= row.must else "no"
        lines.append("| " + " | ".join([*cells, f"{row.ratio:.2f}×", f"{row.must:g}×", met]) + " |")
    return "\n".join(lines)
