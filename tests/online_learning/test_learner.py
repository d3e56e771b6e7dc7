"""How a learner is used: models of any kind, Values as weights, memory, and what is refused."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.quantized import NF4Array
from quaxlike.online_learning import (
    DRTRL,
    PPProp,
    UntracedParameterWarning,
    conv,
    elementwise,
    etp_conv_p,
    matmul,
)
from tests.samples import normal, wrong_types

from .oracles import backpropagated, online, relative_error, squared_error

BATCH, IN, HIDDEN, STEPS = 3, 4, 6, 8


def _sequence(steps=STEPS):
    return normal(steps, BATCH, IN), normal(steps, BATCH, HIDDEN, seed=1)


def _leaky(w, h, x):
    h = 0.5 * h + matmul(x, w)
    return h, jnp.sin(h)


def _two_weights(model, h, x):
    h = jax.nn.sigmoid(elementwise(model["leak"]))[None] * jnp.tanh(h) + matmul(x, model["w"])
    return h, jnp.sin(h)


# -------------------------------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------------------------------


class Cell(eqx.Module):
    weight: jax.Array
    leak: jax.Array
    activation: object = jnp.tanh
    name: str = eqx.field(static=True, default="cell")

    def __call__(self, state, x):
        h = elementwise(self.leak)[None] * state["h"] + self.activation(matmul(x, self.weight))
        return {"h": h, "count": state["count"] + 1}, (h, self.activation)


@pytest.mark.slow
def test_modules_and_states_that_are_not_floats():
    cell = Cell(normal(IN, HIDDEN, seed=2), normal(HIDDEN, seed=3))
    learner = DRTRL(Cell.__call__)
    state = {"h": jnp.zeros((BATCH, HIDDEN)), "count": jnp.array(0)}
    x, target = _sequence(1)
    learned = learner.value_and_grad(
        lambda out, target: squared_error(out[0], target),
        cell,
        state,
        learner.init(cell, state, x[0]),
        x[0],
        targets=(target[0],),
    )
    assert learned.state["count"] == 1
    assert learned.output[1] is jnp.tanh
    assert isinstance(learned.grads, Cell)
    assert learned.grads.activation is None
    expected = eqx.filter_grad(lambda c: squared_error(c(state, x[0])[1][0], target[0]))(cell)
    np.testing.assert_allclose(learned.grads.weight, expected.weight, rtol=1e-5)
    np.testing.assert_allclose(learned.grads.leak, expected.leak, atol=1e-6)
    np.testing.assert_allclose(learned.loss, squared_error(learned.output[0], target[0]))


class Flagged(eqx.Module):
    """What Python reads while the step is traced."""

    weight: jax.Array
    dropout: eqx.nn.Dropout
    num_layers: int = 2

    def __call__(self, h, x, sign):
        for _ in range(self.num_layers):
            x = self.dropout(x)
        h = 0.5 * h + matmul(x, self.weight)
        return h, jnp.sin(h) if sign > 0 else -jnp.sin(h)


@pytest.mark.slow
@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.5)])
def test_numbers_of_python_are_static(learner):
    model = Flagged(normal(IN, HIDDEN, seed=2), eqx.nn.Dropout(0.5, inference=True))
    h, x, learner = jnp.zeros((BATCH, HIDDEN)), normal(BATCH, IN), learner(Flagged.__call__)
    learn = eqx.filter_jit(learner.value_and_grad)
    traces = learner.init(model, h, x, 1)
    for sign in (1, -1):
        found = learn(jnp.sum, model, h, traces, x, sign)
        expected = eqx.filter_grad(lambda m, sign=sign: jnp.sum(m(h, x, sign)[1]))(model)
        np.testing.assert_allclose(found.grads.weight, expected.weight, rtol=1e-5)
        assert found.grads.num_layers is None


def test_arrays_and_trained_numbers_are_traced():
    """Those of NumPy, too."""

    def step(model, h, x, *numbers):
        assert all(isinstance(number, jax.core.Tracer) for number in numbers)
        h = 0.5 * h + model["scale"] * matmul(x, model["w"])
        return h, h

    model, numbers = {"w": normal(IN, HIDDEN), "scale": 2.0}, (np.float32(1), np.bool_(True), np.ones(2))
    h, x = jnp.zeros((BATCH, HIDDEN)), normal(BATCH, IN)
    learner = DRTRL(step, trainable=eqx.is_inexact_array_like, untraced="allow")
    found = learner.value_and_grad(jnp.sum, model, h, learner.init(model, h, x, *numbers), x, *numbers)
    np.testing.assert_allclose(found.grads["scale"], jnp.sum(x @ model["w"]), rtol=1e-5)


@pytest.mark.slow
def test_what_is_trained_can_be_chosen():
    model = {"w": normal(IN, HIDDEN, seed=2), "v": normal(IN, HIDDEN, seed=3)}

    def step(model, h, x):
        masked = jnp.where(model["v"] > 0, model["w"], 0.0)
        return _leaky(masked, h, x)[0] + matmul(x, model["v"]), h

    h, (xs, _) = jnp.zeros((BATCH, HIDDEN)), _sequence()
    learner = DRTRL(step, trainable={"w": True, "v": False})
    traces = learner.init(model, h, xs[0])
    assert len(jax.tree.leaves(traces)) == 1
    learned = learner.value_and_grad(lambda out: jnp.sum(out), model, h, traces, xs[0])
    assert learned.grads["v"] is None


@pytest.mark.slow
@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.9)])
def test_weights_of_another_precision(learner):
    def step(w, h, x):
        h = 0.5 * h + matmul(x.astype(w.dtype), w).astype(h.dtype)
        return h, jnp.sin(h)

    w, h = normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN))
    single, half = (online(learner(step), w.astype(t), h, *_sequence()) for t in (jnp.float32, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert relative_error(half.astype(jnp.float32), single) < 3e-2


@pytest.mark.slow
def test_under_vmap():
    """Examples may be mapped over with a learner that knows of one."""
    w, h = normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN))
    xs, targets = _sequence()
    learner = DRTRL(_leaky)
    traces = jax.vmap(lambda h, x: learner.init(w, h, x))(h, xs[0])
    learn = jax.vmap(lambda h, t, x, y: learner.value_and_grad(squared_error, w, h, t, x, targets=(y,)))
    total = 0.0
    for x, target in zip(xs, targets, strict=True):
        learned = learn(h, traces, x, target)
        h, traces = learned.state, learned.traces
        total += learned.grads.sum(0)
    expected = backpropagated(_leaky, w, jnp.zeros((BATCH, HIDDEN)), xs, targets)
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------
# Values
# -------------------------------------------------------------------------------------------------


def _lora(base, *, by_column, gradients="none"):
    """An adapted weight of logical shape (in, out)."""
    if by_column:
        return ql.LoraArray(
            base,
            0.3 * normal(2, IN, seed=5),
            0.3 * normal(HIDDEN, 2, seed=6),
            alpha=4,
            out_axes=(-1,),
            in_axes=(-2,),
            gradients=gradients,
        )
    return ql.LoraArray(
        base, 0.3 * normal(2, HIDDEN, seed=5), 0.3 * normal(IN, 2, seed=6), alpha=4, gradients=gradients
    )


@pytest.mark.slow
@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.9)])
def test_an_adapter_learns_over_a_quantised_base(learner, by_column):
    base = NF4Array.quantize(normal(IN, HIDDEN, seed=2), block_size=32)
    model = {"w": _lora(base, by_column=by_column), "b": normal(HIDDEN, seed=7)}

    def step(model, h, x):
        h = 0.5 * h + matmul(x, model["w"], model["b"])
        return h, jnp.sin(h)

    trainable = {"w": ql.trainable(model["w"]), "b": True}
    h, (xs, targets) = jnp.zeros((BATCH, HIDDEN)), _sequence(STEPS if learner is DRTRL else 1)
    found = online(learner(step, trainable=trainable, untraced="error"), model, h, xs, targets)
    assert found["w"].w.__class__ is NF4Array
    assert not jax.tree.leaves(found["w"].w)

    def dense_step(params, h, x):
        update = 2.0 * params["b"] @ params["a"]
        w = ql.materialise(base) + (update.T if by_column else update)
        h = 0.5 * h + x @ w + params["bias"][None]
        return h, jnp.sin(h)

    params = {"a": model["w"].a, "b": model["w"].b, "bias": model["b"]}
    expected = backpropagated(dense_step, params, h, xs, targets)
    found = {"a": found["w"].a, "b": found["w"].b, "bias": found["b"]}
    assert relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_a_base_that_is_trained_as_well():
    model = _lora(normal(IN, HIDDEN, seed=2), by_column=False, gradients="train")
    h, (xs, targets) = jnp.zeros((BATCH, HIDDEN)), _sequence()
    found = online(DRTRL(_leaky, untraced="error"), model, h, xs, targets)
    dense = lambda p, h, x: _leaky(p["w"] + 2.0 * p["b"] @ p["a"], h, x)
    expected = backpropagated(dense, {"w": model.w, "a": model.a, "b": model.b}, h, xs, targets)
    assert relative_error({"w": found.w, "a": found.a, "b": found.b}, expected) < 1e-5


# -------------------------------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("learner", [DRTRL(_leaky), PPProp(_leaky, decay=0.9)])
def test_memory_does_not_grow_with_the_sequence(learner):
    w, h = normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN))

    def forward(w, xs, targets):
        def body(carry, x_and_target):
            total, h, traces = carry
            x, target = x_and_target
            learned = learner.value_and_grad(squared_error, w, h, traces, x, targets=(target,))
            return (total + learned.grads, learned.state, learned.traces), None

        carry = (jnp.zeros_like(w), h, learner.init(w, h, xs[0]))
        return jax.lax.scan(body, carry, (xs, targets))[0][0]

    def temporary_bytes(fn, steps):
        compiled = jax.jit(fn).lower(w, *_sequence(steps)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    reverse = lambda w, xs, targets: backpropagated(_leaky, w, h, xs, targets)
    assert temporary_bytes(forward, 1000) == temporary_bytes(forward, 10)
    assert temporary_bytes(reverse, 1000) > 10 * temporary_bytes(reverse, 10)


@pytest.mark.slow
def test_the_size_of_traces():
    sizes = {}
    for n in (8, 16):
        w, h, x = jnp.zeros((2 * n, n)), jnp.zeros((BATCH, n)), jnp.zeros((BATCH, 2 * n))
        for name, learner in (("drtrl", DRTRL(_leaky)), ("pp", PPProp(_leaky, decay=0.9))):
            traces = learner.init(w, h, x)
            sizes[name, n] = sum(t.size for t in jax.tree.leaves(traces) if t.ndim)
    assert sizes["drtrl", 16] == BATCH * 32 * 16
    assert sizes["pp", 16] == BATCH * (32 + 16)
    assert sizes["drtrl", 16] == 4 * sizes["drtrl", 8]
    assert sizes["pp", 16] == 2 * sizes["pp", 8]


# -------------------------------------------------------------------------------------------------
# What is told and refused
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_parameter_without_a_trace_is_told():
    def step(model, h, x):
        h = jnp.tanh(matmul(x, model["w"]) + h @ model["plain"])
        return h, h @ model["out"]

    model = {"w": normal(IN, HIDDEN, seed=2), "plain": jnp.eye(HIDDEN), "out": jnp.eye(HIDDEN)}
    h, (xs, _) = jnp.zeros((BATCH, HIDDEN)), _sequence()
    message = r"parameter model\['plain'\] acts on the state other than through an ETP primitive"
    with pytest.warns(UntracedParameterWarning, match=message):
        DRTRL(step, mixing="allow").init(model, h, xs[0])
    with pytest.raises(ValueError, match=message):
        DRTRL(step, untraced="error", mixing="allow").init(model, h, xs[0])
    DRTRL(step, untraced="allow", mixing="allow").init(model, h, xs[0])


def _gated(m, h, x):
    gate = jax.nn.sigmoid(matmul(x, m["gate"]))
    h = jnp.tanh(matmul(x, m["w"]) + m["mix"](gate, h, m["u"]))
    return h, h


def test_a_gate_in_front_of_another_product_is_told_with_the_reason():
    model = {"gate": normal(IN, HIDDEN, seed=2), "w": normal(IN, HIDDEN), "u": jnp.eye(HIDDEN)}
    h, x = jnp.zeros((BATCH, HIDDEN)), normal(BATCH, IN)
    before = model | {"mix": lambda gate, h, u: matmul(gate * h, u)}
    with pytest.warns(
        UntracedParameterWarning, match="through its ETP primitive 'etp_mm' at .* then through"
    ) as told:
        DRTRL(_gated).init(before, h, x)
    (message,) = (str(w.message) for w in told)
    assert r"model['gate']" in message
    assert "`gate * matmul(h, w)` in place of `matmul(gate * h, w)`" in message
    DRTRL(_gated).init(model | {"mix": lambda gate, h, u: gate * matmul(h, u)}, h, x)


def _init(step, model, state, x):
    return DRTRL(step, untraced="allow").init(model, state, x)


def _in_scan(w, h, x):
    return jax.lax.scan(lambda h, _: (_leaky(w, h, x)[0], None), h, None, length=2)[0], x


def _in_cond(w, h, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: matmul(x, w), lambda: h), x


def _in_custom_vjp(w, h, x):
    f = jax.custom_vjp(matmul)
    f.defvjp(lambda x, w: (matmul(x, w), None), lambda r, g: (g, g))
    return f(x, w), x


def _in_grad(w, h, x):
    return h + jax.grad(lambda x: matmul(x, w).sum())(x).sum(), x


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_in_scan, "'etp_mm' is inside `scan`"),
        (_in_cond, "'etp_mm' is inside `cond`"),
        (_in_custom_vjp, "'etp_mm' is inside `(custom_vjp_call|eval_jaxpr)`"),
        (_in_grad, r"'etp_mm' is batched or differentiated .* became 'etp_mm.vjp'"),
        (
            lambda w, h, x: (h + matmul(x, w * x[0, 0]), x),
            "'weight' of ETP primitive 'etp_mm' depends on the",
        ),
        (lambda w, h, x: (h + matmul(x, w).reshape(BATCH, 2, 3).sum(1, keepdims=True), x), "shape"),
        (
            lambda w, h, x: (jnp.sum(matmul(x, jnp.tile(w, (1, 2))).reshape(2, BATCH, HIDDEN), 0), x),
            "several gates",
        ),
    ],
)
def test_steps_that_cannot_be_learned(step, message):
    h = jnp.zeros((BATCH, HIDDEN))
    with pytest.raises((ValueError, TypeError), match=message):
        _init(step, normal(IN, HIDDEN, seed=2), h, normal(BATCH, IN))


def test_mapped_convolutions_are_refused():
    kernel, x = normal(3, 2, 4, seed=2), normal(2, BATCH, 6, 2)
    step = lambda k, h, x: (h + jax.vmap(lambda x: conv(x, k))(x), h)
    with pytest.raises(ValueError, match=f"'{etp_conv_p}' is batched .* map or differentiate the learner"):
        _init(step, kernel, jnp.zeros((2, BATCH, 6, 4)), x)


def test_states_that_do_not_fit():
    def mixes(w, state, x):
        small, large = state
        large = large + small[..., None]
        return (0.5 * small + matmul(x, w), large), large

    state = (jnp.zeros((BATCH, HIDDEN)), jnp.zeros((BATCH, HIDDEN, 2)))
    message = r"state '\[1\]' of shape .* depends on state '\[0\]' of shape .* only elementwise"
    with pytest.raises(ValueError, match=message):
        _init(mixes, normal(IN, HIDDEN, seed=2), state, normal(BATCH, IN))
    x, w, h = normal(BATCH, IN), normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN))
    with pytest.raises(TypeError, match="must return a pair"):
        _init(lambda w, h, x: matmul(x, w), w, h, x)
    with pytest.raises(TypeError, match="state of the same structure as its argument"):
        _init(lambda w, h, x: ((h, matmul(x, w)), h), w, h, x)
    with pytest.raises(TypeError, match="state of the types of its argument; found"):
        _init(lambda w, h, x: (matmul(x, w)[0], h), w, h, x)


@pytest.mark.parametrize("decay", [1.0, -0.1, 0, -2, True])
def test_decays_that_are_none(decay):
    with pytest.raises(ValueError, match=r"decay must be a float in \[0, 1\) or an integer rank"):
        PPProp(_leaky, decay=decay)


def test_a_rank_of_numpy():
    assert PPProp(_leaky, decay=np.int64(3)).decay == PPProp(_leaky, decay=3).decay == 0.5


@wrong_types
@pytest.mark.parametrize("targets", [np.ones((1, BATCH, HIDDEN)), {"y": 1.0}, "y"])
def test_targets_that_are_no_tuple(targets):
    w, h, x = normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN)), normal(BATCH, IN)
    learner = DRTRL(_leaky)
    traces = learner.init(w, h, x)
    message = f"takes a tuple of further arguments .*; found {type(targets).__name__}. Write `targets="
    with pytest.raises(TypeError, match=message):
        learner.value_and_grad(squared_error, w, h, traces, x, targets=targets)


def test_traces_of_another_learner():
    w, h, x = normal(IN, HIDDEN, seed=2), jnp.zeros((BATCH, HIDDEN)), normal(BATCH, IN)
    d_rtrl, pp_prop = DRTRL(_leaky), PPProp(_leaky, decay=0.9)
    for learner, other in ((d_rtrl, pp_prop), (pp_prop, d_rtrl)):
        name = type(learner).__name__
        message = rf"takes traces from {name}\.init .*; found .*\. The traces of DRTRL and PPProp have"
        with pytest.raises(TypeError, match=message):
            learner.value_and_grad(jnp.sum, w, h, other.init(w, h, x), x)
    with pytest.raises(TypeError, match=r"shapes \[{'weight': \(3, 4, 6, 1\)}\]; found \[.* \(2, 4, 6, 1\)"):
        d_rtrl.value_and_grad(jnp.sum, w, h, d_rtrl.init(w, h[:2], x[:2]), x)


@wrong_types
@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.9)])
@pytest.mark.parametrize("option", ["untraced", "mixing"])
def test_options_that_do_not_exist(learner, option):
    name = "DRTRL" if learner is DRTRL else "PPProp"
    message = f"{name} takes one of 'warn', 'allow', 'error' as {option}; found 'raise'"
    with pytest.raises(ValueError, match=message):
        learner(_leaky, **{option: "raise"})


# -------------------------------------------------------------------------------------------------
# Derivatives of what a learner returns
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_learned_gradient_is_differentiated():
    """As in meta-learning; by the weights, the last state and the input, against backpropagation."""
    learner = DRTRL(_two_weights)
    w, leak = normal(IN, HIDDEN, seed=2), normal(HIDDEN, seed=3)
    h, xs = normal(BATCH, HIDDEN, seed=4), normal(3, BATCH, IN)
    loss = lambda y: jnp.sum(y**2)

    def learned(model, h, xs):
        traces, grads = learner.init(model, h, xs[0]), jax.tree.map(jnp.zeros_like, model)
        for x in xs:
            found = learner.value_and_grad(loss, model, h, traces, x)
            h, traces, grads = found.state, found.traces, jax.tree.map(jnp.add, grads, found.grads)
        return grads

    def backpropagated(model, h, xs):
        def total(model):
            state, sum_ = h, 0.0
            for x in xs:
                state, y = _two_weights(model, state, x)
                sum_ = sum_ + loss(y)
            return sum_

        return jax.grad(total)(model)

    model = {"w": w, "leak": leak}
    squared = lambda grads: sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: squared(f(*args)), argnums=(0, 1, 2)))(model, h, xs)
        for f in (learned, backpropagated)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-3), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["loss", "state", "grads"])
def test_results_of_pp_prop_are_differentiated(of):
    learner, w, h, x = (
        PPProp(_leaky, decay=0.5),
        normal(IN, HIDDEN),
        normal(HIDDEN, seed=1),
        normal(IN, seed=2),
    )
    traces = jax.tree.map(
        lambda t: t + jnp.asarray(0.1, t.dtype) if t.dtype == jnp.float32 else t, learner.init(w, h, x)
    )

    def learned(scale):
        found = learner.value_and_grad(lambda y: jnp.sum(y**2), scale * w, h, traces, x)
        return jnp.sum(getattr(found, of))

    difference = (learned(1 + 1e-2) - learned(1 - 1e-2)) / 2e-2
    np.testing.assert_allclose(jax.grad(learned)(1.0), difference, rtol=5e-3)


def test_functions_with_dead_code_rules_keep_positions_apart():
    square = ql.custom_dce(lambda h: (h**2, jnp.sin(h)))
    square.def_dce(lambda used, h: (h**2 if used[0] else None, jnp.sin(h) if used[1] else None))

    def step(w, h, x):
        h = square(0.5 * h)[1] + matmul(x, w)
        return h, h

    w, h, x = normal(IN, HIDDEN), normal(BATCH, HIDDEN), normal(BATCH, IN)
    learner = DRTRL(step, mixing="error")
    learned = learner.value_and_grad(jnp.sum, w, h, learner.init(w, h, x), x)
    expected = jax.grad(lambda w: jnp.sum(step(w, h, x)[1]))(w)
    np.testing.assert_allclose(learned.grads, expected, rtol=1e-5)
