import jax.numpy as jnp
import pytest

from benchmarks import bitsandbytes, gpu, timing
from benchmarks.timing import Limits, Time


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 0)
    return gpu.Bench(Limits(1e10, 1e11), jnp.dtype("float32"), repeats=2, seed=0)


def _check(rows, cases):
    assert [row.case for row in rows] == cases
    for row in rows:
        assert row.time.median > 0
        assert row.limit > 0
        assert str(row).count("|") == gpu.HEADER.splitlines()[0].count("|")


@pytest.mark.slow
def test_rows_of_the_matmul(bench):
    rows = list(bench.nf4((128, 256), {3: [("XLA", 1.0, None), ("naive", None, None)]}))
    _check(rows, ["NF4 128×256, M = 3"] * 2)
    ours, bf16 = rows[0].errors
    assert ours < 1e-6 < bf16 < 1e-2
    assert "of the weight" in rows[0].note


@pytest.mark.slow
def test_rows_of_scales_and_adapters(bench):
    _check(list(bench.nested((128, 256), 3)), ["double-quantised scales 128×256, M = 3"])
    _check(list(bench.lora((128, 256), 3, 0.7, 0.9)), ["NF4 + LoRA r = 16 128×256, M = 3"])
    _check(list(bench.adapters((128, 256), 3)), ["32 adapters r = 16 128×256, M = 3"])


@pytest.mark.slow
def test_rows_of_the_block_sparse_matmul(bench):
    rows = list(gpu.block_sparse_rows(bench, 0.5, 4, 3.0, None, size=256))
    name = "block-128 sparse 256², 50% dense, M = 4, "
    ways = ["forward", "forward", "forward and backward", "forward and backward"]
    _check(rows, [name + way for way in ways])
    assert [row.baseline for row in rows] == ["XLA dense", "BCOO"] * 2


def test_a_row_says_which_target_is_met():
    row = gpu.Row("case", Time(1e-5, 1e-6), "XLA", Time(2e-5, 1e-6), 5e-6, must=1.8, goal=2.7)
    assert str(row) == ("| case | 10 ± 1 µs | XLA | 20 ± 1 µs | 2.00× | 1.8×/2.7× | must | 50% | — |  |")
    assert "| goal |" in str(row._replace(time=Time(5e-6, 0)))
    assert "| short |" in str(row._replace(time=Time(2e-2, 0)))
    assert "| — | — | 1.8×/2.7× |  |" in str(row._replace(baseline_time=None))


def test_limits_are_measured():
    limits = timing.measure_limits(jnp.float32, 64, 2)
    assert limits.bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert limits.seconds(limits.bytes_per_second, 0) == 1.0


def test_bitsandbytes_is_optional():
    assert bitsandbytes.time(1, (64, 64), 1) is None
