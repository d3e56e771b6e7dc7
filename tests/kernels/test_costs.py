"""Costs of products with stored weights, as `jax.experimental.roofline` counts them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.roofline import roofline

import quaxlike as ql
from tests.samples import Lazy, normal

M, N, K = 3, 64, 128
W, X = normal(N, K), normal(M, K, seed=1)
# Weights, and the share of the products of a dense matrix that they take.
WEIGHTS = Lazy(
    {
        "nf4": lambda: (ql.NF4Array.quantize(W), 1),
        "int8": lambda: (ql.Int8Array.quantize(W), 1),
        "lora over nf4": lambda: (
            ql.LoraArray(ql.NF4Array.quantize(W), a=normal(2, K), b=normal(N, 2)),
            1 + 2 / N + 2 / K,
        ),
        "sparse": lambda: (ql.SparseArray.from_dense(W, density=0.25), 0.25),
        "blocks": lambda: (ql.BlockSparseArray.from_dense(W, block_size=32, density=0.5), 0.5),
    }
)


@pytest.mark.quick("lora over nf4")
@pytest.mark.parametrize("weight", WEIGHTS)
def test_of_a_product(weight):
    w, share = WEIGHTS[weight]
    leaves, tree = jax.tree.flatten(w)
    product = ql.quaxify(lambda x, w: x @ w.T)
    call = lambda x, *leaves: product(x, jax.tree.unflatten(tree, leaves))
    stored = sum(leaf.nbytes for leaf in leaves)
    for f in (call, jax.grad(lambda *args: jnp.sum(call(*args)))):
        _, cost = roofline(f)(X, *leaves)
        assert cost.flops == 2 * M * N * K * share
        assert cost.hbm_bytes <= stored + 2 * (X.nbytes + M * N * 4) + 4096
