"""Slots that hold nothing: they count as zeros, whatever is stored there, and are not trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.structured import KroneckerMatrix
from tests.samples import Lazy, array, once

S, B = ql.SparseArray, ql.BlockSparseArray
DENSE = np.array([[[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]], [[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]], np.float32)


@once
def elements():
    return S.from_dense(DENSE, stacked=1)


@once
def blocks():
    return B.from_blocks(jnp.arange(1.0, 17.0).reshape(2, 2, 2, 2), np.array([[0, 2], [1, 0]]), 2)


VECTORS = OneHotVector(array([1.0, 2.0, 3.0]), array([2, 7, 0]), 3)

# For each: how to put other numbers where numbers are, the numbers, and which of them hold nothing.
CASES = Lazy(
    {
        "elements": lambda: (
            lambda data: elements().replace(data=data),
            elements().data,
            elements().indices[0] == 2,
        ),
        "blocks": lambda: (
            lambda numbers: blocks().replace(blocks=numbers),
            blocks().blocks,
            jnp.broadcast_to((blocks().col_idx == 2)[..., None, None], blocks().blocks.shape),
        ),
        "one-hot": lambda: (
            lambda value: OneHotVector(value, VECTORS.index, 3),
            VECTORS.value,
            VECTORS.index == 7,
        ),
    }
)

READS = {
    "sum": jnp.sum,
    "sum of rows": lambda x: jnp.sum(x, -1),
    "sum of columns": lambda x: jnp.sum(x, -2) if x.ndim > 2 else x,
    "root": lambda x: jnp.sqrt(x).sum(),
    "cube": lambda x: (x**3).sum(),
    "times itself": lambda x: (x * x).sum(),
    "times a number": lambda x: x * x.sum(),
    "plus an array": lambda x: x + np.ones(x.shape, np.float32),
    "product": lambda x: x @ np.ones(x.shape[-1], np.float32),
    "product on the left": lambda x: np.ones(x.shape[-2], np.float32) @ x if x.ndim == 2 else x,
    "reversed": lambda x: jnp.flip(x),
    "the first": lambda x: x[:1],
    "flat": lambda x: x.reshape(-1)[1:],
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
def test_padding_is_not_seen_and_not_trained(case, read):
    """NaN and numbers in it change nothing, and its gradient is zero."""
    make, numbers, empty = CASES[case]
    f = READS[read]
    assert empty.any()
    expected = f(make(jnp.where(empty, 0.0, numbers)).materialise())
    of_dense = jax.grad(lambda numbers: jnp.sum(jnp.sin(f(make(numbers).materialise()))))(
        jnp.where(empty, 0.0, numbers)
    )
    for held in (jnp.nan, 7.0):
        at = jnp.where(empty, held, numbers)
        (_, out), grad = jax.value_and_grad(lambda n: _materialised(f, make(n)), has_aux=True)(at)
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        assert not grad[empty].any()
        np.testing.assert_allclose(grad[~empty], of_dense[~empty], rtol=1e-4, atol=1e-5)


def _materialised(f, x):
    out = ql.materialise(ql.quaxify(f)(x))
    return jnp.sum(jnp.sin(out)), out


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_factor_of_it_is_trained_by_what_is_held(case):
    make, numbers, empty = CASES[case]
    x = make(jnp.where(empty, jnp.nan, numbers))
    found = jax.grad(lambda s: jnp.sum(ql.materialise(ql.quaxify(jnp.multiply)(x, s))))(2.0)
    np.testing.assert_allclose(found, x.materialise().sum())


@pytest.mark.slow
def test_training_keeps_sum_and_array_together():
    data = elements().data
    for _ in range(2):
        data -= 0.1 * jax.grad(lambda data: elements().replace(data=data).sum())(data)
    x = elements().replace(data=data)
    np.testing.assert_allclose(x.sum(), x.materialise().sum(), rtol=1e-6)


def test_arrays_of_a_stack_with_unequal_counts_are_reversed():
    """Each with its own padding."""
    of_axes = 0, 1, 2, (0, 1, 2)
    found = jax.jit(ql.quaxify(lambda x: [jnp.flip(x, axes) for axes in of_axes]))(elements())
    for axes, x in zip(of_axes, jax.jit(ql.materialise)(found), strict=True):
        np.testing.assert_array_equal(x, np.flip(DENSE, axes))


# -------------------------------------------------------------------------------------------------
# Blocks that are Values
# -------------------------------------------------------------------------------------------------


class Opaque(ql.ArrayValue):
    """Blocks that have no leading axis of their own."""

    array: jax.Array

    def materialise(self):
        return self.array


def _stack_of(blocks):
    return B.from_blocks(blocks, np.array([[[0, 1], [1, 2]], [[1, 2], [0, 2]]]), 2)


def _normal(*shape):
    return array(np.random.default_rng(0).normal(size=shape), jnp.float32)


STACKS = Lazy(
    {
        "arrays": lambda: (_stack_of(_normal(2, 2, 2, 2, 2)), True),
        "stacked": lambda: (_stack_of(KroneckerMatrix(_normal(2, 2, 2, 1, 1), _normal(2, 2, 2, 2, 2))), True),
        "partly shared": lambda: (_stack_of(KroneckerMatrix(_normal(1, 1), _normal(2, 2, 2, 2, 2))), False),
        "opaque": lambda: (_stack_of(Opaque(_normal(2, 2, 2, 2, 2))), False),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
def test_a_stack_is_cut_where_all_its_fields_are_stacked(name):
    x, stacked = STACKS[name]
    dense = x.materialise()
    if stacked:
        assert x.leading_axis() == [0] * len(jax.tree.leaves(x))
        assert x.shard_spec(jax.P("i"))[0][0] == "i"
    else:
        assert x.leading_axis() is x.shard_spec(jax.P("i")) is NotImplemented
    for f in (lambda x: x[1], lambda x: jnp.swapaxes(x, -1, -2), lambda x: x[None], lambda x: x[::-1]):
        found = ql.quaxify(f)(x)
        assert isinstance(found, B) <= stacked
        np.testing.assert_allclose(ql.materialise(found), f(dense), rtol=1e-6)
    np.testing.assert_allclose(x @ jnp.ones(4), dense @ jnp.ones(4), rtol=1e-5)
    assert isinstance(ql.quaxify(lambda x: x[1])(x), B) == stacked
