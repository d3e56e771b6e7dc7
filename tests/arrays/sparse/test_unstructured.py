"""`SparseArray` against the dense array it stands for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import quaxlike as ql
from quaxlike.primitives.classes import ZERO_PRESERVING
from tests.primitives.jaxprs import names
from tests.samples import Late, normal, once, wrong_types

jsparse, scipy_sparse = Late("jax.experimental.sparse"), Late("scipy.sparse")

S = ql.SparseArray


def thinned(*shape, density=0.3, seed=1):
    keep = np.random.default_rng(seed).random(shape) < density
    return jnp.asarray(np.where(keep, normal(*shape, seed=seed), np.float32(0)))


@once
def a_matrix():
    return S.from_dense(thinned(8, 12))


@once
def a_stack():
    """One of its matrices is padded."""
    return S.from_dense(thinned(2, 8, 12), stacked=1)


@once
def a_tensor():
    return S.from_dense(thinned(3, 4, 5))


KINDS = {"matrix": a_matrix, "stack": a_stack, "tensor": a_tensor}


def close(found, expected):
    assert found.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(ql.materialise(found), expected, rtol=1e-5, atol=1e-5 * scale)


def agrees(f, *args):
    """`f` of the Values is `f` of the arrays (any tree of results), and materialises nothing."""
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(f))(*args)
    jax.tree.map(close, found, jax.jit(f)(*ql.materialise(args)), is_leaf=ql.is_value)
    return found


# -------------------------------------------------------------------------------------------------
# Making one, and conversions
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 1.0]), st.data())
def test_without_a_density_nothing_changes(shape, density, data):
    x = np.where(
        np.random.default_rng(0).random(shape) < density, 1 + np.arange(np.prod(shape)).reshape(shape), 0
    )
    stacked = data.draw(st.integers(0, len(shape) - 1))
    sparse = S.from_dense(np.float32(x), stacked=stacked)
    assert sparse.shape == x.shape
    assert sparse.num_batch == stacked
    np.testing.assert_array_equal(sparse.materialise(), x)
    again = S.from_bcoo(sparse.to_bcoo())
    assert again.shape == x.shape
    np.testing.assert_array_equal(again.materialise(), x)


@pytest.mark.slow
def test_the_largest_elements_are_kept():
    x = jnp.array([[1.0, -5.0, 2.0], [0.0, 4.0, 3.0]])
    np.testing.assert_array_equal(S.from_dense(x, density=0.5).materialise(), [[0, -5, 0], [0, 4, 3]])
    each = S.from_dense(x, density=0.34, stacked=1)
    np.testing.assert_array_equal(each.materialise(), [[0, -5, 0], [0, 4, 0]])
    with pytest.warns(UserWarning, match="density=0.01 cannot be met: 1 of 6 elements are kept"):
        one = S.from_dense(x, density=0.01)
    np.testing.assert_array_equal(one.materialise(), [[0, -5, 0], [0, 0, 0]])


@pytest.mark.slow
def test_elements_in_any_order_are_sorted_and_added_up():
    indices = np.array([[2, 1], [0, 3], [2, 1], [9, 0], [0, 0], [-1, 0]])
    x = S.from_coo(jnp.arange(1.0, 7.0), indices, (3, 4))
    np.testing.assert_array_equal(x.materialise(), [[5, 0, 0, 2], [0, 0, 0, 0], [0, 4, 0, 0]])
    assert x.csr is not None
    np.testing.assert_array_equal(x @ jnp.ones(4), [7, 0, 4])
    grad = jax.grad(lambda data: S.from_coo(data, indices, (3, 4)).materialise()[2].sum())(jnp.ones(6))
    np.testing.assert_array_equal(grad, [1, 0, 1, 0, 0, 0])
    stack = S.from_coo(jnp.ones((2, 2)), [[[0], [0]], [[1], [2]]], (2, 3))
    np.testing.assert_array_equal(stack.materialise(), [[2, 0, 0], [0, 1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["matrix", "stack", "transposed"])
def test_bcoo_and_bcsr(kind):
    x = ql.quaxify(jnp.transpose)(a_matrix()) if kind == "transposed" else KINDS[kind]()
    dense = x.materialise()
    for matrix in (x.to_bcoo(), x.to_bcsr()):
        np.testing.assert_array_equal(matrix.todense(), dense)
    for again in (S.from_bcoo(x.to_bcoo()), S.from_bcsr(x.to_bcsr())):
        assert again.csr is not None
        assert again.num_batch == x.num_batch
        np.testing.assert_array_equal(again.materialise(), dense)


@pytest.mark.slow
def test_layouts_of_bcoo():
    x = thinned(2, 3, 4)
    for layout in ({"n_batch": 1}, {"n_dense": 1}, {"n_batch": 1, "n_dense": 1}, {"nse": 24}):
        matrix = jsparse.BCOO.fromdense(x, **layout)
        found = S.from_bcoo(matrix)
        assert found.num_batch == layout.get("n_batch", 0)
        np.testing.assert_array_equal(found.materialise(), x)
    shared = jsparse.BCOO((jnp.ones((2, 1)), jnp.zeros((1, 1, 1), jnp.int32)), shape=(2, 3))
    np.testing.assert_array_equal(S.from_bcoo(shared).materialise(), [[1, 0, 0], [1, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["batches", "one pattern"])
def test_bcoo_that_is_traced(shared):
    """Of duplicates as well."""
    data, indices = normal(2, 5), jnp.array([[[0, 1], [2, 0], [0, 1], [3, 4], [2, 3]]] * (1 if shared else 2))
    matrix = jsparse.BCOO((data, indices), shape=(2, 3, 4))
    with ql.on_materialise("error"):
        found = jax.jit(lambda m: ql.quaxify(lambda w: jnp.abs(w @ jnp.ones(4)))(S.from_bcoo(m)))(matrix)
        each = jax.vmap(lambda m: S.from_bcoo(m) @ jnp.ones(4))(
            jsparse.BCOO((data, jnp.broadcast_to(indices, (2, 5, 2))), shape=(2, 3, 4))
        )
    expected = matrix.todense() @ jnp.ones(4)
    np.testing.assert_allclose(found, jnp.abs(expected), rtol=1e-5)
    np.testing.assert_allclose(each, expected, rtol=1e-5)


def test_scipy():
    for matrix in (
        scipy_sparse.csc_array(a_matrix().materialise()),
        scipy_sparse.dok_array(a_matrix().materialise()),
    ):
        np.testing.assert_array_equal(S.from_scipy(matrix).materialise(), a_matrix().materialise())
    assert a_matrix().to_scipy().format == "csr"
    np.testing.assert_array_equal(a_matrix().to_scipy().toarray(), a_matrix().materialise())
    np.testing.assert_array_equal(
        ql.quaxify(jnp.transpose)(a_matrix()).to_scipy().toarray(), a_matrix().materialise().T
    )
    vector = S.from_dense(thinned(9))
    np.testing.assert_array_equal(vector.to_scipy().toarray(), vector.materialise())
    np.testing.assert_array_equal(S.from_scipy(vector.to_scipy()).materialise(), vector.materialise())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: jax.jit(S.from_dense)(normal(3, 4)), "not known under jit"),
        (lambda: S.from_dense(normal(3, 4), density=0.0), "0 < density <= 1; found 0.0"),
        (lambda: S.from_dense(normal(3, 4), stacked=2), r"shape \(3, 4\) and stacked=2"),
        (lambda: S.from_coo(jnp.ones(3), np.zeros((3, 2)), (4,)), r"indices \(3, 2\) and shape \(4,\)"),
        (lambda: jax.jit(lambda i: S.from_coo(jnp.ones(1), i, (4,)))(jnp.zeros((1, 1))), "are traced"),
        (lambda: a_stack().to_scipy(), r"no stacks of arrays.*\(2, 8, 12\)"),
        (lambda: a_matrix().shard_spec(jax.P("i")), r"SparseArray of shape \(8, 12\) cannot be sharded"),
        (lambda: S(jnp.ones(1), (jnp.array([99]),), (4,)), r"sizes \(4,\) .* found an element at \(99,\)"),
        (lambda: S(jnp.ones(1), (jnp.array([-1]),), (4,)), r"found an element at \(-1,\)"),
        (lambda: S(jnp.ones(1), (jnp.array([4]), jnp.array([1])), (4, 4)), r"found an element at \(4, 1\)"),
        (lambda: S(jnp.ones(2), (jnp.array([3, 3]),), (4,)), "takes each place once"),
        (lambda: S(jnp.ones(1), (jnp.array([0]),), (-4,)), r"not negative; found \(-4,\)"),
        (lambda: S(jnp.ones(2), (jnp.array([0]),), (4,)), r"found data \(2,\), indices \[\(1,\)\]"),
    ],
)
def test_what_cannot_be_made(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_how_it_prints():
    printed = eqx.tree_pformat(a_matrix())
    assert printed.startswith("SparseArray(")
    assert f"data=f32[{a_matrix().nse}]" in printed


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
def test_of_zeros_nothing_is_stored(shape):
    assert S.from_dense(jnp.zeros(shape), stacked=len(shape) - 2).nse == 0


# -------------------------------------------------------------------------------------------------
# Products
# -------------------------------------------------------------------------------------------------


@st.composite
def products(draw):
    """How `dot_general` contracts a sparse array of 2 or 3 axes with an array."""
    kind = draw(st.sampled_from(["matrix", "stack", "tensor"]))
    shape = {"matrix": (8, 12), "stack": (2, 8, 12), "tensor": (3, 4, 5)}[kind]
    roles = [draw(st.sampled_from(["free", "summed", "batch"])) for _ in shape]
    pairs = draw(st.permutations([axis for axis, role in enumerate(roles) if role != "free"]))
    others = [None] * draw(st.integers(0, 2))
    x_axes = draw(st.permutations([*pairs, *others]))
    x_shape = tuple(2 if axis is None else shape[axis] for axis in x_axes)
    of_role = lambda role: tuple(axis for axis in pairs if roles[axis] == role)
    dims = tuple((of_role(r), tuple(map(x_axes.index, of_role(r)))) for r in ("summed", "batch"))
    return kind, x_shape, dims


@pytest.mark.slow
@settings(max_examples=15)
@given(products())
def test_dot_general_on_both_sides(case):
    """Against the product of the dense arrays in float64."""
    kind, shape, dims = case
    w, x = KINDS[kind](), normal(*shape)
    swapped = tuple(pair[::-1] for pair in dims)
    on_either_side = lambda w, x: (lax.dot_general(w, x, dims), lax.dot_general(x, w, swapped))
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(on_either_side))(w, x)
    with jax.enable_x64(True):
        expected = jax.jit(on_either_side)(*(jnp.asarray(np.float64(a)) for a in (w.materialise(), x)))
    for y, exact in zip(found, expected, strict=True):
        assert y.shape == exact.shape
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_products_are_the_kernel():
    x = normal(3, 12)
    f = ql.quaxify(lambda w, x: x @ w.T)
    assert names(f, a_matrix(), x) == ["csr_matmul"]
    assert names(ql.quaxify(lambda w, x: w.T.T @ x.T), a_matrix(), x).count("csr_matmul") == 1


def test_a_product_of_two_whose_patterns_are_known():
    other = S.from_dense(thinned(12, 5, seed=3))
    with ql.on_materialise("error"):
        product = ql.quaxify(jnp.matmul)(a_matrix(), other)
    assert type(product) is S
    assert product.nse < 8 * 5
    close(product, a_matrix().materialise() @ other.materialise())


@pytest.mark.slow
def test_products_of_vectors_and_of_traced_data():
    other = S.from_dense(thinned(12, 5, seed=3))
    vectors = [S.from_dense(thinned(30, seed=seed)) for seed in (5, 6)]
    with ql.on_materialise("error"):
        found = ql.quaxify(jnp.dot)(*vectors)
    close(found, jnp.dot(*ql.materialise(vectors)))

    # Of data that is traced:
    @jax.jit
    def traced(data):
        return ql.quaxify(jnp.matmul)(a_matrix().replace(data=data), other).materialise()

    with ql.on_materialise("error"):
        close(traced(2 * a_matrix().data), 2 * a_matrix().materialise() @ other.materialise())
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="SparseArray"):
        jax.jit(ql.quaxify(jnp.matmul))(a_matrix(), other)


@pytest.mark.slow
def test_a_layer_forward_and_backward_without_anything_dense():
    w, x = S.from_dense(normal(1024, 1024), density=0.05), normal(32, 1024)

    @jax.jit
    def step(data, x):
        loss = lambda data, x: jnp.sum(jnp.sin(ql.quaxify(lambda w, x: x @ w.T)(w.replace(data=data), x)))
        return jax.value_and_grad(loss, (0, 1))(data, x)

    temporaries = step.lower(w.data, x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < w.size * 4 / 2


# -------------------------------------------------------------------------------------------------
# Everything else
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sums_of_small_integers_keep_their_dtype():
    x = S.from_dense(jnp.array([[1, 0, 2], [0, 0, 3]], jnp.int8))
    for f in (
        lambda x: lax.reduce_sum(x, (0, 1)),
        lambda x: lax.reduce_sum(x, (1,)),
        lambda x: lax.squeeze(x[:1, 2:], (0, 1)),
        lambda x: x[:1, :1].reshape(()),
        lambda x: lax.reshape(lax.reshape(x, (6,))[2:3], ()),
    ):
        assert agrees(f, x).dtype == jnp.int8


def test_layers_are_stacked_and_scanned():
    """Of different numbers of elements."""
    layers = [S.from_dense(thinned(6, 6, seed=seed)) for seed in (1, 2, 3)]
    assert len({layer.nse for layer in layers}) > 1

    def run(layers, x):
        return lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, jnp.stack(layers))[0]

    agrees(run, layers, normal(6))
    assert "csr_matmul" in names(ql.quaxify(run), layers, normal(6))


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ZERO_PRESERVING)
def test_functions_that_keep_zero_keep_the_type(name):
    functions = {
        "convert_element_type": lambda x: x.astype(jnp.int32),
        "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
        "neg": jnp.negative,
        "erf_inv": lambda x: lax.erf_inv(x / 10),
        "asin": lambda x: jnp.arcsin(x / 10),
        "atanh": lambda x: jnp.arctanh(x / 10),
        "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
        "log1p": lambda x: jnp.log1p(jnp.abs(x)),
        "imag": lambda x: lax.imag(x.astype(jnp.complex64)),
        "real": lambda x: lax.real(x.astype(jnp.complex64)),
    }
    assert (
        type(agrees(functions.get(name) or getattr(lax, name, None) or getattr(jnp, name), a_matrix())) is S
    )


@pytest.mark.slow
def test_two_whose_patterns_are_known():
    other = S.from_dense(thinned(8, 12, seed=7))
    for f in (lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y):
        with ql.on_materialise("error"):
            found = ql.quaxify(f)(a_matrix(), other)
        assert type(found) is S
        assert found.nse <= a_matrix().nse + other.nse
        close(found, f(a_matrix().materialise(), other.materialise()))


def test_what_densifies_says_so():
    for f in (jnp.cos, lambda x: x > 1.0, jnp.max, jnp.exp, lambda x: x**0):
        with pytest.raises(ql.MaterialisationError, match="SparseArray"), ql.on_materialise("error"):
            ql.quaxify(f)(a_matrix())
    with pytest.warns(ql.MaterialisationWarning, match="SparseArray"):
        close(ql.quaxify(jnp.cos)(a_matrix()), jnp.cos(a_matrix().materialise()))


@pytest.mark.slow
def test_a_shape_of_integers_of_any_kind():
    for shape in ((2, 3), (jnp.int32(2), np.int64(3)), [np.array(2), 3], jnp.array([2, 3])):
        made = ql.SparseArray.from_coo(jnp.array([4.0]), np.array([[1, 2]]), shape)
        assert made.shape == (2, 3)
        np.testing.assert_array_equal(made.materialise(), [[0, 0, 0], [0, 0, 4]])
    with pytest.raises(ValueError, match=r"not negative; found \(2, -3\)"):
        ql.SparseArray.from_coo(jnp.array([4.0]), np.array([[1, 2]]), (2, jnp.int32(-3)))


@wrong_types
@pytest.mark.parametrize("shape", [(2.0, 3), ("2", 3), (2, None)])
def test_a_shape_that_is_not_of_integers(shape):
    with pytest.raises(ValueError, match="takes a shape of integers; found"):
        ql.SparseArray.from_coo(jnp.array([4.0]), np.array([[1, 2]]), shape)


def test_a_bcoo_without_a_sparse_axis():
    for n_batch, n_dense in ((2, 0), (1, 1)):
        matrix = jsparse.BCOO.fromdense(jnp.ones((2, 3)), n_batch=n_batch, n_dense=n_dense)
        match = (
            f"at least one sparse axis; found one of shape .* with n_batch={n_batch} and n_dense={n_dense}"
        )
        with pytest.raises(ValueError, match=match):
            ql.SparseArray.from_bcoo(matrix)


def test_why_a_large_matrix_is_not_reshaped():
    x = ql.SparseArray.from_coo(jnp.array([4.0]), np.array([[1, 2]]), (100_000, 100_000))
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="do not fit int32"):
        x.reshape(-1)


def test_rows_of_elements_in_no_order_are_those_of_the_whole():
    ids = np.array([[3, 0, 7], [3, 3, 1]])
    unordered = a_matrix().placed(a_matrix().data, a_matrix().indices, a_matrix().sizes)
    with ql.on_materialise("allow"):
        found = jax.jit(ql.quaxify(lambda x: jnp.take(x, ids, axis=0)))(unordered)
    np.testing.assert_allclose(found, np.take(np.asarray(a_matrix().materialise()), ids, axis=0))


def test_elements_times_a_row():
    """Also where one of a stack is padded."""
    assert isinstance(agrees(lambda w, x: w * x, a_stack(), normal(1, 1, 12)), S)


def test_a_stack_is_repeated_and_its_rows_are_not():
    w, repeated = a_stack(), lambda w: jnp.broadcast_to(w, (3, *w.shape))
    assert agrees(repeated, w).nse == w.nse
    one, longer = S.from_dense(thinned(2, 1, 5), stacked=1), lambda w: jnp.broadcast_to(w, (2, 3, 5))
    with ql.on_materialise("allow"):
        close(ql.quaxify(longer)(one), longer(one.materialise()))


@pytest.mark.parametrize(
    "f",
    [lambda w, x: x + w, lambda w, x: w - x, lambda w, x: x - w],
    ids=["x + w", "w - x", "x - w"],
)
def test_sums_with_an_array(f):
    w, x = a_matrix(), normal(8, 12)
    close(ql.quaxify(f)(w, x), f(w.materialise(), x))
