"""Moments in few bits, against optax in float32 and NumPy."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import quaxlike as ql
from quaxlike.files import safetensors
from quaxlike.optim import QuantizedState, quantize_state
from quaxlike.sharding import fsdp, shard
from tests.samples import array, normal, wrong_types

pytestmark = pytest.mark.usefixtures("default_promotion")

PARAMS = {"weight": normal(96, 64, seed=1), "window": normal(40, 40, 3, seed=2), "bias": array(np.zeros(96))}


def gradients(number, params=None):
    """Of different magnitudes, as those of the rows of a layer are, and too small for float16."""
    rng = np.random.default_rng(number)
    one = lambda p: np.float32(1e-9) * rng.normal(size=p.shape) * np.exp(rng.normal(size=(*p.shape[:-1], 1)))
    return jax.tree.map(lambda p: jnp.asarray(one(p), p.dtype), PARAMS if params is None else params)


def updated(optimiser, steps=8, params=None, **extra):
    params = PARAMS if params is None else params
    step = jax.jit(optimiser.update, donate_argnums=1)
    state = optimiser.init(params)
    for number in range(steps):
        updates, new = step(gradients(number, params), state, params, **extra)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        state = new
    return updates, state


def is_rounded(x):
    return isinstance(x, ql.BlockArray) and x.codes is not None


def rounded(state):
    """The quantised arrays of a state, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_rounded)
    return {ql.path_of(path): x for path, x in leaves if is_rounded(x)}


def test_the_nearest_of_the_numbers_that_are_told():
    moment = np.abs(np.asarray(normal(64, 96, seed=3))) ** 4
    moment[3, 32:64] = 0
    state = quantize_state(optax.rmsprop(1.0)).init({"w": jnp.zeros((64, 96))})
    step = jax.jit(quantize_state(optax.scale_by_rms(decay=0.0)).update)
    _, state = step({"w": jnp.sqrt(moment)}, state._replace(inner_state=state.inner_state[0]))
    roots = np.sqrt(moment.astype(np.float64)).reshape(64, 3, 32)
    scale = roots.max(-1, keepdims=True) / 256
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.round(roots / scale), 1, 256)
    wanted = np.where(scale == 0, 0, codes * scale) ** 2
    found = np.asarray(state.inner_state.nu["w"].materialise()).reshape(64, 3, 32)
    # A root in the middle between two codes may go either way.
    distance = np.abs(np.sqrt(found) - roots) - np.abs(np.sqrt(wanted) - roots)
    assert np.max(np.where(codes > 1, distance / np.where(scale == 0, 1, scale), 0)) < 1e-3
    np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0)
    assert np.all((found == 0) == (scale == 0))


@pytest.mark.slow
def test_bytes_by_table():
    params = {"weight": jnp.zeros((128, 256)), "bias": jnp.zeros(256)}
    state = quantize_state(optax.adamw(1e-3)).init(params)
    rows = {row.path: row for row in ql.summary(state).rows}
    for moment in ("mu", "nu"):
        row = rows[f"inner_state.0.{moment}.weight"]
        assert (row.type, row.dtype, row.shape) == ("BlockArray[8-bit]", "float32", (128, 256))
        assert row.stored_bytes == 128 * 256 + 4 * 128 * 256 // 32
        assert rows[f"inner_state.0.{moment}.bias"].type == "array"
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert ql.summary(state).stored_bytes == size(state) < 0.3 * size(optax.adamw(1e-3).init(params))
    assert size(quantize_state(optax.adamw(1e-3), "q4_0").init(params)) < 0.17 * size(
        optax.adamw(1e-3).init(params)
    )


@pytest.mark.slow
@pytest.mark.parametrize("moments", [None, {"nu": "linear"}])
def test_small_second_moments_are_not_zero(moments):
    """A linear code makes zeros of them, by which the updates are divided."""
    params = {"w": jnp.zeros((64, 64))}
    big = jnp.zeros((64, 64), bool).at[:, ::16].set(True)
    optimiser = quantize_state(optax.scale_by_adam(eps=1e-12), moments=moments)
    step, state = jax.jit(optimiser.update), optimiser.init(params)
    for number in range(6):
        noise = jax.random.normal(jax.random.key(number), (64, 64))
        updates, state = step({"w": jnp.where(big, noise, 0.05 * noise)}, state)
    nu, largest = state.inner_state.nu["w"].materialise(), float(jnp.max(jnp.abs(updates["w"])))
    if moments is None:
        assert float(jnp.min(nu)) > 0
        assert largest < 4
    else:
        assert float(jnp.min(nu)) == 0
        assert largest > 1000


def by_shape(params):
    return jax.tree.map(lambda p: "adam" if p.ndim > 1 else "sgd", params)


OPTIMISERS = {
    "adamw": (optax.adamw(1e-3, eps=1e-20), {"mu", "nu"}),
    "in a chain": (optax.chain(optax.clip_by_global_norm(1e-8), optax.adam(1e-3, eps=1e-20)), {"mu", "nu"}),
    "bfloat16": (optax.adam(1e-3, eps=1e-20, mu_dtype="bfloat16"), {"mu", "nu"}),
    "amsgrad": (optax.amsgrad(1e-3, eps=1e-20), {"mu", "nu", "nu_max"}),
    "momentum": (optax.sgd(1e-3, momentum=0.9), {"trace"}),
    "lion": (optax.scale_by_lion(), {"mu"}),
    "adagrad": (optax.adagrad(1e-3, initial_accumulator_value=0.0, eps=1e-20), {"sum_of_squares"}),
    "adadelta": (optax.adadelta(1e-3, eps=1e-20), {"e_g", "e_x"}),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=1024, eps=1e-30), {"v"}),
    "adan": (optax.adan(1e-3, eps=1e-20), {"m", "v", "n"}),
    "muon": (contrib.muon(1e-3), {"mu", "nu"}),
    "masked": (optax.masked(optax.adam(1e-3, eps=1e-20), {"weight": True, "window": False, "bias": True}),
               {"mu", "nu"}),
    "partition": (
        optax.partition({"adam": optax.adam(1e-3, eps=1e-20), "sgd": optax.sgd(1e-3)}, by_shape),
        {"mu", "nu"},
    ),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, eps=1e-20), {"mu", "nu"}),
    "accumulated": (optax.MultiSteps(optax.adam(1e-3, eps=1e-20), 2).gradient_transformation(),
                    {"mu", "nu"}),
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_updates_of_optax(name, stochastic):
    transformation, fields = OPTIMISERS[name]
    found, state = updated(quantize_state(transformation, stochastic=stochastic))
    wanted, plain = updated(transformation)
    assert {path.split(".")[-2] for path in rounded(state)} == fields
    assert all(path.endswith((".weight", ".window")) for path in rounded(state))
    limit = 0.6 if name == "lion" else 0.1  # signs, of sums that may be near to zero
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert float(jnp.linalg.norm(x - y)) <= limit * float(jnp.linalg.norm(y))
    dense = jax.tree.map(lambda x: x.materialise() if is_rounded(x) else x, state, is_leaf=is_rounded)
    assert jax.tree.structure(dense.inner_state) == jax.tree.structure(plain)
    if name == "hyperparameters":
        assert optax.tree.get(state, "learning_rate") == jnp.float32(1e-3)


@pytest.mark.slow
def test_extra_arguments():
    transformation = optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau(factor=0.5, patience=1))
    found, state = updated(quantize_state(transformation), value=jnp.float32(1.0))
    assert optax.tree.get(state, "scale") < 1
    wanted, _ = updated(transformation, value=jnp.float32(1.0))
    norm = lambda tree: float(optax.tree.norm(tree))
    assert norm(jax.tree.map(jnp.subtract, found, wanted)) < 0.1 * norm(wanted)


@pytest.mark.slow
def test_small_arrays_stay_as_they_are():
    transformation = optax.adamw(1e-3)
    found, state = updated(quantize_state(transformation, min_size=6145))
    wanted, plain = updated(transformation)
    assert not rounded(state)
    for x, y in zip(jax.tree.leaves((found, state)), jax.tree.leaves((wanted, plain)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_scalars_are_not_rounded():
    params = {"w": jnp.ones(64), "scale": jnp.float32(1)}
    optimiser = quantize_state(optax.adam(1e-3), min_size=1)
    updates, state = optimiser.update(params, optimiser.init(params))
    assert updates["scale"].shape == ()
    assert set(rounded(state)) == {f"inner_state.0.{moment}.w" for moment in ("mu", "nu")}


@pytest.mark.slow
def test_adapters_and_their_state_as_a_table():
    """The names in the state are those of the model."""
    model = ql.loraify(
        ql.quantize(eqx.nn.MLP(128, 128, 128, 1, key=jax.random.key(0)), "nf4"),
        rank=32,
        key=jax.random.key(1),
    )
    params, _ = eqx.partition(model, ql.trainable(model))
    state = quantize_state(optax.adam(1e-3)).init(params)
    rows = {row.path: row.type for row in ql.summary(state).rows}
    assert rows["inner_state.0.nu.layers.1.weight.a"] == "BlockArray[8-bit]"
    assert len(rows) == 9


@pytest.mark.slow
def test_trained_scales_are_not_taken_for_moments():
    weight = ql.BlockArray.quantize(normal(256, 1024, seed=0), codec="q8_0")
    model = ql.train_scales({"weight": weight})
    params, _ = eqx.partition(model, ql.trainable(model))
    _, state = updated(quantize_state(optax.adam(1e-3)), 2, params)
    assert set(rounded(state)) == {f"inner_state.0.{x}.weight.scale.scale" for x in ("mu", "nu")}


@pytest.mark.slow
def test_rounding_at_random_keeps_small_changes():
    """The mean of a block whose steps are larger than the changes."""
    gradient = {"w": jnp.where(jnp.arange(64 * 256).reshape(64, 256) % 32 == 0, 100.0, 0.1)}
    means = []
    for stochastic in (False, True):
        optimiser = quantize_state(optax.ema(0.99, debias=False), stochastic=stochastic)

        def step(state, _, optimiser=optimiser):
            return optimiser.update(gradient, state)[1], None

        state, _ = jax.jit(lambda s, step=step: jax.lax.scan(step, s, length=300))(optimiser.init(gradient))
        ema = state.inner_state.ema["w"].materialise()
        means.append(float(jnp.mean(ema[gradient["w"] < 1])))
    assert means[0] == 0
    assert means[1] == pytest.approx(0.1 * (1 - 0.99**300), rel=0.1)


@pytest.mark.slow
def test_on_several_devices():
    """Shards of moments are those of their parameters; updates are those of one device."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"weight": normal(128, 64, seed=1)}
    optimiser = quantize_state(optax.adam(1e-3, eps=1e-20))
    wanted, alone = updated(optimiser, 3, params)
    rule = fsdp(mesh)
    state = shard(optimiser.init(params), mesh, rule)
    codes = state.inner_state[0].nu["weight"].codes
    assert codes.sharding.shard_shape(codes.shape)[0] * 4 == 128 or "data" in codes.sharding.spec
    step = jax.jit(optimiser.update, out_shardings=(None, jax.tree.map(lambda x: x.sharding, state)))
    for number in range(3):
        found, state = step(shard(gradients(number, params), mesh, rule), state)
    np.testing.assert_allclose(found["weight"], wanted["weight"], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.slow
def test_in_a_file(tmp_path):
    optimiser = quantize_state(optax.adam(1e-3), stochastic=True)
    _, state = updated(optimiser, 2)
    safetensors.save(tmp_path / "state.safetensors", state)
    found = safetensors.load(tmp_path / "state.safetensors", like=jax.eval_shape(optimiser.init, PARAMS))
    assert isinstance(found, QuantizedState)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: quantize_state(optax.adam(1), "q8"), r"found 'q8'\. Did you mean .*'q8_0'"),
        (lambda: quantize_state(optax.adam(1), "q4_k"), "no zero points, found 'q4_k'"),
        (lambda: quantize_state(optax.adam(1), block_size=0), "block_size must be positive"),
        (lambda: quantize_state(optax.scale_by_rprop(1e-3)).init(PARAMS), r"step_sizes\.weight \(96, 64\)"),
        (
            lambda: quantize_state(optax.rmsprop(1e-3, centered=True)).init(PARAMS),
            "moments={'field': 'linear'}",
        ),
    ],
)
def test_what_cannot_be_rounded(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@wrong_types
def test_options_that_do_not_exist():
    message = r"takes one of 'linear', 'root' as moments\['nu'\]; found 'sqrt'"
    with pytest.raises(ValueError, match=message):
        quantize_state(optax.adam(1e-3), moments={"mu": None, "nu": "sqrt"})
    with pytest.raises(TypeError, match="takes True or False as stochastic; found 'no'"):
        quantize_state(optax.adam(1e-3), stochastic="no")


def test_fields_of_ones_own():
    optimiser = quantize_state(optax.scale_by_rprop(1e-3), moments={"prev_updates": "linear"})
    assert set(rounded(optimiser.init(PARAMS))) == {
        f"inner_state.prev_updates.{x}" for x in ("weight", "window")
    }


@pytest.mark.slow
def test_a_classifier_of_digits_ends_as_in_float32():
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = jnp.asarray(data.data, jnp.float32) / 16, jnp.asarray(data.target)
    train, held = slice(0, 1400), slice(1400, None)

    def loss(model, x, y):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))

    def ends(optimiser, seed):
        model = eqx.nn.MLP(64, 10, 128, 2, key=jax.random.key(seed))
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, 1400)
            gradient = jax.grad(lambda p: loss(eqx.combine(p, static), x[train][rows], y[train][rows]))(
                params
            )
            updates, state = optimiser.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(seed + 10), 150)
        run = jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[0])
        params, _ = run((params, optimiser.init(params)))
        return float(loss(eqx.combine(params, static), x[held], y[held]))

    plain = [ends(optax.adamw(3e-3), seed) for seed in range(3)]
    for scheme in ("q8_0", "q4_0"):
        found = [ends(quantize_state(optax.adamw(3e-3), scheme, min_size=256), seed) for seed in range(3)]
        assert abs(np.mean(found) - np.mean(plain)) < 2 * np.std(plain) + 1e-3, (scheme, found, plain)


class Attention(NamedTuple):
    q: jax.Array
    v: jax.Array


@pytest.mark.slow
def test_parameters_with_the_names_of_moments():
    """Copies of the parameters in a state are no moments, though a field of theirs is called `v`."""
    params = Attention(normal(64, 64, seed=1), normal(64, 64, seed=1))
    grads = jax.tree.map(jnp.ones_like, params)
    optimiser = quantize_state(contrib.schedule_free_adamw(1e-3))
    updates, state = optimiser.update(grads, optimiser.init(params), params)
    np.testing.assert_allclose(updates.v, updates.q, rtol=1e-6)
    assert not any(map(is_rounded, jax.tree.leaves(state.inner_state.z, is_leaf=is_rounded)))
    with pytest.raises(ValueError, match="No large array of this state is known to be a moment"):
        quantize_state(contrib.schedule_free_sgd(1e-3)).init(params)


@pytest.mark.slow
def test_the_momentum_of_sm3_is_signed():
    params = {"w": normal(64, 64)}
    grads = {"w": -jnp.ones((64, 64))}
    found = []
    for optimiser in (optax.sm3(0.1), quantize_state(optax.sm3(0.1))):
        state = optimiser.init(params)
        for _ in range(3):
            updates, state = optimiser.update(grads, state, params)
        found.append(updates["w"])
    np.testing.assert_allclose(*found, rtol=1e-2)
