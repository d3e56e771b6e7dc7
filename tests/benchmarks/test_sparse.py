import jax
import numpy as np
import pytest

import quaxlike as ql
from benchmarks import sparse

WEIGHTS = {
    "blocks": lambda w: ql.BlockSparseArray.from_dense(w, block_size=8, density=0.5),
    "elements": lambda w: ql.SparseArray.from_dense(w, density=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_all_ways_compute_the_same(kind, gradients, monkeypatch, default_promotion):
    monkeypatch.setattr(sparse, "_SIZE", 32)
    monkeypatch.setattr(sparse, "_ROWS", 4)
    case, memory = sparse._case(
        kind, WEIGHTS[kind](jax.random.normal(jax.random.key(0), (32, 32))), gradients
    )
    results = {way: run() for way, run in case.ways.items()}
    assert results.keys() == memory.keys() == {"quaxlike", "dense", "BCSR", "BCOO"}
    for result in results.values():
        # The product, and the gradient with respect to x; that of what is stored has a form of its own.
        found = [result[0], result[1][1]] if gradients else [result]
        expected = [results["dense"][0], results["dense"][1][1]] if gradients else [results["dense"]]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
