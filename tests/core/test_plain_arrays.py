"""The hooks for types that follow plain arrays are empty until one is defined."""

import subprocess
import sys

import pytest

_PROGRAM = """
import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql
from quaxlike.core.plain_arrays import hooks

ql.quaxify(jnp.sin)(ql.LoraArray(jnp.ones((2, 2)), a=jnp.ones((1, 2)), b=jnp.ones((2, 1))))
assert hooks.following is hooks.placeholders is None

class Tagged(ql.ArrayValue):
    array: jax.Array
    tag: str = eqx.field(static=True)

    def materialise(self):
        raise AssertionError("materialised")

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    @classmethod
    def promote(cls, array, like=None):
        return cls(array, "?" if like is None else like.tag)

@ql.register("add")
def _(x: Tagged, y: Tagged):
    return Tagged(x.array + y.array, x.tag if y.tag == "?" else y.tag)

@ql.register("add")
def _(x: Tagged, y: jax.Array):
    raise ql.OperandMismatch("a plain array", Tagged)

loop = lambda x: jax.lax.fori_loop(0, 3, lambda i, total: x + total, jnp.zeros(()))
assert ql.quaxify(loop)(Tagged(jnp.ones(()), "a")).tag == "a"
"""


@pytest.mark.slow
def test_a_type_of_ones_own_fills_them():
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=120)
