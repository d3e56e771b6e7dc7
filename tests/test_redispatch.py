"""Rules that redispatch: a type meets one that it has never heard of."""

import re

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import ArrayLike

import quaxlike as ql
from quaxlike.arrays.sparse import OneHotVector

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


LORA = Rank1(w=jnp.ones((3, 4)), b=jnp.ones(3), a=jnp.ones(4))
ONE_HOT = OneHotVector(5.0, 2, length=4)


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


def test_nested_quaxify_fixes_the_order(both):
    is_lora = lambda x: isinstance(x, Rank1)
    is_one_hot = lambda x: isinstance(x, OneHotVector)
    f = ql.quaxify(ql.quaxify(jnp.matmul, filter_spec=is_lora, rules=both), filter_spec=is_one_hot)
    with ql.on_materialise("error"):
        np.testing.assert_array_equal(f(LORA, ONE_HOT), [10, 10, 10])


def test_an_explicit_rule_resolves_it(both):
    @ql.register("dot_general", rules=both)
    def _(x: Rank1, y: OneHotVector, **params):
        return x.w[:, y.index] * y.value + x.b * (x.a[y.index] * y.value)

    np.testing.assert_array_equal(ql.quaxify(jnp.matmul, rules=both)(LORA, ONE_HOT), [10, 10, 10])
    ql.check_ambiguities(Rank1, OneHotVector, rules=both)


def test_precedence_resolves_it():
    rules = ql.RuleSet()
    ql.register("dot_general", rules=rules, precedence=1)(lora_dot)
    ql.register("dot_general", rules=rules)(one_hot_dot)
    np.testing.assert_array_equal(ql.quaxify(jnp.matmul, rules=rules)(LORA, ONE_HOT), [10, 10, 10])
    ql.check_ambiguities(Rank1, OneHotVector, rules=rules)
