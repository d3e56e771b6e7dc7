"""Adapters on modules of NNX, parameters of Linen and of Haiku, and plain dicts are those on the same model
in Equinox, and so are the files that PEFT reads."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import quaxlike as ql
from quaxlike.lm import peft

from .test_nnx import Block

pytestmark = pytest.mark.frameworks

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, 32))


class Twin(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    down: eqx.nn.Linear


def twin():
    up, down = jax.random.split(KEY)
    return Twin(eqx.nn.Linear(32, 64, key=up), eqx.nn.LayerNorm(32), eqx.nn.Linear(64, 32, key=down))


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        up, down = nn.Dense(64, name="up"), nn.Dense(32, name="down")
        return x + down(jax.nn.gelu(up(nn.LayerNorm(name="norm")(x))))


def of_haiku(x):
    norm = hk.LayerNorm(-1, True, True, name="norm")
    return x + hk.Linear(32, name="down")(jax.nn.gelu(hk.Linear(64, name="up")(norm(x))))


def of_dict(p, x):
    linear = lambda layer, x: layer["weight"] @ x + layer["bias"]
    norm = lambda layer, x: layer["weight"] * jax.nn.standardize(x) + layer["bias"]
    return x + jax.vmap(lambda x: linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["norm"], x)))))(x)


def layers(weight, bias, scale, offset):
    """The parameters of the twin by layer, under the names of a framework, whose kernels are (in, out)."""
    model = twin()
    kernels = {name: {weight: layer.weight.T, bias: layer.bias} for name, layer in vars(model).items()}
    return kernels | {"norm": {scale: model.norm.weight, offset: model.norm.bias}}


def in_nnx():
    model = Block(nnx.Rngs(0))
    for name, of_layer in layers("kernel", "bias", "scale", "bias").items():
        for field, array in of_layer.items():
            getattr(getattr(model, name), field)[...] = array
    return model, lambda model, x: model(x)


def in_linen():
    params = layers("kernel", "bias", "scale", "bias")
    return params, lambda params, x: OfLinen().apply({"params": params}, x)


def in_haiku():
    apply = hk.without_apply_rng(hk.transform(of_haiku)).apply
    return layers("w", "b", "scale", "offset"), apply


def in_dict():
    params = {name: {"weight": layer.weight, "bias": layer.bias} for name, layer in vars(twin()).items()}
    return params, of_dict


HOSTS = {"NNX": in_nnx, "Linen": in_linen, "Haiku": in_haiku, "a dict": in_dict}
OPTIONS = {
    "as by default": {},
    "LoRA": {"init": "gaussian", "bias": "lora_only"},
    "DoRA": {"init": "gaussian", "dora": True, "rank_pattern": {"down": 3}},
    "PiSSA": {"init": "pissa"},
    "with biases": {"init": "gaussian", "lora_bias": True},
    "modules to save": {"init": "gaussian", "exclude": "down", "modules_to_save": ["norm", "down"]},
    "QLoRA": {"init": "gaussian"},
}


def adapted(model, options):
    base = ql.quantize(model, "nf4", block_size=32) if options == "QLoRA" else model
    return ql.loraify(base, rank=2, key=KEY, **OPTIONS[options])


def after_a_step(model, call):
    """What gradient descent makes of what is trained, and the results before."""
    params, rest = eqx.partition(model, ql.trainable(model))
    run = lambda params: ql.quaxify(call)(eqx.combine(params, rest), X)
    grads = jax.jit(jax.grad(lambda params: jnp.sum(run(params) ** 2)))(params)
    return eqx.combine(jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), rest), jax.jit(run)(params)


def call_twin(model, x):
    return x + jax.vmap(lambda x: model.down(jax.nn.gelu(model.up(model.norm(x)))))(x)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("host", HOSTS)
def test_adapters_and_their_files_are_those_of_the_twin(host, options, tmp_path):
    base, call = HOSTS[host]()
    model, expected = adapted(base, options), adapted(twin(), options)
    peft.save_adapter(tmp_path / "expected", expected)
    peft.save_adapter(tmp_path / "found", model)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "found" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()

    (model, y), (expected, z) = after_a_step(model, call), after_a_step(expected, call_twin)
    np.testing.assert_allclose(y, z, atol=1e-4)
    peft.save_adapter(tmp_path / "found", model)
    peft.save_adapter(tmp_path / "expected", expected)
    found, tensors = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("found", "expected"))
    assert found.keys() == tensors.keys()
    for name in found:
        np.testing.assert_allclose(found[name], tensors[name], atol=1e-4, err_msg=name)

    if options in ("PiSSA", "QLoRA"):  # the base is another one there
        return
    y = ql.quaxify(call)(model, X)
    again = peft.load_adapter(tmp_path / "found", base)
    for found, saved in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(found, saved)
    np.testing.assert_allclose(ql.quaxify(call)(again, X), y, atol=1e-5)
    np.testing.assert_allclose(call(ql.merge(model), X), y, rtol=1e-4, atol=1e-4)
