"""Structured matrices at the edges: axes of size 1, positions out of bounds, dtypes, singular ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.structured import (
    BlockDiagonalMatrix,
    DiagonalMatrix,
    KroneckerMatrix,
    LowRankUpdate,
    StructuredMatrix,
    TridiagonalMatrix,
)
from quaxlike.arrays.zero import Identity
from tests.samples import array

from .test_structured import MAKERS, N
from .test_structured import _normal as normal

pytestmark = pytest.mark.usefixtures("x64")


def _agrees(f, *args):
    found, expected = ql.quaxify(f)(*args), jax.jit(f)(*ql.materialise(args))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    tol = 1e-5 if expected.dtype == jnp.float32 else 1e-8
    np.testing.assert_allclose(ql.materialise(found), expected, rtol=tol, atol=tol)
    return found


@pytest.mark.slow
def test_of_size_one_and_larger():
    one = DiagonalMatrix(normal(1)), TridiagonalMatrix(normal(0), normal(1), normal(0))
    for a in (*one, MAKERS["update of dense"](())):
        for b in (DiagonalMatrix(normal(N)), MAKERS["tridiagonal"](()), normal(N, N)):
            for f in (jnp.add, jnp.multiply, jnp.subtract):
                _agrees(f, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("primitive", [jax.lax.add_p, jax.lax.sub_p], ids=str)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
def test_the_primitives_repeat_axes_of_size_one(primitive):
    """`jax.numpy` broadcasts before it calls them."""
    update, dense = LowRankUpdate(normal(1, 4), normal(1, 2), normal(4, 2)), normal(3, 4)
    _agrees(lambda x, y: primitive.bind(x, y).T @ normal(3, 2), update, dense)
    _agrees(lambda x, y: primitive.bind(x, y).T @ normal(3, 2), dense, update)


_STACKS = {
    "diagonals": ("diagonal", "diagonal"),
    "a tridiagonal and a diagonal": ("tridiagonal", "diagonal"),
    "updates": ("update of dense", "update, shared"),
    "an update and a tridiagonal": ("update of diagonal", "tridiagonal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", _STACKS.values(), ids=_STACKS)
@pytest.mark.parametrize("primitive", [jax.lax.add_p, jax.lax.sub_p, jax.lax.mul_p], ids=str)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)], ids=str)
def test_stacks_of_one_are_repeated(names, primitive, sizes):
    """As primitives do it for arrays: `x[:1] + x`."""
    if primitive is jax.lax.mul_p:  # which keeps the structure where one side is a diagonal
        names = (names[0], "diagonal")
    x, y = (MAKERS[name]((size,)) for name, size in zip(names, sizes, strict=True))
    with ql.on_materialise("error"):
        for a, b in ((x, y), (y, x)):
            assert isinstance(_agrees(primitive.bind, a, b), StructuredMatrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [
        lambda x, d: x * d,
        lambda x, d: d * x,
        lambda x, d: x * d + d,
        lambda x, d: (x * d) * jnp.ones(x.shape),
    ],
    ids=["times a diagonal", "a diagonal times it", "and a sum", "and bands of an array"],
)
def test_elementwise_with_a_base_that_is_a_value(f):
    named = NamedArray(normal(4, 4), ("out", "in"))
    _agrees(f, LowRankUpdate(named, normal(4, 1)), DiagonalMatrix(normal(4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
def test_matrices_out_of_bounds_are_filled_whole(name):
    a, at = MAKERS[name]((2,)), jnp.array([0, 7, -9])
    for fill in (7.0, 0.0, None):
        pick = lambda a, at, fill=fill: a.at[at].get(mode="fill", fill_value=fill)
        found = _agrees(pick, a, at)
        assert isinstance(found, StructuredMatrix) or (
            fill != 0 and type(a) in (DiagonalMatrix, TridiagonalMatrix, BlockDiagonalMatrix)
        )
    _agrees(lambda a, at: a.at[at].get(mode="clip"), a, at)
    with ql.on_materialise("error"):
        kept = _agrees(lambda a: a.at[jnp.array([1, 0, -1])].get(mode="fill"), a)  # known to be inside
    assert isinstance(kept, StructuredMatrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lower", "diagonal", "upper"),
    [
        ([0.0], [0.0, 1.0], [1.0]),  # the first pivot vanishes
        ([2.0, 0.0], [1.0, 2.0, 5.0], [1.0, 0.0]),  # one in the middle
        ([1.0], [1.0, 1.0], [1.0]),  # the last one
        ([0.0, 3.0], [2.0, 0.0, 0.0], [1.0, 0.0]),
        ([], [0.0], []),
        ([1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0]),
    ],
)
def test_a_singular_tridiagonal_matrix(lower, diagonal, upper):
    """Its determinant is zero, with the gradient of cofactors; the logarithm is minus infinity."""
    a = TridiagonalMatrix(*map(jnp.array, (lower, diagonal, upper)))
    sign, log = ql.quaxify(jnp.linalg.slogdet)(a)
    assert (sign, log) == (0, -jnp.inf)
    det = ql.quaxify(jnp.linalg.det)
    assert det(a) == 0
    n = len(diagonal)
    minor = lambda i, j: np.delete(np.delete(np.asarray(a.materialise()), i, 0), j, 1)
    cofactor = lambda i, j: (-1) ** (i + j) * (np.linalg.det(minor(i, j)) if n > 1 else 1.0)
    grad = jax.grad(det)(a)
    np.testing.assert_allclose(grad.diagonal, [cofactor(i, i) for i in range(n)], atol=1e-12)
    np.testing.assert_allclose(grad.lower, [cofactor(i + 1, i) for i in range(n - 1)], atol=1e-12)


@pytest.mark.parametrize("part", [0, 1])
def test_the_determinant_of_an_empty_matrix_has_a_gradient(part):
    f = lambda a: jax.grad(lambda a: jnp.linalg.slogdet(a)[part])(a)
    _agrees(f, DiagonalMatrix(jnp.zeros(0)))


def test_an_update_averaged_in_a_loop():
    """Its rank grows in each iteration, and its base changes: in the end it is dense."""
    base = ql.LoraArray(
        ql.BlockSparseArray.from_dense(normal(4, 4), block_size=2, density=0.5), normal(2, 4), normal(4, 2)
    )
    a = LowRankUpdate(base, normal(4, 1))
    with ql.on_materialise("allow"):
        _agrees(lambda a: jax.lax.fori_loop(0, 3, lambda i, c: 0.5 * c + 0.5 * a, a), a)


def test_a_stack_of_updates_of_one_base_in_a_loop():
    """Base and `v` are shared by the stack before the first iteration, and not after it."""
    a, y = LowRankUpdate(normal(4, 4), normal(2, 4, 1), normal(4, 1)), normal(2, 4, 4)
    found = _agrees(lambda a: jax.lax.fori_loop(0, 3, lambda i, c: 0.5 * c + y, a), a)
    assert isinstance(found, LowRankUpdate)
    _agrees(lambda a: jax.lax.scan(lambda c, _: (a, None), jnp.zeros_like(a), length=2)[0], a)


@pytest.mark.slow
def test_branches_with_updates_of_other_ranks():
    a, b = (LowRankUpdate(DiagonalMatrix(normal(4)), normal(4, rank)) for rank in (1, 3))
    for taken in (True, False):
        found = _agrees(lambda a, b, taken=taken: jax.lax.cond(taken, lambda: a, lambda: b), a, b)
        assert isinstance(found, LowRankUpdate)
        assert found.u.shape == (4, 3)


_SINGULAR = {
    "an array": lambda: jnp.zeros((4, 4)).at[0].set(1.0),
    "a sparse array": lambda: ql.SparseArray.from_dense(jnp.zeros((4, 4)).at[0].set(1.0)),
    "with names": lambda: NamedArray(jnp.zeros((4, 4)).at[0].set(1.0), ("out", "in")),
    "an update": lambda: LowRankUpdate(jnp.zeros((4, 4)).at[0].set(1.0), normal(4, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SINGULAR)
def test_an_update_of_a_singular_base_without_structure(name):
    """Woodbury's formula would divide by zero."""
    a = LowRankUpdate(_SINGULAR[name](), normal(4, 3))
    with ql.on_materialise("allow"):
        for f in (lambda a: jnp.linalg.slogdet(a)[0], lambda a: jnp.linalg.slogdet(a)[1], jnp.linalg.det):
            _agrees(f, a)
        _agrees(jnp.linalg.inv, a)
        _agrees(lambda a: jnp.linalg.solve(a, normal(4, 2)), a)
        of_parts = jax.grad(lambda u: ql.quaxify(jnp.linalg.det)(LowRankUpdate(a.base, u, a.v)))(a.u)
        of_sum = jax.grad(lambda u: jnp.linalg.det(ql.materialise(a.base) + u @ a.v.T))(a.u)
    np.testing.assert_allclose(of_parts, of_sum, rtol=1e-8, atol=1e-8)


def test_an_update_of_a_base_that_solves_by_a_rule():
    with ql.on_materialise("error"):
        _agrees(
            lambda a: jnp.linalg.solve(a, normal(4, 2)),
            LowRankUpdate(Identity(4, jnp.float64), normal(4, 1)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["diagonal", "tridiagonal", "kronecker", "update"])
def test_determinants_of_one_element(name, sign):
    x = jnp.full((1,), 2.0)
    matrix = {
        "diagonal": lambda: DiagonalMatrix(sign * x),
        "tridiagonal": lambda: TridiagonalMatrix(jnp.zeros(0), sign * x, jnp.zeros(0)),
        "kronecker": lambda: KroneckerMatrix(sign * x[None], x[None]),
        "update": lambda: LowRankUpdate(DiagonalMatrix(sign * x), sign * x[None], x[None]),
    }[name]()
    dense = np.asarray(matrix.materialise())
    of_stack = jax.vmap(jnp.linalg.slogdet)
    for f in (jnp.linalg.det, jnp.linalg.slogdet, lambda x: of_stack(jnp.stack([x, x]))):
        jax.tree.map(np.testing.assert_allclose, jax.jit(ql.quaxify(f))(matrix), jax.jit(f)(dense))


_OVERFLOWING = {
    "kronecker": lambda: KroneckerMatrix(array([[100]], "int8"), array([[2]], "int8")),
    "update": lambda: LowRankUpdate(array([[100]], "int8"), array([[50]], "int8"), array([[2]], "int8")),
    "booleans": lambda: LowRankUpdate(array(np.eye(2), "bool"), array(np.ones((2, 1)), "bool")),
    "cancelling": lambda: LowRankUpdate(
        array([[16777217]], "int32"), array([[-16777216]], "int32"), array([[1]], "int32")
    ),
}


@pytest.mark.quick("kronecker", "update")
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize("name", _OVERFLOWING)
def test_integers_wrap_before_they_are_converted(name, default_promotion):
    x = _OVERFLOWING[name]()
    ones = jnp.ones(x.shape[0], jnp.float32)
    programs = [
        lambda x: x.astype(jnp.float32), lambda x: x @ ones, lambda x: ones @ x, jnp.mean, jnp.trace,
        jnp.diagonal, lambda x: jnp.matmul(x, x, preferred_element_type=jnp.int32),
    ]  # fmt: skip
    if x.dtype != bool:
        programs += [jnp.abs, jnp.sign, jnp.linalg.slogdet, jnp.linalg.det, lambda x: x / 2]
    for program in programs:
        found, expected = ql.quaxify(program)(x), program(x.materialise())
        for a, b in zip(jax.tree.leaves(ql.materialise(found)), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_a_diagonal_times_an_update_of_small_integers():
    update = LowRankUpdate(array(np.eye(3), "int8"), array(np.ones((3, 1)), "int8"))
    _agrees(jnp.multiply, DiagonalMatrix(array([1, 2, 3], "int8")), update)


@pytest.mark.parametrize("name", ["diagonal", "tridiagonal"])
def test_the_sign_of_a_complex_determinant_has_a_derivative(name):
    z, t = array([1j, 3 - 1j], "complex128"), array([0.5 + 1j, 0.5 + 1j], "complex128")
    off = array([0.3j], "complex128")
    make = DiagonalMatrix if name == "diagonal" else lambda z: TridiagonalMatrix(off, z, off)
    found = jax.jvp(lambda z: ql.quaxify(jnp.linalg.slogdet)(make(z)), (z,), (t,))
    expected = jax.jvp(lambda z: jnp.linalg.slogdet(make(z).materialise()), (z,), (t,))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_branches_with_blocks_of_different_sizes():
    """They have no common structure."""
    two, one = BlockDiagonalMatrix(normal(2, 2, 2)), BlockDiagonalMatrix(normal(1, 4, 4))
    with ql.on_materialise("allow"):
        _agrees(lambda p, x, y: jax.lax.cond(p, lambda: x, lambda: y), jnp.array(True), two, one)


def test_a_diagonal_times_blocks_has_blocks():
    d, blocks = DiagonalMatrix(normal(6)), BlockDiagonalMatrix(normal(3, 2, 2))
    assert isinstance(_agrees(jnp.matmul, d, blocks), BlockDiagonalMatrix)
    assert isinstance(_agrees(jnp.matmul, blocks, d), BlockDiagonalMatrix)
