"""A jit inside a quaxified function is the same jit, of the leaves: each option is spread over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import Unitful
from tests.strict import StrictPair, strict_pair


class Pair(ql.ArrayValue):
    """left + right, of the same shape; refuses to become dense."""

    left: Array
    right: Array

    def aval(self):
        return jax.core.ShapedArray(self.left.shape, self.left.dtype)

    def materialise(self):
        raise RuntimeError("refused")


@ql.register("mul")
def _(x: Pair, y: Array):
    return Pair(x.left * y, x.right * y)


def _pair() -> Pair:
    return Pair(jnp.arange(8.0), jnp.ones(8))


def _equation(f: Any, *args: Any) -> dict[str, Any]:
    (eqn,) = jax.make_jaxpr(ql.quaxify(f))(*args).eqns
    assert eqn.primitive.name in ("jit", "pjit")
    return eqn.params


def double(x: Any, y: Any, unused: Any = 0.0) -> Any:
    return y * 3.0, x * 2.0


def test_name_and_donation():
    params = _equation(jax.jit(double, donate_argnums=1), jnp.ones(8), _pair())
    assert params["name"] == "double"
    assert tuple(params["donated_invars"]) == (False, True, True)


def test_donated_leaves_are_gone():
    x = Pair(jnp.arange(8.0) + 0.0, jnp.ones(8) + 0.0)
    f = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    y = ql.quaxify(f)(x)
    np.testing.assert_array_equal(y.left, 2 * np.arange(8.0))
    assert x.left.is_deleted()
    assert x.right.is_deleted()


def test_keep_unused():
    params = _equation(jax.jit(double, keep_unused=True), _pair(), jnp.ones(8), jnp.ones(3))
    assert params["keep_unused"]
    assert len(params["jaxpr"].in_avals) == 4


def test_compiler_options_reach_the_compiler():
    f = lambda **options: ql.quaxify(jax.jit(lambda x: x * 2.0, compiler_options=options))
    assert f(xla_cpu_enable_fast_math=True)(_pair()).left[1] == 2.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        f(no_such_option=True)(_pair())


@pytest.mark.parametrize("inline", [False, True])
def test_inline(inline: bool):
    f = lambda x: jax.jit(lambda x: x * 2.0, inline=inline)(x)
    plain, ours = (
        [eqn.primitive.name for eqn in jax.make_jaxpr(g)(x).eqns]
        for g, x in ((f, jnp.ones(8)), (ql.quaxify(f), _pair()))
    )
    assert ours == (["mul", "mul"] if plain == ["mul"] else plain)


def test_shardings():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.NamedSharding(mesh, P("i")), jax.NamedSharding(mesh, P())
    f = jax.jit(lambda x, y: (x * 2.0, y), in_shardings=(split, whole), out_shardings=(whole, split))
    params = _equation(f, _pair(), jnp.ones(8))
    assert [s.spec for s in params["in_shardings"]] == [P("i"), P("i"), P()]
    assert [s.spec for s in params["out_shardings"]] == [P(), P(), P("i")]
    y, _ = ql.quaxify(f)(_pair(), jnp.ones(8))
    assert y.left.sharding.is_equivalent_to(whole, 1)
    np.testing.assert_array_equal(y.left, 2 * np.arange(8.0))


def test_layouts():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    columns = Format(Layout(major_to_minor=(1, 0)), device)
    f = jax.jit(lambda x: x * 2.0, in_shardings=columns, out_shardings=columns)
    x = Pair(jnp.ones((2, 3)), jnp.ones((2, 3)))
    x = jax.device_put(x, columns)
    params = _equation(f, x)
    assert [entry.major_to_minor for entry in params["in_layouts"]] == [(1, 0), (1, 0)]
    y = ql.quaxify(f)(x)
    assert y.left.format.layout.major_to_minor == (1, 0)


def test_static_arguments():
    f = jax.jit(lambda x, n: x * float(n), static_argnums=1)
    assert ql.quaxify(lambda x: f(x, 3))(_pair()).left[1] == 3.0


@pytest.mark.slow
def test_pmap():
    x = strict_pair(jnp.arange(4.0).reshape(4, 1))
    inside = ql.quaxify(jax.pmap(lambda x: x * 2.0))(x)
    outside = jax.pmap(ql.quaxify(lambda x: x * 2.0))(x)
    for y in (inside, outside):
        assert isinstance(y, StrictPair)
        np.testing.assert_array_equal(y.dense(), x.dense() * 2)


def _through_a_jit(x):
    return jax.jit(lambda token, x: (lax.after_all(token), 2.0 * x))(lax.create_token(), x)[1]


def _through_a_loop(x):
    loop = jax.jit(lambda token, x: lax.fori_loop(0, 1, lambda _, c: (c[0], 2.0 * c[1]), (token, x)))
    return loop(lax.create_token(), x)[1]


@pytest.mark.parametrize("f", [_through_a_jit, _through_a_loop])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
@pytest.mark.parametrize("wrap", [lambda x: NamedArray(x, ("a",)), lambda x: Unitful(x, "m")])
def test_tokens(wrap, outer, f):
    out = ql.quaxify(outer(f))(wrap(jnp.ones(2)))
    assert type(out) is type(wrap(jnp.ones(2)))
    np.testing.assert_array_equal(out.array, [2.0, 2.0])


@pytest.mark.quick("max")
@pytest.mark.parametrize("f", [jax.nn.softmax, jax.nn.logsumexp, jnp.max, jax.nn.log_softmax])
def test_infinities_on_the_way_are_no_results(f):
    x = jnp.array([1.0, 2.0])
    expected = f(x)
    with jax.debug_infs(True), jax.debug_nans(True):
        found = ql.materialise(ql.quaxify(f)(NamedArray(x, ("a",))))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_infinite_results_are_found():
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        ql.quaxify(jnp.log)(NamedArray(jnp.zeros(2), ("a",)))
