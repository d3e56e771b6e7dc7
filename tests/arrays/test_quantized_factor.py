"""Numbers that multiply or divide a quantised array: kept in its scales, with their gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import normal

TYPES = {
    "nf4": ql.NF4Array.quantize,
    "nf4, nested": functools.partial(ql.NF4Array.quantize, double_quant=True),
    "nf4, trained": functools.partial(ql.NF4Array.quantize, train_scales=True),
    "int8": ql.Int8Array.quantize,
    "int8, blocks": functools.partial(ql.Int8Array.quantize, block_size=16),
}
ADAPTER = normal(2, 64, seed=1), normal(8, 2, seed=2)
TYPES["qlora"] = lambda w: ql.LoraArray(ql.NF4Array.quantize(w), *ADAPTER)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_scales_that_are_frozen_stay_so(kind):
    w = TYPES[kind](normal(8, 64))
    trains = kind == "nf4, trained"

    def loss(w):
        return jnp.sum(jnp.sin(ql.quaxify(lambda w: jnp.ones(64) @ (w * 0.5).T)(w)))

    grad = jax.grad(loss, allow_int=True)(w)
    base = grad.w if kind == "qlora" else grad
    for leaf in jax.tree.leaves(base.scale):
        if leaf.dtype != jax.dtypes.float0:
            assert bool(jnp.any(leaf != 0)) == trains


@pytest.mark.quick("nf4-inf", "nf4-nan", "nf4, nested-nan")
@pytest.mark.parametrize("factor", [np.inf, np.nan])
@pytest.mark.parametrize("kind", ["nf4", "nf4, nested"])
def test_a_factor_that_is_not_finite(kind, factor):
    """Scales that are themselves sums become NaN: 0 times infinity, or opposite infinities."""
    w = TYPES[kind](normal(1, 64))
    with ql.on_materialise("allow"):
        found = ql.materialise(ql.quaxify(jnp.multiply)(w, np.float32(factor)))
    np.testing.assert_array_equal(found, ql.materialise(w) * jnp.float32(factor))
