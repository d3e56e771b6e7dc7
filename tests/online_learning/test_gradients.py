"""D-RTRL and pp_prop against backpropagation through time and exact RTRL, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.online_learning import DRTRL, PPProp, elementwise, matmul, register_primitive

from .oracles import backpropagated, errors_by_leaf, online, recurrent, relative_error, squared_error

pytestmark = pytest.mark.usefixtures("x64", "default_promotion")

BATCH, IN, HIDDEN, OUT, STEPS = 3, 4, 5, 2, 12


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def _sequence(steps=STEPS, batch=BATCH):
    return jnp.asarray(_normal(0, steps, batch, IN)), jnp.asarray(_normal(1, steps, batch, OUT))


def _state(hidden=HIDDEN):
    return 0.5 * _normal(20, BATCH, hidden)


def _weights(seed=2):
    return _normal(seed, IN, HIDDEN)


READOUT = {"out": _normal(3, HIDDEN, OUT)}


def leaky(m, h, x):
    h = 0.5 * h + matmul(x, m["w"])
    return h, h @ m["out"]


def diagonal(m, h, x):
    h = jnp.tanh(elementwise(m["a"]) * h + matmul(x, m["w"], m["b"]))
    return h, h @ m["out"]


def gated(m, h, x):
    z = jax.nn.sigmoid(matmul(x, m["z"]) + elementwise(m["u"]) * h)
    h = z * h + (1 - z) * jnp.tanh(matmul(x, m["w"]))
    return h, h @ m["out"]


def two_states(m, state, x):
    """Each acts on the other, in this step and from the last one."""
    voltage, adaptation = state
    voltage = 0.9 * voltage - 0.2 * adaptation * elementwise(m["a"]) + matmul(x, m["w"])
    adaptation = jnp.tanh(0.8 * adaptation + 0.3 * voltage + matmul(x, m["z"]))
    return (voltage, adaptation), (jnp.tanh(voltage) + adaptation) @ m["out"]


def lstm_without_recurrence(m, state, x):
    h, c = state
    i, f, o = (jax.nn.sigmoid(matmul(x, m[k])) for k in "ifo")
    c = f * c + i * jnp.tanh(matmul(x, m["w"]))
    h = o * jnp.tanh(c)
    return (h, c), h @ m["out"]


def stacked(m, state, x):
    """Two layers: the second one passes on what the first is to learn, within the step."""
    first, second = state
    first = 0.7 * first + jnp.tanh(matmul(x, m["w"]))
    second = 0.4 * second + jnp.tanh(matmul(jnp.sin(first), m["deep"]))
    return (first, second), (second + first) @ m["out"]


def direct(m, h, x):
    """A weight that acts on the state, and on the output past it."""
    y = matmul(x, m["w"])
    h = 0.5 * h + y
    return h, jnp.tanh(h + y) @ m["out"] + matmul(x, m["skip"])


def tied(m, h, x):
    """One weight used twice, and transformed."""
    w = jax.nn.softplus(m["w"])
    h = 0.3 * h + matmul(x, w) - jnp.tanh(matmul(jnp.cos(x), -w))
    return h, h @ m["out"]


def fully_recurrent(m, h, x):
    h = jnp.tanh(matmul(jnp.concatenate([x, h], axis=-1), m["w"]))
    return h, h @ m["out"]


def rolled(m, h, x):
    h = 0.5 * h + jnp.roll(matmul(x, m["w"]), 1, axis=-1)
    return h, h @ m["out"]


def feedforward(m, h, x):
    h = jnp.tanh(matmul(x, m["w"]))
    return h, h @ m["out"]


def _model(**parts):
    return {**parts, **READOUT}


EXACT = {
    "leaky": (leaky, _model(w=_weights()), _state()),
    "diagonal": (diagonal, _model(w=_weights(), a=_normal(4, HIDDEN), b=_normal(5, HIDDEN)), _state()),
    "gated": (gated, _model(w=_weights(), z=_weights(6), u=_normal(7, HIDDEN)), _state()),
    "two_states": (
        two_states,
        _model(w=_weights(), z=_weights(6), a=1 + 0.1 * _normal(4, HIDDEN)),
        (_state(), _state()),
    ),
    "lstm": (
        lstm_without_recurrence,
        _model(w=_weights(), i=_weights(6), f=_weights(7), o=_weights(8)),
        (_state(), _state()),
    ),
    "stacked": (stacked, _model(w=_weights(), deep=_normal(9, HIDDEN, HIDDEN)), (_state(), _state())),
    "direct": (direct, _model(w=_weights(), skip=_normal(10, IN, OUT)), _state()),
    "tied": (tied, _model(w=_weights()), _state()),
}


def _arrays(cell):
    """In the precision of the test."""
    return cell[0], *jax.tree.map(jnp.asarray, cell[1:])


def _by_backpropagation(cell, steps=STEPS):
    step, model, state = _arrays(cell)
    return backpropagated(step, model, state, *_sequence(steps))


def _online(learner, cell, steps=STEPS):
    _, model, state = _arrays(cell)
    return online(learner, model, state, *_sequence(steps))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [c for c in EXACT if c != "stacked"])
def test_d_rtrl_is_exact(cell):
    cell = EXACT[cell]
    errors = errors_by_leaf(_online(DRTRL(cell[0]), cell), _by_backpropagation(cell))
    assert max(jax.tree.leaves(errors)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["leaky", "two_states"])
def test_the_whole_step_may_be_jitted(cell):
    step, *rest = EXACT[cell]
    found = _online(DRTRL(jax.jit(step)), (step, *rest))
    assert relative_error(found, _by_backpropagation((step, *rest))) < 1e-13


@pytest.mark.slow
def test_stacked_layers():
    """The last layer is exact. The first is, as far as its error comes down within the step: what the
    second layer's state remembers of it is left out."""
    cell = EXACT["stacked"]
    errors = errors_by_leaf(_online(DRTRL(cell[0]), cell), _by_backpropagation(cell))
    assert errors["out"] < 1e-13
    assert errors["deep"] < 1e-13
    assert 1e-3 < errors["w"] < 0.5
    one = errors_by_leaf(_online(DRTRL(cell[0]), cell, 1), _by_backpropagation(cell, 1))
    assert max(jax.tree.leaves(one)) < 1e-13


def _recurrent_cell(seed):
    rng = np.random.default_rng(seed)
    w = 1.25 * rng.normal(size=(IN + 16, 16)) / 4
    model = {"w": w, "out": rng.normal(size=(16, OUT))}
    return fully_recurrent, model, _state(16)


@pytest.mark.slow
def test_what_d_rtrl_leaves_out_of_a_recurrent_weight():
    """It takes no account of how the state comes back through the weight; exact RTRL does."""
    errors = []
    for seed in range(6):
        cell = _arrays(_recurrent_cell(seed))
        found, expected = _online(DRTRL(cell[0]), cell), _by_backpropagation(cell)
        errors.append(relative_error(found["w"], expected["w"]))
    assert np.mean(errors) == pytest.approx(0.7, rel=0.1)
    assert relative_error(recurrent(*cell, *_sequence()), expected) < 1e-13


@pytest.mark.slow
def test_what_d_rtrl_leaves_out_of_a_rolled_output():
    """Each element of y is taken to act on the position of its own."""
    cell = (rolled, _model(w=_weights()), _state())
    expected = _by_backpropagation(cell)
    assert relative_error(_online(DRTRL(rolled, mixing="allow"), cell)["w"], expected["w"]) > 0.5
    assert relative_error(recurrent(*_arrays(cell), *_sequence()), expected) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_a_way_through_an_op_counts_if_it_is_gradient_enabled(enabled):
    """A diagonal recurrent weight, in an op that takes the state for its input."""
    times_p = register_primitive(
        f"test_etp_times_{enabled}", lambda x, w: x * w[None], batched=True, gradient_enabled=enabled
    )
    times_p.register_etp_rules(
        yw_to_w=lambda g, trace: {"weight": trace["weight"] * g},
        xy_to_dw=lambda x, g, weights: {"weight": (x * g).sum(0)},
        init_drtrl=lambda x, y, w, s: {"weight": jnp.zeros((*y.aval.shape, s))},
        init_pp=lambda x, y, w, s: jnp.zeros((*y.aval.shape, s)),
    )

    def step(m, h, x):
        h = jnp.tanh(times_p(h, m["a"]) + matmul(x, m["w"]))
        return h, h @ m["out"]

    cell = (step, _model(w=_weights(), a=_normal(4, HIDDEN)), _state())
    error = relative_error(_online(DRTRL(step), cell), _by_backpropagation(cell))
    assert error < 1e-13 if enabled else error > 1e-2


# -------------------------------------------------------------------------------------------------
# pp_prop
# -------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("cell", EXACT)
@pytest.mark.parametrize("decay", [0.0, 0.9, 1, 7])
def test_pp_prop_is_exact_for_one_step(cell, decay):
    cell = EXACT[cell]
    learner = PPProp(cell[0], decay=decay)
    errors = errors_by_leaf(_online(learner, cell, 1), _by_backpropagation(cell, 1))
    assert max(jax.tree.leaves(errors)) < 1e-13


@pytest.mark.slow
def test_pp_prop_without_memory_is_exact_for_a_step_without_memory():
    cell = (feedforward, _model(w=_weights()), _state())
    expected = _by_backpropagation(cell)
    assert relative_error(_online(PPProp(feedforward, decay=0.0), cell), expected) < 1e-13
    assert relative_error(_online(PPProp(feedforward, decay=0.5), cell), expected) > 1e-2


@pytest.mark.slow
def test_pp_prop_follows_its_definition():
    """For h = 0.5 h + x W the traces are known: written out with NumPy."""
    (xs, targets), decay = _sequence(), 0.8
    _, model, h = EXACT["leaky"]
    w, out = model["w"], model["out"]
    trace_x, trace_f, total = 0.0, 0.0, 0.0
    for t, (x, target) in enumerate(zip(np.asarray(xs), np.asarray(targets), strict=True)):
        h = 0.5 * h + x @ w
        signal = 2 * (h @ out - target) @ out.T
        trace_x = decay * trace_x + x
        trace_f = decay * 0.5 * trace_f + (1 - decay)
        total += trace_x.T @ (trace_f * signal) / (1 - decay ** (t + 1))
    found = _online(PPProp(leaky, decay=decay), EXACT["leaky"])
    np.testing.assert_allclose(found["w"], total, rtol=1e-12)


@pytest.mark.slow
def test_every_knob_changes_the_gradient():
    cell = EXACT["diagonal"]
    learners = [DRTRL(cell[0]), *(PPProp(cell[0], decay=d) for d in (0.0, 0.5, 9))]
    found = [_online(learner, cell)["w"] for learner in learners]
    for i, a in enumerate(found):
        assert np.linalg.norm(a) > 1e-3
        for b in found[:i]:
            assert relative_error(a, b) > 1e-3
    by_rank, by_decay = (_online(PPProp(cell[0], decay=d), cell) for d in (3, 0.5))
    assert relative_error(by_rank, by_decay) == 0


# -------------------------------------------------------------------------------------------------
# Training with it
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_may_change_at_every_step():
    step, model, state = _arrays(EXACT["leaky"])
    learner = DRTRL(step)
    xs, targets = _sequence(300)
    targets = jnp.tanh(xs @ jnp.asarray(_normal(11, IN, OUT)))

    @jax.jit
    def train(carry, x_and_target):
        model, state, traces = carry
        x, target = x_and_target
        learned = learner.value_and_grad(squared_error, model, state, traces, x, targets=(target,))
        model = jax.tree.map(lambda p, g: p - 3e-3 * g, model, learned.grads)
        return (model, learned.state, learned.traces), learned.loss

    carry = (model, state, learner.init(model, state, xs[0]))
    _, losses = jax.lax.scan(train, carry, (xs, targets))
    assert losses[-50:].mean() < 0.1 * losses[:50].mean()
