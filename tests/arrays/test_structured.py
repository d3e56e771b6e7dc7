"""Structured matrices against the dense ones that they stand for, in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import quaxlike as ql
from quaxlike.arrays.structured import (
    BlockCirculantMatrix,
    BlockDiagonalMatrix,
    DiagonalMatrix,
    KroneckerMatrix,
    LowRankUpdate,
    StructuredMatrix,
    TridiagonalMatrix,
    logdet,
    solve,
)
from quaxlike.arrays.unitful import Unitful
from tests.samples import Late, array, checks_annotations

scipy_linalg = Late("scipy.linalg")

pytestmark = pytest.mark.usefixtures("x64")

N = 6


def _normal(*shape, seed=0):
    return array(np.random.default_rng([seed, *shape]).normal(size=shape))


def _tridiagonal(batch=()):
    return TridiagonalMatrix(_normal(*batch, N - 1), _normal(*batch, N), _normal(*batch, N - 1, seed=1))


def _update(base, batch=(), rank=2):
    return LowRankUpdate(base, _normal(*batch, N, rank, seed=2), _normal(*batch, N, rank, seed=3))


MAKERS = {
    "diagonal": lambda b: DiagonalMatrix(_normal(*b, N)),
    "tridiagonal": _tridiagonal,
    "block diagonal": lambda b: BlockDiagonalMatrix(_normal(*b, 2, 3, 3)),
    "block circulant": lambda b: BlockCirculantMatrix(_normal(*b, 2, 2, 3)),
    "kronecker": lambda b: KroneckerMatrix(_normal(*b, 2, 2), _normal(*b, 3, 3)),
    "kronecker, shared": lambda b: KroneckerMatrix(_normal(2, 2), _normal(*b, 3, 3)),
    "kronecker of structured": lambda b: KroneckerMatrix(DiagonalMatrix(_normal(*b, 2)), _normal(*b, 3, 3)),
    "update of dense": lambda b: _update(_normal(*b, N, N), b),
    "update, shared": lambda b: _update(_normal(N, N), b),
    "update of diagonal": lambda b: _update(DiagonalMatrix(_normal(*b, N)), b),
    "update of tridiagonal": lambda b: _update(_tridiagonal(b), b),
    "update of update": lambda b: _update(_update(DiagonalMatrix(_normal(*b, N)), b, rank=1), b),
}


def _same(found, expected):
    tol = {"rtol": 1e-8, "atol": 1e-8}
    if jtu.tree_leaves(expected)[0].dtype == jnp.float32:
        tol = {"rtol": 1e-5, "atol": 1e-5}
    check = lambda x, y: np.testing.assert_allclose(ql.materialise(x), y, **tol)
    jtu.tree_map(check, found, expected, is_leaf=ql.is_value)


def test_each_multiplies_and_solves_as_its_array():
    """All in one program."""
    names = ("diagonal", "tridiagonal", "block diagonal", "block circulant", "kronecker")
    matrices = {f"{name}, {batch}": MAKERS[name](batch) for name in names for batch in ((), (3,))}
    x = _normal(N, 2, seed=5)

    def run(matrices):
        wide = lambda a: jnp.broadcast_to(x, (*a.shape[:-1], 2))
        return {name: (a @ wide(a), solve(a, wide(a))) for name, a in matrices.items()}

    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(run))(matrices)
    for name, a in jax.jit(ql.materialise)(matrices).items():
        _same(found[name], (np.asarray(a) @ x, np.linalg.solve(a, x)))


@pytest.mark.quick("update of dense")
@pytest.mark.parametrize("name", MAKERS)
def test_inverse(name):
    a = MAKERS[name](())
    with ql.on_materialise("error"):
        out = ql.quaxify(jnp.linalg.inv)(a)
    assert isinstance(out, StructuredMatrix) == (
        name not in ("tridiagonal", "update of dense", "update, shared")
    )
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(
            ql.materialise(out), jnp.linalg.inv(ql.materialise(a)), rtol=1e-7, atol=1e-8
        )


# -------------------------------------------------------------------------------------------------
# Two structured matrices
# -------------------------------------------------------------------------------------------------

PRODUCTS = {
    ("diagonal", "diagonal"): DiagonalMatrix,
    ("diagonal", "tridiagonal"): TridiagonalMatrix,
    ("tridiagonal", "diagonal"): TridiagonalMatrix,
    ("kronecker", "kronecker"): KroneckerMatrix,
    ("diagonal", "update of diagonal"): LowRankUpdate,
    ("update of diagonal", "diagonal"): LowRankUpdate,
    ("update of diagonal", "tridiagonal"): LowRankUpdate,
    ("tridiagonal", "update of diagonal"): LowRankUpdate,
    ("update of diagonal", "update of diagonal"): LowRankUpdate,
    ("diagonal", "update of dense"): LowRankUpdate,
}


@pytest.mark.quick("kronecker @ kronecker-(4,)")
@pytest.mark.parametrize("batch", [(), (4,)], ids=str)
@pytest.mark.parametrize("names", PRODUCTS, ids=" @ ".join)
def test_products_that_are_structured(names, batch):
    a, b = (MAKERS[name](batch) for name in names)
    with ql.on_materialise("error"):
        out = ql.quaxify(jnp.matmul)(a, b)
        transposed = ql.quaxify(lambda a, b: jnp.matrix_transpose(a) @ b)(a, b)
    assert type(out) is PRODUCTS[names]
    _same(out, ql.materialise(a) @ ql.materialise(b))
    _same(transposed, jnp.matrix_transpose(ql.materialise(a)) @ ql.materialise(b))


KINDS = ["diagonal", "tridiagonal", "kronecker", "update of dense", "update of diagonal"]


def test_sums_that_are_structured():
    names = ("diagonal", "tridiagonal", "update of diagonal", "update of dense", "block circulant")
    d, t, u, v, c = (MAKERS[name](()) for name in names)
    matrix = _normal(N, N)
    with ql.on_materialise("error"):
        assert type(d + d) is DiagonalMatrix
        assert type(d + t) is type(t - d) is TridiagonalMatrix
        assert type(u + t) is type(t - u) is type(u - u) is LowRankUpdate
        assert (u - u).u.shape == (N, 4)
        assert type(c + c) is BlockCirculantMatrix
        assert type(v + matrix) is type(matrix - v) is LowRankUpdate
    _same(matrix - v, matrix - v.materialise())


def test_quotients_by_arrays():
    k, matrix = MAKERS["kronecker"](()), 1 + _normal(N, N) ** 2
    with ql.on_materialise("allow"):
        _same(ql.quaxify(jnp.divide)(k, matrix), k.materialise() / matrix)


@pytest.mark.parametrize("name", ["diagonal", "kronecker", "block diagonal"])
def test_more_batch_axes(name):
    a = MAKERS[name]((3,))
    broadcast = lambda a: jnp.broadcast_to(a, (2, *a.shape))
    with ql.on_materialise("error"):
        found = ql.quaxify(broadcast)(a)
    assert type(found) is type(a)
    _same(found, broadcast(a.materialise()))


def test_matrices_along_another_axis_have_no_structure():
    d, apart = DiagonalMatrix(_normal(N)), lambda d: lax.broadcast_in_dim(d, (N, 2, N), (0, 2))
    with ql.on_materialise("allow"):
        _same(ql.quaxify(apart)(d), apart(d.materialise()))


# -------------------------------------------------------------------------------------------------
# Shapes, numbers, errors
# -------------------------------------------------------------------------------------------------


@pytest.mark.quick("block diagonal", "kronecker")
@pytest.mark.parametrize("name", MAKERS)
def test_traces(name):
    a = MAKERS[name](())
    np.testing.assert_allclose(ql.quaxify(jnp.trace)(a), jnp.trace(a.materialise()), rtol=1e-10)


def test_systems_of_one_equation():
    one = TridiagonalMatrix(jnp.zeros(0), jnp.array([4.0]), jnp.zeros(0))
    np.testing.assert_array_equal(solve(one, jnp.array([2.0])), [0.5])


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_tridiagonal_determinant_and_system(n, seed):
    """Of integers, so that pivots vanish; the oracles are numpy's determinant and SciPy's banded solver."""
    rng = np.random.default_rng(seed)
    lower, diagonal, upper = (rng.integers(-2, 3, size).astype(float) for size in (n - 1, n, n - 1))
    dense = np.diag(diagonal) + np.diag(lower, -1) + np.diag(upper, 1)
    a = TridiagonalMatrix(*map(jnp.asarray, (lower, diagonal, upper)))
    sign, log = ql.quaxify(jnp.linalg.slogdet)(a)
    det = np.round(np.linalg.det(dense))
    np.testing.assert_allclose(sign * np.exp(log), det, rtol=1e-9, atol=1e-9)
    if det != 0:
        b = rng.normal(size=n)
        bands = np.stack([np.append(0, upper), diagonal, np.append(lower, 0)])
        expected = scipy_linalg.solve_banded(
            (min(1, n - 1), min(1, n - 1)), bands if n > 1 else bands[1:2], b
        )
        np.testing.assert_allclose(solve(a, jnp.asarray(b)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q", "r", "s"), [(1, 3, 2, 2), (3, 1, 2, 4), (2, 3, 3, 2), (4, 2, 1, 1)])
def test_rectangular_kronecker(p, q, r, s):
    a, b, x = _normal(p, q), _normal(r, s), _normal(q * s, 3)
    found = ql.quaxify(jnp.matmul)(KroneckerMatrix(a, b), x)
    np.testing.assert_allclose(found, np.kron(a, b) @ x, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(ql.materialise(KroneckerMatrix(a, b)), np.kron(a, b))
    trace = ql.quaxify(jnp.trace)(KroneckerMatrix(a, b))
    np.testing.assert_allclose(trace, np.trace(np.kron(a, b)), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "rank"), [(3, 5, 2), (5, 3, 1), (4, 4, 0), (1, 2, 3)])
def test_rectangular_update(m, n, rank):
    base, u, v, x = _normal(m, n), _normal(m, rank), _normal(n, rank, seed=1), _normal(n)
    found = ql.quaxify(jnp.matmul)(LowRankUpdate(base, u, v), x)
    np.testing.assert_allclose(found, base @ x + u @ (v.T @ x), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["ij,jk->ik", "ij,kj->ki", "ij,ki->jk", "bij,bj->bi", "bij,jb->ib", "bij,cj->bci", "bij,bcj->cib"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_contractions(name, spec):
    operands, _ = spec.split("->")
    left, right = operands.split(",")
    sizes = {"b": 4, "c": 2, "k": 3, "i": N, "j": N}
    a, x = MAKERS[name]((4,) if "b" in left else ()), _normal(*(sizes[i] for i in right))
    f = lambda a, x: jnp.einsum(spec, a, x)
    g = lambda a, x: jnp.einsum(f"{right},{left}->{spec.split('->')[1]}", x, a)
    with ql.on_materialise("error"):
        for h in (f, g):
            _same(ql.quaxify(h)(a, x), h(ql.materialise(a), x))


@pytest.mark.slow
def test_mixed_precision():
    d = DiagonalMatrix(jnp.ones(4, jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"):
        assert ql.quaxify(jnp.matmul)(d, jnp.ones(4, jnp.float32)).dtype == jnp.float32
    wide = ql.quaxify(lambda d, x: jnp.matmul(d, x, preferred_element_type=jnp.float32))
    assert wide(d, jnp.ones(4, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagonal", "tridiagonal", "kronecker, shared", "update of diagonal"])
def test_products_are_computed_in_the_dtype_that_is_asked_for(name):
    a = jtu.tree_map(lambda x: jnp.full(x.shape, 11, jnp.int8), MAKERS[name](()))
    wide = a.materialise().astype(jnp.int32)  # small integers wrap, as in the dense matrix
    x = jnp.full(N, 100, jnp.int8)
    f = lambda a, x: jnp.matmul(a, x, preferred_element_type=jnp.int32)
    _same(ql.quaxify(f)(a, x), wide @ x.astype(jnp.int32))
    _same(ql.quaxify(f)(x, a), x.astype(jnp.int32) @ wide)
    if name == "diagonal":
        _same(ql.quaxify(f)(a, a), wide @ wide)


@pytest.mark.slow
@pytest.mark.skipif(checks_annotations, reason="The annotations of shapes are of numbers.")
def test_scaling_a_matrix_of_symbolic_size():
    (n,) = jax.export.symbolic_shape("n")
    program = jax.jit(lambda d: ql.materialise(ql.quaxify(lambda x: 2.0 * x)(DiagonalMatrix(d))))
    exported = jax.export.export(program)(jax.ShapeDtypeStruct((n,), jnp.float32))
    np.testing.assert_array_equal(exported.call(jnp.ones(2, jnp.float32)), 2 * np.eye(2))


@pytest.mark.slow
def test_nothing_dense_is_made():
    """A system whose dense matrix would take 8 TB."""
    n = 10**6
    heat = TridiagonalMatrix(-jnp.ones(n - 1), 3 * jnp.ones(n), -jnp.ones(n - 1))
    kron = KroneckerMatrix(DiagonalMatrix(jnp.full(1000, 2.0)), DiagonalMatrix(jnp.full(1000, 3.0)))
    update = LowRankUpdate(heat, 1e-3 * jnp.ones((n, 1)))
    for a in (DiagonalMatrix(jnp.full(n, 2.0)), heat, kron, update):
        f = jax.jit(ql.quaxify(lambda a, x: (jnp.linalg.solve(a, a @ x), jnp.linalg.slogdet(a)[1])))
        x, log = f(a, jnp.ones(n))
        np.testing.assert_allclose(x, 1.0, rtol=1e-6)
        assert jnp.isfinite(log)


@pytest.mark.slow
def test_direct_functions():
    a = MAKERS["update of diagonal"](())
    dense, b = ql.materialise(a), _normal(N)
    np.testing.assert_allclose(solve(a, b), np.linalg.solve(dense, b), rtol=1e-8)
    np.testing.assert_allclose(logdet(a), np.linalg.slogdet(dense)[1], rtol=1e-8)
    np.testing.assert_allclose(solve(dense, b), np.linalg.solve(dense, b), rtol=1e-8)


def test_function_of_the_same_name_is_not_mistaken():
    @jax.jit
    def slogdet(a):
        return a @ jnp.ones(N)

    inv = jax.jit(lambda a: jnp.matrix_transpose(a))
    a = MAKERS["tridiagonal"](())
    np.testing.assert_allclose(ql.quaxify(slogdet)(a), slogdet(ql.materialise(a)))
    _same(ql.quaxify(inv)(a), inv(ql.materialise(a)))
    f = lambda a: jnp.diagonal(a, offset=1)
    np.testing.assert_allclose(ql.quaxify(f)(a), f(ql.materialise(a)))


def test_elements_of_the_factors_are_refused():
    with pytest.raises(ql.MaterialisationError, match=r"(?s)Factored.*factorise `quaxlike.mat"):
        ql.quaxify(lambda a: jax.scipy.linalg.lu_factor(a)[0] + 1.0)(MAKERS["kronecker"](()))
    with ql.on_materialise("allow"), pytest.raises(ValueError, match="Factorise `quaxlike"):
        ql.quaxify(lambda a: jax.scipy.linalg.lu_factor(a)[0] + 1.0)(MAKERS["kronecker"](()))


def test_determinant_of_a_diagonal_matrix_with_a_unit():
    a = DiagonalMatrix(jnp.array([2.0, 3.0, 4.0]))
    volume = ql.quaxify(jnp.linalg.det)(Unitful(a, "m"))
    assert volume.unit == Unitful(1.0, "m^3").unit
    np.testing.assert_allclose(volume.array, 24.0)


def test_shapes_that_do_not_fit():
    x = jnp.ones
    with pytest.raises(ValueError, match=r"diagonal of shape \(\*batch, n\)"):
        DiagonalMatrix(x(()))
    with pytest.raises(ValueError, match="takes lower and upper of length 3; found 4 and 3"):
        TridiagonalMatrix(x(4), x(4), x(3))
    with pytest.raises(
        ValueError, match=r"batch axes that all its parts share .* a \(2, 3, 3\), b \(4, 3, 3\)"
    ):
        KroneckerMatrix(x((2, 3, 3)), x((4, 3, 3)))
    with pytest.raises(ValueError, match=r"u of shape \(..., 4, rank\) .* found \(3, 2\) and \(5, 2\)"):
        LowRankUpdate(x((4, 5)), x((3, 2)), x((5, 2)))
    with pytest.raises(ValueError, match="not square"):
        ql.quaxify(jnp.linalg.inv)(KroneckerMatrix(x((2, 3)), x((3, 2))))


def test_printing():
    a = LowRankUpdate(DiagonalMatrix(jnp.ones(3)), jnp.ones((3, 1)))
    assert (
        eqx.tree_pformat(a, width=200)
        == "LowRankUpdate(base=DiagonalMatrix(diagonal=f64[3]), u=f64[3,1], v=f64[3,1])"
    )


def test_shard_spec():
    a = MAKERS["update of diagonal"]((4,))
    P = jax.P
    assert a.shard_spec(P("i")) == [P("i", None), P("i", None, None), P("i", None, None)]
    assert a.shard_spec(P(None, "i")) is NotImplemented


@pytest.mark.slow
def test_no_ambiguities():
    ql.check_ambiguities()
