import jax.numpy as jnp
import pytest

from benchmarks import bitsandbytes, gpu, gpu_record, provenance, timing
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
    _check(list(bench.nested((128, 256), 3)), ["NF4, double 128×256, M = 3"])
    _check(list(bench.lora((128, 256), 3, 0.7, 0.9)), ["NF4 + LoRA of rank 16 128×256, M = 3"])
    _check(list(bench.adapters((128, 256), 3)), ["NF4 + 32 LoRAs of rank 16 128×256, M = 3"])


@pytest.mark.slow
def test_rows_of_the_block_sparse_matmul(bench):
    rows = list(gpu.block_sparse_rows(bench, 0.5, 4, 3.0, None, size=256))
    name = "block-sparse, 50%, {} 256×256, M = 4"
    ways = ["forward", "forward", "forward and backward", "forward and backward"]
    _check(rows, [name.format(way) for way in ways])
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
    found = gpu.run_jobs(iter(jobs), 600)
    assert [entry["error"] for entry in found if "error" in entry] == []
    assert len(found) == len(jobs) - 1 + 4
    assert all(0 <= entry["errors"][0] < 1e-2 for entry in found)


def test_what_fails_costs_its_row_alone(capsys):
    def row(time):
        yield gpu.Row("good", Time(time, 1e-6), "XLA", Time(2e-5, 1e-6), 5e-6)

    def wrong():
        raise AssertionError("the result is wrong")
        yield

    kept = []
    jobs = [("wrong", wrong), ("good", lambda: row(1e-5)), ("good", lambda: row(2e-5))]
    found = gpu.run_jobs(iter(jobs), 60, lambda rows: kept.append(len(rows)))
    assert found[0] == {"case": "wrong", "error": "AssertionError: the result is wrong"}
    assert [entry["case"] for entry in found] == ["wrong", "good", "good"]
    assert kept == [1, 2, 3]
    assert "| wrong | AssertionError" in capsys.readouterr().out
    late = gpu.run_jobs(iter(jobs), -1)
    assert {entry["error"] for entry in late} == {"left out: the time was up"}


@pytest.mark.slow
def test_a_wrong_result_is_no_row(bench):
    way = timing.Way(lambda x: x * 1.001, [(jnp.ones(4),)])
    with pytest.raises(AssertionError, match=r"wrong: relative error 1.00e-03, allowed is 1e-05"):
        bench.checked(way, jnp.ones(4))


def test_the_jobs_of_a_visit_are_named():
    bench = gpu.Bench(Limits(1e10, 1e11), jnp.dtype("bfloat16"), repeats=2, seed=0)
    names = [name for name, _ in gpu.accelerator_jobs(bench)]
    assert {f"NF4 14336×4096, M = {m}" for m in (1, 8, 16, 32, 64, 128, 256, 512, 4096)} < set(names)
    assert {"NF4, x @ W, M = 1", "int8, M = 4096", "block-sparse, 10%", "float16"} < set(names)


def test_the_record_keeps_what_rows_come_from(tmp_path):
    limits = Limits(1e12, 1e14)
    row = gpu.Row("NF4 8×8, M = 1", Time(1e-5, 1e-6), "XLA", Time(2e-5, 1e-6), 5e-6, must=1.8, errors=(2e-3,))
    rows = [row.as_json(), {"case": "int8", "error": "left out: the time was up"}]
    record = gpu.record_of(limits, rows)
    assert record["versions"].startswith("Python 3.")
    assert record["limits"] == {"bytes_per_second": 1e12, "flops_per_second": 1e14}
    file = tmp_path / "rows.json"
    gpu_record.write({"a device": record}, file)
    assert set(gpu_record.read(file)["a device"]) == set(gpu_record.Record.__annotations__)
    page = gpu_record.page(gpu_record.read(file))
    assert "| NF4 8×8, M = 1 | 10 ± 1.0 | XLA | 20 ± 1.0 | 2.00 | 1.8, — | 2.0e-03 |" in page
    assert "| int8 | not measured: left out: the time was up |" in page
    assert "Measured limits: 1000 GB/s, 100 TFLOP/s." in page


def test_the_page_is_that_of_the_record():
    records = gpu_record.read()
    assert gpu_record.PAGE.read_text("utf-8") == gpu_record.page(records)
    assert all(set(record) == set(gpu_record.Record.__annotations__) for record in records.values())
    assert "Driver: not noted." in gpu_record.page(records)  # rather than left out
    assert gpu_record.times("NVIDIA H200")["NF4 14336×4096, M = 1"] == pytest.approx(20.8e-6)
    assert gpu_record.times("a device that is not there") == {}


def test_what_cannot_be_found_out_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is provenance.driver() is provenance.clocks() is None


def test_the_clocks_of_a_gpu(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '1980 MHz, 345 MHz, 3201 MHz, 700.00 W'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert provenance.clocks() == "at most 1980 MHz, now 345 MHz; memory 3201 MHz; 700.00 W"


def test_no_accelerator_is_said(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu", "--json", "rows.json"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "there is no GPU and no TPU" in capsys.readouterr().err
