"""`Zero`, `Full` and `Identity` against the dense arrays, and what is left of the computation."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import quaxlike as ql
from quaxlike.arrays.structured import DiagonalMatrix
from quaxlike.arrays.zero import Full, Identity, Zero
from quaxlike.primitives import classes
from tests.array_types import TYPES
from tests.samples import array

X = array(np.arange(1.0, 13.0).reshape(3, 4))
ZERO = Zero((3, 4))
ONE = Full(1, (3, 4), jnp.float32)
TWO = Full(2.0, (3, 4))
TRACED = Full(array(2.0), (3, 4))
STACK = Full(array([2.0, 3.0, 4.0]), (4,))
EYE = Identity(4)


def agrees(f, *args):
    """`f` of the Values is `f` of the arrays, and materialises nothing."""
    with ql.on_materialise("error"):
        out = ql.quaxify(f)(*args)
    expected = eqx.filter_jit(f)(*ql.materialise(args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(ql.materialise(a), b, rtol=1e-6),
        out,
        expected,
        is_leaf=ql.is_value,
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype), out, is_leaf=ql.is_value) == jax.tree.map(
        lambda a: (a.shape, a.dtype), expected
    )
    return out


def primitives_of(f, *args):
    """What is left to compute."""
    return [eqn.primitive.name for eqn in jax.make_jaxpr(ql.quaxify(f))(*args).jaxpr.eqns]


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, z: x + z, (X, ZERO)),
        (lambda x, z: z + x, (X, ZERO)),
        (lambda x, z: x - z, (X, ZERO)),
        (lambda x, o: x * o, (X, ONE)),
        (lambda x, o: x / o, (X, ONE)),
        (lambda x, o: x**o, (X, ONE)),
        (lambda x, z: x + z * x, (X, ZERO)),
        (lambda x, z: x + z / x, (X, ZERO)),
        (lambda x, z: x + jnp.sin(z) * jnp.exp(z) - z.sum(), (X, ZERO)),
        (lambda x, z: x + (x @ z.T) @ x * z, (X, ZERO)),
        (lambda x, i: x @ i, (X, EYE)),
        (lambda x, i: i @ i.T @ x.T, (X, EYE)),
    ],
)
def test_nothing_is_left_of_an_identity(f, args):
    arithmetic = set(classes.ELEMENTWISE_BINARY) | set(classes.ELEMENTWISE_UNARY) | {"dot_general"}
    if not any(isinstance(a, Identity) or a is ZERO for a in args):
        assert primitives_of(f, *args) == []
    assert arithmetic.isdisjoint(primitives_of(f, *args))
    agrees(f, *args)


@pytest.mark.parametrize("zero_times", [lambda x, z: x * z, lambda x, z: z / x, lambda x, z: x @ z.T])
def test_zero_annihilates(zero_times):
    assert type(agrees(zero_times, X, ZERO)) is Zero


def test_of_booleans():
    assert type(agrees(jnp.any, Zero((3, 4), bool))) is Zero
    assert type(agrees(jnp.all, Full(True, (3, 4)))) is Full


@pytest.mark.slow
@given(st.sampled_from(["float16", "bfloat16", "float32", "int8", "int32", "complex64"]))
def test_dtypes_are_those_of_the_arrays(dtype):
    z = Zero((2,), dtype)
    assert (z + jnp.ones(2, dtype)).dtype == dtype
    assert jax.jit(lambda z: z + 1)(z).dtype == dtype
    assert jax.jit(lambda z: z * 1)(z).dtype == dtype


@pytest.mark.slow
def test_identity():
    agrees(lambda i: i.T, EYE)
    agrees(jnp.sqrt, EYE)
    agrees(jnp.sum, EYE)
    agrees(lambda i: i.sum(axis=1), EYE)
    assert type(agrees(lambda i: i.astype(jnp.int32), EYE)) is Identity
    assert type(agrees(jnp.matmul, EYE, EYE)) is Identity
    assert agrees(lambda x, y: jnp.einsum("ij,ij->", x, y), EYE, EYE) == 4
    assert type(agrees(jnp.matmul, EYE, Zero((4, 2)))) is Zero
    agrees(lambda i, x: jnp.einsum("ij,abj->iab", i, x), EYE, jnp.ones((2, 3, 4)))
    agrees(lambda i, x: jnp.einsum("abj,ij->abi", x, i), EYE, jnp.ones((2, 3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "subscripts",
    ["ij,jk->ik", "ij,kj->ik", "abj,ij->abi", "ij,abj->iab", "bij,bkj->bik", "i,j->ij", "ij,ij->"],
)
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_products_with_full(subscripts, dtype):
    """The other side is summed once; no matrix product is left, and nothing of the size of the `Full`."""
    sizes = dict(zip("abijk", (2, 3, 4, 5, 6), strict=True))
    shapes = [[sizes[i] for i in part] for part in subscripts.split("->")[0].split(",")]
    f = lambda x, y: jnp.einsum(subscripts, x, y, preferred_element_type="int32" if dtype == "int8" else None)
    for number in (2, jnp.asarray(2, dtype)):
        full = [Full(number, shape, dtype) for shape in shapes]
        x, y = (jnp.asarray(np.random.default_rng(0).integers(-4, 5, shape), dtype) for shape in shapes)
        assert type(agrees(f, *full)) is Full
        for args in ((full[0], y), (x, full[1])):
            agrees(f, *args)
            assert "dot_general" not in primitives_of(f, *args)


def test_a_stack_of_constants():
    np.testing.assert_array_equal(STACK.materialise(), jnp.broadcast_to(jnp.array([[2.0], [3], [4]]), (3, 4)))
    out = jax.vmap(ql.quaxify(lambda c: c * 2))(STACK)
    assert type(out) is Full
    np.testing.assert_array_equal(out.materialise(), 2 * STACK.materialise())
    agrees(lambda x: jax.lax.scan(lambda a, b: (a + b, None), jnp.zeros(4), x)[0], STACK)
    agrees(lambda x: x.sum(axis=1), STACK)
    agrees(lambda x: jnp.sort(x, axis=1), STACK)
    with ql.on_materialise("allow"):
        out = ql.quaxify(lambda x: jnp.sort(-x, axis=0))(STACK)
    np.testing.assert_array_equal(ql.materialise(out)[:, 0], [-4, -3, -2])


@pytest.mark.quick("float32-nan-prod")
@pytest.mark.parametrize("reduce", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("number", [np.inf, np.nan, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_reductions_of_no_elements(reduce, number, dtype):
    number = number if dtype == "float32" else 2
    primitive = {"sum": lax.reduce_sum, "prod": lax.reduce_prod, "max": lax.reduce_max, "min": lax.reduce_min}
    for value in (number, jnp.asarray(number, dtype)):
        agrees(lambda x: primitive[reduce](x, (0,)), Full(value, (0, 3), dtype))
        agrees(lambda x: primitive[reduce](x, (1,)), Full(value, (2, 0), dtype))


@pytest.mark.parametrize("number", [np.inf, np.nan, 2.0])
def test_products_that_sum_no_elements(number):
    nothing = Full(number, (2, 0))
    agrees(lambda x: x @ x.T, nothing)
    agrees(lambda x: x @ jnp.ones((0, 3)), nothing)


def test_quotients_of_constants_without_elements_have_no_gradient():
    total = ql.quaxify(lambda x: jnp.sum(x / 4.0))
    divided = lambda number, shape: ql.materialise(total(Full(number, shape)))
    assert jax.grad(divided)(2.0, (0, 4)) == 0
    assert jax.grad(divided)(2.0, (1, 4)) == 1


def test_products_of_booleans():
    for value in (True, jnp.array(True)):
        true = Full(value, (3, 3))
        agrees(lambda x: x @ x, true)
        agrees(lambda x: x @ jnp.eye(3, dtype=bool), true)


def test_constants_that_control_flow_changes():
    holds = jnp.array(False)
    nan = lambda: Full(np.float32("nan"), (3,))
    programs = {
        "halved": (lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5, x), Full(1.0, (3,)), 0.125),
        "counted": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + 1.0, x), Zero((3,)), 3.0),
        "or": (lambda x: lax.cond(holds, lambda: x, lambda: x + 1.0), Full(0.0, (3,)), 1.0),
        "nan": (lambda x: lax.cond(holds, nan, nan), Full(0.0, (3,)), np.nan),
    }
    for program, x, expected in programs.values():
        with ql.on_materialise("error"):
            out = ql.quaxify(program)(x)
        assert type(out) is Full
        np.testing.assert_allclose(ql.materialise(out), np.full(3, expected), rtol=1e-6)


def test_printing():
    assert eqx.tree_pformat(ZERO) == "Zero(float32[3,4])"
    assert eqx.tree_pformat(TWO) == "Full(2.0, float32[3,4])"
    assert eqx.tree_pformat(STACK) == "Full(f32[3], float32[3,4])"
    assert repr(EYE) == "Identity(float32[4,4])"


def test_what_does_not_fold_is_materialised_visibly():
    with pytest.raises(ql.MaterialisationError, match="Zero"), ql.on_materialise("error"):
        ZERO.at[0].set(1.0)
    np.testing.assert_array_equal(ZERO.at[0].set(1.0), jnp.zeros((3, 4)).at[0].set(1.0))


@pytest.mark.parametrize("number", [np.nan, complex(1, np.nan)])
def test_constants_with_nan_are_equal(number):
    x = Full(number, (3,))
    for same in (Full(number + 0, (3,)), pickle.loads(pickle.dumps(x))):
        assert jax.tree.structure(same) == jax.tree.structure(x)


def test_branches_with_nan():
    with ql.on_materialise("error"):
        out = ql.quaxify(
            lambda p: jax.lax.cond(p, lambda: jax.lax.log(Full(-1.0, 2)), lambda: jax.lax.log(Full(-2.0, 2)))
        )(True)
    assert isinstance(out, Full)
    assert np.isnan(ql.materialise(out)).all()


@pytest.mark.slow
@pytest.mark.parametrize("x", [Identity(3), Zero((3, 3)), Full(2.0, (3, 3))], ids=repr)
@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i],
        lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (1, 3)),
        lambda x, i: jnp.take(x, i, axis=0),
        lambda x, i: jnp.where(i > 1, x, 0.0),
        lambda x, i: x.at[i].set(0.0),
        lambda x, i: x * jnp.full((3, 3), i, jnp.float32),
        lambda x, i: (x + i.astype(jnp.float32)).sum(),
    ],
    ids=["index", "dynamic_slice", "take", "where", "set", "mul", "add"],
)
def test_with_operands_that_vary_over_a_mesh(x, f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def g(x, i):
        body = lambda x, i: jnp.asarray(ql.materialise(f(x, i[0])))[None]
        return jax.shard_map(body, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P("i"))(x, i)

    at = jnp.array([1, 2])
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(ql.materialise(ql.quaxify(g)(x, at)), g(x.materialise(), at))


@pytest.mark.quick(1)
@pytest.mark.parametrize("constant", [Zero((4, 4)), Full(2.0, (4, 4)), Full(array(2.0), (4, 4))], ids=str)
@pytest.mark.parametrize("name", ["LoraArray", "NF4Array", "TridiagonalMatrix", "TrainableArray of NF4Array"])
def test_beside_another_type_in_a_branch_or_a_loop(name, constant):
    """It is lifted to the type as an array is, or both are dense."""
    x = TYPES[name]()
    fs = (
        lambda x, c: lax.cond(jnp.sum(c) < 1.0, lambda: x, lambda: c) @ jnp.arange(4.0),
        lambda x, c: lax.fori_loop(0, 2, lambda i, y: c.T @ y, x),
    )
    for f in fs:
        with ql.on_materialise("allow"):
            out = ql.materialise(jax.jit(ql.quaxify(f))(x, constant))
            of_leaves = jax.grad(
                lambda x: jnp.sum(ql.materialise(ql.quaxify(f)(x, constant)) ** 2), allow_int=True
            )
            grads = jax.jit(of_leaves)(x)
        dense = ql.materialise(constant)
        np.testing.assert_allclose(out, jax.jit(f)(ql.materialise(x), dense), rtol=1e-5)
        of_dense = jax.grad(lambda x: jnp.sum(f(ql.materialise(x), dense) ** 2), allow_int=True)
        expected = jax.jit(of_dense)(x)
        for found, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            if want.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize("f", [jnp.add, jnp.multiply, jnp.maximum])
def test_stacks_of_several_depths(f):
    # Numbers for rows, and for elements: they must not be broadcast against each other.
    rows, elements = Full(jnp.arange(4.0), (4,)), Full(jnp.arange(16.0).reshape(4, 4), ())
    for x, y in ((rows, elements), (elements, rows)):
        with ql.on_materialise("allow"):
            found = ql.materialise(ql.quaxify(f)(x, y))
        np.testing.assert_array_equal(found, f(x.materialise(), y.materialise()))


CASES = {
    "arrays": (array(np.arange(4.0).reshape(2, 2)), array(np.ones((2, 2)))),
    "constants": (Full(array(3.0), (2, 2)), Zero((2, 2))),
    "diagonals": (DiagonalMatrix(array(np.ones(2))), DiagonalMatrix(array(np.arange(2.0)))),
    "both": (DiagonalMatrix(array(np.ones(2))), array(np.ones((2, 2)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@pytest.mark.parametrize("which", [True, False, array(True), array(False)])
def test_selection_by_a_constant(which, cases):
    found = ql.quaxify(jnp.where)(Full(which, (2, 2)), *cases)
    np.testing.assert_array_equal(ql.materialise(found), ql.materialise(cases[0 if which else 1]))
    if type(cases[0]) is type(cases[1]) is DiagonalMatrix:
        assert type(found) is DiagonalMatrix


def test_selection_by_a_stack_of_constants():
    which = Full(jnp.array([True, False]), (3,))
    for cases in (
        (Full(jnp.array([1.0, 2.0]), (3,)), Full(5.0, (2, 3))),
        (jnp.ones((2, 3)), jnp.zeros((2, 3))),
    ):
        found = ql.materialise(ql.quaxify(jnp.where)(which, *cases))
        np.testing.assert_array_equal(found, jnp.where(which.materialise(), *ql.materialise(cases)))


@pytest.mark.slow
def test_the_sum_of_a_large_identity_of_small_integers():
    program = lambda x: jnp.sum(x, dtype=jnp.int8)
    assert ql.materialise(ql.quaxify(program)(Identity(300, jnp.int8))) == program(
        jnp.eye(300, dtype=jnp.int8)
    )
