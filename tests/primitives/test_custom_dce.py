"""custom_dce: under every transform, what is not used is not computed, as the rule says."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P

from quaxlike.primitives import custom_dce
from tests.samples import array

from .jaxprs import equations

X, Y = array([0.3, -0.7, 1.1]), array([2.0, 0.5, -1.5])


def _both(x, y):
    """Two results by way of `exp`, which no rule uses."""
    return (jnp.exp(x) - jnp.exp(-x)) / 2 * y, jnp.tan(y) / (1 + jnp.exp(-x))


both = custom_dce(_both)


@both.def_dce
def _rule(used_outs, x, y):
    """The same by other operations: `sinh` for the first result, `logistic` for the second."""
    return (
        jnp.sinh(x) * y if used_outs[0] else None,
        jnp.tan(y) * jax.nn.sigmoid(x) if used_outs[1] else None,
    )


def live(fn, *args):
    """The names of the primitives that are left of `fn` when JAX has eliminated what is dead."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    left, _ = pe.dce_jaxpr(opened, [True] * len(opened.outvars))
    return {eqn.primitive.name for eqn in equations(left)}


def first(f):
    return lambda x, y: f(x, y)[0].sum()


def second(f):
    return lambda x, y: f(x, y)[1].sum()


def _custom_vjp(g):
    h = jax.custom_vjp(g)
    h.defvjp(lambda *a: jax.vjp(g, *a), lambda pullback, ct: pullback(ct))
    return h


def _custom_jvp(g):
    h = jax.custom_jvp(g)
    h.defjvp(lambda p, t: jax.jvp(g, p, t))
    return h


def _while(g):
    def body(carry):
        i, total, x, y = carry
        return i + 1, total + g(x, y), x, y

    return lambda x, y: lax.while_loop(lambda c: c[0] < 2, body, (0, 0.0, x, y))[1]


def _shard_map(g):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = lambda x, y: lax.psum(g(x, y), "i")
    return jax.shard_map(mapped, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P())


def _linearized(g):
    return lambda x, y: jax.linearize(g, x, y)[1](x, y)


def _vjp(g):
    return lambda x, y: jax.vjp(g, x, y)[1](1.0)


TRANSFORMS = {
    "make_jaxpr": lambda g: g,
    "jit": jax.jit,
    "jit_jit": lambda g: jax.jit(lambda x, y: jax.jit(g)(x, 2 * y)),
    "jit_vmap": lambda g: jax.jit(jax.vmap(g)),
    "vmap_jit": lambda g: jax.vmap(jax.jit(g)),
    "vmap_one": lambda g: jax.vmap(g, in_axes=(0, None)),
    "vmap_vmap": lambda g: jax.vmap(jax.vmap(g, in_axes=(None, 0)), in_axes=(0, None)),
    "scan": lambda g: lambda x, y: lax.scan(lambda c, x: (c + g(x, y), None), 0.0, x[:, None])[0],
    "scan_ys": lambda g: lambda x, y: lax.scan(lambda c, x: (c, g(x, c)), y, x[:, None])[1],
    "cond": lambda g: lambda x, y: lax.cond(x[0] > 0, g, lambda x, y: x.sum(), x, y),
    "switch": lambda g: lambda x, y: lax.switch(1, [lambda x, y: x.sum(), g], x, y),
    "fori": lambda g: lambda x, y: lax.fori_loop(0, 3, lambda _, c: c + g(x, y), 0.0),
    "while": _while,
    "map": lambda g: lambda x, y: lax.map(lambda x: g(x[None], y), x, batch_size=2),
    "checkpoint": jax.checkpoint,
    "shard_map": _shard_map,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "filter_jit": eqx.filter_jit,
    "filter_vmap": eqx.filter_vmap,
    "filter_checkpoint": eqx.filter_checkpoint,
}
DERIVATIVES = {
    "grad": jax.grad,
    "grad_y": lambda g: jax.grad(g, argnums=1),
    "value_and_grad": lambda g: jax.value_and_grad(g, argnums=(0, 1)),
    "jvp": lambda g: lambda x, y: jax.jvp(g, (x, y), (y, x)),
    "jvp_one": lambda g: lambda x, y: jax.jvp(lambda x: g(x, y), (x,), (y,)),
    "linearize": _linearized,
    "vjp": _vjp,
    "jit_grad": lambda g: jax.jit(jax.grad(g)),
    "grad_jit": lambda g: jax.grad(jax.jit(g)),
    "checkpoint_grad": lambda g: jax.checkpoint(jax.grad(g)),
    "grad_checkpoint": lambda g: jax.grad(jax.checkpoint(g)),
    "grad_checkpoint_all": lambda g: jax.grad(
        jax.checkpoint(g, policy=jax.checkpoint_policies.everything_saveable)
    ),
    "hessian": jax.hessian,
    "grad_grad": lambda g: jax.grad(lambda x, y: jnp.sum(jax.grad(g)(x, y) ** 2)),
    "vmap_grad": lambda g: jax.vmap(jax.grad(g)),
    "grad_vmap": lambda g: jax.grad(lambda x, y: jax.vmap(g, in_axes=(0, None))(x, y).sum(), (0, 1)),
    "grad_scan": lambda g: jax.grad(lambda x, y: TRANSFORMS["scan"](g)(x, y), argnums=(0, 1)),
    "grad_custom_vjp": lambda g: jax.grad(_custom_vjp(g)),
    "grad_custom_jvp": lambda g: jax.grad(_custom_jvp(g)),
    "grad_shard_map": lambda g: jax.grad(_shard_map(g)),
    "filter_grad": lambda g: eqx.filter_grad(g),
    "filter_value_and_grad": lambda g: eqx.filter_jit(eqx.filter_value_and_grad(g)),
    "linear_transpose": lambda g: (
        lambda x, y: jax.linear_transpose(lambda t: jax.jvp(lambda y: g(x, y), (y,), (t,))[1], y)(1.0)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", [*TRANSFORMS, *DERIVATIVES])
@pytest.mark.parametrize("used", [first, second])
def test_only_what_the_rule_computes_is_left(transform, used, x64):
    x, y = X.astype(float), Y.astype(float)
    apply = (TRANSFORMS | DERIVATIVES)[transform]
    found = live(apply(used(both)), x, y)
    mine, others = ({"sinh", "cosh"}, {"logistic", "tan"})[:: 1 if used is first else -1]
    assert "exp" not in found
    assert not others & found
    # The derivative of the first result by y is sinh(x); where that is all, x is not needed beyond.
    assert mine & found or (transform == "linear_transpose" and used is second)
    expected = apply(used(_both))(x, y)
    for run in (apply(used(both)), jax.jit(lambda x, y: apply(used(both))(x, y))):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), run(x, y), expected)


@pytest.mark.parametrize("transform", [*TRANSFORMS, *DERIVATIVES])
def test_the_rule_is_not_asked_when_all_is_used(transform):
    f = custom_dce(_both)

    @f.def_dce
    def _(used_outs, x, y):
        raise AssertionError(f"asked for {used_outs}")

    g = lambda x, y: sum(map(jnp.sum, f(x, y)))
    found = live((TRANSFORMS | DERIVATIVES)[transform](g), X, Y)
    assert "exp" in found


# Functions with derivatives other than those of their rules, in which `y` scales a gradient.


def _rounded(x, y):
    return jnp.round(x) * jnp.ones_like(y), jnp.cos(x) + jnp.sin(y)


def _declared(x, y):
    """The function whose derivative is declared to be that of `_rounded`."""
    return x * jnp.exp(y), 3.0 * y - jnp.cos(x)


def _own_jvp():
    f = jax.custom_jvp(_rounded)
    f.defjvp(lambda p, t: (f(*p), jax.jvp(_declared, p, t)[1]))
    return f


def _own_vjp():
    f = jax.custom_vjp(_rounded)
    f.defvjp(lambda *args: (f(*args), args), lambda args, ct: jax.vjp(_declared, *args)[1](ct))
    return f


def _straight_through(x, y):
    return x * jnp.exp(y) + lax.stop_gradient(jnp.round(x) - x * jnp.exp(y)), jnp.cos(x) + jnp.sin(y)


DECLARED = {
    "custom_jvp": _own_jvp,
    "custom_vjp": _own_vjp,
    "custom_jvp_inside": lambda: lambda x, y: tuple(2 * z for z in _own_jvp()(x, y)),
    "custom_vjp_jitted": lambda: jax.jit(_own_vjp()),
    "stop_gradient": lambda: _straight_through,
}


def _with_rule(fun):
    f = custom_dce(fun)
    factor = fun(1.0, 0.0)[0]
    parts = [lambda *args, i=i: factor * _rounded(*args)[i] for i in (0, 1)]
    f.def_dce(
        lambda used, *args: tuple(part(*args) if u else None for u, part in zip(used, parts, strict=True))
    )
    return f


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("derivative", [*DERIVATIVES, "primal"])
@pytest.mark.parametrize("used", [first, second])
@pytest.mark.parametrize("name", DECLARED)
def test_the_derivative_that_the_function_declares(name, used, derivative, x64):
    derive = (DERIVATIVES | {"primal": jax.jit})[derivative]
    fun, x, y = DECLARED[name](), X.astype(float), Y.astype(float)
    try:
        expected = derive(used(fun))(x, y)
    except TypeError as error:  # forward mode of a custom_vjp
        with pytest.raises(TypeError, match=str(error).splitlines()[0][:30]):
            derive(used(_with_rule(fun)))(x, y)
        return
    found = derive(used(_with_rule(fun)))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), found, expected)


@pytest.mark.quick("custom_jvp_inside")
@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_derivative_holds_after_dead_code_is_eliminated(name, x64):
    fun, x, y = DECLARED[name](), X.astype(float), Y.astype(float)
    jaxpr = jax.make_jaxpr(jax.jit(first(_with_rule(fun))))(x, y)
    left, _ = pe.dce_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), [True], instantiate=True)
    grads = jax.jit(jax.grad(lambda *args: jax.core.eval_jaxpr(left, (), *args)[0], argnums=(0, 1)))(x, y)
    expected = jax.jit(jax.grad(first(fun), argnums=(0, 1)))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), grads, expected)
    assert "cos" not in live(first(_with_rule(fun)), x, y) or name == "custom_vjp_jitted"


@pytest.mark.slow
def test_a_derivative_may_be_declared_after_the_decorator():
    f = custom_dce(jax.custom_vjp(_rounded))
    f.def_dce(lambda used, x, y: _rounded(x, y))
    f.defvjp(lambda *args: (f.fun(*args), None), lambda _, ct: (7 * ct[0], ct[1]))
    for g in (first(f), jax.jit(first(f))):
        np.testing.assert_allclose(jax.grad(g)(X, Y), 7 * jnp.ones(3))


@pytest.mark.slow
def test_never_asked_eagerly():
    f = custom_dce(_both)

    @f.def_dce
    def _(used_outs, x, y):
        raise AssertionError(f"asked for {used_outs}")

    np.testing.assert_allclose(f(X, Y)[0], _both(X, Y)[0])
    jax.vmap(lambda x: f(x, Y)[0])(X)
    jax.jvp(lambda x: f(x, Y)[0], (X,), (X,))


def test_unused_equation_goes_with_what_feeds_it():
    assert live(lambda x, y: (both(jnp.cos(x), y), x + 1)[1], X, Y) == {"add"}


def test_inputs_the_rule_does_not_need_are_not_computed():
    f = custom_dce(lambda x, y: (jnp.sin(x), x * y))
    f.def_dce(lambda used, x, y: (jnp.sin(x) if used[0] else None, x * y if used[1] else None))
    assert live(lambda x, y: f(x, jnp.cos(y))[0], X, Y) == {"sin", "custom_dce_call"}
    assert live(jax.grad(lambda x, y: f(x, jnp.cosh(y))[0].sum()), X, Y).isdisjoint({"cosh", "sinh"})


@pytest.mark.slow
def test_what_only_the_backward_pass_needs():
    """Residuals of a custom_vjp function that come out of a kernel beside its result."""
    kernel = custom_dce(lambda x: (jnp.sinh(x), jnp.exp(x) - jnp.sinh(x)))
    kernel.def_dce(lambda used, x: (jnp.sinh(x) if used[0] else None, jnp.cosh(x) if used[1] else None))

    @jax.custom_vjp
    def f(x):
        return kernel(x)[0]

    f.defvjp(kernel, lambda cosh, ct: (ct * cosh,))
    loss = lambda x: f(jnp.cos(x)).sum()
    assert live(lambda x: jax.vjp(loss, x)[0], X).isdisjoint({"exp", "cosh"})
    assert live(jax.grad(loss), X).isdisjoint({"exp", "sinh"})
    assert {"exp", "sinh"} <= live(jax.value_and_grad(loss), X)
    # The forward pass of checkpoint keeps no residuals; the backward pass computes those alone.
    remat = live(jax.value_and_grad(lambda x: jnp.exp2(jax.checkpoint(loss)(x))), X)
    assert {"sinh", "cosh"} <= remat
    assert "exp" not in remat
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), -jnp.cosh(jnp.cos(X)) * jnp.sin(X), rtol=1e-5)


def test_later_rounds_merge_their_masks():
    asked = []
    f = custom_dce(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x)))

    @f.def_dce
    def _(used, x):
        asked.append(tuple(used))
        ops = (jnp.tanh, jnp.exp, jnp.sinh)
        return tuple(op(x) if u else None for op, u in zip(ops, used, strict=True))

    jaxpr = jax.make_jaxpr(lambda x: f(x))(X)
    for used, names in [
        ([True, False, True], {"tanh", "sinh"}),
        ([False, True], {"sinh"}),
        ([True], {"sinh"}),
        ([False], set()),
    ]:
        opened = getattr(jaxpr, "jaxpr", jaxpr)
        jaxpr, _ = pe.dce_jaxpr(opened, used)
        assert {e.primitive.name for e in equations(jaxpr)} - {"custom_dce_call"} == names
    assert asked == [(True, False, True), (False, False, True)]


def test_later_round_whose_rule_wants_an_operand_that_is_gone():
    f = custom_dce(lambda x, y: (x * 2, x * 3, x * 4))

    @f.def_dce
    def _(used, x, y):
        extra = y if sum(used) == 1 else 0.0
        return tuple(x * (k + 2) + 0 * extra if u else None for k, u in enumerate(used))

    jaxpr = jax.make_jaxpr(f)(X, Y)
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    twice, used_ins = pe.dce_jaxpr(opened, [True, True, False])
    assert used_ins == [True, False]
    once, _ = pe.dce_jaxpr(twice, [False, True])
    (eqn,) = once.eqns
    assert len(eqn.invars) == 1
    np.testing.assert_allclose(jax.core.eval_jaxpr(once, [], X)[0], 3 * X)


def test_effects_are_kept():
    def fun(x):
        jax.debug.print("seen {}", x)
        return jnp.sin(x), jnp.cos(x)

    f = custom_dce(fun)
    f.def_dce(lambda used, x: fun(x))
    found = live(lambda x: (f(x), x + 1)[1], X)
    assert {n for n in found if n.startswith("debug")}


def test_nested_functions_are_eliminated_too():
    inner = custom_dce(lambda x: (jnp.sin(x), jnp.exp(x)))
    inner.def_dce(lambda used, x: (jnp.tanh(x) if used[0] else None, jnp.exp(x) if used[1] else None))
    outer = custom_dce(lambda x: (*inner(x), jnp.cosh(x)))
    outer.def_dce(lambda used, x: (inner(x)[0] if used[0] else None, None, None))
    f = lambda x: outer(x)[0].sum()
    assert live(f, X) == {"custom_dce_call", "tanh", "reduce_sum"}
    assert live(jax.grad(f), X).isdisjoint({"sin", "exp", "cosh"})


def test_a_rule_that_calls_its_function():
    f = custom_dce(lambda x: (jnp.sin(x), jnp.cos(x), jnp.exp(x)))
    f.def_dce(lambda used, x: f(x))
    for g in (lambda x: f(x)[0].sum(), jax.grad(lambda x: f(x)[0].sum()), jax.vmap(lambda x: f(x)[1])):
        assert "custom_dce_call" in live(g, X) or "sin" in live(g, X)
        jax.jit(g)(X)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x)[0].sum()))(X), jnp.cos(X), rtol=1e-6)


def test_redefining_the_rule_takes_effect():
    f = custom_dce(lambda x: (jnp.sin(x), jnp.cos(x)))
    f.def_dce(lambda used, x: (jnp.zeros_like(x), None))
    g = jax.jit(lambda x: f(x)[0])
    np.testing.assert_array_equal(g(X), 0.0)
    f.def_dce(lambda used, x: (jnp.ones_like(x), None))
    np.testing.assert_array_equal(g(X), 1.0)


@pytest.mark.slow
def test_export():
    exported = jax.export.export(jax.jit(jax.value_and_grad(first(both))))(X, Y)
    assert "tan" not in exported.mlir_module().replace("constant", "")
    np.testing.assert_allclose(exported.call(X, Y)[0], first(_both)(X, Y), rtol=1e-6)


@pytest.mark.slow
def test_xla_computes_once_what_both_passes_compute():
    """The derivative starts from the inputs; compiled, that costs nothing."""
    g = lambda f: jax.jit(jax.value_and_grad(lambda x, y: sum(map(jnp.sum, f(x, y))), argnums=(0, 1)))
    big = jnp.ones((64, 64))
    cost = lambda f: g(f).lower(big, big).compile().cost_analysis()
    found, plain = cost(both), cost(_both)
    for key in ("flops", "transcendentals"):
        assert found.get(key, 0) <= plain.get(key, 0)


@pytest.mark.slow
def test_named_axis_in_function_and_rule():
    f = custom_dce(lambda x: (lax.psum(jnp.sin(x), "i"), jnp.exp(x)))
    f.def_dce(lambda used, x: (lax.psum(jnp.tanh(x), "i") if used[0] else None, None))
    vmapped = jax.vmap(lambda x: f(x)[0], axis_name="i")
    np.testing.assert_allclose(jax.jit(vmapped)(X), jnp.tanh(X).sum() * jnp.ones(3), rtol=1e-6)
    shared = jax.vmap(lambda x: f(x)[0], axis_name="i", out_axes=None)
    np.testing.assert_allclose(jax.jit(shared)(X), jnp.tanh(X).sum(), rtol=1e-6)
    assert "exp" not in live(vmapped, X)
    unmapped = jax.vmap(lambda _: f(X)[0], axis_name="i")
    np.testing.assert_allclose(jax.jit(unmapped)(jnp.zeros(5))[0], 5 * jnp.tanh(X), rtol=1e-6)


def test_results_that_are_not_mapped_stay_so():
    f = custom_dce(lambda x, y: (x * y, jnp.sin(y)))
    # The rule mixes in an operand that is mapped, to no effect on the value.
    f.def_dce(lambda used, x, y: (None, jnp.sin(y) + 0 * x))
    shared = jax.vmap(lambda x, y: f(x, y)[1], in_axes=(0, None), out_axes=None)
    np.testing.assert_allclose(jax.jit(shared)(X, Y[0]), jnp.sin(Y[0]), rtol=1e-6)


@pytest.mark.slow
def test_sharded_with_shard_map_on_devices():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(8.0) / 8
    mapped = jax.shard_map(lambda x: both(x, x)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_allclose(jax.jit(mapped)(x), _both(x, x)[0], rtol=1e-5)
    constant = custom_dce(lambda x: (0 * x, jnp.exp(x)))
    constant.def_dce(lambda used, x: (jnp.zeros_like(x, shape=x.shape), None))
    mapped = jax.shard_map(lambda x: constant(x)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_array_equal(jax.jit(mapped)(x), 0 * x)
    # A constant is the same on every device; the result it stands for is not.
    constant.def_dce(lambda used, x: (jnp.zeros(x.shape), None))
    np.testing.assert_array_equal(jax.jit(mapped)(x), 0 * x)


def test_no_tracer_leaks(check_leaks):
    jax.jit(jax.grad(first(both)))(X, Y)
