"""The figures of whole jobs, and what is read in the text of their programs."""

import json

import pytest

from benchmarks import jobs
from benchmarks.targets import TARGETS

RECORD = json.loads(jobs.RECORD.read_text("utf-8"))

TEXT = """
%inner (p: f32[4]) -> f32[4] {
  %g.1 = u8[8,4]{1,0} all-gather(%p), dimensions={0}
}

%body (p: f32[4]) -> f32[4] {
  %w.1 = f32[4]{0} while(%p), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %r.1 = f32[4]{0} all-reduce(%w.1), to_apply=%sum
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %w.2 = f32[4]{0} while(%a), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %c.1 = bf16[5,2,3,7]{3,2,1,0} custom-call(%w.2), custom_call_target="mosaic_gpu_v2"
  %c.2 = u8[5,6,7]{2,1,0} custom-call(%w.2), custom_call_target="mosaic_gpu_v2"
  %c.3 = bf16[6,7]{1,0} custom-call(%w.2), custom_call_target="__cublas$gemm"
  ROOT %g.2 = f32[16]{0} all-gather(%a), dimensions={0}
}
"""


def test_collectives_count_as_often_as_their_loops_run():
    counts = jobs.repetitions(TEXT)
    assert (counts["main"], counts["body"], counts["inner"], counts["sum"]) == (1, 10, 30, 10)
    assert jobs.exchanged(TEXT) == {"all-gather": 30 * 32 + 64, "all-reduce": 10 * 16}


def test_a_loop_runs_as_often_as_its_condition_says():
    """For TPUs, the compiler does not write the number."""
    known = ', backend_config={"known_trip_count":{"n":"10"}}'
    condition = """
%less (p: f32[4]) -> pred[] {
  %n = s32[]{:T(128)} constant(10)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}
"""
    assert known in TEXT
    assert jobs.exchanged(condition + TEXT.replace(known, "")) == jobs.exchanged(TEXT)


def test_dense_copies_have_the_shape_of_a_weight_of_all_layers():
    assert jobs.dense_copies(TEXT, [(5, 6, 7)]) == 1  # 2 × 3 rows; codes and a single layer are none
    assert jobs.dense_copies(TEXT, [(5, 7, 6), (6, 7, 1)]) == 0


def test_calls_are_counted():
    assert jobs.custom_calls(TEXT) == {"__cublas$gemm": 1, "mosaic_gpu_v2": 2}


def test_drift_is_a_problem():
    figures = {
        "arguments": 2**30, "temporaries": 2**30, "peak": 2**31, "exchanged": {"all-gather": 2**30},
        "dense_copies": 0, "custom_calls": {"mosaic_gpu_v2": 7},
    }  # fmt: skip
    assert jobs.problems("a job", figures, figures) == []
    assert jobs.problems("a job", figures, None) == []
    more = figures | {"temporaries": 2**30 + 2**25, "exchanged": {"all-reduce": 2**29}}
    more |= {"dense_copies": 2, "custom_calls": {}}
    assert jobs.problems("a job", more, figures) == [
        "a job: 2 dense copies of weights",
        f"a job: temporaries: {2**30 + 2**25:,} bytes, recorded were {2**30:,}",
        f"a job: all-gather: 0 bytes, recorded were {2**30:,}",
        f"a job: all-reduce: {2**29:,} bytes, recorded were 0",
        "a job: calls {}, recorded were {'mosaic_gpu_v2': 7}",
    ]
    failed = {"error": "LLVM ERROR"}
    assert jobs.problems("a job", failed, figures) == ["a job: LLVM ERROR"]
    assert jobs.problems("a job", failed, failed) == []


def test_the_page_is_that_of_the_record():
    assert jobs.PAGE.read_text("utf-8") == jobs.page(RECORD)
    assert list(RECORD) == [job.name for job in jobs.JOBS if job.name in RECORD]
    for name, figures in RECORD.items():
        assert jobs.problems(name, figures, figures) == []
    gpus = [figures for name, figures in RECORD.items() if "H100" in name]
    assert len(gpus) == 4
    assert all("mosaic_gpu_v2" in figures["custom_calls"] for figures in gpus)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(TARGETS["h100"].missing()), reason="pip install '.[kernels-check]'")
def test_a_job_compiles_as_recorded():
    (job,) = (job for job in jobs.JOBS if job.name == "8B decode, 8 × H100")
    assert jobs.problems(job.name, jobs.run(job), RECORD[job.name]) == []
