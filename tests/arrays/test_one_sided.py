"""A user's types that have a rule for one side of a product alone, multiplied with every shipped weight that
takes any type: operands keep their order where a rule redispatches on its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import quaxlike as ql
from tests.array_types import TYPES
from tests.samples import normal


class OneSided(ql.ArrayValue):
    """Linear, and never materialised."""

    array: jax.Array

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise AssertionError("materialised")


class Right(OneSided):
    pass


class Left(OneSided):
    pass


RULES = ql.RuleSet()
_AXES = ["broadcast_in_dim", "convert_element_type", "neg", "reduce_sum", "reshape", "squeeze", "transpose"]


@ql.register(_AXES, rules=RULES)
def _(primitive: Primitive, x: OneSided, **params):
    return type(x)(primitive.bind(x.array, **params))


@ql.register_on_either_side(["add", "mul", "sub"], OneSided, rules=RULES, precedence=-1)
def _(primitive, x, y, **params):
    cls = type(x) if isinstance(x, OneSided) else type(y)
    if not all(isinstance(each, OneSided | jax.Array) for each in (x, y)):
        return NotImplemented
    return cls(primitive.bind(*(getattr(each, "array", each) for each in (x, y)), **params))


@ql.register("dot_general", rules=RULES)
def _(x: jax.Array, y: Right, **params):
    return Right(jax.lax.dot_general_p.bind(x, y.array, **params))


@ql.register("dot_general", rules=RULES)
def _(x: Left, y: jax.Array, **params):
    return Left(jax.lax.dot_general_p.bind(x.array, y, **params))


PRODUCTS = {
    "w @ x": (Right, lambda w, x: w @ x),
    "w @ v": (Right, lambda w, x: w @ x[:, 0]),
    "w.T @ x": (Right, lambda w, x: w.T @ x),
    "x @ w": (Left, lambda w, x: x.T @ w),
    "x @ w.T": (Left, lambda w, x: x.T @ w.T),
}
# Of those that redispatch. Quantised and sparse arrays and constants multiply arrays alone.
KINDS = [
    "LoraArray",
    "LoraArray, magnitude",
    "TrainableArray",
    "DiagonalMatrix",
    "KroneckerMatrix",
    "LowRankUpdate",
    "BlockDiagonalMatrix",
    "SumArray",
    "ScaledArray",
    "RotatedArray",
    "OFTArray",
    "LoKrArray",
    "Identity",
]


@pytest.mark.quick(12)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_for_one_side_is_found(kind, product):
    w = TYPES[kind]()
    cls, program = PRODUCTS[product]
    n = w.shape[0] if product in ("w.T @ x", "x @ w") else w.shape[1]
    x = jnp.asarray(normal(n, 3))
    want = program(ql.materialise(w), x)
    take = lambda x: x if product != "w @ v" else x[:, :1]
    run = lambda w, x: program(w, x) if product != "w @ v" else jnp.squeeze(w @ x, 1)
    for wrap in (lambda f: f, jax.jit):
        out = ql.quaxify(wrap(run), rules=RULES)(w, cls(take(x)))
        assert isinstance(out, cls)
        np.testing.assert_allclose(out.array, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_levels_between(jit):
    """The inner level multiplies arrays; what it binds keeps the order for the outer one."""
    w, x = TYPES["LoraArray"](), jnp.asarray(normal(4, 3))
    inner = ql.quaxify(lambda w, x: w @ x, (False, True, False))
    inner = jax.jit(inner) if jit else inner
    out = ql.quaxify(inner, (False, False, True), rules=RULES)(w, Right(x))
    np.testing.assert_allclose(out.array, ql.materialise(w) @ x, rtol=1e-4, atol=1e-5)
