"""Every transform keeps the type: programs on types that refuse to materialise."""

import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike.testing import check_type
from quaxlike.testing.programs import LINEAR
from tests.strict import product, strict, strict_pair


@pytest.mark.slow
@pytest.mark.parametrize("make", [strict, strict_pair, product], ids=lambda make: make.__name__)
def test_type_is_kept(make, default_promotion):
    with ql.on_materialise("error"):
        report = check_type(make(jnp.array([1.0, -2.0, 3.0, 0.5])), programs=LINEAR)
    assert not report.failures, report
    assert all("declined" not in check.results.values() for check in report.checks), report
    assert all(
        sum(r == "ok" for r in check.results.values()) for check in report.checks if len(check.results) > 1
    )
