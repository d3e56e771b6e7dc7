"""Learning rates of adapters: LoRA+, and LoRA-FA, which leaves one matrix as it began."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike.optim import lora_plus
from tests.samples import normal

MODEL = {"q.weight": normal(6, 5), "v.weight": normal(6, 5, seed=1)}


def adapted(**options):
    return ql.loraify(MODEL, rank=2, key=jax.random.key(0), layout="oi", **options)


def step(model, spec, optimiser):
    params, rest = eqx.partition(model, spec)

    def loss(params):
        return sum(jnp.sum((x.materialise() - 1) ** 2) for x in eqx.combine(params, rest).values())

    updates, _ = optimiser.update(jax.jit(jax.grad(loss))(params), optimiser.init(params), params)
    return eqx.combine(optax.apply_updates(params, updates), rest)


@pytest.mark.slow
def test_b_has_a_rate_of_its_own(default_promotion):
    model = adapted(init="gaussian")
    model = {name: w.replace(b=w.b + 0.1) for name, w in model.items()}
    # Weight decay, too, is in proportion to the rate.
    plain, slow, fast = (
        step(model, ql.trainable(model), optimiser)
        for optimiser in (
            optax.adamw(1e-3, weight_decay=0.1),
            optax.adamw(8e-3, weight_decay=0.1),
            optax.chain(optax.adamw(1e-3, weight_decay=0.1), lora_plus(8)),
        )
    )
    for name in model:
        np.testing.assert_array_equal(fast[name].a, plain[name].a)
        np.testing.assert_allclose(fast[name].b, slow[name].b, rtol=1e-6)
        np.testing.assert_array_equal(fast[name].w, model[name].w)


def test_what_is_no_lora():
    with pytest.raises(
        ValueError, match="lora_plus is for LoRAs, and the parameters have none whose `b` is trained"
    ):
        lora_plus(8).init(MODEL)
    with pytest.raises(ValueError, match="lora_plus takes a positive number as `ratio`; found 0"):
        lora_plus(0)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_stays_as_it_began(nested):
    model = adapted(dora=True)
    if nested:
        model = {name: ql.LoraArray(w, normal(2, 5), normal(6, 2)) for name, w in model.items()}
    spec = ql.trainable(model, freeze=["a"])
    after = step(model, spec, optax.sgd(0.1))
    for before, w in zip(model.values(), after.values(), strict=True):
        while isinstance(w, ql.LoraArray):
            np.testing.assert_array_equal(w.a, before.a)
            assert not np.array_equal(w.b, before.b)
            before, w = before.w, w.w
    params, _ = eqx.partition(model, spec)
    assert {x.shape for x in jax.tree.leaves(params)} == {(6, 2), (6,)}


def test_parts_that_no_adapter_has():
    with pytest.raises(ValueError, match=r"No adapter trains a part 'c'; they train a, b\."):
        ql.trainable(adapted(), freeze=["c"])
    with pytest.raises(TypeError, match=r"a sequence of names as `freeze`, such as \['a'\]"):
        ql.trainable(adapted(), freeze="a")
