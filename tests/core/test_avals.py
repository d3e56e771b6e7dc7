"""The JAX type of a Value: worked out from its leaves, and remembered for as long as that is right."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.implicit import ImplicitArray


class Stopped(ql.ArrayValue):
    """A type whose `aval` computes on its leaves."""

    array: Any

    @property
    def stopped(self):
        return lax.stop_gradient(self.array)

    def aval(self):
        return jax.core.ShapedArray(self.stopped.shape, self.stopped.dtype)

    def materialise(self):
        return self.stopped


@pytest.mark.quick("relu")
@pytest.mark.parametrize(
    "f",
    [
        jax.nn.relu,
        lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: jnp.zeros(3)),
        lambda x: lax.scan(lambda c, _: (c, x), 0.0, length=2)[1][0],
    ],
)
def test_an_aval_that_computes(f):
    x = Stopped(jnp.arange(3.0))
    for run in (ql.quaxify(f), jax.jit(ql.quaxify(f))):
        np.testing.assert_array_equal(ql.materialise(run(x)), f(x.array))


class Default(ql.ArrayValue):
    """Its dtype is JAX's default."""

    array: Any

    def materialise(self):
        return jnp.zeros(self.array.shape, float)


@pytest.mark.slow
def test_64_bit_types_switched_on():
    x = Default(jnp.zeros(2, jnp.float32))
    for on in (False, True, False):
        with jax.enable_x64(on):
            assert x.dtype == (jnp.float64 if on else jnp.float32)
            assert ql.quaxify(lambda x: x + 1)(x).dtype == x.dtype


class Weak(ql.ArrayValue):
    array: Any

    def materialise(self):
        raise RuntimeError("Weak refuses to materialise")

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype, weak_type=self.array.weak_type)


@ql.register("mul")
def _(x: Weak, y: jax.Array, **params):
    return Weak(lax.mul_p.bind(x.array, y, **params))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.fori_loop(0, 3, lambda i, c: c * jnp.float32(3), x),
        lambda x: lax.scan(lambda c, _: (c * jnp.float32(3), None), x, length=3)[0],
        lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * jnp.float32(3), c[1] + 1), (x, 0))[0],
    ],
    ids=["fori_loop", "scan", "while_loop"],
)
def test_a_carry_that_starts_weakly_typed(f):
    out = ql.quaxify(f)(Weak(jnp.asarray(2.0)))
    assert type(out) is Weak
    assert not out.array.weak_type
    assert out.array == 54.0


class _ByTag(type(ql.ArrayValue)):
    def __instancecheck__(cls, x):
        return type(x) is Tagged and (cls is Tagged or x.tag == "a")


class Tagged(ql.ArrayValue, metaclass=_ByTag):
    array: Any
    tag: str = eqx.field(static=True)

    def materialise(self):
        return self.array


class TaggedA(Tagged):
    """Those with the tag "a"."""

    __faithful__ = False


def test_types_that_are_told_by_their_values():
    """For plum, whose signatures these are, a type says so by `__faithful__ = False`."""
    rules = ql.RuleSet()

    @ql.register("neg", rules=rules)
    def _(x: TaggedA, **params):
        return x.array + 100.0

    @ql.register("neg", rules=rules)
    def _(x: Tagged, **params):
        return x.array + 1.0

    negate = ql.quaxify(jnp.negative, rules=rules)
    for tag, expected in [("b", 1.0), ("a", 100.0), ("b", 1.0), ("a", 100.0)]:
        assert negate(Tagged(jnp.zeros(()), tag)) == expected


class RowOrColumn(ql.ArrayValue):
    row: Any | None
    column: Any | None

    def materialise(self):
        return self.column[:, None] if self.row is None else self.row[None]


def test_which_field_is_none_decides_the_shape():
    # The leaves of both have the same type.
    assert RowOrColumn(jnp.ones(3), None).shape == (1, 3)
    assert RowOrColumn(None, jnp.ones(3)).shape == (3, 1)


class Constant(ql.ArrayValue):
    """Its dtype is that of a static number."""

    number: Any = eqx.field(static=True)
    shape_: tuple[int, ...] = eqx.field(static=True)

    def aval(self):
        return jax.core.ShapedArray(self.shape_, jnp.result_type(type(self.number)))

    def materialise(self):
        return jnp.full(self.shape_, self.number)


class Held(ql.ArrayValue):
    value: ql.ArrayValue

    def materialise(self):
        return ql.materialise(self.value)


@pytest.mark.quick("Held")
@pytest.mark.parametrize("wrap", [lambda x: x, Held])
def test_statics_that_are_equal_and_of_other_types(wrap, default_promotion):
    for number in (1, 1.0, True, 1):
        x = wrap(Constant(number, (2,)))
        dense = jnp.full((2,), number)
        assert x.dtype == dense.dtype
        y = ql.quaxify(lambda x: x * jnp.arange(2))(x)
        assert y.dtype == (dense * jnp.arange(2)).dtype
        np.testing.assert_array_equal(y, dense * jnp.arange(2))


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    "make", [lambda: ql.SparseArray.from_dense(jnp.eye(2)), lambda: ql.Int8Array.quantize(jnp.ones((2, 2)))]
)
@pytest.mark.parametrize(
    "use",
    [ql.materialise, lambda x: x.materialise(), ql.quaxify(jnp.sin), lambda x: x @ jnp.ones(2), jnp.shape],
)
def test_a_derivative_without_its_pattern(use, make):
    _, derivative = jax.jvp(ql.quaxify(lambda s: make() * s), (2.0,), (1.0,))
    with pytest.raises(ValueError, match=f"{type(derivative).__name__} was used as an array.*no tangents"):
        use(derivative)
    assert type(derivative).__name__ in repr(derivative)


@pytest.mark.slow
def test_the_derivative_of_what_is_materialised():
    w = ql.SparseArray.from_dense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    found = jax.jacfwd(lambda s: ql.materialise(ql.quaxify(lambda s: w * s)(s)))(2.0)
    np.testing.assert_array_equal(found, [[0.0, 2.0], [3.0, 0.0]])


class NoRule(ql.ArrayValue):
    """Without rules."""

    array: jax.Array
    on_materialise = "warn"

    def materialise(self):
        return self.array


class Times(ql.ArrayValue):
    """Computes with a Value that it holds."""

    array: jax.Array
    by: ql.ArrayValue

    def materialise(self):
        return ql.quaxify(jnp.multiply)(self.array, self.by)


class ImplicitNoRule(ImplicitArray):
    array: jax.Array

    def materialize(self):
        return self.array


class ImplicitTimes(ImplicitArray):
    array: jax.Array
    by: ImplicitArray

    def materialize(self):
        return self.array * self.by


@pytest.mark.slow
@pytest.mark.parametrize("types", [(Times, NoRule), (ImplicitTimes, ImplicitNoRule)])
def test_asking_for_a_shape_loses_nothing(types):
    outer, held = types

    def use(n):
        x = outer(jnp.ones((4, n)), held(jnp.ones((4, 1))))
        assert (x.shape, x.dtype) == ((4, n), jnp.float32)
        stack = jax.vmap(lambda w: outer(w, held(jnp.ones((4, 1)))))(jnp.ones((2, 4, n)))
        assert stack.shape == (2, 4, n)
        return x

    with ql.on_materialise("error"):
        use(2)
    use(3)  # warnings are errors
    assert ql.explain(lambda: use(4))().rows == ()
    x = use(5)
    for mode in ("allow", "error", "allow", "error"):  # whatever was traced before
        with ql.on_materialise(mode):
            if mode == "error":
                with pytest.raises(ql.MaterialisationError, match=rf"no rule for .*{held.__name__}"):
                    ql.quaxify(lambda y: y + 1.0)(x.by)
                with pytest.raises(ql.MaterialisationError, match=rf"no rule for .*{held.__name__}"):
                    x.materialise()
            else:
                np.testing.assert_array_equal(x.materialise(), np.ones((4, 5)))


class Vectors(ql.ArrayValue):
    """Vectors along the last axis, whose `shape` is that of their components."""

    array: jax.Array

    @property
    def shape(self):
        return self.array.shape[:-1]

    def materialise(self):
        return self.array


def test_a_type_may_call_another_shape_its_own():
    x = Vectors(jnp.ones((4, 3)))
    assert (x.shape, x.ndim, x.size) == ((4,), 2, 12)  # these are those of `aval`
