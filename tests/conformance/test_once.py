"""A Value that is there twice among the operands of a primitive becomes one array.

Two arrays that are decoded apart may differ in their last digits, as XLA fuses them otherwise, and `x != x`
is how `jnp.isnan` asks for NaNs.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.array_types import TYPES
from tests.differential.program import under
from tests.primitives.jaxprs import equations

QUICK = ["LowRankUpdate of Int4Array", "TrainableArray of NF4Array", "LoraBias"]
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TYPES]


@pytest.mark.quick("TrainableArray of NF4Array", "LoraBias")
@pytest.mark.parametrize("name", ALL)
def test_nans_are_asked_for_of_one_array(name):
    with under(True), ql.on_materialise("allow"):
        isnan = jax.make_jaxpr(lambda x: ql.materialise(ql.quaxify(jnp.isnan)(x)))(TYPES[name]())
    compared = [eqn.invars for eqn in equations(isnan.jaxpr) if eqn.primitive.name == "ne"]
    # Not with a number, as `triu_indices` of older JAX compares what it has made.
    of_floats = [
        (x, y)
        for x, y in compared
        if jnp.issubdtype(x.aval.dtype, jnp.inexact) and not isinstance(y, Literal)
    ]
    assert all(x is y for x, y in of_floats)


@pytest.mark.slow
def test_a_mean_without_nans_in_a_compiled_loop():
    x = TYPES["LowRankUpdate of Int4Array"]()
    means = lambda x: lax.map(lambda s: jnp.nanmean(x * s), 1 + jnp.arange(4.0))
    with ql.on_materialise("allow"):
        found = jax.jit(ql.quaxify(means))(x)
    assert not disagreement(found, means(ql.materialise(x)), tolerance=1e-5)
