import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import packages
from tests.samples import wrong_types

RECORD = json.loads(packages.RECORD.read_text())


@pytest.mark.slow
@wrong_types
def test_a_function_is_measured_and_shown(default_promotion):
    x = jnp.arange(3.0)
    row = packages.measured("right", lambda x: 2.0 * x, x)
    assert (row.checks, row.passed, row.runs) == (6, 6, True)
    wrong = packages.measured("wrong", lambda x: x / np.linalg.norm(x), x)
    assert (wrong.checks, wrong.passed, wrong.runs) == (6, 5, False)
    assert wrong.where.startswith("numpy/linalg/")
    assert wrong.why.startswith("refuses; eager: Refused: `array` of Python or NumPy needs")
    record = {"versions": {"jax.numpy": "1"}, "rows": {"jax.numpy": [*map(dataclasses.asdict, (row, wrong))]}}
    page = packages.page(record)
    assert "| jax.numpy 1 | 2 | 1 | 12 | 11 |" in page
    assert "| jax.numpy | `wrong` | 1 of 6 |" in page


def test_the_recorded_page_is_what_the_program_writes():
    assert packages.PAGE.read_text(encoding="utf-8") == packages.page(RECORD)
    assert [*RECORD["rows"]] == [*packages.PACKAGES]


@pytest.mark.frameworks
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("package", packages.PACKAGES)
def test_no_function_runs_less_than_was_recorded(package, default_promotion):
    if package not in packages.installed():
        pytest.skip(f"{package} is not installed")
    recorded = {row["name"]: row["passed"] for row in RECORD["rows"][package]}
    assert {*recorded} <= {*packages.PACKAGES[package].functions()}
    fewer = [row for row in packages.rows_of(package) if row.passed < recorded.get(row.name, row.passed)]
    jax.clear_caches()
    assert not fewer
