"""Fifty steps of training with SGD and AdamW, step by step as torch and PEFT did them."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files.tensors import open_tensors
from quaxlike.lm import bitsandbytes, peft

from ...fixtures import fixture


class MLP(eqx.Module):
    lin0: eqx.nn.Linear
    lin1: eqx.nn.Linear
    lin2: eqx.nn.Linear

    def __init__(self, weights):
        self.lin0, self.lin1, self.lin2 = (
            eqx.tree_at(
                lambda x: (x.weight, x.bias),
                eqx.nn.Linear(1, 1, key=jax.random.key(0)),
                (weights[f"lin{i}.weight"], weights[f"lin{i}.bias"]),
            )
            for i in range(3)
        )

    def __call__(self, x):
        for layer in (self.lin0, self.lin1):
            x = jnp.tanh(layer.weight @ x + layer.bias)
        return self.lin2.weight @ x + self.lin2.bias


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def next_token(model, batch):
    (ids,) = batch
    logits = jax.vmap(model)(ids, jnp.ones_like(ids, bool))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]))


def problem(name):
    """The base model, the loss, and the batches."""
    data = np.load(fixture(name) / "data.npz")
    if name == "train_mlp_lora":
        base = MLP(bitsandbytes.load(fixture(name) / "base.safetensors"))
        return base, mse, [(data["x"][i], data["y"][i]) for i in range(5)]
    base = "qlora_llama_double/base4bit" if "qlora" in name else "peft_llama/base"
    return lm.load(fixture(base))[0], next_token, [(data["input_ids"][i],) for i in range(5)]


def optimiser(meta):
    h = meta["hyperparameters"]
    if meta["optimizer"] == "sgd":
        return optax.sgd(h["lr"], h["momentum"] or None)
    b1, b2 = h["betas"]
    return optax.adamw(h["lr"], b1, b2, h["eps"], weight_decay=h["weight_decay"])


def adapter_folder(tmp_path, tensors, meta):
    """A PEFT directory with these tensors."""
    layers = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in meta["trainable"]})
    config = {"peft_type": "LORA", "r": meta["r"], "lora_alpha": meta["lora_alpha"], "target_modules": layers}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_mlp_lora", "train_llama_lora", "train_llama_qlora"])
@pytest.mark.parametrize("which", ["sgd", "adamw"])
def test_curve(name, which, tmp_path, default_promotion):
    folder = fixture(name) / which
    meta = json.loads((folder / "meta.json").read_text())
    base, loss_fn, batches = problem(name)
    init = adapter_folder(tmp_path, folder / "adapter_init.safetensors", meta)
    model = peft.load_adapter(init, base)
    params, frozen = eqx.partition(model, ql.trainable(model))
    tx = optimiser(meta)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss = lambda params: ql.quaxify(loss_fn)(eqx.combine(params, frozen), batch)
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    curve, gradients = [], []
    with ql.on_materialise("error"):
        for t in range(meta["steps"]):
            params, state, value, grads = step(params, state, batches[t % 5])
            curve.append(float(value))
            gradients += [grads] if t < 2 else []

    expected = np.load(folder / "curve.npz")["loss"]
    np.testing.assert_allclose(curve[:10], expected[:10], rtol=0, atol=2e-5)
    np.testing.assert_allclose(curve, expected, rtol=0, atol=2e-4)

    def tensors(params):
        peft.save_adapter(tmp_path / "out", eqx.combine(params, frozen))
        return open_tensors(tmp_path / "out" / "adapter_model.safetensors")

    final, reference = tensors(params), open_tensors(folder / "adapter_final.safetensors")
    assert final.keys() == reference.keys()
    for key in final:
        np.testing.assert_allclose(final[key], reference[key], rtol=0, atol=3e-4)
    reference = open_tensors(folder / "grads_step0_step1.safetensors")
    for t, grads in enumerate(gradients):
        for key, grad in tensors(grads).items():
            np.testing.assert_allclose(grad, reference[f"step{t}/{key}"], rtol=1e-3, atol=1e-5)
