"""Balanced models compute the same, and lose less where some activations are large."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.surgery.balance import LLAMA_FOLDS
from tests.fixtures import fixture
from tests.samples import normal

_FOLDS = {"norm": ["first", "second"], "first": ["last"]}
SCHEMES = {
    "int3_block": {"scheme": "int3_block", "block_size": 32},
    "int8, activations": {"scheme": "int8", "activations": "int8"},
}


class _Gated(eqx.Module):
    norm: eqx.nn.LayerNorm
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        x = self.norm(x)
        return self.last(self.first(x) * jax.nn.silu(self.second(x)))


def _model():
    a, b, c = jax.random.split(jax.random.key(0), 3)
    norm = eqx.tree_at(lambda n: n.weight, eqx.nn.LayerNorm(64), jnp.ones(64).at[::16].set(20.0))
    linear = lambda key: eqx.nn.Linear(64, 64, key=key)
    return _Gated(norm, linear(a), linear(b), linear(c))


def _run(model, x):
    return jax.vmap(model)(x)


@pytest.mark.quick("int8, activations")
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_a_balanced_model_computes_the_same_and_rounds_better(options):
    model, x, held_out = _model(), jnp.asarray(normal(128, 64)), jnp.asarray(normal(32, 64, seed=1))
    moments = ql.input_moments(_run)(model, x)
    balanced = ql.balance(model, moments, folds=_FOLDS, **options)
    wanted = _run(model, held_out)
    np.testing.assert_allclose(_run(balanced, held_out), wanted, rtol=1e-4, atol=1e-3)
    assert not jnp.allclose(balanced.norm.weight, model.norm.weight)

    def error(model):
        quantised = ql.quantize(model, **options)
        return float(jnp.mean((ql.quaxify(_run)(quantised, held_out) - wanted) ** 2))

    assert error(balanced) < 0.7 * error(model)


@pytest.mark.slow
def test_a_decoder_is_known_by_its_names():
    model, config = ql.lm.load(fixture("models/llama_llama3/base"))
    ids = jnp.arange(12) % config["vocab_size"]
    run = lambda model, ids: model(ids, jnp.ones(ids.shape, bool))
    where = r".*_proj"
    moments = ql.input_moments(run, where)(model, ids)
    balanced = ql.balance(model, moments, "int4_block", block_size=16)
    np.testing.assert_allclose(run(balanced, ids), run(model, ids), rtol=1e-3, atol=1e-3)
    assert len(LLAMA_FOLDS) == 3


@pytest.mark.parametrize(
    ("folds", "moments", "message"),
    [
        ({"nothing": ["first"]}, None, "No layer of the model matches `folds`: nothing"),
        ({"norm": ["third"]}, None, "`folds` names third, which is not a layer"),
        ({"norm": ["first"]}, {}, "balance has no moments for first.weight"),
        ({"norm": ["first"]}, {"first.weight": np.eye(3)}, r"must have shape \(64, 64\); found \(3, 3\)"),
    ],
)
def test_what_does_not_fit_is_told(folds, moments, message):
    with pytest.raises(ValueError, match=message):
        ql.balance(_model(), {} if moments is None else moments, folds=folds)
