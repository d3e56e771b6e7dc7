"""ETP primitives: what they are registered with, and what is told of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from quaxlike.online_learning import (
    DRTRL,
    ETPPrimitive,
    PPProp,
    UntracedParameterWarning,
    elementwise,
    etp_conv_p,
    etp_elemwise_p,
    etp_emb_p,
    etp_lora_mm_p,
    etp_mm_p,
    etp_mv_p,
    get_trainable_invars,
    get_x_invar_index,
    get_y_outvar_index,
    is_batched_primitive,
    is_etp_enable_gradient_primitive,
    is_etp_primitive,
    register_primitive,
)
from quaxlike.primitives import DefinedPrimitive, MissingRuleError
from tests.samples import array, wrong_types

from ..primitives.jaxprs import primitives

X, W = array(np.arange(12.0).reshape(4, 3)), array(np.arange(6.0).reshape(3, 2))


def _scaled(x, w, *, scale=1.0):
    return scale * (x.astype(w.dtype) @ w)


scaled_p = register_primitive("test_etp_scaled", _scaled, batched=True)


@pytest.mark.slow
def test_it_is_a_primitive_with_everything_derived():
    assert isinstance(scaled_p, ETPPrimitive)
    assert isinstance(scaled_p, DefinedPrimitive)
    assert isinstance(scaled_p, Primitive)
    np.testing.assert_allclose(scaled_p.bind(X, W, scale=2.0), 2 * X @ W)
    loss = lambda w, x: scaled_p(x, w, scale=2.0).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(W, X), jax.grad(lambda w: 2 * (X @ w).sum())(W))
    assert scaled_p in primitives(jax.grad(loss), W, X)
    by_integers = jax.grad(loss)(W, X.astype(jnp.int32))
    np.testing.assert_allclose(by_integers, jax.grad(loss)(W, X))


def test_defaults_and_accessors():
    p = register_primitive("test_etp_defaults", _scaled)
    assert is_etp_primitive(p)
    assert not is_batched_primitive(p)
    assert not is_etp_enable_gradient_primitive(p)
    assert get_trainable_invars(p) == {"weight": 1}
    assert get_trainable_invars(p, {"scale": 1.0}) == {"weight": 1}
    assert get_x_invar_index(p) == 0
    assert get_y_outvar_index(p) == 0
    assert is_batched_primitive(scaled_p)
    assert not is_etp_primitive(jax.lax.dot_general_p)
    assert not is_batched_primitive(jax.lax.dot_general_p)
    assert not is_etp_enable_gradient_primitive(jax.lax.dot_general_p)


def test_options():
    p = register_primitive(
        "test_etp_options",
        lambda w, v, *, both: (w, w + v),
        gradient_enabled=True,
        trainable_invars_fn=lambda params: {"w": 0, "v": 1} if params["both"] else {"w": 0},
        x_invar_index=None,
        y_outvar_index=1,
        multiple_results=True,
    )
    assert is_etp_enable_gradient_primitive(p)
    assert get_trainable_invars(p, {"both": True}) == {"w": 0, "v": 1}
    assert get_trainable_invars(p, {"both": False}) == {"w": 0}
    assert get_x_invar_index(p) is None
    assert get_y_outvar_index(p) == 1


def test_built_in_layouts():
    assert get_trainable_invars(etp_mm_p, {"has_bias": True}) == {"weight": 1, "bias": 2}
    assert get_trainable_invars(etp_mv_p, {}) == {"weight": 1}
    assert get_trainable_invars(etp_lora_mm_p, {}) == {"b": 1, "a": 2}
    assert get_x_invar_index(etp_elemwise_p) is None
    gradient_enabled = [p for p in (etp_mm_p, etp_conv_p, etp_emb_p, etp_elemwise_p) if p.gradient_enabled]
    assert gradient_enabled == [etp_elemwise_p]


def test_what_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        register_primitive("test_etp_unknown", _scaled, batch=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'xy'"):
        scaled_p.register_etp_rules(xy=lambda *_: None)
    with pytest.raises(ValueError, match="'test_etp_scaled' was already defined"):
        register_primitive("test_etp_scaled", _scaled)


def test_rules_are_registered_one_by_one_or_together():
    p = register_primitive("test_etp_rules", _scaled)
    one, two = (lambda *args, **params: 1), (lambda *args, **params: 2)

    @p.register_yw_to_w
    def yw_to_w(g, trace, **params):
        return trace

    assert p.slot("yw_to_w").rule is yw_to_w
    assert p.register_xy_to_dw(one) is one
    assert p.register_init_drtrl(one) is one
    assert p.register_init_pp(one) is one
    p.register_etp_rules(xy_to_dw=two, init_pp=None)
    assert p.slot("xy_to_dw").rule is two
    assert p.slot("init_pp").rule is one
    assert p.slot("yw_to_w").rule is yw_to_w
    with pytest.raises(MissingRuleError, match="primitive 'test_etp_rules' has no rule in slot 'solve'"):
        p.slot("solve")()


# -------------------------------------------------------------------------------------------------
# A primitive of one's own
# -------------------------------------------------------------------------------------------------


def _step(model, h, x):
    h = jnp.tanh(elementwise(model["a"])[None] * h + scaled_p(x, model["w"], scale=0.5))
    return h, h


def _problem():
    return {"a": jnp.array([0.5, -0.5]), "w": W}, jnp.ones((4, 2)), X / 12


@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.5)])
def test_a_missing_rule_is_named(learner):
    missing = "init_drtrl" if learner is DRTRL else "init_pp"
    model, h, x = _problem()
    message = f"primitive 'test_etp_scaled' has no rule in slot '{missing}'"
    with pytest.raises(MissingRuleError, match=message):
        learner(_step).init(model, h, x)


@pytest.mark.slow
def test_rules_of_ones_own_are_used():
    p = register_primitive("test_etp_own", _scaled, batched=True)
    p.register_etp_rules(
        yw_to_w=lambda g, trace, *, scale: {"weight": trace["weight"] * g[..., None, :]},
        xy_to_dw=lambda x, g, weights, *, scale: {"weight": scale * x.T @ g},
        init_drtrl=lambda x, y, w, s: {"weight": jnp.zeros((x.aval.shape[0], *w["weight"].aval.shape, s))},
        init_pp=lambda x, y, w, s: jnp.zeros((*y.aval.shape, s)),
    )

    def step(model, h, x):
        h = jnp.tanh(elementwise(model["a"])[None] * h + p(x, model["w"], scale=0.5))
        return h, h

    model, h, x = _problem()
    for learner in (DRTRL(step), PPProp(step, decay=0.5)):
        found = learner.value_and_grad(jnp.sum, model, h, learner.init(model, h, x), x)
        expected = jax.grad(lambda m: step(m, h, x)[1].sum())(model)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found.grads, expected)


def _two_results(y_first):
    y_and_square = lambda x, w: (x @ w, (x @ w) ** 2)
    p = register_primitive(
        "test_etp_two",
        y_and_square if y_first else lambda x, w: y_and_square(x, w)[::-1],
        batched=True,
        multiple_results=True,
        y_outvar_index=0 if y_first else 1,
        replace=True,
    )
    p.register_etp_rules(
        **RIGHT
        | {
            "yw_to_w": lambda g, trace: {"weight": trace["weight"] * g[..., None, :]},
            "xy_to_dw": lambda x, g, weights: {"weight": x.T @ g},
        }
    )
    return p if y_first else lambda x, w: p(x, w)[::-1]


def _square_acts_on_the_state(p):
    def step(w, h, x):
        y, square = p(x, w)
        h = jnp.sin(0.5 * h + y + square)
        return h, h

    return step


@pytest.mark.slow
@pytest.mark.parametrize("y_first", [True, False])
@pytest.mark.parametrize("learner", [DRTRL, partial(PPProp, decay=0.5)])
def test_a_result_without_a_trace_that_acts_on_the_state_is_told(learner, y_first):
    step, h, x = _square_acts_on_the_state(_two_results(y_first)), jnp.ones((4, 2)), X / 12
    message = "through a result of its ETP primitive 'test_etp_two' .* other than y, .* through y alone"
    with pytest.warns(UntracedParameterWarning, match=message):
        traces = learner(step).init(W, h, x)
    with pytest.raises(ValueError, match=message):
        learner(step, untraced="error").init(W, h, x)
    found = learner(step, untraced="allow").value_and_grad(jnp.sum, W, h, traces, x)
    expected = jax.grad(lambda w: step(w, h, x)[1].sum())(W)
    np.testing.assert_allclose(found.grads, expected, rtol=1e-5)


def test_a_result_alone_that_has_no_trace_is_told():
    p = _two_results(y_first=True)
    step = lambda w, h, x: ((n := 0.5 * h + p(x, w)[1]), n)
    with pytest.raises(ValueError, match=r"a result of its ETP primitive '.*' .* other than y"):
        DRTRL(step, untraced="error").init(W, jnp.ones((4, 2)), X)


@pytest.mark.slow
def test_a_result_beside_the_state_needs_no_trace():
    p = _two_results(y_first=True)

    def step(w, h, x):
        y, square = p(x, w)
        h = jnp.sin(0.5 * h + jnp.where(square > 1, y, 0.0))
        return h, h * square

    h, x = jnp.ones((4, 2)), X / 12
    learner = DRTRL(step, untraced="error")
    found = learner.value_and_grad(jnp.sum, W, h, learner.init(W, h, x), x)
    expected = jax.grad(lambda w: step(w, h, x)[1].sum())(W)
    np.testing.assert_allclose(found.grads, expected, rtol=1e-5)


# -------------------------------------------------------------------------------------------------
# Rules and arguments of the wrong form
# -------------------------------------------------------------------------------------------------

RIGHT = {
    "yw_to_w": lambda g, trace, *, scale: {"weight": trace["weight"] * g[..., None, :]},
    "xy_to_dw": lambda x, g, weights, *, scale: {"weight": scale * x.T @ g},
    "init_drtrl": lambda x, y, w, s: {"weight": jnp.zeros((x.aval.shape[0], *w["weight"].aval.shape, s))},
    "init_pp": lambda x, y, w, s: jnp.zeros((*y.aval.shape, s)),
}
# A rule, whether D-RTRL or pp_prop calls it, and what is said.
WRONG = {
    "bare": ("yw_to_w", lambda g, t, **_: t * g[..., None, :], DRTRL, "failed with TypeError.*'dict'"),
    "dict, bare": ("yw_to_w", lambda g, t, **_: t["weight"] * g[..., None, :], DRTRL, "must return a dict"),
    "another key": ("yw_to_w", lambda g, t, **_: {"w": t["weight"]}, DRTRL, "found .*'w'"),
    "another shape": (
        "yw_to_w", lambda g, t, **_: {"weight": t["weight"][:1]}, DRTRL,
        r"must return a dict \{'weight': an array of shape \(4, 3, 2\)\}; found .*\(1, 3, 2\)",
    ),
    "cotangent": ("xy_to_dw", lambda x, g, w, **_: x.T @ g, DRTRL, "must return a dict .*; found an array"),
    "bare, for pp_prop": ("xy_to_dw", lambda x, g, w, **_: x.T @ g, PPProp, "must return a dict"),
    "None": ("xy_to_dw", lambda x, g, w, **_: None, PPProp, "must return a dict .*; found None"),
    "attribute": ("xy_to_dw", lambda x, g, w, **_: w.shape, PPProp, "failed with AttributeError"),
    "bare init_drtrl": ("init_drtrl", lambda x, y, w, s: jnp.zeros(s), DRTRL, "must return a dict of arrays"),
    "init_drtrl without states": (
        "init_drtrl", lambda x, y, w, s: {"weight": jnp.zeros((4, 3, 2))}, DRTRL, "last axis is of size 1"),
    "init_pp": ("init_pp", lambda x, y, w, s: jnp.zeros(y.aval.shape), PPProp, r"must return .*\(4, 2, 1\)"),
    "init_pp, dict": ("init_pp", lambda x, y, w, s: {"weight": 1}, PPProp, r"found a dict"),
    "solve": ("solve", lambda g, t, w, **_: t, DRTRL, r"must return .*\(3, 2\).*; found .*\(4, 3, 2\)"),
    "instant": ("instant", lambda x, g, w, **_: {"weight": w["weight"]}, DRTRL, r"must return .*\(4, 3, 2\)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_rule_of_the_wrong_form_is_named(name):
    slot, rule, learner, message = WRONG[name]
    p = register_primitive("test_etp_wrong", _scaled, batched=True, replace=True)
    p.register_etp_rules(**(RIGHT | {slot: rule}))
    step = lambda m, h, x: ((n := 0.5 * h + p(x, m, scale=0.5)), n)
    run = learner(step) if learner is DRTRL else learner(step, decay=0.5)
    h, x, w = jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.ones((3, 2))
    with pytest.raises(
        TypeError, match=rf"rule '{slot}' of ETP primitive 'test_etp_wrong', {slot}\(.*{message}"
    ):
        run.value_and_grad(jnp.sum, w, h, run.init(w, h, x), x)


REFUSED = {
    "batched": ({"batched": "yes"}, "True or False as `batched`; found 'yes'"),
    "gradient_enabled": ({"gradient_enabled": 1}, "True or False as `gradient_enabled`; found 1"),
    "x": ({"x_invar_index": "a"}, "the position of an array as `x_invar_index`; found 'a'"),
    "x, a bool": ({"x_invar_index": True}, "as `x_invar_index`; found True"),
    "y": ({"y_outvar_index": None}, "as `y_outvar_index`; found None"),
    "y, negative": ({"y_outvar_index": -1}, "as `y_outvar_index`; found -1"),
    "trainables": ({"trainable_invars_fn": {"weight": 1}}, "a function as `trainable_invars_fn`"),
}


@wrong_types
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_of_the_wrong_type_are_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        register_primitive("test_etp_refused", _scaled, **options)


@wrong_types
@pytest.mark.parametrize("slot", ["yw_to_w", "xy_to_dw", "init_drtrl", "init_pp"])
def test_a_rule_is_a_function(slot):
    p = register_primitive("test_etp_slots", _scaled, replace=True)
    with pytest.raises(
        TypeError, match=f"slot '{slot}' of primitive 'test_etp_slots' takes a function; found 3"
    ):
        getattr(p, f"register_{slot}")(3)
    with pytest.raises(TypeError, match=f"slot '{slot}' .* takes a function; found 'x'"):
        p.register_etp_rules(**{slot: "x"})


def test_positions_of_the_wrong_form_are_named():
    p = register_primitive(
        "test_etp_positions", _scaled, trainable_invars_fn=lambda params: [1], replace=True
    )
    step = lambda m, h, x: ((n := 0.5 * h + p(x, m, scale=0.5)), n)
    message = r"trainable_invars_fn of ETP primitive 'test_etp_positions' must return a dict .*; found \[1\]"
    with pytest.raises(TypeError, match=message):
        DRTRL(step).init(jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.ones((4, 3)))


@pytest.mark.quick("False-call", "True-call", "True-bind")
@pytest.mark.parametrize("how", [lambda p: p, lambda p: p.bind], ids=["call", "bind"])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_static_parameter_that_cannot_be_hashed_is_named(how, jitted):
    p = register_primitive("test_etp_hash", lambda x, w, *, sizes: x @ w, replace=True)
    run = lambda x, w: how(p)(x, w, sizes=[1, 2])
    message = "parameter 'sizes' of primitive 'test_etp_hash' is static and must be hashable, got .1, 2."
    with pytest.raises(TypeError, match=message):
        (jax.jit(run) if jitted else run)(jnp.ones((1, 3)), W)


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda run: jax.grad(lambda y: run(y).sum()),
    "vmap": lambda run: lambda y: jax.vmap(run)(y[None]),
    "scan": lambda run: lambda y: jax.lax.scan(lambda c, _: (c, run(c)), y, None, length=2),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_function_that_closes_over_a_traced_array_is_named(transform):
    def run(y):
        p = register_primitive("test_etp_closure", lambda x, w: x @ w + y, replace=True)
        return p(jnp.ones((1, 3)), W)

    message = r"primitive 'test_etp_closure', .*test_primitive\.py:\d+\), closes over an array that is being"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        transform(run)(jnp.float32(1))
