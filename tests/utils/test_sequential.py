from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from quaxlike.utils import dataclass, sequential_vmap_with_vjp, shard_map
from quaxlike.utils.sequential import sequential_call_p
from tests.primitives.jaxprs import names, primitives
from tests.samples import Lazy, array, normal


@dataclass
class State:
    x: Any
    n: Any


def f(x, y):
    return jnp.sin(x) * y @ x, {"a": x * jnp.sum(y**2), "n": jnp.int32(3)}


def of_state(state, y):
    return State(jnp.tanh(state.x @ y) * state.n.astype(jnp.float32), state.n + 1)


X = normal(2, 3, 2)
Y = normal(3, 2)
STATE = State(X, array(np.arange(6).reshape(2, 3)))

CASES = Lazy(
    {
        "not batched": lambda: (f, (X[0, 0], Y[0]), lambda g: g),
        "vmap": lambda: (f, (X[0], Y), jax.vmap),
        "other axes": lambda: (lambda x, y: x * y, (X[0].T, Y[0]), lambda g: jax.vmap(g, (1, None), 1)),
        "twice": lambda: (f, (X, Y), lambda g: jax.vmap(jax.vmap(g), in_axes=(0, None))),
        "twice, apart": lambda: (
            f,
            (X[0], Y),
            lambda g: jax.vmap(jax.vmap(g, in_axes=(0, None)), in_axes=(None, 0)),
        ),
        "trees": lambda: (of_state, (STATE, Y), lambda g: jax.vmap(jax.vmap(g), in_axes=(0, None))),
    }
)


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def tangents_like(tree, seed):
    def one(i, x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return np.zeros(x.shape, jax.dtypes.float0)
        return normal(*x.shape, seed=seed + i)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [one(i, x) for i, x in enumerate(leaves)])


def value(fun, args):
    return fun(*args)


def jvp(fun, args):
    return jax.jvp(fun, args, tangents_like(args, 10))


def vjp(fun, args):
    out, pullback = jax.vjp(fun, *args)
    return pullback(tangents_like(out, 20))


def linearize(fun, args):
    out, pushforward = jax.linearize(fun, *args)
    return out, pushforward(*tangents_like(args, 10))


def scalar(fun):
    floats = lambda tree: [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in floats(fun(*args)))


def gradient(fun, args):
    return jax.grad(scalar(fun), argnums=1)(*args)


def second(outer, inner):
    """Second derivatives, with respect to the second argument."""
    return lambda fun, args: outer(inner(scalar(fun), argnums=1), argnums=1)(*args)


TRANSFORMS = {
    "value": value,
    "jvp": jvp,
    "vjp": vjp,
    "linearize": linearize,
    "hessian": second(jax.jacfwd, jax.jacrev),
}
MORE_TRANSFORMS = {
    "gradient": gradient,
    "forward over forward": second(jax.jacfwd, jax.jacfwd),
    "reverse over reverse": second(jax.jacrev, jax.jacrev),
    "reverse over forward": second(jax.jacrev, jax.jacfwd),
    "jit of vjp": lambda fun, args: jax.jit(lambda *args: vjp(fun, args))(*args),
    "vjp of jit": lambda fun, args: vjp(jax.jit(fun), args),
    "checkpoint": lambda fun, args: vjp(jax.checkpoint(fun), args),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_function(case, transform):
    fun, args, mapped = CASES[case]
    if transform is linearize and fun is of_state:
        args = (State(args[0].x, args[0].n.astype(jnp.float32)), args[1])  # JAX asks for floats here
        fun = lambda state, y: State(jnp.tanh(state.x @ y) * state.n, state.n + 1.0)
    found = transform(mapped(sequential_vmap_with_vjp(fun)), args)
    assert_close(found, transform(mapped(fun), args))


@pytest.mark.slow
@pytest.mark.parametrize("transform", MORE_TRANSFORMS.values(), ids=MORE_TRANSFORMS)
def test_other_derivatives(transform):
    test_equals_the_plain_function("twice", transform)


# Running one after the other


@pytest.mark.slow
def test_runs_once_for_each_item():
    shapes: list[tuple[int, ...]] = []

    def on_host(x):
        shapes.append(x.shape)
        return np.sin(x)

    def unbatchable(x):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(unbatchable)(X[0])
    out = jax.vmap(jax.vmap(sequential_vmap_with_vjp(unbatchable)))(X)
    np.testing.assert_allclose(out, np.sin(X), rtol=1e-6)
    assert shapes == [(2,)] * 6


@pytest.mark.slow
def test_derivatives_run_once_for_each_item():
    shapes: list[tuple[int, ...]] = []

    def record(x):
        shapes.append(x.shape)
        return np.cos(x)

    @jax.custom_jvp
    def sin(x):
        return jnp.sin(x)

    @sin.defjvp
    def _(primals, tangents):
        cos = jax.pure_callback(record, jax.ShapeDtypeStruct(primals[0].shape, primals[0].dtype), *primals)
        return sin(*primals), cos * tangents[0]

    g = jax.vmap(sequential_vmap_with_vjp(sin))
    found = jax.grad(lambda x: jnp.sum(g(x) ** 2))(X[0])
    np.testing.assert_allclose(found, 2 * np.sin(X[0]) * np.cos(X[0]), rtol=1e-5)
    assert set(shapes) == {(2,)}
    shapes.clear()
    jax.vmap(lambda t: jax.jvp(g, (X[0],), (t,)))(jnp.ones((5, 3, 2)))
    assert set(shapes) == {(2,)}


def test_the_jaxpr_has_a_scan_for_each_vmap():
    g = sequential_vmap_with_vjp(lambda x: jnp.sin(x) @ x)
    assert names(g, X[0, 0])[:1] == ["sequential_call"]
    for depth, x in enumerate([X[0, 0], X[0], X]):
        fun = g
        for _ in range(depth):
            fun = jax.vmap(fun)
        assert names(fun, x).count("scan") == depth
        assert names(fun, x).count("sequential_call") == 1
        grad = jax.grad(lambda x, fun=fun: jnp.sum(fun(x)))
        assert sequential_call_p in primitives(grad, x)


def test_unmapped_operands_are_not_copied():
    g = sequential_vmap_with_vjp(lambda x, m: m @ x)
    jaxpr = jax.make_jaxpr(jax.vmap(g, in_axes=(0, None)))(X[0], jnp.ones((2, 2)))
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [v.aval.shape for v in scan.invars] == [(2, 2), (3, 2)]


# Reverse mode, repeatedly


@pytest.mark.slow
def test_reverse_mode_repeatedly():
    g = jax.vmap(sequential_vmap_with_vjp(lambda x: jnp.sum(x**3)))
    grad = jax.grad(lambda x: jnp.sum(g(x)))
    for scale in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(grad(scale * X[0]), 3 * (scale * X[0]) ** 2, rtol=1e-5)
    _, pullback = jax.vjp(g, X[0])
    for _ in range(2):
        np.testing.assert_allclose(pullback(jnp.ones(3))[0], 3 * X[0] ** 2, rtol=1e-5)


@pytest.mark.slow
def test_third_derivatives():
    g = jax.vmap(sequential_vmap_with_vjp(lambda x: x**4))
    plain = lambda x: jnp.sum(x**4)
    ours = lambda x: jnp.sum(g(x))
    x = jnp.arange(1.0, 4.0)
    third = lambda fun: jax.jacfwd(jax.jacrev(jax.jacrev(fun)))(x)
    np.testing.assert_allclose(third(ours), third(plain), rtol=1e-5)


# What the function closes over


def closing_over(make):
    return lambda z, xs: jnp.sum(jax.vmap(make(lambda x: jnp.sin(x) * z + 2.0 * np.arange(2.0)))(xs) ** 2)


CLOSED = {
    "value": lambda h: h,
    "jit": jax.jit,
    "grad": jax.grad,
    "grad of both": lambda h: jax.grad(h, argnums=(0, 1)),
    "jvp": lambda h: lambda z, xs: jax.jvp(h, (z, xs), (z, xs)),
    "hessian": lambda h: jax.hessian(h, argnums=(0, 1)),
    "vmap": lambda h: jax.vmap(h, in_axes=(0, None)),
    "vmap of grad": lambda h: jax.vmap(jax.grad(h), in_axes=(0, None)),
    "jit of vmap of grad": lambda h: jax.jit(jax.vmap(jax.grad(h), in_axes=(0, None))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transform"), CLOSED.items(), ids=CLOSED)
def test_closed_over_tracers(name, transform):
    z = Y if "vmap" in name else Y[0]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = transform(closing_over(sequential_vmap_with_vjp))(z, X[0])
        assert_close(found, transform(closing_over(lambda fun: fun))(z, X[0]))


@pytest.mark.slow
@pytest.mark.usefixtures("check_leaks")
def test_no_tracer_is_left():
    h = closing_over(sequential_vmap_with_vjp)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jax.jit(jax.grad(h))(Y[0], X[0])


# Arguments and results


def test_arguments_that_are_no_arrays():
    @sequential_vmap_with_vjp
    def scaled(x, mode, *, by=2.0, options=None):
        """Doc of scaled."""
        assert type(by) is float
        assert (mode, options) == ("a", {"b": None})
        return x * by

    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Doc of scaled.")
    np.testing.assert_allclose(jax.vmap(lambda x: scaled(x, "a", by=3.0, options={"b": None}))(Y), 3 * Y)


def test_mapped_keyword_arguments():
    g = sequential_vmap_with_vjp(lambda x, *, y: x - y)
    np.testing.assert_allclose(jax.vmap(lambda x, y: g(x, y=y))(Y, 2 * Y), -Y)


@pytest.mark.slow
def test_results_that_do_not_depend_on_anything():
    g = sequential_vmap_with_vjp(lambda x: (x, jnp.ones(4), jnp.zeros((), int)))
    out = jax.vmap(g)(Y)
    assert [x.shape for x in out] == [(3, 2), (3, 4), (3,)]
    assert float(jax.grad(lambda x: jnp.sum(jax.vmap(g)(x)[0]))(Y).sum()) == 6.0
    assert float(jnp.sum(jax.grad(lambda x: jnp.sum(jax.vmap(g)(x)[1]))(Y))) == 0.0


@pytest.mark.slow
def test_keys_and_integers():
    g = sequential_vmap_with_vjp(lambda key, n: jax.random.normal(key) * n.astype(float))
    keys, n = jax.random.split(jax.random.key(0), 3), jnp.arange(3)
    np.testing.assert_allclose(
        jax.vmap(g)(keys, n), jax.vmap(jax.random.normal)(keys) * np.arange(3.0), rtol=1e-6
    )


@pytest.mark.slow
def test_inside_scan_and_cond():
    g = sequential_vmap_with_vjp(jnp.sin)
    scanned = lambda xs: jnp.sum(jax.lax.scan(lambda c, x: (c + jax.vmap(g)(x), None), jnp.zeros(2), xs)[0])
    np.testing.assert_allclose(jax.grad(scanned)(Y), jnp.cos(Y), rtol=1e-6)
    choose = lambda x: jax.lax.cond(x[0] > 0, jax.vmap(g), jax.vmap(jnp.cos), x)
    expected = jnp.where(Y[:, :1] > 0, jnp.sin(Y), jnp.cos(Y))
    np.testing.assert_allclose(jax.vmap(choose)(Y), expected, rtol=1e-6)


def test_a_vmap_that_maps_nothing():
    g = sequential_vmap_with_vjp(jnp.sin)
    out = jax.vmap(g, in_axes=None, axis_size=3)(Y[0])
    np.testing.assert_allclose(out, jnp.sin(jnp.stack([Y[0]] * 3)))
    assert "scan" not in names(jax.vmap(lambda x, y: g(y) * x, in_axes=(0, None)), jnp.ones(3), 2.0)


def test_collectives_over_the_mapped_axis():
    centered = sequential_vmap_with_vjp(lambda x: x - jax.lax.pmean(x, "items"))
    with pytest.raises(
        NotImplementedError, match=r"collective over the axis 'items' .* Move the collective out"
    ):
        jax.vmap(centered, axis_name="items")(Y)
    np.testing.assert_allclose(jax.vmap(sequential_vmap_with_vjp(jnp.sin), axis_name="items")(Y), jnp.sin(Y))


@pytest.mark.slow
def test_a_function_with_a_vjp_of_its_own():
    @jax.custom_vjp
    def external(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def backward(x, ct):
        assert x.shape == ct.shape == ()
        return (jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * ct,)

    external.defvjp(lambda x: (external(x), x), backward)
    g = jax.vmap(sequential_vmap_with_vjp(lambda x: external(x) * x))
    found = jax.jit(jax.grad(lambda x: jnp.sum(g(x) ** 2)))(Y[0])
    expected = jax.grad(lambda x: jnp.sum((jnp.sin(x) * x) ** 2))(Y[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(g, (Y[0],), (Y[0],))


@pytest.mark.slow
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    g = sequential_vmap_with_vjp(lambda x: jnp.sum(x**2))
    total = shard_map(
        lambda x: jax.lax.psum(jnp.sum(jax.vmap(g)(x)), "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    x = X.reshape(6, 2)
    np.testing.assert_allclose(total(x), np.sum(x**2), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), 2 * x, rtol=1e-5)


def test_effects_are_kept(capfd: pytest.CaptureFixture[str]):
    def noisy(x):
        jax.debug.print("saw {}", x)
        return x

    jax.jit(jax.vmap(sequential_vmap_with_vjp(noisy)))(jnp.arange(3))
    jax.effects_barrier()
    assert capfd.readouterr().out == "saw 0\nsaw 1\nsaw 2\n"


def test_an_error_inside_comes_out():
    def bad(x):
        raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        jax.vmap(sequential_vmap_with_vjp(bad))(Y)
