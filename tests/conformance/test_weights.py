"""A value of every shipped type is what it says of itself, and computes what its array computes."""

import pytest

import quaxlike as ql
from quaxlike.testing import check_type
from quaxlike.testing.layers import LAYERS
from tests.conformance.weights import CORNERS, WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_the_materialised_array(name, default_promotion):
    with ql.on_materialise("error"):
        report = check_type(WEIGHTS[name](), programs=LAYERS)
    assert not report.failures, report
    assert sum(set(check.results.values()) - {""} == {"ok"} for check in report.checks) > len(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORNERS)
def test_hooks(name, default_promotion):
    report = check_type(CORNERS[name](), programs={})
    assert not report.failures, report
