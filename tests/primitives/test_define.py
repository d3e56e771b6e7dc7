"""A defined primitive computes what its function does, and stays whole, under every transform."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from quaxlike.primitives import DefinedPrimitive, define_primitive
from tests.samples import array, normal, random_key

from .jaxprs import equations, names, primitives


def _gate(x, w, *, power):
    return jnp.tanh(x @ w) ** power


def _split(x, params, n, shift):
    """Trees, an integer operand and an integer result, an optional operand, several results."""
    out = {"a": jnp.sin(x) * params["w"], "n": n + 1, "b": (params["v"][0] ** 2,)}
    return out if shift is None else out | {"a": out["a"] + shift}


gate_p = define_primitive("test_gate", _gate)
split_p = define_primitive("test_split", _split, multiple_results=True)

key = random_key(0)
X, W = normal(3), normal(3, 2)
TREE = {"w": normal(3, seed=2), "v": [array([0.3, 2.0])]}
N = array([1, 2])


def _gate_loss(gate, x, w):
    return jnp.sum(jnp.cos(gate(x, w, power=2)))


def _split_loss(split, x, params):
    out = split(x, params, N, None)
    return jnp.sum(out["a"] ** 2) * jnp.sum(out["b"][0])


LOSSES = {
    "gate": (partial(_gate_loss, gate_p), partial(_gate_loss, _gate), (X, W)),
    "split": (partial(_split_loss, split_p), partial(_split_loss, _split), (X, TREE)),
}


def _ones(tree):
    return jax.tree.map(jnp.ones_like, tree)


def _stack(args):
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x], axis=-1), args)


def _vmap(f, in_axes=-1):
    return jax.vmap(f, in_axes=in_axes)


def _scan(f):
    def run(*args):
        return lax.scan(lambda c, _: (c + f(*args), f(*args)), jnp.zeros(()), None, length=2)

    return run


def _custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *args: jax.vjp(f, *args), lambda pullback, ct: pullback(ct))
    return wrapped


def _linearised(f):
    def run(*args):
        out, lin = jax.linearize(f, *args)
        return out, lin(*_ones(args))

    return run


def _transposed(f):
    """The gradient's own transpose: cotangents of cotangents."""

    def run(*args):
        _, pullback = jax.vjp(f, *args)
        return jax.linear_transpose(pullback, jnp.ones(()))(_ones(args))

    return run


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=1),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, _ones(a)),
    "linearize": _linearised,
    "jit_grad": lambda f: jax.jit(jax.grad(f)),
    "checkpoint_grad": lambda f: jax.grad(jax.checkpoint(f)),
    "scan_grad": lambda f: jax.grad(lambda *a: _scan(f)(*a)[0]),
    "hessian": jax.hessian,
    "grad_grad": lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(f)(*a) ** 2)),
    "jacrev_jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
    "transposed_vjp": _transposed,
    "custom_vjp_grad": lambda f: jax.grad(_custom_vjp(f), argnums=(0, 1)),
}
MAPPED = {
    "vmap": _vmap,
    "vmap_one": lambda f: (
        lambda x, w: jax.vmap(f, in_axes=(-1, None))(x, jax.tree.map(lambda v: v[..., 0], w))
    ),
    "vmap_grad": lambda f: _vmap(jax.grad(f, argnums=(0, 1))),
    "grad_vmap": lambda f: jax.grad(lambda *a: _vmap(f)(*a).sum(), argnums=(0, 1)),
    "grad_vmap_shared": lambda f: jax.grad(
        lambda x, w: jax.vmap(f, in_axes=(-1, None))(x, jax.tree.map(lambda v: v[..., 0], w)).sum(),
        argnums=(0, 1),
    ),
    "vmap_vmap": lambda f: (
        lambda x, w: jax.vmap(lambda w: jax.vmap(f, in_axes=(-1, None))(x, w), in_axes=-1)(w)
    ),
    "vmap_hessian": lambda f: _vmap(jax.hessian(f)),
    "hessian_vmap": lambda f: jax.hessian(lambda *a: _vmap(f)(*a).sum()),
    "jvp_vmap": lambda f: lambda *a: jax.jvp(_vmap(f), a, _ones(a)),
}


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("transform", [*TRANSFORMS, *MAPPED])
def test_equals_the_plain_function_and_stays_whole(loss, transform, x64):
    defined, plain, args = LOSSES[loss]
    args = jax.tree.map(lambda x: x.astype(jnp.float64), args)
    if transform in MAPPED:
        args = _stack(args)
    apply = (TRANSFORMS | MAPPED)[transform]
    found, expected = apply(defined)(*args), apply(plain)(*args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, expected)

    in_jaxpr = primitives(apply(defined), *args)
    root = gate_p if loss == "gate" else split_p
    assert any(isinstance(p, DefinedPrimitive) and p.root is root for p in in_jaxpr)
    assert not {lax.tanh_p, lax.sin_p} & in_jaxpr - ({lax.sin_p} if loss == "gate" else set())


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_derivatives_against_finite_differences(loss, x64):
    defined, _, args = LOSSES[loss]
    args = jax.tree.map(lambda x: x.astype(jnp.float64), args)
    check_grads(defined, args, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("transform", ["grad", "jvp", "linearize", "checkpoint_grad", "value_and_grad"])
def test_the_primitive_itself_is_kept(transform):
    defined, _, args = LOSSES["gate"]
    assert gate_p in primitives(TRANSFORMS[transform](defined), *args)


def test_derived_primitives_are_recognised():
    f = lambda x: gate_p(x, W, power=1).sum()
    by_form = {"jvp": lambda x: jax.jvp(f, (x,), (x,)), "vjp": jax.grad(f)}
    for form, fn in by_form.items():
        (found,) = primitives(fn, X) & {gate_p.jvp_p, gate_p.vjp_p}
        assert found.form == form
        assert found.parent is gate_p
        assert found.name == f"test_gate.{form}"
    (batched,) = (e for e in equations(jax.make_jaxpr(jax.vmap(f))(X[None])) if "forms" in e.params)
    assert batched.primitive is gate_p.batch_p
    assert (batched.primitive.form, batched.primitive.name) == ("batch", "test_gate.batch")
    assert batched.params["power"] == 1
    assert gate_p.batch_p.jvp_p.root is gate_p


@pytest.mark.slow
def test_tree_result_and_static_parameters():
    out = split_p(X, TREE, N, jnp.ones(3))
    expected = _split(X, TREE, N, jnp.ones(3))
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    np.testing.assert_allclose(gate_p(X, W, power=3), _gate(X, W, power=3), rtol=1e-6)


@pytest.mark.slow
def test_integer_operands_and_results_have_trivial_derivatives():
    def f(x, n):
        out = split_p(x, TREE, n, None)
        return jnp.sum(out["a"]) + jnp.sum(out["n"]).astype(x.dtype)

    grad_n = jax.grad(f, argnums=1, allow_int=True)(X, N)
    assert grad_n.dtype == jax.dtypes.float0
    zeros = np.zeros(N.shape, jax.dtypes.float0)
    out, tangents = jax.jvp(lambda x, n: split_p(x, TREE, n, None), (X, N), (X, zeros))
    assert tangents["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(out["n"], N + 1)
    vmapped = jax.vmap(jax.grad(f))(jnp.stack([X, X]), jnp.stack([N, N]))
    np.testing.assert_allclose(vmapped[0], jnp.cos(X) * TREE["w"], rtol=1e-6)


@pytest.mark.slow
def test_boolean_operand_and_key_operand():
    noise = define_primitive(
        "test_noise", lambda k, mask, x: jnp.where(mask, x * jax.random.normal(k, x.shape), x)
    )
    mask = jnp.array([True, False, True])
    f = lambda x: noise(key, mask, x).sum()
    np.testing.assert_allclose(jax.grad(f)(X), jnp.where(mask, jax.random.normal(key, (3,)), 1.0), rtol=1e-6)
    batched = jax.vmap(noise, in_axes=(0, None, None))(jax.random.split(key, 2), mask, X)
    assert batched.shape == (2, 3)


def test_zero_tangents_are_never_instantiated():
    def f(x):
        out = split_p(x, TREE, N, None)
        return jnp.sum(out["a"]), jnp.exp(out["b"][0])

    jaxpr = jax.make_jaxpr(lambda x: jax.jvp(f, (x,), (x,)))(X)
    (tangent,) = (e for e in jaxpr.eqns if e.primitive is split_p.jvp_p)
    (form,) = tangent.params["forms"]
    # Operands: x, params["v"][0], params["w"], n. Results: a, b[0], n.
    assert form.nonzero == (True, False, False, False)
    assert form.outputs == (True, False, False)
    assert names(lambda x: jax.jvp(f, (x,), (x,))[1], X).count("mul") == 0

    vjp = jax.make_jaxpr(jax.grad(lambda x: f(x)[0]))(X)
    (cotangent,) = (e for e in vjp.eqns if e.primitive is split_p.vjp_p)
    assert cotangent.params["forms"][0].cotangents == (True, False, False)


def test_weak_types_are_kept():
    assert jax.typeof(double_p(2.0)).weak_type
    assert not jax.typeof(double_p(jnp.float32(2.0))).weak_type
    assert jax.eval_shape(double_p, 2.0).weak_type


double_p = define_primitive("test_double", lambda x: 2 * x)


@pytest.mark.slow
def test_modules_are_operands():
    class Pair(eqx.Module):
        a: jax.Array
        b: jax.Array

    scale_p = define_primitive("test_module", lambda m, x: m.a * x + m.b)
    pair = Pair(jnp.ones(3), jnp.zeros(3))
    grad = jax.grad(lambda m: scale_p(m, X).sum())(pair)
    np.testing.assert_allclose(grad.a, X)


@pytest.mark.slow
def test_named_axis_in_the_function():
    centre_p = define_primitive("test_centre", lambda x: x - lax.pmean(x, "rows"))
    rows = jnp.arange(6.0).reshape(2, 3)
    plain = lambda x: x - lax.pmean(x, "rows")
    for in_axes in (0, 1):
        vmap = partial(jax.vmap, in_axes=in_axes, axis_name="rows")
        np.testing.assert_allclose(vmap(centre_p)(rows), vmap(plain)(rows))
    total_p = define_primitive("test_total", lambda x: lax.psum(x, "rows"))
    shared = jax.vmap(lambda _: total_p(X), axis_name="rows")(jnp.zeros(4))
    np.testing.assert_allclose(shared[0], 4 * X)
    loss = lambda f, x: (jax.vmap(f, axis_name="rows")(x) ** 2).sum()
    np.testing.assert_allclose(jax.grad(partial(loss, centre_p))(rows), jax.grad(partial(loss, plain))(rows))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_operands(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    x = jax.device_put(jnp.ones((8, 3)), jax.NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: gate_p(x, W, power=2))(x)
        assert out.sharding.spec[0] == "i"
        np.testing.assert_allclose(out, _gate(x, W, power=2), rtol=1e-6)


@pytest.mark.slow
def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(f, x, w):
        mapped = jax.shard_map(
            lambda x, w: lax.psum(f(x, w, power=2).sum(), "i"),
            mesh=mesh,
            in_specs=(P("i"), P()),
            out_specs=P(),
        )
        return mapped(x, w)

    x = jnp.arange(24.0).reshape(8, 3) / 24
    for found, expected in zip(
        jax.jit(jax.grad(partial(loss, gate_p), argnums=(0, 1)))(x, W),
        jax.grad(lambda x, w: _gate(x, w, power=2).sum(), argnums=(0, 1))(x, W),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_export_and_symbolic_shapes():
    f = jax.jit(lambda x: gate_p(x, W, power=2))
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    x = jnp.ones((5, 3))
    np.testing.assert_allclose(exported.call(x), f(x), rtol=1e-6)


def test_unused_equation_is_eliminated():
    def f(x):
        split_p(x, TREE, N, None)
        return x

    jaxpr = jax.make_jaxpr(f)(X)
    assert len(jaxpr.eqns) == 1
    assert "cosine" not in jax.jit(f).lower(X).as_text()
    remat = jax.jit(jax.grad(jax.checkpoint(lambda x: f(x).sum())))
    assert "cosine" not in remat.lower(X).as_text()


@pytest.mark.slow
def test_no_tracer_leaks(check_leaks):
    jax.jit(jax.grad(lambda x: jax.vmap(lambda x: gate_p(x, W, power=2))(x).sum()))(X[None])


def test_retracing_is_memoised():
    calls = []

    def impl(x):
        calls.append(1)
        return jnp.sin(x)

    p = define_primitive("test_calls", impl)
    grad = jax.grad(lambda x: p(x).sum())
    grad(X)
    before = len(calls)
    for _ in range(3):
        grad(X)
    assert len(calls) == before


class _Named(NamedTuple):
    n: Any


@dataclasses.dataclass(frozen=True)
class _Record:
    n: Any


# Its results and its derivatives are multiples of a number that depends on the type.
written_p = define_primitive("test_written", lambda x, *, n: x * len(repr(n)))
BOTH = {
    "eager": lambda f, g, x: (f(x), g(x)),
    "jit": lambda f, g, x: jax.jit(lambda x: (f(x), g(x)))(x),
    "grad": lambda f, g, x: (jax.grad(lambda x: f(x).sum())(x), jax.grad(lambda x: g(x).sum())(x)),
    "vmap": lambda f, g, x: (jax.vmap(f)(x), jax.vmap(g)(x)),
    "transposed": lambda f, g, x: (jax.linear_transpose(f, x)(x)[0], jax.linear_transpose(g, x)(x)[0]),
}


@pytest.mark.quick("values0-jit", "values0-grad", "values0-vmap", "values2-eager", "values5-jit")
@pytest.mark.parametrize("transform", BOTH)
@pytest.mark.parametrize(
    "values",
    [
        (3, 3.0),
        (1, True),
        (0.0, -0.0),
        (2.0, np.float32(2)),
        ((1, (2,)), (1, (2.0,))),
        ((2, 3), (2, 3.0)),
        ((2,), _Named(2)),
        (_Record(2), _Record(2.0)),
        (frozenset([2]), frozenset([2.0])),
    ],
)
def test_parameters_that_compare_equal_have_programs_of_their_own(transform, values):
    n, m = values
    assert n == m
    found = BOTH[transform](partial(written_p, n=n), partial(written_p, n=m), X)
    x = jnp.ones_like(X) if transform == "grad" else X
    for out, value in zip(found, values, strict=True):
        np.testing.assert_allclose(out, x * len(repr(value)), rtol=1e-6)


def test_parameters_that_compare_equal_may_give_other_shapes():
    p = define_primitive("test_other_shapes", lambda x, *, n: [x] * len(repr(n)), multiple_results=True)
    f = lambda x: (p(x, n=1), p(x, n=True))
    assert list(map(len, f(X))) == list(map(len, jax.eval_shape(f, X))) == [1, 4]


def test_rules_have_the_parameters_as_they_were_given():
    seen = []

    def jvp(primals, tangents, **params):
        seen.append(params)
        return tangents[0]

    def batching(size, operands, dims, **params):
        seen.append(params)
        return operands[0], dims[0]

    p = define_primitive("test_params_of_rules", lambda x, *, n: x, jvp=jvp, batching=batching)
    jax.jvp(partial(p, n=2.0), (X,), (X,))
    jax.vmap(partial(p, n=True))(X)
    assert [list(map(repr, params.items())) for params in seen] == [["('n', 2.0)"], ["('n', True)"]]
    (eqn,) = jax.make_jaxpr(partial(p, n=2.0))(X).eqns
    assert p.plain_params(eqn.params) == {"n": 2.0}


# Each makes a function of a vector, with a vector of the same size for a result, of another one.
STACKABLE = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.cos(x))[0],
    "vmap": lambda f: lambda x: jax.vmap(f, in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], 1)).sum(1),
    "shared": lambda f: lambda x: jax.vmap(lambda s: s * f(x))(jnp.arange(2.0)).sum(0),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (0.5 * f(c), None), x, None, length=2)[0],
}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(STACKABLE)), min_size=1, max_size=4))
def test_any_stack_of_transforms(transforms):
    with jax.enable_x64(True):
        w = jnp.asarray([[0.2, -1.0, 0.4], [0.9, 0.3, -0.5], [-0.7, 0.6, 0.1]])
        x = jnp.asarray([0.3, -0.2, 0.8])
        defined, plain = (lambda x, g=g: g(x, w, power=3) for g in (gate_p, _gate))
        for name in transforms:
            defined, plain = STACKABLE[name](defined), STACKABLE[name](plain)
        np.testing.assert_allclose(defined(x), plain(x), rtol=1e-10, atol=1e-12)
        assert lax.tanh_p not in primitives(defined, x)
