"""Steps that mix positions of the state are refused, and those that do not are accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quaxlike.online_learning import (
    DRTRL,
    MixingWarning,
    PPProp,
    elementwise,
    matmul,
    register_primitive,
)
from tests.samples import array

pytestmark = pytest.mark.usefixtures("default_promotion")

BATCH, IN, HIDDEN = 2, 3, 6
X, H, W = array(np.ones((BATCH, IN))), array(np.full((BATCH, HIDDEN), 0.3)), array(np.ones((IN, HIDDEN)))
K = np.random.default_rng(0).normal(size=(HIDDEN, HIDDEN)).astype(np.float32)

# Maps that mix, and the operation that is named.
MIXING = {
    "standardize": (jax.nn.standardize, "reduce_sum"),
    "softmax": (jax.nn.softmax, "reduce_sum"),
    "log_softmax": (jax.nn.log_softmax, "reduce_sum"),
    "batch norm": (lambda h: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3), "reduce_sum"),
    "inhibition": (lambda h: h - 0.1 * h.sum(-1, keepdims=True), "reduce_sum"),
    "max": (lambda h: h - h.max(-1, keepdims=True), "reduce_sum|reduce_max"),
    "constant matrix": (lambda h: h @ K, "dot_general"),
    "einsum": (lambda h: jnp.einsum("bi,ij->bj", h, K), "dot_general"),
    "roll": (lambda h: jnp.roll(h, 1, axis=-1), "concatenate"),
    "neighbours": (lambda h: h + jnp.pad(h, ((0, 0), (1, 0)))[:, :-1], "pad|slice|jit"),
    "flip": (lambda h: jnp.flip(h, -1), "rev"),
    "flip of the batch": (lambda h: h[::-1], "rev|slice|gather"),
    "cumsum": (lambda h: jnp.cumsum(h, -1), "cumsum"),
    "permuted": (lambda h: h[:, np.array([1, 0, 2, 3, 4, 5])], "gather"),
    "one for all": (lambda h: h + h[:, :1], "broadcast_in_dim|slice|add"),
    "sort": (lambda h: jnp.sort(h, -1), "gather|sort"),
    "convolution": (lambda h: jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3), "same"))(h), "conv"),
    "in a scan": (lambda h: lax.scan(lambda c, _: (jnp.flip(c, -1), None), h, None, length=2)[0], "rev"),
    "in a branch": (lambda h: lax.cond(h[0, 0] > 0, lambda h: h, lambda h: jnp.flip(h, -1), h), "rev"),
    "jitted": (jax.jit(lambda h: jnp.flip(h, -1)), "rev"),
    "regrouped": (
        lambda h: h.reshape(BATCH, 2, 3).swapaxes(1, 2).reshape(BATCH, HIDDEN),
        "transpose|reshape",
    ),
    "scattered": (lambda h: jnp.zeros_like(h).at[:, ::-1].set(h), "scatter|gather|rev"),
    "fft": (lambda h: jnp.fft.fft(h).real, "fft"),
}


def _of_result(mix):
    return lambda w, h, x: ((n := 0.9 * h + mix(matmul(x, w))), n)


def _of_state(mix):
    return lambda w, h, x: ((n := jnp.tanh(0.5 * mix(h) + matmul(x, w))), n)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("where", [_of_result, _of_state], ids=["result", "state"])
def test_a_step_that_mixes_is_refused(name, where):
    mix, operation = MIXING[name]
    who = r"the y of ETP primitive 'etp_mm'" if where is _of_result else "state 'state'"
    message = (
        rf"{who} acts on the state through `({operation})[^`]*` at .*test_mixing\.py:\d+ .*mixes positions"
    )
    with pytest.raises(ValueError, match=message):
        DRTRL(where(mix)).init(W, H, X)


@pytest.mark.slow
def test_every_call_and_learner_refuses():
    step = _of_result(jax.nn.softmax)
    with pytest.raises(ValueError, match="mixes positions"):
        PPProp(step, decay=0.5).init(W, H, X)
    traces = DRTRL(step, mixing="allow").init(W, H, X)
    with pytest.raises(ValueError, match="mixes positions"):
        DRTRL(step).value_and_grad(jnp.sum, W, H, traces, X)
    with pytest.warns(MixingWarning, match=r'reduce_sum.*set mixing="allow"'):
        DRTRL(step, mixing="warn").init(W, H, X)


def test_a_square_state_may_not_be_transposed():
    w, h, x = jnp.ones((IN, 3)), jnp.ones((3, 3)), jnp.ones((3, IN))
    with pytest.raises(ValueError, match=r"state 'state' acts on the state through `transpose`"):
        DRTRL(lambda w, h, x: ((n := 0.5 * h + 0.1 * h.T + matmul(x, w)), n)).init(w, h, x)


@jax.custom_jvp
def _spike(v):
    return (v > 0).astype(v.dtype)


@_spike.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return _spike(v), t / (1 + jnp.abs(v)) ** 2


# Maps that act on each position alone.
KEPT = {
    "gelu": jax.nn.gelu,
    "selu": jax.nn.selu,
    "softplus": jax.nn.softplus,
    "clip": lambda h: jnp.clip(h, -1, 1),
    "where": lambda h: jnp.where(h > h.mean(), h, 0.1 * h),
    "surrogate": lambda h: h * (1 - _spike(h - 1)),
    "jitted": jax.jit(lambda h: jax.jit(jnp.tanh)(h) * 2),
    "cond": lambda h: lax.cond(h.sum() > 0, lambda h: h, jnp.tanh, h),
    "switch": lambda h: lax.switch(jnp.int32(1), [jnp.tanh, jnp.sin, lambda h: 0 * h], h),
    "loop": lambda h: lax.fori_loop(0, 3, lambda i, h: h - 0.1 * jnp.sin(h), h),
    "scan": lambda h: lax.scan(lambda h, k: (k * h, h), h, jnp.arange(3.0))[1].sum(0),
    "checkpoint": jax.checkpoint(lambda h: jnp.sin(h) ** 2),
    "vmap": lambda h: jax.vmap(lambda row: jax.vmap(jnp.tanh)(row))(h),
    "normalised by what is held": lambda h: h / lax.stop_gradient(jnp.linalg.norm(h)),
    "parameters of neurons": lambda h: h * jnp.arange(1.0, 1 + HIDDEN) + jnp.float32(2),
    "of examples": lambda h: h * jnp.arange(1.0, 1 + BATCH)[:, None],
    "einsum": lambda h: jnp.einsum("bi,i->bi", h, K[0]),
    "there and back": lambda h: jnp.tanh(h.T.reshape(2, 3, BATCH)).reshape(HIDDEN, BATCH).T,
    "groups": lambda h: (h.reshape(BATCH, 2, 3) * K[0, :2, None]).reshape(BATCH, HIDDEN),
    "flat": lambda h: jnp.sin(h.reshape(-1)).reshape(h.shape),
    "parts": lambda h: jnp.concatenate([jnp.sin(h[:, :2]), h[:, 2:]], axis=-1),
    "split": lambda h: jnp.concatenate([jnp.tanh(p) for p in jnp.split(h, 3, axis=-1)], axis=-1),
    "stacked": lambda h: jnp.stack([h, 2 * h, jnp.sin(h)]).sum(0),
    "synapses": lambda h: (h[:, :, None] * jnp.ones(4)).mean(-1),
    "padded": lambda h: jnp.pad(h, ((0, 0), (1, 2)))[:, 1:-2],
    "some set": lambda h: h.at[:, 0].set(0.0).at[1].add(K[0]),
    "one set": lambda h: lax.dynamic_update_slice(h, jnp.zeros((1, 2)), (0, 1)),
    "maximum": lambda h: jnp.maximum(h, 0.2 * h),
    "integers": lambda h: h * jnp.argmax(h, -1, keepdims=True),
    "complex": lambda h: jnp.abs(h + 1j * jnp.sin(h)),
}


@pytest.mark.quick(41)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("where", [_of_result, _of_state], ids=["result", "state"])
def test_a_step_that_does_not_mix_is_accepted(name, where):
    DRTRL(where(KEPT[name])).init(W, H, X)


def _lif(w, state, x):
    v, a = state
    z = _spike(v - 1 - 0.1 * a)
    return (0.9 * v * (1 - z) + matmul(x, w), 0.95 * a + z), z @ jnp.asarray(K)


def _gru(w, h, x):
    xh = jnp.concatenate([x, h], axis=-1)
    z, r = (jax.nn.sigmoid(matmul(xh, m)) for m in (w, 2 * w))
    n = jnp.tanh(matmul(jnp.concatenate([x, r * h], axis=-1), w))
    return z * h + (1 - z) * n, jax.nn.softmax(h)


@pytest.mark.slow
def test_usual_cells_are_accepted():
    DRTRL(_lif).init(W, (H, H), X)
    DRTRL(_gru, untraced="allow").init(jnp.ones((IN + HIDDEN, HIDDEN)), H, X)
    v = lambda w, h, x: ((n := elementwise(jax.nn.sigmoid(w["a"])) * h + matmul(x, w["w"])), n)
    DRTRL(v).init({"w": jnp.ones((IN, 1)), "a": jnp.ones(1)}, jnp.ones((BATCH, 1)), X)
    several = lambda w, h, x: ((n := 0.5 * h + matmul(x, w)[None]), n)
    DRTRL(several).init(W, jnp.ones((4, BATCH, HIDDEN)), X)


@pytest.mark.slow
def test_primitives_of_ones_own_are_looked_into():
    gain = register_primitive(
        "mixing_gain", lambda x, w: jnp.tanh(x) * w, batched=True, gradient_enabled=True, replace=True
    )
    sums = register_primitive(
        "mixing_sums", lambda x, w: jnp.cumsum(x, -1) * w, batched=True, gradient_enabled=True, replace=True
    )
    for p in (gain, sums):
        p.register_etp_rules(
            yw_to_w=lambda g, trace: {"weight": trace["weight"] * g},
            xy_to_dw=lambda x, g, weights: {"weight": (x * g).sum(0)},
            init_drtrl=lambda x, y, w, s: {"weight": jnp.zeros((*y.aval.shape, s))},
            init_pp=lambda x, y, w, s: jnp.zeros((*y.aval.shape, s)),
        )
    step = lambda p: lambda m, h, x: ((n := p(h, m["a"]) + matmul(x, m["w"])), n)
    model = {"a": jnp.ones(HIDDEN), "w": W}
    DRTRL(step(gain)).init(model, H, X)
    with pytest.raises(ValueError, match=r"state 'state' acts on the state through `cumsum`"):
        DRTRL(step(sums)).init(model, H, X)
