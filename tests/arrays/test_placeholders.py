"""What is known of plain arrays beside them, and what loops make of their placeholders."""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import DimensionError, Unitful, placeholders
from quaxlike.arrays.zero import Zero
from tests.samples import array


@pytest.fixture
def inside():
    """Runs a function inside of `quaxify`, with a Value near so that it is not called directly."""
    return lambda f: ql.quaxify(lambda _: f())(Unitful(1.0, "m"))


ONE, SEVERAL = array(np.ones(())), array(np.arange(3.0, dtype=np.float32))


def loop(body, *carry):
    return lax.while_loop(lambda x: jnp.sum(x[0]) > 5, body, carry)[1]


@pytest.mark.quick(10)
@pytest.mark.parametrize(
    ("f", "number"),
    [
        (lambda: jnp.zeros(3), 0.0),
        (lambda: jnp.ones((2, 3)), 1.0),
        (lambda: lax.convert_element_type(jnp.ones(3)[:, None], jnp.float16), 1.0),
        (lambda: lax.mul(jnp.zeros(3), jnp.arange(3.0)), 0.0),
        (lambda: lax.dot(jnp.arange(6.0).reshape(2, 3), jnp.zeros(3)), 0.0),
        (lambda: lax.dynamic_update_slice(jnp.zeros(3), jnp.zeros(1), (0,)), 0.0),
        (lambda: lax.dynamic_update_slice(jnp.zeros(3), jnp.ones(1), (0,)), None),
        (lambda: lax.add(jnp.zeros(3), 1.0), None),
        (lambda: jnp.arange(3.0), None),
        (lambda: 2.0, 2.0),
        (lambda: jax.jit(lambda x: x + 0 * x)(jnp.zeros(3)), 0.0),
        (lambda: jax.jit(lambda: jnp.ones(3))(), 1.0),
        (lambda: jax.checkpoint(lambda x: x[:2] * 3.0)(jnp.zeros(3)), 0.0),
        (lambda: lax.cond(ONE > 0, lambda x: x, lambda x: x * ONE, jnp.zeros(3)), 0.0),
        (lambda: lax.cond(ONE > 0, lambda x: x, lambda x: x + ONE, jnp.zeros(3)), None),
        (lambda: lax.scan(lambda x, y: (x * SEVERAL, x), jnp.zeros(3), jnp.ones((5, 3)))[1], 0.0),
        (lambda: loop(lambda x: (x[0], x[0] + x[1]), jnp.zeros(3), jnp.zeros(3)), 0.0),
        (lambda: loop(lambda x: (x[0] + 1, x[0] + x[1]), jnp.zeros(3), jnp.zeros(3)), None),
        (lambda: lax.scan(lambda x, y: (x * 2, x + y), jnp.zeros(3), jnp.zeros((5, 3)))[1], 0.0),
        (lambda: lax.scan(lambda x, y: (x + 1, x + y), jnp.zeros(3), jnp.zeros((5, 3)))[1], None),
    ],
)
def test_what_a_plain_array_is_filled_with(inside, f, number):
    assert inside(lambda: placeholders.constant_of(f())) == number
    seen = []
    jax.jit(lambda: inside(lambda: seen.append(placeholders.constant_of(f()))))()
    assert seen == [number]


@pytest.mark.slow
def test_nothing_is_kept_alive(inside):
    gc.collect()
    before = len(placeholders._known)
    for _ in range(5):
        inside(lambda: jnp.zeros(3) * 2.0)
        jax.make_jaxpr(lambda: inside(lambda: jnp.zeros(3) * 2.0))()
    gc.collect()
    assert len(placeholders._known) <= before


def test_the_result_of_a_callback_is_an_array_like_any_other():
    call = lambda: jax.pure_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), jnp.float32))
    length = Unitful(2.0, "m")
    assert str(ql.quaxify(lambda x: x * call())(length).unit) == "m"
    with pytest.raises(DimensionError, match="`add` takes arrays in the same unit"):
        ql.quaxify(lambda x: x + call())(length)
    with pytest.raises(DimensionError, match="An array without a unit takes the place of one in m"):
        ql.quaxify(lambda x: lax.cond(x.array > 1, lambda: x, call))(length)


@pytest.mark.slow
def test_the_branch_that_raises_has_the_unit_of_the_other():
    f = lambda x: eqx.error_if(x, ql.value_of(x).array > 3, "too long")
    for run in (ql.quaxify(f), jax.jit(ql.quaxify(f))):
        assert str(run(Unitful(2.0, "m")).unit) == "m"


class Tagged(ql.ArrayValue):
    """A toy with a tag: `add` wants the same tag on both sides; a placeholder takes the other's."""

    array: jax.Array
    tag: str = eqx.field(static=True)

    def materialise(self):
        raise AssertionError("materialised")

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    @classmethod
    def promote(cls, array, like=None):
        if like is not None:
            return cls(array, like.tag)
        return cls(array, "?") if jnp.issubdtype(array.dtype, jnp.floating) else NotImplemented


@ql.register("add")
def _(x: Tagged, y: Tagged, **params):
    tags = {x.tag, y.tag} - {"?"}
    if len(tags) > 1:
        raise ql.OperandMismatch(f"{x.tag} and {y.tag}", Tagged)
    return type(x)(x.array + y.array, tags.pop() if tags else "?")


@ql.register("add")
def _(x: Tagged, y: jax.Array, **params):
    raise ql.OperandMismatch(f"{x.tag} and a plain array", Tagged)


X = Tagged(jax.device_put(2.0), "a")


class Computing(Tagged):
    """Its `promote` computes with the array."""

    @classmethod
    def promote(cls, array, like=None):
        found = super().promote(array, like)
        return found if found is NotImplemented else cls(1.0 * jnp.sum(array[None], 0), found.tag)


@pytest.mark.quick("Tagged-<lambda>0", "Computing-quaxify", "Computing-<lambda>0", "Computing-<lambda>1")
@pytest.mark.parametrize(
    "wrap", [ql.quaxify, lambda f: jax.jit(ql.quaxify(f)), lambda f: ql.quaxify(jax.jit(f))]
)
@pytest.mark.parametrize("cls", [Tagged, Computing])
def test_a_loop_finds_out_what_its_placeholders_are(cls, wrap):
    """Here `y` has to be a Tagged before an iteration can be traced at all."""
    x = cls(jnp.array(2.0), "a")
    assert wrap(lambda x: x + x)(x).tag == "a"
    f = lambda x: jax.lax.fori_loop(0, 3, lambda i, s: (s[0], s[0] + s[1]), (x, jnp.zeros(())))[1]
    out = wrap(f)(x)
    assert (type(out), out.tag) == (cls, "a")
    np.testing.assert_allclose(out.array, 6.0)


def test_what_is_no_placeholder_is_not_lifted():
    f = lambda x, y: jax.lax.fori_loop(0, 3, lambda i, s: (s[0], s[0] + s[1]), (x, y))
    with pytest.raises(ql.OperandMismatch, match="a and a plain array"):
        ql.quaxify(f)(X, jnp.array(1.0))


def test_a_mismatch_between_values_stands():
    f = lambda x, y: jax.lax.fori_loop(0, 3, lambda i, s: (x + y, s[1]), (x, jnp.zeros(())))
    with pytest.raises(ql.OperandMismatch, match="a and b"):
        ql.quaxify(f)(X, Tagged(jnp.array(1.0), "b"))


def test_nothing_is_followed_where_no_type_asks_for_it():
    seen = []

    def f(x):
        zeros = jnp.zeros(3)
        seen.append(placeholders.constant_of(zeros))
        return x * zeros

    ql.quaxify(f)(Zero((3,), jnp.float32))
    assert seen == [None]
    ql.quaxify(f)(NamedArray(Unitful(jnp.ones(3), "m"), ("i",)))
    assert seen == [None, 0.0]
