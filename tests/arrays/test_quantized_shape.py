"""Quantised arrays: how they print, are sharded and stacked, and what cannot be quantised."""

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


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.slow
def test_printing():
    w = ql.NF4Array.quantize(jnp.ones((4, 64)))
    assert repr(w) == "NF4Array(f32[4,64], codes=u8[4,32], scale=f32[4,1], block_size=64)"
    assert "codes=None" in repr(eqx.partition(w, lambda x: False)[0])


@pytest.mark.quick("shape", "<lambda>1", "<lambda>2")
@pytest.mark.parametrize("f", [lambda x: x.dtype, jnp.shape, lambda x: jnp.zeros(()), lambda x: jax.P()])
def test_printing_what_a_map_over_leaves_makes(f):
    assert repr(jax.tree.map(f, ql.NF4Array.quantize(jnp.ones((4, 64))))).startswith("NF4Array(codes=")


def test_materialising_warns_unless_told_otherwise():
    w = ql.NF4Array.quantize(_normal(8, 64))
    with pytest.warns(ql.MaterialisationWarning, match=r"^sin: no rule for \(NF4Array f32\[8,64\]\)"):
        ql.quaxify(jnp.sin)(w)


def test_partition_specs_follow_the_logical_array():
    w = ql.NF4Array.quantize(_normal(8, 256))
    assert list(w.shard_spec(jax.P("a", "b"))) == [jax.P("a", "b")] * 2
    assert list(w.with_axes((1, 0)).shard_spec(jax.P("a"))) == [jax.P(None, "a")] * 2
    per_row = ql.Int8Array.quantize(_normal(8, 256))
    assert list(per_row.shard_spec(jax.P(None, "b"))) == [jax.P(None, "b"), jax.P(None, None)]
    a_block = ql.Int8Array.quantize(_normal(8, 32), block_size=32)  # whose size is a block's, also of a part
    assert list(a_block.shard_spec(jax.P(None, "b"))) == [jax.P(None, "b")] * 2
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


@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int4Array])
def test_scales_that_are_quantised_are_about_the_same(cls):
    once, twice = (cls.quantize(_normal(8, 64), double_quant=double) for double in (False, True))
    np.testing.assert_allclose(twice.materialise(), once.materialise(), rtol=0.02, atol=0.02)


def test_matrices_of_a_stack_of_one():
    """Their indices are those of an axis that is taken whole."""
    w, at = ql.NF4Array.quantize(_normal(1, 4, 64)), jnp.array([[0], [0]])
    found = jax.jit(ql.quaxify(lambda w, at: w[at]))(w, at)
    np.testing.assert_array_equal(ql.materialise(found), w.materialise()[at])


def test_matrices_of_a_turned_stack():
    w = ql.Int8Array.quantize(_normal(2, 3, 8))
    second = lambda w: jnp.unstack(jnp.moveaxis(w, 1, 2), axis=2)[1]
    np.testing.assert_array_equal(ql.quaxify(second)(w).materialise(), second(w.materialise()))


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


@pytest.mark.parametrize("i", [3, 4, -4, -5])
def test_a_row_beyond_the_first_or_last(i):
    """Of blocks that begin and end within rows."""
    w = ql.NF4Array.quantize(_normal(4, 24), block_size=64)
    row = lambda w, i: w.at[i].get(mode="fill")
    np.testing.assert_array_equal(ql.quaxify(row)(w, jnp.array([i])), row(w.materialise(), jnp.array([i])))
