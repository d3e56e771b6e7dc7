"""The table of transforms on modules of NNX whose Param holds a value of each shipped type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quaxlike as ql
from quaxlike.testing.layers import LAYERS
from tests.array_types import WEIGHTS

pytestmark = pytest.mark.frameworks


class Square(nnx.Module):
    """A layer without bias that the programs multiply by, pass and close over like its weight."""

    dtype = jnp.dtype(jnp.float32)

    def __init__(self, weight):
        self.weight = nnx.Param(weight)
        self.shape = weight.shape

    def __matmul__(self, y):
        return self.weight[...] @ y


def run(module):
    return {name: program.run(module) for name, program in LAYERS.items()}


@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_the_module_of_the_materialised_array(name, default_promotion):
    weight = WEIGHTS[name]()
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(run))(Square(weight))
    expected = jax.jit(run)(Square(ql.materialise(weight)))
    for program in LAYERS:
        for x, y in zip(
            *(jax.tree.leaves(ql.materialise(out[program])) for out in (found, expected)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=program)
