"""Equal layers as one: with weights of all types, in a scan, and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import array, drawn, normal, random_key

KEYS = [random_key(seed) for seed in range(3)]


def _quantised(scheme, **options):
    return lambda layer, key: ql.quantize(layer, scheme, **options)


def _qlora(layer, key):
    layer = ql.quantize(layer, "nf4", double_quant=True)
    return ql.loraify(layer, rank=2, init="gaussian", key=key)


FORMS = {
    "dense": lambda layer, key: layer,
    "nf4": _quantised("nf4"),
    "nf4 twice": _quantised("nf4", double_quant=True),
    "int8": _quantised("int8"),
    "int4": _quantised("int4"),
    "lora": lambda layer, key: ql.loraify(layer, rank=2, init="gaussian", key=key),
    "dora": lambda layer, key: ql.loraify(layer, rank=2, init="gaussian", dora=True, key=key),
    "qlora": _qlora,
    "lora of biases": lambda layer, key: ql.loraify([layer], rank=2, lora_bias=True, key=key)[0],
    "lora of trained biases": lambda layer, key: ql.loraify(
        [layer], rank=2, lora_bias=True, bias="all", key=key
    )[0],
}


@pytest.mark.quick("lora of biases")
@pytest.mark.parametrize("form", FORMS)
def test_scanned_layers_are_the_layers_in_turn(form):
    layers = [FORMS[form](eqx.nn.Linear(64, 64, key=key), key) for key in KEYS]
    stacked = ql.stack_layers(layers)
    assert isinstance(stacked, eqx.nn.Linear)
    assert stacked.weight.shape == (3, 64, 64)

    def run(stacked, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, stacked)[0]

    def in_turn(layers, x):
        for layer in layers:
            x = jnp.tanh(layer(x))
        return x

    x = normal(64)
    with ql.on_materialise("error"):
        found, wanted = jax.jit(ql.quaxify(run))(stacked, x), jax.jit(ql.quaxify(in_turn))(layers, x)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    back = ql.unstack_layers(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(layers)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(layers)))


@pytest.mark.slow
def test_gradients_are_those_of_the_layers():
    layers = [_qlora(eqx.nn.Linear(64, 64, key=key), key) for key in KEYS]

    def loss(params, frozen, run):
        return jnp.sum(ql.quaxify(run)(eqx.combine(params, frozen), normal(64)) ** 2)

    def grads(model, run):
        params, frozen = eqx.partition(model, ql.trainable(model))
        return jax.grad(loss)(params, frozen, run)

    scan = lambda stacked, x: jax.lax.scan(lambda x, layer: (jnp.tanh(layer(x)), None), x, stacked)[0]

    def in_turn(layers, x):
        for layer in layers:
            x = jnp.tanh(layer(x))
        return x

    found = jax.tree.leaves(grads(ql.stack_layers(layers), scan))
    wanted = jax.tree.leaves(ql.stack_layers(grads(layers, in_turn)))
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer; found none"),
        ([{"a": array(np.ones(2))}, {"b": array(np.ones(2))}], "layers 0 and 1 have different arrays: a, b"),
        (
            [{"a": array(np.ones(2))}, {"a": array(np.ones(3))}],
            r"a is float32\[2\] in layer 0 and float32\[3\] in layer 1",
        ),
        ([{"a": 1.0}, {"a": 2.0}], "a is 1.0 in layer 0 and 2.0 in layer 1"),
        (
            [drawn(eqx.nn.RMSNorm, 2, eps=1e-5), drawn(eqx.nn.RMSNorm, 2, eps=1e-6)],
            "layers 0 and 1 differ in their static fields",
        ),
    ],
)
def test_layers_that_differ(layers, message):
    with pytest.raises(ValueError, match=message):
        ql.stack_layers(layers)


def test_what_is_no_stack():
    with pytest.raises(ValueError, match="a leading axis of one size; found a: 2, b: 3"):
        ql.unstack_layers({"a": jnp.ones(2), "b": jnp.ones(3)})
    w = ql.loraify(eqx.nn.Linear(4, 4, key=KEYS[0]), rank=2, key=KEYS[0]).weight
    with pytest.raises(ValueError, match=r"a: LoraArray of shape \(4, 4\) cannot be split into rows"):
        ql.unstack_layers({"a": w})
