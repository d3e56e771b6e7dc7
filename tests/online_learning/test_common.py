"""The gradient of a learner does not depend on how its step is written."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from quaxlike.online_learning import DRTRL, PPProp, matmul
from quaxlike.online_learning.step import TracedStep

from .oracles import online, relative_error

pytestmark = pytest.mark.usefixtures("x64", "default_promotion")

BATCH, IN, HIDDEN, OUT, STEPS = 4, 3, 6, 2, 8
_normal = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape)
MODEL = {"w": _normal(0, IN, HIDDEN), "out": _normal(1, HIDDEN, OUT)}
PROBLEM = MODEL, np.zeros((BATCH, HIDDEN)), _normal(2, STEPS, BATCH, IN), _normal(3, STEPS, BATCH, OUT)


def _spike(backward):
    """A threshold with a derivative of its own, defined anew."""

    @jax.custom_jvp
    def spike(z):
        return (z > 0).astype(z.dtype)

    spike.defjvp(lambda primals, tangents: (spike(*primals), backward(primals[0]) * tangents[0]))
    return spike


def _spike_vjp(z):
    spike = jax.custom_vjp(lambda z: (z > 0).astype(z.dtype))
    spike.defvjp(lambda z: (spike(z), z), lambda z, g: (jnp.exp(-(z**2)) * g,))
    return spike(z)


smooth = _spike(lambda z: jnp.exp(-(z**2)))
_current = lambda m, h, x: 0.9 * h + matmul(x, m["w"])


def _written(f, g=None):
    """A step that computes its new state by `f`, and again for the output by `g`."""

    def step(m, h, x):
        z = _current(m, h, x)
        return f(z), (g or f)(z) @ m["out"]

    return step


def _once(f):
    def step(m, h, x):
        h = f(_current(m, h, x))
        return h, h @ m["out"]

    return step


def _all_twice(m, h, x):
    return jnp.tanh(_current(m, h, x)), jnp.tanh(_current(m, h, x)) @ m["out"]


def _commuted(m, h, x):
    return jnp.tanh(_current(m, h, x)), jnp.tanh(matmul(x, m["w"]) + h * 0.9) @ m["out"]


def _constants(m, h, x):
    z = lambda: _current(m, h, x) * jnp.asarray(np.linspace(0.5, 1.5, HIDDEN))
    return jnp.tanh(z()), jnp.tanh(z()) @ m["out"]


def _constants_once(m, h, x):
    h = jnp.tanh(_current(m, h, x) * np.linspace(0.5, 1.5, HIDDEN))
    return h, h @ m["out"]


def _placed(m, h, x):
    h = jnp.tanh(_current(m, h, x))
    return jax.device_put(checkpoint_name(h, "state"), jax.devices()[0]), h @ m["out"]


def _copied_back(m, h, x):
    h = jnp.tanh(_current(m, h, x))
    return jnp.copy(h).reshape(h.shape).astype(h.dtype), jnp.transpose(h, (0, 1)) @ m["out"]


def _rolled(z):
    return jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(jax.nn.relu(z) - 0.2), z)


WRITTEN = {
    "twice": (_written(jnp.tanh), _once(jnp.tanh)),
    "all_twice": (_all_twice, _once(jnp.tanh)),
    "jitted": (_written(jax.jit(jnp.tanh), jnp.tanh), _once(jnp.tanh)),
    "jitted_apart": (_written(jax.jit(lambda z: jnp.tanh(z)), jax.jit(jnp.tanh)), _once(jnp.tanh)),
    "checkpoint": (_written(jax.checkpoint(jnp.tanh), jnp.tanh), _once(jnp.tanh)),
    "commuted": (_commuted, _once(jnp.tanh)),
    "constants": (_constants, _constants_once),
    "copied": (_written(jnp.tanh, lambda z: jnp.copy(jnp.tanh(z))), _once(jnp.tanh)),
    "copied_back": (_copied_back, _once(jnp.tanh)),
    "placed": (_placed, _once(jnp.tanh)),
    "relu": (_written(jax.nn.relu), _once(jax.nn.relu)),
    "relu_jitted": (_written(jax.nn.relu, jax.jit(lambda z: jax.nn.relu(z))), _once(jax.nn.relu)),
    "softplus": (_written(jax.nn.softplus), _once(jax.nn.softplus)),
    "custom_jvp": (_written(smooth), _once(smooth)),
    "custom_vjp": (_written(_spike_vjp), _once(_spike_vjp)),
    "loop": (_written(_rolled), _once(_rolled)),
}


@pytest.mark.quick("d_rtrl-relu")
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("learner", [partial(PPProp, decay=0.9), DRTRL], ids=["pp_prop", "d_rtrl"])
def test_the_gradient_does_not_depend_on_how_the_step_is_written(learner, name):
    written, once = (online(learner(step), *PROBLEM) for step in WRITTEN[name])
    assert relative_error(written, once) < 1e-13


def _num_equations(step):
    model, h, xs, _ = PROBLEM
    return len(TracedStep(step, True, model, h, [xs[0]]).step.eqns)


@pytest.mark.slow
def test_functions_of_other_derivatives_are_kept_apart():
    """They have the same values, and other gradients."""
    other, sharp = _written(smooth, _spike(lambda z: 1 + z**2)), _once(smooth)
    assert _num_equations(other) == _num_equations(_written(smooth)) + 1 == _num_equations(sharp) + 1
    of = partial(online, PPProp(other, decay=0.9))
    assert relative_error(of(*PROBLEM), online(PPProp(sharp, decay=0.9), *PROBLEM)) > 1e-2


def test_effects_are_kept():
    said = []

    def step(m, h, x):
        for _ in range(2):
            jax.debug.callback(lambda h: said.append(h.shape), h)
        h = jnp.tanh(_current(m, h, x))
        return h, h

    assert _num_equations(step) == _num_equations(_once(jnp.tanh)) - 1 + 2
