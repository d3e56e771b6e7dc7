"""Caches are keyed on what a result depends on, and let go of what is gone."""

import dataclasses
import functools
import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaxlike as ql
from quaxlike.core.jaxprs import evaluate
from tests.samples import normal
from tests.strict import Strict, strict


class LowRank(ql.ArrayValue):
    """b @ a, of a rank that its type does not know."""

    a: Any
    b: Any

    def materialise(self) -> Array:
        return self.b @ self.a


@ql.register("dot_general")
def _contract(x: LowRank, y: Array, **params):
    return x.b @ (x.a @ y)


def _low_rank(rank: int) -> LowRank:
    return LowRank(normal(rank, 4), normal(4, rank))


def _loop(w, x):
    scanned = lax.scan(lambda c, _: (w @ c, None), x, length=2)[0]
    return lax.while_loop(lambda c: c[1] < 2, lambda c: (w @ c[0], c[1] + 1), (scanned, 0))[0]


@pytest.mark.slow
def test_leaf_shapes_are_in_the_key():
    x = jnp.arange(4.0)
    quaxified = ql.quaxify(_loop)
    for rank in (2, 3, 2):
        w = _low_rank(rank)
        np.testing.assert_allclose(quaxified(w, x), _loop(w.materialise(), x), rtol=1e-3)


@pytest.mark.slow
def test_leaf_dtypes_and_statics_are_in_the_key():
    f = jax.jit(lambda x: x * 2.0)
    quaxified = ql.quaxify(f)
    assert quaxified(Strict(jnp.ones(2), "a")).tag == "a"
    assert quaxified(Strict(jnp.ones(2), "b")).tag == "b"
    assert quaxified(Strict(jnp.ones(2, jnp.float16), "a")).array.dtype == jnp.float16


@pytest.mark.slow
def test_a_rule_registered_after_a_jitted_call_takes_effect():
    class Late(ql.ArrayValue):
        array: Any

        def materialise(self) -> Array:
            return self.array

    outer = jax.jit(ql.quaxify(lambda x: jnp.sin(x)))
    inner = ql.quaxify(jax.jit(lambda x: jnp.sin(x)))
    loop = ql.quaxify(lambda x: lax.fori_loop(0, 1, lambda i, c: jnp.sin(c), x))
    x = Late(jnp.ones(2))
    for f in (outer, inner, loop):
        assert not ql.is_value(f(x))

    @ql.register("sin")
    def _(x: Late, **params):
        return Late(x.array + 1.0)

    for f in (outer, inner):
        assert ql.is_value(f(x))
        np.testing.assert_array_equal(f(x).array, 2.0)
    assert ql.is_value(loop(x))


@pytest.mark.slow
def test_a_collected_function_leaves_the_caches():
    def run() -> weakref.ref[Any]:
        f = jax.jit(lambda x: x * 2.0)
        ql.quaxify(f)(strict(jnp.ones(3)))
        return weakref.ref(f)

    ref = run()
    gc.collect()
    assert ref() is None


@pytest.mark.slow
def test_no_growth_over_fresh_functions():
    x = strict(jnp.ones(3))

    def run(n: int) -> None:
        for i in range(n):
            branches = lambda x, i=i: lax.cond(True, lambda y: y * 2.0, lambda y: -y, x)
            jax.eval_shape(ql.quaxify(branches), x)

    run(5)
    jax.clear_caches()
    gc.collect()
    before = len(evaluate.memo)
    for _ in range(10):
        run(100)
        jax.clear_caches()
        gc.collect()
    assert len(evaluate.memo) <= before + 2


def test_repeated_eager_control_flow_is_traced_once():
    traced = 0

    def body(c, _):
        nonlocal traced
        traced += 1
        return c * 2.0, None

    @ql.quaxify
    def f(x):
        return lax.scan(body, x, length=3)[0]

    x = strict(jnp.ones(2))
    with ql.on_materialise("error"):
        f(x)
        n = len(evaluate.memo)
        f(x)
    assert len(evaluate.memo) == n
    assert traced == 1


def test_equal_structures_do_not_recompile():
    compiled = 0

    @jax.jit
    def f(x):
        nonlocal compiled
        compiled += 1
        return ql.quaxify(lambda x: x * 2.0)(x)

    f(strict(jnp.ones(2)))
    f(strict(jnp.zeros(2)))
    assert compiled == 1
    assert eqx.tree_equal(f(strict(jnp.ones(2))), strict(jnp.full(2, 2.0)))


def test_a_jitted_function_quaxified_at_each_call_is_traced_once():
    traced = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: Any

        @jax.jit
        def __call__(self, x):
            traced.append("method")
            return self.weight * x

    @jax.jit
    def double(x):
        traced.append("function")
        return x * 2.0

    x = strict(jnp.ones(2))
    for _ in range(3):
        assert eqx.tree_equal(ql.quaxify(double)(x), strict(jnp.full(2, 2.0)))
        assert eqx.tree_equal(ql.quaxify(Layer(x).__call__)(jnp.ones(2)), x)
    assert traced == ["function", "method"]


def test_a_wrapper_of_a_jitted_function_runs_each_time():
    f = jax.jit(lambda x: x * 2.0)
    calls = []

    @functools.wraps(f)
    def counted(x):
        calls.append(1)
        return f(x)

    quaxified = ql.quaxify(counted)
    for _ in range(2):
        quaxified(strict(jnp.ones(2)))
    assert len(calls) == 2
