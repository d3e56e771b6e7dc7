"""`default`: what a type does with all primitives alike, and whose is called where several meet."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql


def counting(name, precedence=0):
    """A type whose `default` runs the primitive on its arrays and says so."""

    class Counting(ql.ArrayValue):
        array: jax.Array
        calls: ClassVar[list[str]] = []
        default_precedence = precedence

        def materialise(self):
            raise AssertionError("materialised")

        def aval(self):
            return jax.core.ShapedArray(self.array.shape, self.array.dtype)

        @staticmethod
        def default(primitive, values, params):
            Counting.calls.append(primitive.name)
            bare = [v.array if isinstance(v, Counting) else v for v in values]
            return ql.quaxify(primitive.bind)(*bare, **params)

    Counting.__name__ = Counting.__qualname__ = name
    return Counting


def test_one_default_is_called():
    cls = counting("Inner")
    out = ql.quaxify(jnp.add)(cls(jnp.ones(3)), jnp.ones(3))
    assert (out == 2).all()
    assert cls.calls == ["add"]


def test_several_defaults_need_an_order():
    inner, outer = counting("Inner"), counting("Outer")
    with pytest.raises(
        TypeError, match=r"Inner, Outer each have a `default` of their own.*default_precedence"
    ):
        ql.quaxify(jnp.add)(inner(jnp.ones(3)), outer(jnp.ones(3)))


def test_the_highest_precedence_goes_first():
    inner, outer = counting("Inner"), counting("Outer", precedence=1)
    out = ql.quaxify(jnp.add)(inner(jnp.ones(3)), outer(jnp.ones(3)))
    assert (out == 2).all()
    assert (outer.calls, inner.calls) == (["add"], ["add"])
