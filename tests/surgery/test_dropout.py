"""Dropout that is asked for and then forgotten is told."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.lora import DropoutWarning
from tests.samples import array, random_key

KEY = random_key(0)
X = array(np.ones(64))


class Conv(eqx.Module):
    conv: eqx.nn.Conv1d

    def __call__(self, x):
        return self.conv(x.reshape(4, 16))


MODELS = {
    "dense": lambda: eqx.nn.MLP(64, 3, 64, depth=1, key=KEY),
    "nf4": lambda: ql.quantize(eqx.nn.MLP(64, 64, 64, depth=0, key=KEY), "nf4"),
    "conv": lambda: Conv(eqx.nn.Conv1d(4, 3, 3, key=KEY)),
}


def _adapted(kind, dropout=0.1):
    return ql.loraify(
        MODELS[kind](), rank=2, dropout=dropout, key=KEY, where=["conv"] if kind == "conv" else "all-linear"
    )


def _grad(model, x=X, of=lambda f: f):
    params, rest = eqx.partition(model, ql.trainable(model))
    loss = lambda params: jnp.sum(of(ql.quaxify(eqx.combine(params, rest)))(x) ** 2)
    return jax.grad(loss)(params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_training_without_a_key_warns(kind):
    model = _adapted(kind)
    message = r"dropout=0\.1 is trained without a key, so nothing is dropped.*with_dropout_key"
    with pytest.warns(DropoutWarning, match=message):
        _grad(model)
    with pytest.warns(DropoutWarning, match=message):
        _grad(model, X[None], jax.vmap)
    with pytest.warns(DropoutWarning, match=message):
        eqx.filter_jit(_grad)(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_else_warns(kind):
    model = _adapted(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = ql.quaxify(model)
        run(X)
        eqx.filter_jit(run)(X)
        jax.vmap(run)(X[None])
        jax.grad(lambda x: jnp.sum(run(x)))(X)  # not of the adapters
        _grad(ql.with_dropout_key(model, KEY))
        _grad(_adapted(kind, dropout=0.0))


@pytest.mark.slow
def test_the_summary_says_whether_it_drops():
    model = _adapted("dense")
    kinds = lambda model: {row.type for row in ql.summary(model).rows if "Lora" in row.type}
    assert kinds(model) == {"LoraArray[r=2, dropout 0.1 (no key: off)]"}
    assert kinds(ql.with_dropout_key(model, KEY)) == {"LoraArray[r=2, dropout 0.1]"}
    assert kinds(_adapted("dense", 0.0)) == {"LoraArray[r=2]"}
