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


def _materialised(f, x):
    out = ql.materialise(ql.quaxify(f)(x))
    return jnp.sum(jnp.sin(out)), out


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
