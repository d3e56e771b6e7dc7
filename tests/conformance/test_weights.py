"""A value of every shipped type is what it says of itself, and computes what its array computes."""

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike.arrays.unitful import DimensionError
from quaxlike.testing import check_type
from quaxlike.testing.compare import disagreement
from quaxlike.testing.layers import LAYERS
from tests.array_types import CORNERS, TYPES, WEIGHTS


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


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_cotangent_is_added_to_that_of_an_array(name, default_promotion):
    x = TYPES[name]()
    dense = ql.materialise(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return  # it has no cotangents

    def add(x, y):
        _, pullback = jax.vjp(lambda z: (z, z), jnp.zeros(x.shape, x.dtype))
        return pullback((x, y))[0]

    array = jnp.cos(jnp.arange(x.size, dtype=dense.real.dtype)).reshape(x.shape).astype(x.dtype)
    tolerance = 100 * jnp.finfo(x.dtype).eps
    for operands in ((x, array), (array, x), (x, x)):
        with ql.on_materialise("allow"):
            try:
                out = ql.materialise(ql.quaxify(jax.jit(add))(*operands))
            except DimensionError:  # what has a unit is not added to what has none
                continue
        expected = sum(map(ql.materialise, operands))
        assert not disagreement(out, expected, tolerance=tolerance, scale=1.0)
