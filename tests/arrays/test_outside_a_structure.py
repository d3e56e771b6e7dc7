"""One convention for NaN and infinity: what is not stored is zero, whatever it is multiplied or divided by.

Where something is stored, the result is that of the dense array, NaNs of the value included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import BlockSparseArray, OneHotVector, SparseArray
from quaxlike.arrays.structured import DiagonalMatrix, KroneckerMatrix, LowRankUpdate, TridiagonalMatrix
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Zero
from tests.samples import Lazy, array

NAN = float("nan")
D = array([3.0, NAN, -2.0, 0.5])
BLOCKS = array(np.pad(np.array([[1.0, NAN], [3.0, -2.0]], np.float32), ((0, 2), (2, 0))))
TYPES = Lazy(
    {
        "sparse": lambda: SparseArray.from_dense(jnp.array([[0.0, 3.0, 0.0, NAN], [0.0, 0.0, -2.0, 0.0]])),
        "blocks": lambda: BlockSparseArray.from_dense(BLOCKS, block_size=2),
        "one-hot": lambda: OneHotVector(2.0, 1, 3),
        "one-hot, NaN": lambda: OneHotVector(NAN, 1, 3),
        "one-hots": lambda: OneHotVector(jnp.array([2.0, NAN]), jnp.array([1, 0]), 3),
        "one-hot, nowhere": lambda: OneHotVector(2.0, 7, 3),
        "diagonal": lambda: DiagonalMatrix(D),
        "diagonals": lambda: DiagonalMatrix(jnp.stack([D, 2 * D])),
        "tridiagonal": lambda: TridiagonalMatrix(jnp.ones(3), D, jnp.array([1.0, NAN, 2.0])),
        "nothing": lambda: Zero((2, 3)),
    }
)
PROGRAMS = {
    "times NaN": lambda x: x * NAN,
    "NaN times": lambda x: NAN * x,
    "times infinity": lambda x: x * jnp.inf,
    "by zero": lambda x: x / 0.0,
    "by NaN": lambda x: x / NAN,
    "times an array": lambda x: x * jnp.full(x.shape, NAN),
    "by an array": lambda x: x / jnp.zeros(x.shape),
    "by itself": lambda x: x / x,
    "by its square": lambda x: x / (x * x),
    "staged": jax.jit(lambda x: x / (x * x) * jnp.inf),
    "derivative of a cube root": lambda x: jax.jvp(jnp.cbrt, (x,), (x,))[1],
}


def _stored(x):
    """Where the elements are that a Value stores."""
    return (
        np.asarray(
            ql.materialise(
                jax.tree.map(lambda v: jnp.ones_like(v) if jnp.issubdtype(v.dtype, jnp.inexact) else v, x)
            )
        )
        != 0
    )


@pytest.mark.quick(
    "NaN times-one-hot, NaN",
    "by an array-tridiagonal",
    "by its square-nothing",
    "derivative of a cube root-one-hot",
)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_not_stored_is_zero(program, kind):
    fn, x = PROGRAMS[program], TYPES[kind]
    with ql.on_materialise("allow"):
        out = np.asarray(ql.materialise(jax.jit(ql.quaxify(fn))(x)))
    dense = np.asarray(jax.jit(fn)(x.materialise()))
    stored = _stored(x) & (np.nan_to_num(np.asarray(x.materialise()), nan=1.0) != 0)
    np.testing.assert_allclose(out, np.where(stored, dense, 0), rtol=1e-6)


@pytest.mark.quick("sparse-<lambda>1", "diagonal-<lambda>1", "tridiagonal-<lambda>1")
@pytest.mark.parametrize("wrap", [lambda x: Unitful(x, "m"), lambda x: NamedArray(x, ("a", "b"))])
@pytest.mark.parametrize("kind", ["sparse", "blocks", "diagonal", "tridiagonal"])
def test_in_a_unit_or_with_names(kind, wrap):
    x = TYPES[kind]
    program = lambda x: x / (x * x)
    out = ql.quaxify(program)(wrap(x))
    expected = np.where(_stored(x), program(x.materialise()), 0)
    np.testing.assert_allclose(ql.materialise(out), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "blocks", "diagonal", "tridiagonal", "nothing"])
def test_a_product_reads_only_what_meets_an_element(kind):
    x = TYPES[kind]
    y = jnp.full(x.shape[-1:], NAN).at[0].set(1.0)
    out = np.asarray(ql.quaxify(jnp.matmul)(x, y))
    stored = _stored(x)
    terms = np.asarray(x.materialise()) * np.asarray(y)
    np.testing.assert_allclose(out, np.sum(np.where(stored, terms, 0), -1), rtol=1e-6)


SUMS = Lazy(
    {
        "lora": lambda: ql.LoraArray(jnp.ones((1, 2)), jnp.ones((1, 2)), -jnp.ones((1, 1)) / 2),
        "low rank": lambda: LowRankUpdate(jnp.ones((1, 2)), jnp.ones((1, 1)), -jnp.ones((2, 1)) / 2),
        "scales and minima": lambda: ql.BlockArray.quantize(
            jnp.arange(1.0, 65.0).reshape(1, 64), codec="q2_k"
        ),
    }
)
FACTORS = {
    "by zero": lambda x: x / 0.0,
    "by minus zero": lambda x: x / -0.0,
    "by a zero": lambda x: jnp.divide(x, jnp.zeros(())),
    "overflow": lambda x: x / 1e-39,
    "infinity": lambda x: jnp.inf * x,
}
MODES = {
    "eager": ql.quaxify,
    "jit": lambda f: ql.quaxify(jax.jit(f)),
    "jit outside": lambda f: jax.jit(ql.quaxify(f)),
    "checkpoint": lambda f: ql.quaxify(jax.checkpoint(f)),
    "cond": lambda f: ql.quaxify(lambda x: jax.lax.cond(True, f, f, x)),
}


@pytest.mark.each_value
@pytest.mark.quick("eager-infinity-low rank", "jit outside-by minus zero-low rank")
@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("mode", MODES)
def test_the_terms_of_a_sum_are_not_made_infinite(mode, factor, kind):
    f, x = FACTORS[factor], SUMS[kind]
    with ql.on_materialise("allow"):
        out = ql.materialise(MODES[mode](f)(x))
    np.testing.assert_array_equal(out, f(x.materialise()))


def test_a_kronecker_product_is_divided_by_one():
    a, b = jnp.array([[1.0, 2.0], [3.0, NAN]]), jnp.array([[2.0, 0.0], [1.0, 4.0]])
    x = KroneckerMatrix(a, b)
    y = KroneckerMatrix(b, a)
    out = ql.quaxify(functools.partial(jnp.divide))(x, y)
    assert isinstance(out, KroneckerMatrix)
    np.testing.assert_allclose(ql.materialise(out), x.materialise() / y.materialise(), rtol=1e-6)
