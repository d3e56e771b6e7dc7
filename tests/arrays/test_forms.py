"""Loop carries and branches that hold one type in two forms: brought to one, or dense under the policy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import quaxlike as ql
from tests.array_types import METHODS, TYPES, WEIGHTS, WRAPPERS
from tests.differential.compare import Finding, check, outcomes
from tests.differential.program import Program, Step, result, under
from tests.samples import normal, some_of, tree_equal

FORMS = [
    "jnp.transpose(x)",
    "jnp.rot90(x)",
    "jnp.roll(x, 1, axis=-1)",
    "jnp.concatenate([x[1:], x[:1]])",
    "jnp.reshape(jnp.ravel(x), x.shape)",
    "jnp.stack([x, x])[0]",
    "x * 0.5",
    "x - 0.5 * x",
    "jnp.matmul(x, x)",
    "jnp.where(x > 0, x, 0 * x)",
    "x.at[0].set(0)",
]
TURNED = ["LowRankUpdate of Int4Array", "BlockSparseArray of NF4Array", "LoraArray, magnitude"]
HELD = ["Zero", "Full", "Identity", "NF4Array", "Int8Array", "SparseArray", "DiagonalMatrix"]
DENSE = ["NF4Array", "Int8Array", "SparseArray", "BlockSparseArray"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")  # of what stands beside units
@pytest.mark.each_value
@pytest.mark.parametrize("loop", ["fori_carry", "average_in_loop"])
@pytest.mark.parametrize("name", [name for name in TYPES if name in (*WEIGHTS, *METHODS) or " of " in name])
def test_every_form_in_a_loop(name, loop):
    with under(True):
        x = TYPES[name]()
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        results = {step: result(step, aval) for step in map(Step, some_of(dict.fromkeys(FORMS), name, 6))}
        steps = [step for step, out in results.items() if out is not None and out.shape == x.shape]
    programs = [Program(name, (step,), (loop,), ("grad",), True, first=i) for i, step in enumerate(steps)]
    assert not [str(found) for _, found in outcomes(programs) if isinstance(found, Finding)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name for name in [*WEIGHTS, *TURNED] if "Named" not in name])
def test_transposed_in_a_loop(name):
    program = Program(name, (Step("jnp.transpose(x)"),), ("fori_carry",), ("grad_and_result",), jit=True)
    assert check(program).status == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8Array", "Int8Array, column"])
def test_blocks_as_long_as_a_row_are_no_other_form(name):
    program = Program(name, (Step("jnp.reshape(jnp.ravel(x), x.shape)"),), ("fori_carry",), ("grad",), True)
    assert check(program).status == "equal"
    loop = ql.quaxify(lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.reshape(jnp.ravel(x), x.shape), x))
    with ql.on_materialise("error"):
        assert isinstance(loop(TYPES[name]()), ql.Int8Array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KroneckerMatrix, mixed", "x * 0.5"),
        ("TridiagonalMatrix, mixed", "x + x"),
        ("LowRankUpdate of DiagonalMatrix", "jnp.matmul(x, x)"),
    ],
)
def test_parts_of_other_dtypes_and_types_in_a_loop(name, text):
    program = Program(name, (Step(text),), ("fori_carry",), ("grad_and_result",), True)
    assert check(program).status == "equal"


def test_a_part_that_becomes_dense_in_a_loop():
    step = Step("jnp.linalg.matrix_transpose(x)")
    program = Program("LowRankUpdate of LoraArray", (step,), ("average_in_loop",), ("grad_and_result",), True)
    assert check(program).status == "equal"


@pytest.mark.quick("NF4Array")
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


@pytest.mark.quick("NamedArray-Zero")
@pytest.mark.parametrize("inner", [*HELD, "LoraArray", "LoraArray of NF4Array"])
@pytest.mark.parametrize("outer", ["NamedArray", "LoraArray", "TrainableArray", "LowRankUpdate"])
def test_branches_of_which_one_holds_what_the_other_is(outer, inner):
    x = TYPES[inner](1)
    wrapped = WRAPPERS[outer](TYPES[inner](), 0)
    either = ql.quaxify(lambda p, x, y: lax.cond(p, lambda x, y: x, lambda x, y: y, x, y))
    weighted = lambda x: jnp.sum(normal(4, 4) * ql.materialise(x))
    with ql.on_materialise("error"):
        for p, expected in ((True, wrapped), (False, x)):
            out = either(p, wrapped, x)
            assert type(out) is type(wrapped)
            assert jnp.allclose(ql.materialise(out), ql.materialise(expected))
        gradient = eqx.filter_grad(lambda x: weighted(either(False, wrapped, x)))(x)
        assert tree_equal(gradient, eqx.filter_grad(weighted)(x), rtol=1e-5)
