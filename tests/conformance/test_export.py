"""Programs with weights of every type are exported by `jax.export`, for batches of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.array_types import WEIGHTS

PROGRAMS = {
    "x @ w.T": lambda w, x: jnp.matmul(x, jnp.swapaxes(w, -1, -2)),
    "gradient": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(jnp.matmul(x, w))))(x),
}


# Kernels are made for shapes that are known: the reference runs where one is open, and says so.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_batch_of_any_size(name, program, default_promotion):
    w = WEIGHTS[name]()
    fn = jax.jit(lambda x: ql.materialise(ql.quaxify(PROGRAMS[program])(w, x)))
    (batch,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, w.shape[-1]), w.dtype)
    exported = jax.export.export(fn, platforms=["cpu", "cuda", "tpu"])(shape)
    for n in (1, 5):
        x = jnp.linspace(-1, 1, n * w.shape[-1], dtype=w.dtype).reshape(n, -1)
        np.testing.assert_allclose(exported.call(x), fn(x), rtol=1e-5, atol=1e-6)
