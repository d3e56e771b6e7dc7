"""`BlockSparseArray` against the dense matrix it stands for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import quaxlike as ql
from tests.primitives.jaxprs import names
from tests.samples import Late, normal, once

scipy_sparse = Late("scipy.sparse")
B = ql.BlockSparseArray


def pruned(*shape, b=4, density=1 / 3, balanced=False):
    return B.from_dense(normal(*shape, seed=1), block_size=b, density=density, balanced=balanced)


@once
def a_matrix():
    return pruned(8, 12)


@once
def a_stack():
    return pruned(2, 8, 12)


def agrees(f, *args, rtol=1e-5):
    """`f` of the Values is `f` of the arrays, and materialises nothing."""
    expected = jax.jit(f)(*ql.materialise(args))
    with ql.on_materialise("error"):
        out = jax.jit(ql.quaxify(f))(*args)
    assert out.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(ql.materialise(out), expected, rtol=rtol, atol=rtol * scale)
    return out


# -------------------------------------------------------------------------------------------------
# Making one
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_that_are_not_numbers_are_kept():
    w = jnp.zeros((8, 8)).at[0, 5].set(jnp.nan)
    np.testing.assert_array_equal(B.from_dense(w, block_size=4).materialise(), w)


@pytest.mark.slow
def test_the_largest_blocks_are_kept():
    scale = jnp.array([[1.0, 5.0, 2.0], [7.0, 6.0, 4.0]])
    w = jnp.kron(scale, jnp.ones((4, 4)))
    of_each_row = B.from_dense(w, block_size=4, density=1 / 3)
    kept = jnp.array([[0.0, 5.0, 0.0], [7.0, 0.0, 0.0]])
    np.testing.assert_array_equal(of_each_row.materialise(), jnp.kron(kept, jnp.ones((4, 4))))
    assert of_each_row.density == 1 / 3
    of_all = B.from_dense(w, block_size=4, density=0.5, balanced=False)
    kept = jnp.array([[0.0, 5.0, 0.0], [7.0, 6.0, 0.0]])
    np.testing.assert_array_equal(of_all.materialise(), jnp.kron(kept, jnp.ones((4, 4))))


@pytest.mark.quick("False")
@pytest.mark.parametrize("balanced", [True, False])
def test_a_density_that_so_few_blocks_cannot_have_is_told(balanced):
    w = normal(32, 32)
    found = "1 of the 4 blocks of each row are kept, which is 0.25" if balanced else "3 of the 16 blocks"
    with pytest.warns(UserWarning, match=f"density=0.2 cannot be met: {found}"):
        pruned = B.from_dense(w, block_size=8, density=0.2, balanced=balanced)
    assert jnp.mean(pruned.materialise() != 0) == (0.25 if balanced else 0.1875)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 2), max_size=2),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.floats(0, 1),
)
def test_without_a_density_nothing_changes(batch, rows, columns, b, share):
    rng = np.random.default_rng(0)
    mask = rng.random((*batch, rows, columns)) < share
    w = np.kron(mask, np.ones((b, b))) * rng.standard_normal((*batch, rows * b, columns * b))
    w = jnp.asarray(w, jnp.float32)
    sparse = B.from_dense(w, block_size=b)
    assert sparse.shape == w.shape
    assert sparse.col_idx.shape[-1] == mask.sum(-1).max()
    np.testing.assert_array_equal(sparse.materialise(), w)
    np.testing.assert_array_equal(ql.quaxify(lambda w: jnp.swapaxes(w, -2, -1))(sparse).materialise(), w.mT)


def test_to_and_from_scipy():
    for w in (a_matrix(), ql.quaxify(jnp.transpose)(a_matrix())):
        bsr = w.to_scipy()
        assert bsr.format == "bsr"
        np.testing.assert_array_equal(bsr.toarray(), w.materialise())
    for matrix in (a_matrix().to_scipy(), scipy_sparse.csr_array(a_matrix().to_scipy())):
        again = B.from_scipy(matrix, block_size=4)
        assert type(again) is B
        np.testing.assert_array_equal(again.materialise(), a_matrix().materialise())
    empty = B.from_scipy(scipy_sparse.csr_array((8, 4), dtype=np.float32), block_size=4)
    np.testing.assert_array_equal(agrees(lambda w, x: x @ w, empty, normal(3, 8)), jnp.zeros((3, 4)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: B.from_dense(normal(8, 12), block_size=5), r"shape \(8, 12\).*block_size that divides both"),
        (lambda: B.from_dense(normal(8), block_size=4), r"last two axes of w.*\(8,\)"),
        (lambda: B.from_dense(normal(8, 8), block_size=4, density=1.5), "0 < density <= 1; found 1.5"),
        (lambda: jax.jit(lambda w: B.from_dense(w, block_size=4))(normal(8, 8)), "not known under jit"),
        (lambda: B.from_blocks(normal(2, 1, 4, 4), [[0], [3]], 3), None),
        (lambda: B.from_blocks(normal(2, 1, 4, 4), [[0], [4]], 3), r"must lie in \[0, 3\]"),
        (lambda: B.from_blocks(normal(2, 1, 4, 3), [[0], [1]], 3), r"\(2, 1, 4, 3\) and \(2, 1\)"),
        (lambda: B.from_scipy(a_matrix().to_scipy(), block_size=5), r"block_size that divides both"),
        (lambda: a_stack().to_scipy(), r"no stacks of matrices.*\(2, 8, 12\)"),
    ],
)
def test_what_cannot_be_made(make, match):
    if match is None:
        make()
    else:
        with pytest.raises(ValueError, match=match):
            make()


def test_how_it_prints():
    printed = eqx.tree_pformat(a_matrix())
    assert printed.startswith("BlockSparseArray(")
    assert f"col_idx=i32[2,{a_matrix().col_idx.shape[1]}]" in printed


# -------------------------------------------------------------------------------------------------
# Products
# -------------------------------------------------------------------------------------------------


@st.composite
def products(draw):
    """A stack (2, 8, 12) or one matrix, an array, and how `dot_general` contracts them."""
    stacked, axis = draw(st.booleans()), draw(st.integers(0, 1))
    batched = stacked and draw(st.booleans())
    sizes = {"free": draw(st.integers(1, 3)), "other": 2, "summed": (8, 12)[axis], "batch": 2}
    names = ["summed", *draw(st.sampled_from([[], ["free"], ["free", "other"]])), *["batch"][: int(batched)]]
    names = draw(st.permutations(names))
    shape = tuple(sizes[name] for name in names)
    w_dims = ((axis + stacked,), (0,) if batched else ())
    x_dims = ((names.index("summed"),), (names.index("batch"),) if batched else ())
    return stacked, shape, tuple(zip(w_dims, x_dims, strict=True))


@pytest.mark.slow
@settings(max_examples=12)
@given(products())
def test_dot_general_on_both_sides(case):
    """Against the product of the dense arrays in float64."""
    stacked, shape, dims = case
    w, x = a_stack() if stacked else a_matrix(), normal(*shape)
    swapped = tuple(pair[::-1] for pair in dims)
    with ql.on_materialise("error"):
        on_either_side = lambda w, x: (lax.dot_general(w, x, dims), lax.dot_general(x, w, swapped))
        found = jax.jit(ql.quaxify(on_either_side))(w, x)
    with jax.enable_x64(True):
        w, x = (jnp.asarray(np.float64(array)) for array in (w.materialise(), x))
        expected = jax.jit(on_either_side)(w, x)
    for y, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_products_are_the_kernel():
    x = normal(3, 12)
    f = ql.quaxify(lambda w, x: x @ w.T)
    assert names(f, a_matrix(), x) == ["block_sparse_matmul"]


@pytest.mark.slow
def test_a_layer_forward_and_backward_without_anything_dense():
    w, x = B.from_dense(normal(1024, 1024), block_size=64, density=1 / 8), normal(32, 1024)

    @jax.jit
    def step(blocks, x):
        loss = lambda blocks, x: jnp.sum(
            jnp.sin(ql.quaxify(lambda w, x: x @ w.T)(w.replace(blocks=blocks), x))
        )
        return jax.value_and_grad(loss, (0, 1))(blocks, x)

    temporaries = step.lower(w.blocks, x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < w.size * 4 / 4


def test_blocks_in_eight_bits():
    w = a_matrix()
    w = w.replace(blocks=ql.Int8Array.quantize(w.blocks))
    agrees(lambda w, x: x @ w.T, w, normal(3, 2, 12))


@pytest.mark.slow
def test_blocks_in_four_bits():
    w = B.from_dense(normal(256, 192), block_size=64, density=1 / 3)
    w = w.replace(blocks=ql.NF4Array.quantize(w.blocks))
    assert w.blocks.codes.size < 0.4 * 256 * 192 / 2 * 1.3
    x, y = normal(5, 192), normal(5, 256)
    agrees(lambda w, x: x @ w.T, w, x)
    agrees(lambda w, y: y @ w, w, y)
    agrees(lambda w, x: (2.0 * w) @ x[0], w, x)
    grad = lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(ql.quaxify(lambda w, x: x @ w.T)(w, x))))(x)
    np.testing.assert_allclose(grad(w, x), grad(w.materialise(), x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["dense", "nf4"])
def test_products_without_rows(stored):
    w = B.from_dense(normal(16, 8), block_size=8)
    w = w if stored == "dense" else w.replace(blocks=ql.NF4Array.quantize(w.blocks, block_size=32))
    for shape, product in ((0, 16), jnp.matmul), ((2, 0, 16), jnp.matmul), ((0, 8), lambda x, w: x @ w.T):
        out = ql.quaxify(product)(jnp.zeros(shape), w)
        assert out.shape == (*shape[:-1], 24 - shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_summed_in_float32(dtype):
    w, x = ql.quaxify(lambda w: w.astype(dtype))(pruned(64, 256, b=8)), normal(3, 256).astype(dtype)
    y = jax.jit(ql.quaxify(lambda w, x: x @ w.T))(w, x)
    assert y.dtype == dtype
    exact = np.float64(x) @ np.float64(w.materialise()).T
    np.testing.assert_allclose(np.float64(y), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-2)


# -------------------------------------------------------------------------------------------------
# Everything else
# -------------------------------------------------------------------------------------------------


def test_what_densifies_says_so():
    for f in (jnp.cos, lambda w: w > 1.0, jnp.max, lambda w: w[2:5], lambda w: w @ w.T):
        with pytest.raises(ql.MaterialisationError, match="BlockSparseArray"), ql.on_materialise("error"):
            ql.quaxify(f)(a_matrix())
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(
            ql.quaxify(lambda w: w @ w.T)(a_matrix()),
            a_matrix().materialise() @ a_matrix().materialise().T,
            rtol=1e-5,
        )


@pytest.mark.slow
def test_shard_map():
    """Rows of activations, or matrices of a stack, over devices; the index of one matrix is not cut."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x, cut, whole = normal(4, 12), jax.P("i"), jax.P()

    def on_devices(f, *in_specs):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=cut)

    agrees(on_devices(lambda w, x: x @ w.T, whole, cut), a_matrix(), x)
    agrees(on_devices(lambda w, y: y @ w, whole, cut), a_matrix(), normal(4, 8))
    agrees(on_devices(lambda w, x: jnp.einsum("lnk,mk->lnm", w, x), cut, whole), a_stack(), x)
    with pytest.raises(ValueError, match=r"BlockSparseArray of shape \(8, 12\) cannot be sharded"):
        ql.quaxify(on_devices(lambda w, x: w @ x, cut, whole))(a_matrix(), x[0])


def test_a_column_that_comes_twice():
    with pytest.raises(ValueError, match="each block column once in a row"):
        B.from_blocks(jnp.ones((1, 2, 2, 2)), np.array([[1, 1]]), 3)
    assert B.from_blocks(jnp.ones((1, 2, 2, 2)), np.array([[3, 3]]), 3).materialise().sum() == 0


def test_a_stack_is_repeated():
    assert isinstance(agrees(lambda w: jnp.broadcast_to(w, (3, *w.shape)), a_stack()), B)


@pytest.mark.parametrize("start", [8, -1])
def test_a_row_beyond_the_last_is_the_last(start):
    agrees(lambda w, i: lax.dynamic_slice_in_dim(w, i, 1, 0), a_matrix(), jnp.int32(start))


@pytest.mark.quick("True")
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_columns_that_are_looked_up(transposed):
    """Also of blocks that are not there."""
    dense = np.array(normal(6, 8))
    dense[2:4, :4] = dense[:2, 2:6] = 0
    w = ql.BlockSparseArray.from_dense(dense, block_size=2)
    w, dense = (ql.quaxify(jnp.transpose)(w), dense.T) if transposed else (w, dense)
    at = jnp.array([[5, 0, 3], [2, 3, 4]])
    look_up = lambda w, at: [w[at], w[:, at], w[at[0, 0]], w[:, at[1, 2]]]
    for found, expected in zip(
        jax.jit(ql.quaxify(look_up))(w, at), jax.jit(look_up)(jnp.asarray(dense), at), strict=True
    ):
        np.testing.assert_array_equal(ql.materialise(found), expected)
