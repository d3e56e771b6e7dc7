"""What `jax.checkpoint` keeps of products by kernels."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import quaxlike as ql
from tests.samples import Lazy, normal

W, X = normal(64, 64), normal(5, 64)
WEIGHTS = Lazy({
    "dense": lambda: W,
    "NF4": lambda: ql.NF4Array.quantize(W),
    "int8": lambda: ql.Int8Array.quantize(W),
    "Q8_0": lambda: ql.BlockArray.quantize(W, codec="q8_0"),
    "LoRA over NF4": lambda: ql.LoraArray(ql.NF4Array.quantize(W), W[:2], W[:, :2]),
    "LoRA": lambda: ql.LoraArray(W, W[:2], W[:, :2]),
    "sparse": lambda: ql.SparseArray.from_dense(jnp.where(W > 1, W, 0)),
    "block-sparse": lambda: ql.BlockSparseArray.from_dense(W.at[:32].set(0), block_size=32),
})  # fmt: skip


def products(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (
            [eqn.primitive.name] if "dot" in eqn.primitive.name or "matmul" in eqn.primitive.name else []
        )
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from products(inner)


@pytest.mark.quick("LoRA", "dense")
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_kept(name):
    w, layer = WEIGHTS[name], ql.quaxify(lambda w, x: jnp.tanh(jnp.einsum("bk,nk->bn", x, w)))

    def count(run):
        found = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(w, x))))(X)
        return len(list(products(found.jaxpr)))

    kept = jax.checkpoint(layer, policy=ql.kernels.dots_with_no_batch_dims_saveable)
    assert count(kept) == count(layer) < count(jax.checkpoint(layer))
