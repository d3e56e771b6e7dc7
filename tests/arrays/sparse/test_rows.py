"""Rows and columns of sparse matrices, looked up at positions that are data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import Lazy, array

from .test_unstructured import a_matrix, agrees, thinned


def _blocks(balanced):
    return ql.BlockSparseArray.from_dense(thinned(8, 12), block_size=2, density=1 / 3, balanced=balanced)


MATRICES = Lazy(
    {
        "elements": a_matrix,
        "elements, transposed": lambda: ql.quaxify(jnp.transpose)(a_matrix()),
        "blocks": lambda: _blocks(balanced=True),
        "blocks, transposed": lambda: _blocks(balanced=True).T,
        "ragged blocks": lambda: _blocks(balanced=False),
        "nothing": lambda: ql.SparseArray.from_dense(jnp.zeros((8, 12))),
    }
)
IDS = array([[3, 0, 7], [3, 3, 1]])
LOOKED_UP = {
    "take": lambda w, ids: jnp.take(w, ids, axis=0),
    "columns": lambda w, ids: jnp.take(w, ids, axis=1),
    "clipped": lambda w, ids: jnp.take(w, ids - 2, axis=0, mode="clip"),
    "filled": lambda w, ids: jnp.nan_to_num(jnp.take(w, 3 * ids, axis=0), nan=-1.0),
    "mapped": lambda w, ids: jax.vmap(jax.vmap(lambda i: lax.dynamic_index_in_dim(w, i, 0, False)))(ids),
    "kept axis": lambda w, ids: jax.vmap(lambda i: lax.dynamic_slice_in_dim(w, i, 1, 1))(ids[0]),
    "one": lambda w, ids: jnp.sin(w[ids[0, 0]]),
}


QUICK = ("elements", "blocks")


@pytest.mark.quick("blocks-one")
@pytest.mark.parametrize("what", LOOKED_UP)
@pytest.mark.parametrize(
    "matrix", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in MATRICES]
)
def test_are_those_of_the_dense_matrix(matrix, what):
    agrees(LOOKED_UP[what], MATRICES[matrix], IDS)


@pytest.mark.quick("blocks")
@pytest.mark.parametrize("matrix", QUICK)
def test_have_gradients(matrix):
    """Of the stored elements, those of the dense matrix."""
    w = MATRICES[matrix]
    trained, rest = eqx.partition(w, eqx.is_inexact_array)
    call = ql.quaxify(lambda w, ids: jnp.sum(jnp.sin(jnp.take(w, ids, axis=0)) * jnp.take(w, ids, axis=0)))
    with ql.on_materialise("error"):
        found = jax.jit(jax.grad(lambda trained: call(eqx.combine(trained, rest), IDS)))(trained)
    of_dense = jax.grad(lambda trained: call(ql.materialise(eqx.combine(trained, rest)), IDS))
    expected = jax.jit(of_dense)(trained)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("blocks")
@pytest.mark.parametrize("matrix", ["elements", "blocks"])
def test_embeddings_of_tokens(matrix):
    layer = eqx.nn.Embedding(8, 12, key=jax.random.key(0))
    agrees(lambda w, ids: jax.vmap(eqx.tree_at(lambda e: e.weight, layer, w))(ids), MATRICES[matrix], IDS[0])


def test_of_elements_in_no_order_are_those_of_the_whole():
    unordered = a_matrix().placed(a_matrix().data, a_matrix().indices, a_matrix().sizes)
    with ql.on_materialise("allow"):
        found = jax.jit(ql.quaxify(lambda x: jnp.take(x, IDS, axis=0)))(unordered)
    np.testing.assert_allclose(found, np.take(np.asarray(a_matrix().materialise()), IDS, axis=0))
