"""Orbax saves and restores the state of a training run, with Values in it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike.lm import load
from tests.lm.clients.suite import client
from tests.lm.models.fixtures import family, folder

pytestmark = client("orbax")

_SCHEMES = {
    "nf4": {"double_quant": True}, "fp4": {}, "int8": {}, "int4": {}, "int4_block": {}, "fp8": {},
    "mxfp4": {},
}  # fmt: skip
_OPTIMISER = optax.adam(1e-2)


@jax.jit
def _step(params, frozen, state):
    ids, seen = jnp.arange(3, 14), jnp.ones(10, bool)

    def loss(params):
        logits = ql.quaxify(eqx.combine(params, frozen))(ids[:-1], seen)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:]).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = _OPTIMISER.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_run_goes_on(scheme, compare, tmp_path):
    """What it restores is the same bit for bit, and so is the next step."""
    import orbax.checkpoint as ocp

    base, _ = load(folder("qwen3"), quantize={"scheme": scheme, **_SCHEMES[scheme]})
    model = ql.loraify(base, rank=2, key=jax.random.key(0))
    params, frozen = eqx.partition(eqx.filter(model, eqx.is_array), ql.trainable(model))
    state = _OPTIMISER.init(params)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for number in range(2):
            params, state, _ = _step(params, frozen, state)
            tree = {"params": params, "frozen": frozen, "state": state}
            manager.save(number, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    losses = [_step(x["params"], x["frozen"], x["state"])[2] for x in (found, tree)]
    compare("Orbax", "states of runs with LoRA", family("qwen3"), scheme, *losses)


def test_moments_in_few_bits(tmp_path):
    """The next update after restoring is the same bit for bit, rounded with the same random numbers."""
    import orbax.checkpoint as ocp

    optimiser = ql.optim.quantize_state(optax.adam(1e-3), stochastic=True)
    params = {"weight": jnp.ones((64, 128)), "bias": jnp.ones(3)}
    gradient = jax.tree.map(lambda x: 0.1 * x, params)
    state = optimiser.update(gradient, optimiser.init(params), params)[1]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"state": state})
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"state": state})
        found = checkpointer.restore(tmp_path / "state", like)["state"]
    assert jax.tree.structure(found) == jax.tree.structure(state)
    both = [optimiser.update(gradient, x, params) for x in (found, state)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
