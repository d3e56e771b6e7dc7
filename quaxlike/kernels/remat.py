"""`jax.checkpoint` policies supporting the products computed by kernels."""

from typing import Any

import jax

from .block_matmul import lora_matmul_p
from .block_matmul.primitive import PRODUCTS
from .block_sparse_matmul import block_sparse_matmul_p
from .csr_matmul import csr_matmul_p
from .dense_matmul import dense_matmul_p

_PRODUCTS = {*PRODUCTS.values(), lora_matmul_p, block_sparse_matmul_p, csr_matmul_p, dense_matmul_p}


def dots_with_no_batch_dims_saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that also saves products with quantised, adapted and sparse weights.

    JAX's policy of the same name only saves `dot_general`s. It doesn't recognise the products computed by our
    kernels, which would be recomputed in the backward pass.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import quaxlike as ql

        w = ql.NF4Array.quantize(jax.random.normal(jax.random.key(0), (64, 64)))
        layer = ql.quaxify(lambda w, x: jnp.tanh(x @ w.T))
        policy = ql.kernels.dots_with_no_batch_dims_saveable
        loss = lambda x: jnp.sum(jax.checkpoint(layer, policy=policy)(w, x))
        gradient = jax.jit(jax.grad(loss))(jnp.ones((2, 64)))
        ```
    """
    if primitive in _PRODUCTS:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)
