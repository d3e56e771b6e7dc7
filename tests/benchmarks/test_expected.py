"""The model of the time of products on an H100, beside what the compilers say of the kernels."""

import json

import pytest

from benchmarks import expected, kernels_check
from quaxlike.kernels.block_matmul import costs

RECORDED = {row["row"]: row for row in json.loads(kernels_check.RECORD.read_text())["h100"]["rows"]}
ROWS = list(expected.rows(RECORDED))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.case} {row.baseline}")
def test_no_target_is_missed_by_design(row):
    assert row.ratio >= row.must
    assert row.ours.seconds > max(row.ours.limits.values())


@pytest.mark.parametrize(("name", "tokens", "tiles"), [("M = 512", 128, 2), ("M = 320", 160, 2)])
def test_the_library_counts_the_instructions_that_were_compiled(name, tokens, tiles):
    # Each scheduler issues those of two warps.
    compiled = 2 * RECORDED[f"NF4 14336×4096, {name}"]["loop"]
    counted = costs.step_limits(4, tokens, tiles, fixed=True)["instructions"]
    assert counted == pytest.approx(compiled, rel=0.1)


def test_a_slower_kernel_shows():
    slower = {name: row | {"loop": 9 * row.get("loop", 0)} for name, row in RECORDED.items()}
    assert sum(row.ratio < row.must for row in expected.rows(slower)) >= 5
    crowded = {name: row | {"registers": 255} for name, row in RECORDED.items()}
    first = next(iter(expected.rows(crowded)))
    assert first.ours.limits["latency"] == pytest.approx(2 * ROWS[0].ours.limits["latency"])
