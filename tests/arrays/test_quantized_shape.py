"""Moving quantised arrays about: the same as on dense arrays, and still quantised."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import tree_equal

_NF4, _INT8 = ql.NF4Array.quantize, ql.Int8Array.quantize


def _double(x, **kwargs):
    return ql.NF4Array.quantize(x, double_quant=True, **kwargs)


def _stacked(x):
    return jax.vmap(_double)(x)


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _same(actual, expected):
    actual, expected = np.asarray(ql.materialise(actual)), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


_KEPT = [
    (_NF4, (8, 64), lambda w: w.T),
    (_NF4, (2, 3, 64), lambda w: w.transpose(2, 0, 1).transpose(1, 2, 0)),
    (_double, (7, 9), lambda w: w.T),
    (_INT8, (8, 10), lambda w: w.T),
    (_NF4, (8, 64), lambda w: w.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16)),
    (_NF4, (8, 64), lambda w: w.reshape(2, 4, 64)),
    (_NF4, (8, 64), lambda w: w.reshape(512)),
    (_NF4, (4, 128), lambda w: w.reshape(8, 64).reshape(4, 2, 64)),
    (_NF4, (8, 64), lambda w: w.reshape(8, 4, 16).reshape(8, 64)),
    (_NF4, (7, 9), lambda w: w.reshape(9, 7)),
    (_double, (8, 64), lambda w: w.reshape(4, 2, 64)),
    (_stacked, (2, 8, 64), lambda w: w.reshape(2, 512)),
    (_stacked, (2, 8, 64), lambda w: w.reshape(16, 64)),
    (_INT8, (8, 12), lambda w: w.reshape(2, 4, 12).reshape(8, 12).reshape(8, 3, 4)),
    (_NF4, (8, 64), lambda w: w[2:6]),
    (_NF4, (8, 64), lambda w: w[1::3]),
    (_NF4, (8, 64), lambda w: w.T[:, 2:6]),
    (_double, (8, 64), lambda w: w[2:6]),
    (_stacked, (3, 8, 16), lambda w: w[1:]),
    (_stacked, (3, 8, 16), lambda w: w[1]),
    (_stacked, (3, 8, 16), lambda w: w[jnp.int32(1)]),
    (_NF4, (3, 8, 64), lambda w: w[jnp.array([2, 0])]),
    (_stacked, (3, 8, 16), lambda w: w[jnp.array([[2, 0]])]),
    (_stacked, (3, 8, 16), lambda w: jax.vmap(lambda i: w[i])(jnp.array([2, 0]))),
    (_INT8, (8, 10), lambda w: w[2:6]),
    (_NF4, (8, 64), lambda w: w[None]),
    (_NF4, (8, 64), lambda w: w.T[None]),
    (_NF4, (8, 64), lambda w: w[:, None, :]),
    (_NF4, (1, 64), lambda w: jnp.broadcast_to(w, (5, 64))),
    (_double, (7, 9), lambda w: jnp.broadcast_to(w.T, (2, 3, 9, 7))),
    (_NF4, (1, 8, 64), lambda w: w.squeeze(0)),
    (_NF4, (8, 1, 64), lambda w: w.transpose(2, 1, 0).squeeze(1)),
    (_NF4, (7, 1, 9), lambda w: w.squeeze(1)),
    (_NF4, (8, 64), lambda w: jnp.concatenate([w, w[:3]])),
    (_double, (8, 64), lambda w: jnp.concatenate([w, w[:3]])),
    (_NF4, (8, 64), lambda w: jnp.concatenate([w.T, w.T], axis=1)),
    (_NF4, (8, 64), lambda w: jnp.split(w, 2)[1]),
    (_NF4, (8, 64), lambda w: jnp.stack([w, w, -w])),
    (_NF4, (8, 64), lambda w: jnp.stack([w, w], axis=1)),
    (_NF4, (8, 64), lambda w: jnp.stack([w.T, 2.0 * w.T], axis=2)),
    (_double, (7, 9), lambda w: jnp.stack([w, w], axis=-1)),
    (_INT8, (8, 10), lambda w: jnp.stack([w, w], axis=1)),
    (_double, (8, 64), lambda w: jnp.stack([w, w[:]])),
    (_double, (8, 64), lambda w: jnp.stack([w[0:8:2], w[1:8:2]])),
    (_NF4, (8, 64), lambda w: jnp.unstack(jnp.stack([w, -w], axis=1), axis=1)[1]),
    (_stacked, (3, 8, 16), lambda w: jnp.unstack(w)[2]),
    (_NF4, (8, 64), lambda w: jnp.stack(jnp.unstack(w))),
    (_NF4, (8, 64), lambda w: jnp.stack(jnp.unstack(w.T, axis=1), axis=1)),
    (_double, (8, 64), lambda w: jnp.unstack(w)[3]),
    (_NF4, (8, 64), lambda w: jax.lax.stop_gradient(w)),
    (_NF4, (8, 64), lambda w: jax.device_put(w)),
    (_NF4, (8, 64), lambda w: -w),
    (_NF4, (8, 64), lambda w: w * 0.5),
    (_double, (8, 64), lambda w: 2.0 * w),
    (_INT8, (8, 64), lambda w: w / 4.0),
    (_INT8, (8, 64), lambda w: jnp.concatenate([w, w * 0.5])),
    (_NF4, (8, 64), lambda w: jnp.concatenate([w / 2.0, w])),
]


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "shape", "move"), _KEPT, ids=range(len(_KEPT)))
def test_stays_quantised(quantize, shape, move):
    w = quantize(_normal(*shape))
    with ql.on_materialise("error"):
        out = ql.quaxify(move)(w)
        jitted = jax.jit(ql.quaxify(move))(w)
    assert type(out) is type(jitted) is type(w)
    expected = move(w.materialise())
    assert out.shape == expected.shape
    _same(out, expected)
    _same(jitted, expected)


_IDS = np.array([[3, 0, 5], [5, 5, 1]])
_ROWS = [
    (_NF4, (6, 64), lambda w: w[_IDS]),
    (_double, (6, 64), lambda w: w[_IDS]),
    (_NF4, (6, 50), lambda w: w[_IDS]),
    (_NF4, (6, 50), lambda w: w[jnp.int32(4)]),
    (_NF4, (6, 64), lambda w: w[jnp.int32(4)]),
    (_INT8, (6, 10), lambda w: w[_IDS]),
    (_NF4, (6, 64), lambda w: jnp.take(w, _IDS, axis=0)),
    (_NF4, (6, 64), lambda w: jnp.take(w, jnp.array([5, 6, -7]), axis=0)),
    (_NF4, (6, 50), lambda w: jnp.take(w, jnp.array([5, 6, -7]), axis=0)),
    (_NF4, (6, 64), lambda w: jnp.take(w, jnp.array([5, 6, -7]), axis=0, mode="clip")),
    (_NF4, (6, 64), lambda w: jax.vmap(lambda i: w[i])(_IDS[0])),
    (_NF4, (6, 64), lambda w: w.at[_IDS].get(mode="fill", fill_value=jnp.nan)),
    (_INT8, (6, 1), jnp.diagonal),
    (_NF4, (6, 1), lambda w: w[_IDS, _IDS * 0]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "shape", "look_up"), _ROWS, ids=range(len(_ROWS)))
def test_rows_are_looked_up_on_codes(quantize, shape, look_up):
    w = quantize(_normal(*shape))
    with ql.on_materialise("error"):
        out = ql.quaxify(look_up)(w)
    assert isinstance(out, jax.Array)
    _same(out, look_up(w.materialise()))


@pytest.mark.slow
def test_printing():
    w = ql.NF4Array.quantize(jnp.ones((4, 64)))
    assert repr(w) == "NF4Array(f32[4,64], codes=u8[4,32], scale=f32[4,1], block_size=64)"
    assert "codes=None" in repr(eqx.partition(w, lambda x: False)[0])


@pytest.mark.quick("shape", "<lambda>1", "<lambda>2")
@pytest.mark.parametrize("f", [lambda x: x.dtype, jnp.shape, lambda x: jnp.zeros(()), lambda x: jax.P()])
def test_printing_what_a_map_over_leaves_makes(f):
    assert repr(jax.tree.map(f, ql.NF4Array.quantize(jnp.ones((4, 64))))).startswith("NF4Array(codes=")


@pytest.mark.slow
def test_an_embedding():
    layer = eqx.nn.Embedding(6, 50, key=jax.random.key(0))
    w = ql.NF4Array.quantize(layer.weight)
    layer = eqx.tree_at(lambda layer: layer.weight, layer, w)
    with ql.on_materialise("error"):
        out = ql.quaxify(lambda layer, ids: jax.vmap(layer)(ids) + 1)(layer, _IDS[0])
    _same(out, w.materialise()[_IDS[0]] + 1)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "move",
    [
        lambda w: w[:, 3:9],
        lambda w: w.T.reshape(8, 64),
        lambda w: jnp.concatenate([w, w], axis=1),
        lambda w: w.astype(jnp.int32),
        lambda w: w + 1,
        lambda w: w.at[jnp.array([9])].get(mode="fill", fill_value=1.0),
        lambda w: jnp.concatenate([w, jnp.ones((1, 64))]),
        lambda w: jnp.stack([w, jnp.ones((8, 64))]),
        lambda w: jnp.unstack(w, axis=1),
    ],
)
def test_what_cuts_through_blocks_is_materialised_and_says_so(move):
    w = ql.NF4Array.quantize(_normal(8, 64))
    with (
        ql.on_materialise("error"),
        pytest.raises(ql.MaterialisationError, match="NF4Array would be made dense"),
    ):
        ql.quaxify(move)(w)
    with ql.on_materialise("allow"):
        jax.tree.map(_same, ql.quaxify(move)(w), move(w.materialise()))


def test_materialising_warns_unless_told_otherwise():
    w = ql.NF4Array.quantize(_normal(8, 64))
    with pytest.warns(ql.MaterialisationWarning, match=r"^sin: no rule for \(NF4Array f32\[8,64\]\)"):
        ql.quaxify(jnp.sin)(w)


@pytest.mark.slow
def test_rows_of_a_matrix_and_layers_of_a_stack_are_scanned():
    w = ql.NF4Array.quantize(_normal(8, 64))
    x = _normal(64)
    product = lambda w: jax.lax.map(lambda row: row @ x, w)
    with ql.on_materialise("error"):
        np.testing.assert_allclose(ql.quaxify(product)(w), product(w.materialise()), rtol=2e-5)


@pytest.mark.slow
def test_partition_specs_follow_the_logical_array():
    w = ql.NF4Array.quantize(_normal(8, 256))
    assert list(w.shard_spec(jax.P("a", "b"))) == [jax.P("a", "b")] * 2
    assert list(w.with_axes((1, 0)).shard_spec(jax.P("a"))) == [jax.P(None, "a")] * 2
    per_row = ql.Int8Array.quantize(_normal(8, 256))
    assert list(per_row.shard_spec(jax.P(None, "b"))) == [jax.P(None, "b"), jax.P(None, None)]
    nested = jax.vmap(_double)(_normal(2, 8, 64))
    assert list(nested.shard_spec(jax.P("a"))) == [jax.P("a", None)] * 3 + [jax.P("a")]
    with pytest.raises(ValueError, match=r"the axes \(8, 64\) share blocks"):
        nested.shard_spec(jax.P(None, "a"))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, 1, -2])
@pytest.mark.parametrize("quantize", [_NF4, _double, _INT8])
def test_stacks_are_quantised_one_by_one(quantize, axis):
    x = _normal(3, 7, 9)
    w = quantize(x, axis=axis, stacked=1)
    one = quantize(x[1], axis=axis if axis < 0 else axis - 1)
    assert tree_equal(ql.quaxify(lambda w: w[1])(w), one)
    with pytest.raises(ValueError, match="axis 0 is not an axis of one of the arrays in 1 axes of stacks"):
        quantize(x, axis=0, stacked=1)


@pytest.mark.slow
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 64), (3, 0), (64,)])
def test_small_and_empty_arrays(shape, double_quant):
    w = ql.NF4Array.quantize(jnp.ones(shape), double_quant=double_quant)
    assert w.shape == w.materialise().shape == shape
    np.testing.assert_allclose(w.materialise(), 1, rtol=1e-6)


def test_what_cannot_be_quantised():
    with pytest.raises(TypeError, match=r"NF4Array.quantize takes a floating array; found dtype int32"):
        ql.NF4Array.quantize(jnp.arange(3))
    with pytest.raises(ValueError, match=r"axis 2 is not an axis of an array of shape \(3, 4\)"):
        ql.Int8Array.quantize(jnp.ones((3, 4)), axis=2)
    with pytest.raises(ValueError, match="double_quant is for 4-bit types"):
        ql.Int8Array.quantize(jnp.ones((3, 4)), double_quant=True)
    with pytest.raises(ValueError, match="at least one axis; found a scalar"):
        ql.Int8Array.quantize(jnp.ones(()))
    with pytest.raises(ValueError, match=r"takes scale of shape \(1,\); found \(2,\)"):
        ql.NF4Array(jnp.zeros(4, jnp.uint8), jnp.zeros(2), block_size=64)


def test_a_last_axis_of_size_one_comes_and_goes():
    """Blocks of one element each are not kept."""
    w = _INT8(_normal(4, 6))
    with ql.on_materialise("allow"):
        out = ql.quaxify(lambda w: jnp.squeeze(w[:, :, None], 2))(w)
    np.testing.assert_allclose(ql.materialise(out), w.materialise(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [_NF4, _INT8])
def test_a_layer_of_a_stack_is_taken_with_64_bit_types_on(quantize, x64):
    w = quantize(_normal(2, 8, 64), stacked=1)
    for take in (lambda w: w[1], lambda w: jax.lax.dynamic_slice_in_dim(w, 1, 1)):
        _same(ql.quaxify(take)(w), take(w.materialise()))
