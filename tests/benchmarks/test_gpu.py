import json

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


@pytest.mark.slow
def test_limits_are_measured():
    limits = timing.measure_limits(jnp.float32, 64, 2)
    assert limits.bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert limits.seconds(limits.bytes_per_second, 0) == 1.0


def test_bitsandbytes_is_optional():
    assert bitsandbytes.time(1, (64, 64), 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_row_is_checked_and_measured(monkeypatch, dtype):
    """What runs on a GPU, on tiny weights, with calls in one program as there."""
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 0)
    monkeypatch.setattr(timing.measure, "__kwdefaults__", {"chained": True})
    bench = gpu.Bench(Limits(1e10, 1e11), jnp.dtype(dtype), repeats=2, seed=0)
    shape = 128, 256
    jobs = [
        ("forward", lambda: bench.nf4(shape, {3: [("XLA", 1.0, None)]})),
        ("scales", lambda: bench.nested(shape, 3)),
        ("LoRA", lambda: bench.lora(shape, 3, 0.7, 0.9)),
        ("adapters", lambda: bench.adapters(shape, 3)),
        ("transposed", lambda: bench.transposed(shape, 3)),
        ("float16", lambda: bench.half(shape, 3)),
        ("int8", lambda: bench.int8(shape, 3)),
        ("int8, x @ W", lambda: bench.int8(shape, 3, transpose=True)),
        ("blocks", lambda: gpu.block_sparse_rows(bench, 0.5, 4, 3.0, None, size=256)),
    ]
    found = gpu.run_jobs(iter(jobs), 600, None)
    assert [entry["error"] for entry in found if "error" in entry] == []
    assert len(found) == len(jobs) - 1 + 4
    assert all(0 <= entry["errors"][0] < 1e-2 for entry in found)


def test_what_fails_costs_its_row_alone(tmp_path, capsys):
    def row(time):
        yield gpu.Row("good", Time(time, 1e-6), "XLA", Time(2e-5, 1e-6), 5e-6)

    def wrong():
        raise AssertionError("the result is wrong")
        yield

    file = tmp_path / "rows.json"
    jobs = [("wrong", wrong), ("good", lambda: row(1e-5)), ("good", lambda: row(2e-5))]
    found = gpu.run_jobs(iter(jobs), 60, file)
    assert found[0] == {"case": "wrong", "error": "AssertionError: the result is wrong"}
    assert [entry["case"] for entry in found] == ["wrong", "good", "good"]
    assert [entry["case"] for entry in json.loads(file.read_text())] == ["wrong", "good", "good"]
    assert "| wrong | AssertionError" in capsys.readouterr().out
    late = gpu.run_jobs(iter(jobs), -1, file)
    assert {entry["error"] for entry in late} == {"left out: the time was up"}


def test_a_wrong_result_is_no_row(bench):
    way = timing.Way(lambda x: x * 1.001, [(jnp.ones(4),)])
    with pytest.raises(AssertionError, match=r"wrong: relative error 1.00e-03, allowed is 1e-05"):
        bench.checked(way, jnp.ones(4))


def test_the_jobs_of_a_visit_are_named():
    bench = gpu.Bench(Limits(1e10, 1e11), jnp.dtype("bfloat16"), repeats=2, seed=0)
    names = [name for name, _ in gpu.gpu_jobs(bench)]
    assert {f"NF4 14336×4096, M = {m}" for m in (1, 8, 16, 32, 64, 128, 256, 512, 4096)} < set(names)
    assert {"NF4, x @ W, M = 1", "int8, M = 4096", "block-sparse, 10%", "float16"} < set(names)
