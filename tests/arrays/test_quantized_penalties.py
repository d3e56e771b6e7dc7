"""Powers, sums and factors for rows: what penalties and weight normalisation ask of a quantised weight."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import normal

_X = jnp.asarray(normal(6, 64))


@pytest.mark.slow
def test_an_adapter_is_penalised_over_a_quantised_base():
    """Of scales that may be trained there is a gradient, too."""
    w = ql.Int8Array.quantize(_X, train_scales=True)
    with ql.on_materialise("error"):
        found = jax.grad(lambda w: jnp.sum(ql.quaxify(jnp.square)(w).scale.scale), allow_int=True)(w)
        penalty = lambda scale: ql.quaxify(lambda w: jnp.sum(w**2))(eqx.tree_at(lambda w: w.scale, w, scale))
        by_scale = jax.grad(penalty)(w.scale)
    expected = jax.grad(lambda s: jnp.sum((w.codes.astype(jnp.float32) * s) ** 2))(w.scale)
    np.testing.assert_allclose(by_scale, expected, rtol=1e-5)
    np.testing.assert_allclose(found.scale, 2 * w.scale, rtol=1e-6)


@pytest.mark.slow
def test_a_mask_of_elements_warns():
    """Zero is no code of every codec, and what is masked would be quantised anew."""
    mask = jnp.ones((6, 64))
    with pytest.warns(ql.MaterialisationWarning, match="mul"):
        ql.quaxify(lambda w: w * mask)(ql.BlockArray.quantize(_X, codec="nvfp4"))


@pytest.mark.slow
def test_weight_norm_keeps_codes():
    layer = eqx.nn.WeightNorm(eqx.nn.Linear(64, 6, key=jax.random.key(0)), axis=0)
    quantised = eqx.tree_at(lambda m: m.layer.weight, layer, ql.NF4Array.quantize(layer.layer.weight))
    dense = eqx.tree_at(lambda m: m.layer.weight, layer, ql.materialise(quantised.layer.weight))
    with ql.on_materialise("error"):
        found = ql.quaxify(lambda m, x: m(x))(quantised, _X[0])
    np.testing.assert_allclose(found, dense(_X[0]), rtol=1e-5, atol=1e-5)
