"""Every transform keeps the type: programs on types that refuse to materialise."""

import pytest

import quaxlike as ql
from quaxlike.testing import check_type
from quaxlike.testing.programs import LINEAR
from tests.array_types import STRICT


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
def test_type_is_kept(name, default_promotion):
    with ql.on_materialise("error"):
        report = check_type(STRICT[name](), programs=LINEAR)
    assert not report.failures, report
    assert all("declined" not in check.results.values() for check in report.checks), report
    assert all(
        sum(r == "ok" for r in check.results.values()) for check in report.checks if len(check.results) > 1
    )
