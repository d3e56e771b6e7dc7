import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from quaxlike.utils import dataclass, jit, linearize, non_differentiable, shard_map, vectorize

# jit


def power(x: jax.Array, n: int = 2, *, scale: float = 1.0) -> jax.Array:
    """Doc of power."""
    return scale * x**n


@pytest.mark.parametrize(
    "compiled",
    [jit(power, static_argnames="n"), jit(static_argnames=("n",))(power), jit(power, static_argnums=1)],
)
def test_jit_plain_and_with_options(compiled):
    x = jnp.arange(3.0)
    np.testing.assert_allclose(compiled(x, 3), x**3)
    np.testing.assert_allclose(compiled(x), x**2)
    np.testing.assert_allclose(compiled(x, scale=2.0), 2 * x**2)


def test_static_argnames_by_position_and_by_keyword():
    seen: list[Any] = []

    @jit(static_argnames="n")
    def f(x, n):
        seen.append(n)
        return x * n

    x = jnp.ones(2)
    f(x, 3)
    f(x, n=3)
    f(x, 4)
    assert all(type(n) is int for n in seen)
    assert set(seen) == {3, 4}


def test_attributes_are_kept():
    compiled = jit(power, static_argnames="n")
    x = jnp.arange(3.0)
    assert compiled.__wrapped__ is power
    assert (compiled.__name__, compiled.__qualname__, compiled.__doc__) == ("power", "power", "Doc of power.")
    assert inspect.signature(compiled) == inspect.signature(power)
    np.testing.assert_allclose(compiled.lower(x, 3).compile()(x), x**3)
    assert compiled.trace(x, 3).jaxpr.out_avals[0].shape == (3,)
    assert compiled.eval_shape(x, 3).shape == (3,)
    compiled(x, 3)
    compiled.clear_cache()
    assert type(compiled) is type(jax.jit(power))


def test_compiled_once():
    traced: list[int] = []

    @jit
    def f(x):
        traced.append(1)
        return x + 1

    f(jnp.ones(2))
    f(jnp.zeros(2))
    assert traced == [1]


@dataclass
class Model:
    w: Any

    @jit
    def apply(self, x):
        return self.w * x

    @jit(static_argnames="n")
    def times(self, x, n: int):
        return self.w * x * n


@pytest.mark.slow
def test_methods():
    model = Model(jnp.array(2.0))
    assert float(model.apply(3.0)) == 6.0
    assert float(model.times(3.0, 2)) == float(model.times(3.0, n=2)) == 12.0
    assert float(Model.apply(model, 3.0)) == 6.0
    assert float(jax.grad(lambda m: m.apply(3.0))(model).w) == 3.0


def test_other_callables():
    assert float(jit(functools.partial(power, n=3))(2.0)) == 8.0
    assert float(jit(Model(2.0).apply)(3.0)) == 6.0


def test_only_options_given_are_handed_on(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []

    def spy(fn, *, in_shardings=..., inline=..., device=...):
        calls.append({"in_shardings": in_shardings, "inline": inline, "device": device})
        return fn

    monkeypatch.setattr(jax, "jit", spy)
    jit(power)
    jit(power, in_shardings=None, inline=True)
    assert calls == [
        {"in_shardings": ..., "inline": ..., "device": ...},
        {"in_shardings": None, "inline": True, "device": ...},
    ]
    with pytest.raises(
        TypeError, match=rf"jax.jit of JAX {jax.__version__} has no option backend, keep_unused"
    ):
        jit(power, keep_unused=True, backend="cpu", inline=True)


@pytest.mark.parametrize("use", [lambda o: jit(power, **o), lambda o: jit(**o)(power)])
def test_options_that_jax_has_given_up(use):
    with pytest.raises(TypeError, match=r"jax.jit of JAX [\d.]+ has no option abstracted_axes. Leave it out"):
        use({"abstracted_axes": {0: "n"}})
    assert use({"abstracted_axes": None})(jnp.float32(2.0), 3) == 8.0


def test_all_options_of_jax_are_known():
    of_jax, ours = (inspect.signature(f).parameters for f in (jax.jit, jit))
    assert of_jax.keys() - {"fun"} <= ours.keys()
    assert all(p.default is of_jax[name].default for name, p in ours.items() if name in of_jax)


def test_donation_and_compiler_options():
    x = jnp.arange(4.0)
    jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    fast = jit(compiler_options={"xla_cpu_enable_fast_math": True}, keep_unused=True)(lambda x, y: x + 1)
    assert float(fast(1.0, 2.0)) == 2.0


# vectorize


@pytest.mark.slow
def test_vectorize_plain_and_with_options():
    @vectorize
    def add(x, y):
        """Doc of add."""
        assert x.shape == y.shape == ()
        return x + y

    @vectorize(signature="(n),(n)->()")
    def dot(x, y):
        assert x.ndim == 1
        return x @ y

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(add(x, 1.0), x + 1)
    np.testing.assert_allclose(dot(x, x), jnp.sum(x * x, -1))
    assert (add.__name__, add.__doc__) == ("add", "Doc of add.")
    assert inspect.signature(dot) == inspect.signature(dot.__wrapped__)


@vectorize(signature="(n)->()", excluded=frozenset({1}))
def norm(x, order=2, scale=1.0):
    assert isinstance(order, int)
    return jnp.sum(jnp.abs(x) ** order) ** (1 / order) * scale


X = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda: norm(X, 1),
        lambda: norm(X, order=1),
        lambda: norm(x=X, order=1),
        lambda: norm(order=1, x=X),
    ],
)
def test_excluded_by_index_given_by_position_or_keyword(call):
    np.testing.assert_allclose(call(), X.sum(-1))


def test_excluded_by_name():
    @vectorize(excluded=frozenset({"mode", "kind"}))
    def f(x, mode, *, kind="k"):
        assert (mode, kind) == ("a", "b")
        assert x.shape == ()
        return 2 * x

    np.testing.assert_allclose(f(X, "a", kind="b"), 2 * X)
    np.testing.assert_allclose(f(X, mode="a", kind="b"), 2 * X)


@pytest.mark.slow
def test_keywords_are_mapped_over():
    @vectorize
    def subtract(x, y):
        assert x.shape == y.shape == ()
        return x - y

    np.testing.assert_allclose(subtract(y=X, x=1.0), 1 - X)
    np.testing.assert_allclose(subtract(X, y=X + 1), -np.ones_like(X))


def test_a_default_in_front_of_a_keyword():
    @vectorize
    def f(x, mode="a", y=0.0):
        assert mode == "a"
        assert y.shape == ()
        return x + y

    np.testing.assert_allclose(f(X, y=X), 2 * X)


def test_variadic_arguments():
    @vectorize
    def total(x, *others):
        assert all(o.shape == () for o in others)
        return x + sum(others)

    np.testing.assert_allclose(total(X, X, 1.0), 2 * X + 1)


def test_keyword_only_arguments_are_not_dropped():
    @vectorize
    def f(x, *, shift=0.0):
        return x + shift

    np.testing.assert_allclose(f(X), X)
    with pytest.raises(TypeError, match=r"shift of .*f can only be given by keyword. Add it to `excluded`"):
        f(X, shift=X)

    @vectorize
    def g(x, **options):
        return x

    with pytest.raises(TypeError, match=r"a, b of .*g can only be given by keyword"):
        g(X, b=1, a=2)


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        norm(X, nothing=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        norm(order=1)


def test_wrong_exclusions():
    with pytest.raises(ValueError, match="contains negative numbers"):
        vectorize(power, excluded=frozenset({-1}))


@pytest.mark.slow
def test_vectorize_under_transforms():
    np.testing.assert_allclose(jax.jit(lambda x: norm(x, order=1))(X), X.sum(-1))
    grad = jax.grad(lambda x: norm(x, order=1).sum())(X + 1)
    np.testing.assert_allclose(grad, np.ones_like(X))


# shard_map


AUTO = lambda *names: jax.make_mesh((2,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
EXPLICIT = lambda *names: jax.make_mesh(
    (2,) * len(names), names, axis_types=(AxisType.Explicit,) * len(names)
)


def local_sum(x, y):
    """Doc of local_sum."""
    return jnp.sum(x)[None] + y


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y: f(x, y),
        lambda f, x, y: f(x, y=y),
        lambda f, x, y: f(y=y, x=x),
        lambda f, x, y: jax.jit(f)(x=x, y=y),
    ],
)
def test_shard_map_by_position_and_keyword(call):
    f = shard_map(local_sum, mesh=AUTO("i"), in_specs=(P("i"), P()), out_specs=P("i"))
    x, y = jnp.arange(4.0), jnp.array([10.0])
    np.testing.assert_allclose(call(f, x, y), [11, 15])
    assert (f.__name__, f.__doc__) == ("local_sum", "Doc of local_sum.")


def test_only_what_is_given_is_handed_on(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax, "shard_map", lambda f, **options: calls.append(options) or f)
    mesh = AUTO("i")
    shard_map(local_sum, out_specs=P())
    shard_map(
        local_sum, out_specs=None, in_specs=P("i"), mesh=mesh, axis_names=frozenset({"i"}), check_vma=False
    )
    assert calls == [
        {"out_specs": P()},
        {"out_specs": None, "in_specs": P("i"), "mesh": mesh, "axis_names": {"i"}, "check_vma": False},
    ]


def test_mesh_of_the_context():
    f = shard_map(lambda x: jax.lax.psum(x, "i"), in_specs=P("i"), out_specs=P())
    with jax.set_mesh(AUTO("i")):
        np.testing.assert_allclose(jax.jit(f)(jnp.arange(4.0)), [2, 4])


def test_axis_names():
    mesh = AUTO("i", "j")
    f = shard_map(
        lambda x: jax.lax.psum(x, "i"),
        mesh=mesh,
        in_specs=P("i"),
        out_specs=P(),
        axis_names=frozenset({"i"}),
    )
    np.testing.assert_allclose(jax.jit(f)(jnp.arange(4.0)), [2, 4])


def test_specs_inferred_from_explicit_axes():
    mesh = EXPLICIT("i")
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("i")))
    f = shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, out_specs=P())
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(f(x), [2, 4])


@pytest.mark.parametrize("given", [True, False])
def test_specs_cannot_be_inferred_from_other_axes(given):
    mesh = AUTO("i")
    f = shard_map(lambda x: x, mesh=mesh if given else None, out_specs=P("i"))
    message = r"shard_map without `in_specs` .* must be Explicit; found \{'i': 'Auto'\}. Give `in_specs`"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        f(jnp.arange(4.0))


def test_static_arguments_by_spec():
    def f(x, n):
        assert n == 3
        return x * n

    scaled = shard_map(f, mesh=AUTO("i"), in_specs=(P("i"), None), out_specs=P("i"))
    np.testing.assert_allclose(scaled(jnp.arange(4.0), n=3), [0, 3, 6, 9])


def test_keyword_only_arguments_of_a_shard_map():
    def f(x, *, n):
        return x * n

    sharded = shard_map(f, mesh=AUTO("i"), in_specs=(P("i"),), out_specs=P("i"))
    with pytest.raises(TypeError, match=r"shard_map passes arguments by position, and n of .*f can only"):
        sharded(jnp.arange(4.0), n=2)


@pytest.mark.slow
def test_shard_map_under_grad():
    f = shard_map(lambda x: jax.lax.psum(jnp.sum(x**2), "i"), mesh=AUTO("i"), in_specs=P("i"), out_specs=P())
    np.testing.assert_allclose(jax.grad(f)(jnp.arange(4.0)), [0, 2, 4, 6])


# linearize


def test_linearize():
    x, y = jnp.arange(3.0), jnp.ones(3)
    out, jvp = linearize(lambda x, y: x**2 * y, x, y)
    np.testing.assert_allclose(out, x**2)
    np.testing.assert_allclose(jvp(y, x), 2 * x + x**3)


def test_linearize_with_aux():
    out, jvp, aux = linearize(lambda x: (x**2, {"n": 3}), jnp.array(2.0), has_aux=True)
    assert (float(out), float(jvp(jnp.array(1.0))), aux) == (4.0, 4.0, {"n": 3})


BLOCKED = {
    "itself": non_differentiable,
    "in_a_product": lambda x: x * non_differentiable(x),
    "in_jit": jax.jit(lambda x: x + jax.jit(non_differentiable)(x)),
    "in_scan": lambda x: jax.lax.scan(lambda c, _: (non_differentiable(c), None), x, length=2)[0],
}
PASSED = {
    "stopped": lambda x: x + jax.lax.stop_gradient(non_differentiable(x)),
    "stopped_in_jit": jax.jit(lambda x: x + jax.lax.stop_gradient(jax.jit(non_differentiable)(x))),
    "of_a_constant": lambda x: x * non_differentiable(jnp.ones(3)),
    "aside": lambda x: (2 * non_differentiable(x), x)[1],
}


@pytest.mark.quick("in_jit", "in_scan")
@pytest.mark.parametrize("name", BLOCKED)
def test_linearize_raises_where_no_derivative_may_pass(name):
    x = jnp.arange(3.0)
    for run in (lambda x: linearize(BLOCKED[name], x), jax.jit(lambda x: linearize(BLOCKED[name], x)[0])):
        with pytest.raises(NotImplementedError, match="passes through `non_differentiable`"):
            run(x)
    with pytest.raises(NotImplementedError, match="passes through `non_differentiable`"):
        linearize(lambda n, x: (BLOCKED[name](x), n), 3, x, has_aux=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSED)
def test_linearize_where_the_derivative_passes_by(name):
    x = jnp.arange(3.0)
    out, jvp = linearize(PASSED[name], x)
    np.testing.assert_allclose(out, PASSED[name](x))
    np.testing.assert_allclose(jvp(x), x)


def test_linearize_of_trees():
    out, jvp = linearize(lambda m: Model(m.w**2), Model(jnp.array(3.0)))
    assert jvp(Model(jnp.array(2.0))) == Model(jnp.array(12.0))
    assert out == Model(jnp.array(9.0))
