"""Classes of Values whose `__new__` does not return a new instance, and those that plum makes."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plum
import pytest

import quaxlike as ql
from quaxlike.core.rules import resolver
from tests.samples import array


def _returning(found):
    class Returning(ql.ArrayValue):
        array: jax.Array

        def __new__(cls, array):
            return found

        def __init__(self, array):
            raise AssertionError("what is no instance is not initialised")

        def materialise(self):
            return self.array

    return Returning


@pytest.mark.parametrize(
    "make", [object, lambda: None, lambda: jnp.ones(2), lambda: ql.Int8Array.quantize(jnp.ones((1, 2)))]
)
def test_another_object_is_returned_as_it_is(make):
    found = make()
    cls = _returning(found)

    class Sub(cls):
        def __new__(cls, array):
            assert super().__new__(cls, array) is found
            return found

    for made in (cls(jnp.ones(3)), cls(array=jnp.ones(3)), cls(jnp.ones(3)), Sub(jnp.ones(3))):
        assert made is found


class One(ql.ArrayValue):
    """One instance for each shape."""

    array: jax.Array

    def __new__(cls, array, made={}):  # noqa: B006
        return made.setdefault((cls, array.shape), super().__new__(cls))

    def materialise(self):
        return self.array


class OneOfASubclass(One):
    pass


@pytest.mark.parametrize("cls", [One, OneOfASubclass])
def test_an_instance_made_earlier_is_left_as_it_is(cls):
    x = cls(jnp.ones(3))
    assert cls(jnp.zeros(3)) is x
    assert type(x) is cls
    np.testing.assert_array_equal(ql.quaxify(jnp.negative)(x), -np.ones(3))
    np.testing.assert_array_equal(cls(jnp.zeros(4)).array, np.zeros(4))
    with pytest.raises(AttributeError, match="cannot assign"):
        x.array = jnp.zeros(3)


@plum.parametric
class Length(ql.ArrayValue):
    """A class for each unit, which may be left to be inferred."""

    array: jax.Array

    def materialise(self):
        return self.array

    @classmethod
    def __infer_type_parameter__(cls, array, **kwargs):
        return f"{array.ndim}"


@plum.parametric
class WithOperators(ql.ArrayOperators, ql.ArrayValue):
    array: jax.Array
    unit: str = eqx.field(static=True)

    def __init__(self, array, unit="m"):
        self.array = jnp.asarray(array)
        self.unit = unit

    def materialise(self):
        return self.array


class OfLength(Length):
    scale: Any


class Metres(Length["m"]):
    pass


@ql.register("mul")
def _(x: Length, y: Length):
    return Length["any"](x.array * y.array)


@ql.register("mul")
def _(x: Length["m"], y: Length["m"]):
    return Length["m2"](x.array * y.array)


@ql.register("add")
def _(x: WithOperators[int], y: jax.Array):
    return WithOperators[int](x.array + y, unit=x.unit)


def _sin(x: Length["m"]):
    return jnp.sin(x.array)


class TestParametric:
    """Classes of `plum.parametric`."""

    def test_made(self):
        assert Length["m"] is Length["m"]
        assert issubclass(Length["m"], Length)
        assert not issubclass(Length["m"], Length["s"])
        assert type(Length["m"](jnp.ones(2))) is Length["m"]
        assert type(Length(jnp.ones((1, 2)))) is Length["2"]  # inferred
        made = WithOperators[int](3.0, unit="s")
        assert (type(made), made.unit) == (WithOperators[int], "s")
        assert type(WithOperators(3.0)) is WithOperators[float]

    def test_subclasses_are_plain(self):
        made = OfLength(jnp.ones(2), 2.0)
        assert type(made) is OfLength
        assert made.scale == 2.0
        assert type(Metres(jnp.ones(2))) is Metres
        assert isinstance(Metres(jnp.ones(2)), Length["m"])

    @pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.vmap])
    def test_dispatch(self, run):
        multiply = run(ql.quaxify(jnp.multiply))
        for cls, expected in {
            Length["m"]: Length["m2"],
            Length["s"]: Length["any"],
            Metres: Length["m2"],
        }.items():
            x = cls(jnp.arange(3.0))
            out = multiply(x, x)
            assert type(out) is expected
            np.testing.assert_array_equal(out.array, x.array**2)

    def test_their_rules_are_remembered_by_class(self):
        """Those for types that are told by their values would be looked for at each call, for all types."""
        rules = ql.RuleSet()
        ql.register("sin", rules=rules)(_sin)
        found = resolver((rules,)).candidates((jax.lax.sin_p, Metres))
        assert [rule.rule.written for rule in found] == [_sin]

    @pytest.mark.slow
    def test_operators_and_gradient(self):
        x = WithOperators[int](jnp.arange(3.0), unit="s")
        assert type(x + 1.0) is WithOperators[int]
        grad = jax.grad(lambda x: jnp.sum((x + 1.0).array ** 2))(x)
        assert (type(grad), grad.unit) == (WithOperators[int], "s")
        np.testing.assert_array_equal(grad.array, 2 * (x.array + 1))

    @pytest.mark.parametrize(
        "copied",
        [
            copy.copy,
            copy.deepcopy,
            lambda x: jax.tree.map(lambda leaf: leaf, x),
            lambda x: eqx.tree_at(lambda x: x.array, x, x.array + 0),
            lambda x: pickle.loads(pickle.dumps(x)),
        ],
        ids=["copy", "deepcopy", "tree_map", "tree_at", "pickle"],
    )
    @pytest.mark.parametrize(
        "value",
        [Length["m"](array(np.ones(2))), WithOperators(array(np.ones(2))), Metres(array(np.ones(2)))],
        ids=type,
    )
    def test_copies(self, value, copied):
        found = copied(value)
        assert type(found) is type(value)
        assert eqx.tree_equal(found, value)
