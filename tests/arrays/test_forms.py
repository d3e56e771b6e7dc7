"""Loop carries and branches that hold one type in two forms: brought to one, or dense under the policy."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import quaxlike as ql
from tests.conformance.weights import TYPES, WEIGHTS
from tests.differential.compare import check
from tests.differential.program import Program, Step

TURNED = ["LowRankUpdate of Int4Array", "BlockSparseArray of NF4Array"]
DENSE = ["NF4Array", "Int8Array", "SparseArray", "BlockSparseArray"]


@pytest.mark.parametrize("name", [name for name in [*WEIGHTS, *TURNED] if "Named" not in name])
def test_transposed_in_a_loop(name):
    program = Program(name, (Step("jnp.transpose(x)"),), ("fori_carry",), ("grad_and_result",), jit=True)
    assert check(program).status == "equal"


def test_a_part_that_becomes_dense_in_a_loop():
    step = Step("jnp.linalg.matrix_transpose(x)")
    program = Program("LowRankUpdate of LoraArray", (step,), ("average_in_loop",), ("grad_and_result",), True)
    assert check(program).status == "equal"


@pytest.mark.parametrize("name", DENSE)
def test_branches_of_two_forms_are_dense_under_the_policy(name):
    turned = lambda x, p: lax.cond(p, jnp.transpose, lambda x: x, x)
    x = TYPES[name]()
    with ql.on_materialise("allow"):
        for p in (False, True):
            expected = turned(ql.materialise(x), p)
            assert jnp.array_equal(ql.quaxify(turned)(x, jnp.array(p)), expected)
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="laid out otherwise"):
        jax.jit(ql.quaxify(turned))(x, True)
