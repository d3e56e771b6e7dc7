"""Python scalars and NumPy arrays beside Values, and loops that run at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array, ArrayLike, Float

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import OneHotVector, SparseArray
from quaxlike.arrays.structured import DiagonalMatrix, KroneckerMatrix, LowRankUpdate
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Full, Zero
from tests.samples import Lazy, array

X = array([[0.0, 3.0], [1.0, 2.0]])
TYPES = Lazy(
    {
        "sparse": lambda: SparseArray.from_dense(X),
        "one-hot": lambda: OneHotVector(2.0, 1, 3),
        "diagonal": lambda: DiagonalMatrix(array([1.0, 2.0])),
        "lora": lambda: ql.LoraArray(X, array(np.ones((1, 2))), array(np.ones((2, 1)))),
        "int8": lambda: ql.Int8Array.quantize(X),
        "full": lambda: Full(jax.device_put(2.0), (2,)),
        "zero": lambda: Zero((2,)),
        "unit": lambda: Unitful(X, "m"),
        "names of a sparse array": lambda: NamedArray(SparseArray.from_dense(X), ("a", "b")),
    }
)
SELECTIONS = {
    "select": lambda x: lax.select(True, x, -x),
    "select, False": lambda x: lax.select(False, x, -x),
    "select_n": lambda x: lax.select_n(True, x, -x),
    "NumPy": lambda x: lax.select(np.bool_(True), x, -x),
    "jit": jax.jit(lambda x: lax.select(True, x, -x)),
}


@pytest.mark.quick(
    "select-full", "select, False-int8", "select_n-names of a sparse array", "NumPy-unit", "jit-lora"
)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_python_bool_selects(selection, kind):
    fn, x = SELECTIONS[selection], TYPES[kind]
    with ql.on_materialise("allow"):
        out = ql.quaxify(fn)(x)
    np.testing.assert_array_equal(ql.materialise(out), fn(ql.materialise(x)))


CARRIES = Lazy(
    {
        "zero": lambda: Zero((2, 2)),
        "number": lambda: Full(1.0, (2, 2)),
        "full": lambda: Full(jax.device_put(2.0), (2, 2)),
        "sparse": lambda: SparseArray.from_dense(X),
        "diagonal": lambda: DiagonalMatrix(array([1.0, 2.0])),
        "kronecker": lambda: KroneckerMatrix(X, array(np.ones((1, 1)))),
        "low rank": lambda: LowRankUpdate(DiagonalMatrix(array([1.0, 2.0])), array(np.ones((2, 2)))),
        "lora": lambda: ql.LoraArray(X, array(np.ones((2, 2))), array(np.ones((2, 2)))),
        "int8": lambda: ql.Int8Array.quantize(X),
    }
)
BODIES = {"same": lambda x: x * 1.0, "doubles": lambda x: x * 2.0, "adds": lambda x: x + 1.0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", CARRIES)
@pytest.mark.parametrize("body", BODIES)
def test_loops_that_end_at_different_times(body, kind):
    step, x, ends = BODIES[body], CARRIES[kind], jnp.array([1, 3])

    def run(end, x):
        return lax.fori_loop(0, end, lambda i, x: step(x), x)

    programs = (
        lambda x: jax.vmap(run, in_axes=(0, None))(ends, x),
        lambda x: jax.vmap(lambda end: jax.vmap(lambda more: run(end + more, x))(jnp.arange(2)))(ends),
        lambda x: jax.vmap(run)(ends, jnp.broadcast_to(x, (2, 2, 2))),
    )
    for program in programs:
        with ql.on_materialise("allow"):
            out = ql.quaxify(program)(x)
        np.testing.assert_allclose(ql.materialise(out), program(x.materialise()), rtol=1e-5)


class _Held(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


@pytest.mark.quick(10)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("number", [2.0, np.float32(2), np.full(3, 2, np.float32), array(np.full(3, 2.0))])
@pytest.mark.parametrize(
    ("annotation", "is_array"),
    [
        (jax.Array, True),
        (_Held | jax.Array, True),
        (Float[Array, "*n"], True),
        (ArrayLike, False),
        (Any, False),
    ],
)
def test_a_rule_gets_the_arrays_that_it_names(annotation, is_array, number, jit):
    """JAX hands numbers and NumPy arrays to primitives as they are."""
    rules, found = ql.RuleSet(), []

    def rule(x, y, **params):
        found.append(y)
        return _Held(lax.mul(x.array, jnp.broadcast_to(jnp.asarray(y), x.shape)))

    rule.__annotations__ = {"x": _Held, "y": annotation}
    ql.register("mul", rules=rules)(rule)
    run = ql.quaxify(lambda x: lax.mul(x, number), rules=rules)
    out = (jax.jit(run) if jit else run)(_Held(jnp.ones(np.shape(number), np.float32)))
    np.testing.assert_array_equal(out.array, np.full(np.shape(number), 2))
    assert isinstance(found[0], jax.Array) or not is_array
    several = lambda x, *ys, **params: found.append(ys) or x.array
    several.__annotations__ = {"x": _Held, "ys": annotation}
    ql.register("clamp", rules=rules)(several)
    ql.quaxify(lambda x: lax.clamp_p.bind(x, 1.0, 2.0), rules=rules)(_Held(jnp.ones(())))
    assert all(isinstance(y, jax.Array) for y in found[-1]) or not is_array
