"""Rules that redispatch: a type meets one that it has never heard of."""

import re

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, ArrayLike, Float, Int

import quaxlike as ql
from quaxlike.arrays.sparse import OneHotVector
from tests.samples import array

MATVEC = (((1,), (0,)), ((), ()))


class Rank1(ql.ArrayValue):
    w: jax.Array
    b: jax.Array
    a: jax.Array

    def aval(self):
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    def materialise(self):
        raise AssertionError("materialised")


def matmul(w, b, a, y):
    return w @ y + b * (a @ y)


def lora_dot(x: Rank1, y: ArrayLike | ql.ArrayValue, *, dimension_numbers, **params):
    assert dimension_numbers == MATVEC
    return ql.quaxify(matmul)(x.w, x.b, x.a, y)


def one_hot_dot(x: ArrayLike | ql.ArrayValue, y: OneHotVector, *, dimension_numbers, **params):
    return ql.quaxify(lambda x, v, i: x @ (jnp.zeros(4).at[i].set(v)))(x, y.value, y.index)


LORA = Rank1(w=array(np.ones((3, 4))), b=array(np.ones(3)), a=array(np.ones(4)))
ONE_HOT = OneHotVector(jax.device_put(5.0), jax.device_put(2), length=4)


@pytest.fixture
def only_lora():
    rules = ql.RuleSet()
    ql.register("dot_general", rules=rules)(lora_dot)
    return rules


@pytest.fixture
def both():
    rules = ql.RuleSet()
    ql.register("dot_general", rules=rules)(lora_dot)
    ql.register("dot_general", rules=rules)(one_hot_dot)
    return rules


@pytest.mark.quick("jit")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_plain_vector_and_one_never_heard_of(only_lora, transform):
    f = transform(ql.quaxify(jnp.matmul, rules=only_lora))
    with ql.on_materialise("error"):
        np.testing.assert_array_equal(f(LORA, jnp.arange(4.0)), [12, 12, 12])
        np.testing.assert_array_equal(f(LORA, ONE_HOT), [10, 10, 10])


def test_two_rules_that_both_match_are_an_error_that_lists_them(both):
    lines = [f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}" for fn in (lora_dot, one_hot_dot)]
    with pytest.raises(ql.AmbiguousRuleError, match="ambiguous") as raised:
        ql.quaxify(jnp.matmul, rules=both)(LORA, ONE_HOT)
    for line in lines:
        assert re.search(rf"dot_general\(.*(Rank1|OneHotVector).*\) at {re.escape(line)}", str(raised.value))
    with pytest.raises(ql.AmbiguousRuleError, match=r"1 ambiguous pair"):
        ql.check_ambiguities(Rank1, OneHotVector, rules=both)


@pytest.mark.slow
def test_nested_quaxify_fixes_the_order(both):
    is_lora = lambda x: isinstance(x, Rank1)
    is_one_hot = lambda x: isinstance(x, OneHotVector)
    f = ql.quaxify(ql.quaxify(jnp.matmul, filter_spec=is_lora, rules=both), filter_spec=is_one_hot)
    with ql.on_materialise("error"):
        np.testing.assert_array_equal(f(LORA, ONE_HOT), [10, 10, 10])


@pytest.mark.slow
def test_an_explicit_rule_resolves_it(both):
    @ql.register("dot_general", rules=both)
    def _(x: Rank1, y: OneHotVector, **params):
        return x.w[:, y.index] * y.value + x.b * (x.a[y.index] * y.value)

    np.testing.assert_array_equal(ql.quaxify(jnp.matmul, rules=both)(LORA, ONE_HOT), [10, 10, 10])
    ql.check_ambiguities(Rank1, OneHotVector, rules=both)


@pytest.mark.slow
def test_precedence_resolves_it():
    rules = ql.RuleSet()
    ql.register("dot_general", rules=rules, precedence=1)(lora_dot)
    ql.register("dot_general", rules=rules)(one_hot_dot)
    np.testing.assert_array_equal(ql.quaxify(jnp.matmul, rules=rules)(LORA, ONE_HOT), [10, 10, 10])
    ql.check_ambiguities(Rank1, OneHotVector, rules=rules)


class Halves(ql.ArrayValue):
    """Twice an array, with the rules that a test registers."""

    array: jax.Array

    def materialise(self):
        return 2 * self.array


class Thirds(Halves):
    def materialise(self):
        return 3 * self.array


class TestOfSomeOperands:
    """Where no rule is for all types, one is found for some of them, and the others are made dense."""

    X = array(np.arange(1.0, 4.0))

    def test_as_few_as_possible(self):
        rules, asked = ql.RuleSet(), []

        @ql.register("clamp", rules=rules)
        def _(low: jax.Array, x: jax.Array, high: Halves):
            asked.append("one")
            return NotImplemented

        @ql.register("clamp", rules=rules)
        def _(low: jax.Array, x: Halves, high: Halves):
            asked.append("two")
            return Halves(jnp.clip(x.array, low / 2, high.array))

        clamp = ql.quaxify(jax.lax.clamp, rules=rules)
        out = clamp(Thirds(self.X), Halves(self.X), Halves(self.X * 2))
        assert asked == ["two"]
        np.testing.assert_array_equal(out.materialise(), 3 * self.X)

    @pytest.mark.slow
    def test_the_left_one_of_two_that_can_both_be_kept(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: jax.Array, y: Halves):
            return Halves(x * y.array)

        @ql.register("mul", rules=rules)
        def _(x: Thirds, y: jax.Array):
            return Thirds(x.array * y)

        for transform in (lambda f: f, jax.jit, jax.vmap):
            out = transform(ql.quaxify(jax.lax.mul, rules=rules))(Thirds(self.X), Halves(self.X))
            assert type(out) is Halves
            np.testing.assert_array_equal(out.materialise(), 6 * self.X**2)

    @pytest.mark.slow
    def test_what_refuses_is_kept(self):
        rules = ql.RuleSet()

        class Refusing(Halves):
            on_materialise = "error"

        @ql.register("mul", rules=rules)
        def _(x: jax.Array, y: Thirds):
            return Thirds(x * y.array)

        @ql.register("mul", rules=rules)
        def _(x: Refusing, y: jax.Array):
            return Refusing(x.array * y)

        out = ql.quaxify(jax.lax.mul, rules=rules)(Refusing(self.X), Thirds(self.X))
        assert type(out) is Refusing
        np.testing.assert_array_equal(out.array, 3 * self.X**2)

    def test_one_value_twice_is_one_array(self):
        """`x != x` is a test for NaNs."""
        rules = ql.RuleSet()

        @ql.register(["ne", "mul"], rules=rules)
        def _(x: jax.Array, y: Halves):
            raise AssertionError("asked")

        x = Halves(self.X)
        np.testing.assert_array_equal(ql.quaxify(jax.lax.mul, rules=rules)(x, x), 4 * self.X**2)

    @pytest.mark.slow
    def test_rules_that_decline(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: jax.Array, y: Halves):
            return NotImplemented

        @ql.register("mul", rules=rules)
        def declines_these(x: Thirds, y: ArrayLike | ql.ArrayValue):
            return NotImplemented

        with ql.on_materialise("warn"), pytest.warns(ql.MaterialisationWarning) as warned:
            out = ql.quaxify(jax.lax.mul, rules=rules)(Thirds(self.X), Halves(self.X))
        np.testing.assert_array_equal(out, 6 * self.X**2)
        lines = [str(w.message).splitlines()[0] for w in warned]
        assert ["; Thirds was made dense" in lines[0], "; Halves was made dense" in lines[1]] == [True, True]

    def test_rules_for_other_dtypes(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: Int[Array, "..."], y: Halves):
            raise AssertionError("asked")

        with (
            ql.on_materialise("error"),
            pytest.raises(ql.MaterialisationError, match="Thirds and Halves would"),
        ):
            ql.quaxify(jax.lax.mul, rules=rules)(Thirds(self.X), Halves(self.X))

        @ql.register("mul", rules=rules)
        def _(x: Float[Array, "n"], y: Halves):
            return Halves(x * y.array)

        out = ql.quaxify(jax.lax.mul, rules=rules)(Thirds(self.X), Halves(self.X))
        np.testing.assert_array_equal(out.materialise(), 6 * self.X**2)

    def test_a_default_comes_first(self):
        rules = ql.RuleSet()

        class Passing(Halves):
            @staticmethod
            def default(primitive, values, params):
                return jnp.zeros(3)

        @ql.register("mul", rules=rules)
        def _(x: jax.Array, y: Halves):
            raise AssertionError("asked")

        assert not ql.quaxify(jax.lax.mul, rules=rules)(Passing(self.X), Halves(self.X)).any()

    def test_a_selection(self):
        """Built-ins of the interpreter find such a rule, too."""
        rules = ql.RuleSet()

        @ql.register("select_n", rules=rules)
        def _(which: jax.Array, x: jax.Array, y: Halves):
            return Halves(jnp.where(which, y.array, x / 2))

        out = ql.quaxify(jax.lax.select_n, rules=rules)(self.X > 1, Thirds(self.X), Halves(self.X))
        assert type(out) is Halves
        np.testing.assert_array_equal(out.materialise(), [3, 4, 6])
