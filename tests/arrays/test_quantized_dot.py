"""Products with quantised weights against the same products with the dense weights, in float64."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.arrays.quantized.dot import Tiles

_TYPES = [ql.NF4Array, ql.FP4Array, ql.Int4Array, ql.Int8Array]


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _close(actual, expected, tolerance=2e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = max(np.abs(expected).max(initial=0), 1e-3)
    np.testing.assert_allclose(actual, expected, atol=tolerance * scale, rtol=0)


def _dot_general_in_float64(x, w, dimension_numbers):
    (x_contract, w_contract), (x_batch, w_batch) = dimension_numbers
    w_names = [None] * w.ndim
    x_names = list(range(x.ndim))
    for i, j in zip((*x_contract, *x_batch), (*w_contract, *w_batch), strict=True):
        w_names[j] = i
    w_names = [x.ndim + j if name is None else name for j, name in enumerate(w_names)]
    out = [x_names[i] for i in x_batch]
    out += [i for i in x_names if i not in (*x_contract, *x_batch)]
    out += [name for name in w_names if name >= x.ndim]
    return np.einsum(x.astype(np.float64), x_names, w.astype(np.float64), w_names, out)


@st.composite
def _products(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 16, 64]), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(shape))))
    paired = axes[: draw(st.integers(0, len(shape)))]
    batch = paired[: draw(st.integers(0, min(len(paired), 2)))]
    contract = paired[len(batch) :]
    free = draw(st.integers(0, 2))
    order = draw(st.permutations(range(free + len(paired))))
    sizes = [2 + i for i in range(free)] + [shape[i] for i in paired]
    x_shape = tuple(sizes[i] for i in order)
    place = {axis: order.index(free + i) for i, axis in enumerate(paired)}
    dims = (
        (tuple(place[i] for i in contract), tuple(contract)),
        (tuple(place[i] for i in batch), tuple(batch)),
    )
    return shape, x_shape, dims


@pytest.mark.slow
@settings(max_examples=15)
@given(_products(), st.sampled_from(_TYPES), st.booleans(), st.booleans(), st.integers(0, 2))
def test_every_dimension_numbers_on_either_side(product, cls, double_quant, on_left, axis):
    shape, x_shape, dims = product
    options = {} if cls is ql.Int8Array else {"double_quant": double_quant}
    w = cls.quantize(_normal(0, *shape), block_size=32, axis=axis % len(shape), **options)
    x = _normal(1, *x_shape)
    (x_contract, w_contract), (x_batch, w_batch) = dims
    dense = np.asarray(w.materialise())
    with ql.on_materialise("error"):
        if on_left:
            flipped = ((w_contract, x_contract), (w_batch, x_batch))
            y = ql.quaxify(lambda w, x: jax.lax.dot_general(w, x, flipped))(w, x)
            expected = _dot_general_in_float64(dense, x, flipped)
        else:
            y = ql.quaxify(lambda x, w: jax.lax.dot_general(x, w, dims))(x, w)
            expected = _dot_general_in_float64(x, dense, dims)
    _close(y, expected)


@pytest.mark.slow
def test_accumulates_into_the_preferred_type():
    w = ql.NF4Array.quantize(jnp.asarray(_normal(0, 16, 64), jnp.bfloat16))
    x = jnp.asarray(_normal(1, 3, 64), jnp.bfloat16)
    assert w.dtype == jnp.bfloat16
    assert ql.quaxify(lambda x, w: x @ w.T)(x, w).dtype == jnp.bfloat16
    dot = lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    assert ql.quaxify(dot)(x, w).dtype == jnp.float32


@pytest.mark.quick("True")
@pytest.mark.parametrize("double_quant", [False, True])
def test_stacks_of_rows_that_end_within_blocks(double_quant):
    quantise = functools.partial(ql.NF4Array.quantize, double_quant=double_quant)
    stack, x = jax.vmap(quantise)(_normal(0, 3, 4, 50)), _normal(1, 5, 50)
    product = lambda w, x: jnp.einsum("loi,bi->blo", w, x)
    dense = np.asarray(jax.jit(ql.materialise)(stack), np.float64)
    _close(jax.jit(ql.quaxify(product))(stack, x), np.einsum("loi,bi->blo", dense, np.float64(x)))


@pytest.mark.slow
@pytest.mark.parametrize("train_scales", [False, True])
def test_scales_are_trained_only_if_asked(train_scales):
    w = ql.NF4Array.quantize(_normal(0, 8, 64), train_scales=train_scales)
    x = _normal(1, 64)
    loss = lambda scale: jnp.sum(ql.quaxify(lambda w: (w @ x) ** 2)(eqx.tree_at(lambda w: w.scale, w, scale)))
    actual = jax.jit(jax.grad(loss))(w.scale)
    unit = eqx.tree_at(lambda w: w.scale, w, jnp.ones_like(w.scale)).materialise()
    y = np.asarray(w.materialise(), np.float64) @ x
    expected = (2 * y * (np.asarray(unit, np.float64) @ x))[:, None] * train_scales
    _close(actual, expected, 1e-4)


@pytest.mark.slow
def test_the_backward_pass_keeps_no_dense_weight():
    n = 1024
    shapes = jax.eval_shape(ql.NF4Array.quantize, jax.ShapeDtypeStruct((n, n), jnp.float32))
    x = jax.ShapeDtypeStruct((4, n), jnp.float32)
    three = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w.T) @ w.T) @ w.T))
    step = jax.jit(jax.value_and_grad(ql.quaxify(three), argnums=1))
    memory = step.lower(shapes, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * n * n / 2


@pytest.mark.parametrize(("axis", "slices"), [(0, 2), (1, 2), (1, 0)])
def test_a_batch_axis_along_the_blocks(axis, slices):
    """No stack of matrices has this form: the weight is decoded slice by slice."""
    w = ql.NF4Array.quantize(_normal(0, slices, 3, 32), block_size=32)
    x, dims = _normal(1, 32, w.shape[axis], 5), (((1,), (axis,)), ((0,), (2,)))
    y = ql.quaxify(lambda x, w: jax.lax.dot_general(x, w, dims))(x, w)
    _close(y, _dot_general_in_float64(x, np.asarray(w.materialise()), dims))


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_all_permutations_of_contracting_axes_agree(order):
    w = ql.NF4Array.quantize(_normal(0, 2, 4, 64), block_size=64)
    x = _normal(1, *(w.shape[i] for i in order))
    dims = (((0, 1, 2), order), ((), ()))
    y = ql.quaxify(lambda x, w: jax.lax.dot_general(x, w, dims))(x, w)
    _close(y, _dot_general_in_float64(x, np.asarray(w.materialise()), dims))


@pytest.mark.quick(1)
@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int8Array])
@pytest.mark.parametrize("shape", [(4, 64, 6), (4, 6, 64)])
def test_mixture_of_experts(cls, shape):
    w = cls.quantize(_normal(0, *shape))
    x, sizes = _normal(1, 9, shape[1]), jnp.array([2, 0, 4, 2])
    dense = w.materialise()
    product = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
    with ql.on_materialise("error"):
        _close(ql.quaxify(product)(x, w), product(x, dense))
        loss = lambda x, w: jnp.sum(jnp.sin(product(x, w)))
        _close(jax.grad(ql.quaxify(loss))(x, w), jax.grad(loss)(x, dense), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [0, 1])
@pytest.mark.parametrize("block_size", [64, 256])
def test_experts_whose_scales_or_blocks_are_not_apart(block_size, stacked):
    """Nested scales share blocks across experts, and so may codes."""
    w = ql.NF4Array.quantize(_normal(0, 4, 6, 64), block_size=block_size, double_quant=True, stacked=stacked)
    x, sizes = _normal(1, 9, 6), jnp.array([2, 0, 4, 2])
    product = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
    with ql.on_materialise("allow"):
        _close(ql.quaxify(product)(x, w), product(x, w.materialise()))


@pytest.mark.quick(2)
@pytest.mark.parametrize("counts", [[2, 0, 22, 2], [0, 0, 0, 29], [0, 0, 0, 0], [9, 1, 1, 18]])
def test_rows_of_experts_are_cut_into_tiles(counts):
    tiles = Tiles(jnp.array(counts), 29)
    expert = np.append(np.repeat(np.arange(4), counts), [4] * (29 - sum(counts)))
    np.testing.assert_array_equal(tiles.grouped, expert < 4)
    size = tiles.rows.shape[1]
    row = np.flatnonzero(tiles.grouped)
    tile, place = np.divmod(np.asarray(tiles.positions)[row], size)
    np.testing.assert_array_equal(np.asarray(tiles.experts)[tile], expert[row])
    np.testing.assert_array_equal(np.asarray(tiles.rows)[tile, place], row)
    assert int(tiles.filled.sum()) == sum(counts)
    # Not every row for every expert: the places are those of the rows, and a tile of rest for each expert.
    assert tiles.rows.size <= 29 + 4 * size


_ON_EACH_DEVICE = {
    "x @ W.T": ((16, 64), 64, lambda w, x: x @ w.T),
    "x @ W": ((64, 16), 64, lambda w, x: x @ w),
    "blocks across summed axes": ((8, 64, 3), 64, lambda w, x: jnp.einsum("bk,nkl->bnl", x, w)),
    "experts": ((2, 64, 8), 64, lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([1, 1]))),
}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int8Array])
@pytest.mark.parametrize("name", _ON_EACH_DEVICE)
def test_within_shard_map(name, cls):
    """Rows of activations are spread over devices, the weight is on all of them."""
    shape, features, product = _ON_EACH_DEVICE[name]
    w, x = cls.quantize(_normal(0, *shape)), _normal(1, 8, features)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("rows")
    fn = lambda w, x: jax.shard_map(product, mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows)(w, x)
    of = lambda fn, w: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(fn(w, x))))(x)
    with ql.on_materialise("error"):
        actual = of(ql.quaxify(fn), w)
    jax.tree.map(_close, actual, of(fn, w.materialise()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantise",
    [
        ql.NF4Array.quantize,
        functools.partial(ql.Int8Array.quantize, block_size=16),
        functools.partial(ql.BlockArray.quantize, codec="uint4_block", block_size=16),
    ],
)
def test_rows_of_a_matrix_that_are_parts_of_rows_of_codes(quantise):
    w, x = quantise(_normal(0, 4, 30)), _normal(1, 6, 2)
    with ql.on_materialise("error"):
        y = ql.quaxify(lambda w, x: jnp.reshape(w, (4, 5, 6)) @ x)(w, x)
    _close(y, np.float64(ql.materialise(w)).reshape(4, 5, 6) @ x)
