"""From the weights to the loss: through old states, complex ones, and derivatives by `custom_vjp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quaxlike.online_learning import DRTRL, PPProp, elementwise, matmul

from .oracles import backpropagated, errors_by_leaf, online, relative_error, squared_error

pytestmark = pytest.mark.usefixtures("x64", "default_promotion")

BATCH, IN, HIDDEN, OUT, STEPS = 2, 3, 4, 2, 6


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def _xs():
    return jnp.asarray(_normal(0, STEPS, BATCH, IN)), jnp.asarray(_normal(1, STEPS, BATCH, OUT))


def _model(dtype=float):
    w = _normal(2, IN, HIDDEN) + (1j * _normal(3, IN, HIDDEN) if dtype is complex else 0)
    return {
        "w": jnp.asarray(w),
        "a": jnp.asarray(_normal(4, HIDDEN)),
        "out": jnp.asarray(_normal(5, HIDDEN, OUT)),
    }


def _state(dtype=float):
    return jnp.asarray(
        _normal(6, BATCH, HIDDEN) + (1j * _normal(7, BATCH, HIDDEN) if dtype is complex else 0)
    )


def _next(m, h, x):
    return jnp.tanh(elementwise(m["a"]) * h + matmul(x, m["w"]))


OUTPUTS = {
    "old": lambda m, h, new: h @ m["out"],
    "new": lambda m, h, new: new @ m["out"],
    "both": lambda m, h, new: jnp.tanh(new * h - h) @ m["out"],
    "difference": lambda m, h, new: (new - h) @ m["out"],
    "old, through an op": lambda m, h, new: matmul(jnp.sin(h), m["out"]),
    "both, jitted": jax.jit(lambda m, h, new: (jnp.sin(h) + new) @ m["out"]),
}


def _reading(output):
    return lambda m, h, x: (lambda new: (new, OUTPUTS[output](m, h, new)))(_next(m, h, x))


def _exact(step, model, state):
    errors = errors_by_leaf(
        online(DRTRL(step), model, state, *_xs()), backpropagated(step, model, state, *_xs())
    )
    assert max(jax.tree.leaves(errors)) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
def test_d_rtrl_is_exact_for_outputs_of_old_and_new_states(output):
    _exact(_reading(output), _model(), _state())


@pytest.mark.slow
def test_several_states_of_which_the_old_ones_are_read():
    def step(m, state, x):
        v, (a, slow) = state
        new = 0.9 * v - 0.2 * a * elementwise(m["a"]) + matmul(x, m["w"])
        adapted = 0.8 * a + 0.3 * jnp.tanh(v)
        return (new, (adapted, 0.5 * slow + matmul(jnp.cos(x), m["w"]))), (v * adapted + a - slow) @ m["out"]

    _exact(step, _model(), (_state(), (0.5 * _state(), 0.1 * _state())))


@pytest.mark.slow
def test_a_state_that_is_passed_on_unchanged():
    """The last state is kept as a state of its own."""

    def step(m, state, x):
        h, before = state
        return (_next(m, h, x), h), (before + h) @ m["out"]

    _exact(step, _model(), (_state(), 0.3 * _state()))


@pytest.mark.slow
def test_a_leaky_readout_of_the_old_state_teaches_the_hidden_layer():
    """As it does with the new state: within the step, through the op of the read-out."""

    def step(m, state, x, *, old):
        h, y = state
        new = _next(m, h, x)
        y = 0.5 * y + matmul(h if old else new, m["out"])
        return (new, y), y

    state = (_state(), jnp.zeros((BATCH, OUT)))
    grads = online(DRTRL(functools.partial(step, old=True)), _model(), state, *_xs())
    assert all(jnp.linalg.norm(g) > 1e-2 for g in jax.tree.leaves(grads))
    # Reading the old state is reading the new one a step later.
    xs, targets = _xs()
    later = online(DRTRL(functools.partial(step, old=False)), _model(), state, xs[:-1], targets[1:])
    first = lambda m, s: (_next(m, s[0], xs[0]), 0.5 * s[1] + s[0] @ m["out"])
    y0 = first(_model(), state)[1]
    shifted = online(
        DRTRL(functools.partial(step, old=False)), _model(), (state[0], y0), xs[:-1], targets[1:]
    )
    assert relative_error(grads["w"], shifted["w"]) < 1e-12
    assert relative_error(grads["w"], later["w"]) > 1e-6


@pytest.mark.slow
def test_recurrence_through_weights_stays_left_out():
    def step(m, h, x):
        new = jnp.tanh(0.5 * h + matmul(jnp.concatenate([x, h], -1), m["w"]))
        return new, new @ m["out"]

    def without(m, h, x):
        new = jnp.tanh(0.5 * h + matmul(jnp.concatenate([x, lax.stop_gradient(h)], -1), m["w"]))
        return new, new @ m["out"]

    model = _model() | {"w": jnp.asarray(_normal(8, IN + HIDDEN, HIDDEN))}
    del model["a"]
    found = online(DRTRL(step), model, _state(), *_xs())
    assert relative_error(found, backpropagated(without, model, _state(), *_xs())) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_pp_prop_of_the_old_state_follows_its_definition(decay):
    """An output of the old state has the gradient that the last step had for this loss of its new one."""
    xs, targets = _xs()
    model = {"w": _model()["w"], "out": _model()["out"]}
    leaky = lambda output: (
        lambda m, h, x: (lambda new: (new, (h if output == "old" else new) @ m["out"]))(
            0.5 * h + matmul(x, m["w"])
        )
    )
    old = online(PPProp(leaky("old"), decay=decay), model, _state(), xs, targets)
    new = online(PPProp(leaky("new"), decay=decay), model, _state(), xs[:-1], targets[1:])
    assert relative_error(old["w"], new["w"]) < 1e-12


# -------------------------------------------------------------------------------------------------
# Complex states
# -------------------------------------------------------------------------------------------------

COMPLEX = {
    "rotation": lambda m, h, x: 0.9 * jnp.exp(1j * elementwise(m["a"])) * h + matmul(x, m["w"]),
    "not holomorphic": lambda m, h, x: (lambda n: n / (1 + jnp.abs(n)))(
        0.5 * jnp.conj(h) * elementwise(m["a"]) + 1j * matmul(x, m["w"])
    ),
    "linear recurrent unit": lambda m, h, x: (
        jnp.exp(-jnp.exp(elementwise(m["a"])) + 0.3j) * h
        + jnp.sqrt(1 - jnp.exp(-2 * jnp.exp(elementwise(m["a"])))) * matmul(x, m["w"])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("dtype", [float, complex])
def test_d_rtrl_is_exact_for_complex_states(name, dtype):
    def step(m, h, x):
        new = COMPLEX[name](m, h, x)
        return new, (new.real * new.imag + h.imag) @ m["out"]

    _exact(step, _model(dtype), _state(complex))


@pytest.mark.slow
def test_real_states_of_complex_results():
    def step(m, h, x):
        y = matmul(x, m["w"])
        new = jnp.tanh(elementwise(m["a"]) * h + y.imag - y.real**2)
        return new, new @ m["out"]

    _exact(step, _model(complex), _state())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("dtype", [float, complex])
def test_pp_prop_of_one_step_is_exact_for_complex_states(name, dtype):
    def step(m, h, x):
        new = COMPLEX[name](m, h, x)
        return new, (new.real * new.imag) @ m["out"]

    (xs, targets), model, state = _xs(), _model(dtype), _state(complex)
    found = online(PPProp(step, decay=0.7), model, state, xs[:1], targets[:1])
    expected = backpropagated(step, model, state, xs[:1], targets[:1])
    assert max(jax.tree.leaves(errors_by_leaf(found, expected))) < 1e-12


# -------------------------------------------------------------------------------------------------
# Surrogate derivatives
# -------------------------------------------------------------------------------------------------


@jax.custom_vjp
def _spike(v, width):
    return (v > 0).astype(v.dtype)


_spike.defvjp(
    lambda v, width: (_spike(v, width), (v, width)),
    lambda res, g: (g / (1 + res[1] * jnp.abs(res[0])) ** 2, None),
)


@jax.custom_jvp
def _spike_forward(v, width):
    return (v > 0).astype(v.dtype)


@_spike_forward.defjvp
def _(primals, tangents):
    v, width = primals
    return _spike_forward(v, width), tangents[0] / (1 + width * jnp.abs(v)) ** 2


WAYS = {
    "plain": lambda spike: lambda v: spike(v, 2.0),
    "jitted": lambda spike: jax.jit(lambda v: spike(v, 2.0)),
    "mapped": lambda spike: jax.vmap(lambda v: spike(v, 2.0)),
    "in a branch": lambda spike: lambda v: lax.cond(v[0, 0] < 9, lambda v: spike(v, 2.0), jnp.tanh, v),
    "in a loop": lambda spike: (
        lambda v: lax.scan(lambda c, _: (spike(v - c, 2.0), None), v, None, length=2)[0]
    ),
    "checkpointed": lambda spike: jax.checkpoint(lambda v: spike(v, 2.0)),
}


@pytest.mark.quick("d_rtrl-checkpointed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "learner",
    [
        pytest.param(DRTRL, id="d_rtrl"),
        pytest.param(functools.partial(PPProp, decay=0.6), id="pp_prop", marks=pytest.mark.slow),
    ],
)
def test_spikes_by_custom_vjp_learn_like_those_by_custom_jvp(way, learner):
    def step(spike):
        def step(m, state, x):
            v, a = state
            z = spike(v - 0.3 - 0.1 * a)
            new = 0.9 * v * (1 - z) * elementwise(m["a"]) + matmul(x, m["w"])
            return (new, 0.9 * a + z), (z + spike(new)) @ m["out"]

        return step

    state = (_state(), 0.1 * jnp.abs(_state()))
    found, expected = (
        online(learner(step(WAYS[way](s))), _model(), state, *_xs()) for s in (_spike, _spike_forward)
    )
    assert max(jax.tree.leaves(errors_by_leaf(found, expected))) < 1e-12


@pytest.mark.slow
def test_a_backward_function_that_is_not_linear_is_named():
    @jax.custom_vjp
    def f(v):
        return v

    f.defvjp(lambda v: (v, v), lambda v, g: (jnp.clip(g, -1, 1),))
    step = lambda m, h, x: ((n := f(0.5 * h + matmul(x, m["w"]))), n @ m["out"])
    (xs, _), model = _xs(), _model()
    with pytest.raises(TypeError, match=r"jax\.custom_vjp whose backward function is not linear.*custom_jvp"):
        DRTRL(step).init({"w": model["w"], "out": model["out"]}, _state(), xs[0])
    loss = lambda y: squared_error(f(y), 0.0)  # the loss may have any
    plain = lambda m, h, x: ((n := 0.5 * h + matmul(x, m["w"])), n @ m["out"])
    model = {"w": model["w"], "out": model["out"]}
    traces = DRTRL(plain).init(model, _state(), xs[0])
    DRTRL(plain).value_and_grad(loss, model, _state(), traces, xs[0])
