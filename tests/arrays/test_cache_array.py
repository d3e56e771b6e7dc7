"""Caches: what is written is rounded, and only that."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.quantized import CODECS, BlockArray, CacheArray
from quaxlike.arrays.quantized.search import SEARCHED
from tests.samples import normal

CODES = ["int8", "q8_0", "q4_0", "nf4"]
SHAPE = (6, 3, 64)


def rounded(x, codec):
    """Rounds as weights do, unless these search for scales: caches take those of the largest."""
    cls = CacheArray if CODECS[codec] in SEARCHED else BlockArray
    return cls.quantize(x, codec=codec, block_size=CODECS[codec].block).materialise()


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODES)
def test_writes_round_the_update_alone(codec):
    """At a place that is data; like a write to a dense array, it ends within the array."""
    first, second = normal(4, 3, 64, seed=1), normal(2, 3, 64, seed=2)
    write = jax.jit(ql.quaxify(lambda w, x, i: lax.dynamic_update_slice(w, x, (i, 0, 0))))
    with ql.on_materialise("error"):
        cache = write(CacheArray.empty(SHAPE, codec), first, jnp.int32(0))
        new = write(cache, second, jnp.int32(9))
    assert type(new) is CacheArray
    assert jax.tree.structure(new) == jax.tree.structure(cache)
    expected = jnp.concatenate([rounded(first, codec), rounded(second, codec)])
    np.testing.assert_array_equal(new.materialise(), expected)
    for old, leaf in zip(jax.tree.leaves(cache), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(leaf[:4], old[:4])


@pytest.mark.parametrize("start", [-1, -9, 9])
def test_starts_beyond_either_end(start):
    """They are those of a dense array: counted from the end, and then clamped."""
    cache, update = CacheArray.quantize(normal(*SHAPE)), CacheArray.quantize(normal(2, 3, 64, seed=1))
    write = lambda w, x: lax.dynamic_update_slice(w, x, (start, 0, 0))
    expected = write(cache.materialise(), update.materialise())
    for x in (update, update.materialise()):
        np.testing.assert_allclose(ql.quaxify(write)(cache, x).materialise(), expected, atol=1e-6)


@pytest.mark.quick("nf4")
@pytest.mark.parametrize("codec", CODES)
def test_codes_are_copied(codec):
    """A cache that is written to a stack of them, as layers that are scanned do."""
    write = jax.jit(ql.quaxify(lambda w, x, i: lax.dynamic_update_slice(w, x[None], (i, 0, 0, 0))))
    one = ql.quaxify(lax.dynamic_update_slice)(
        CacheArray.empty(SHAPE, codec), normal(*SHAPE, seed=1), (0, 0, 0)
    )
    with ql.on_materialise("error"):
        out = write(CacheArray.empty((3, *SHAPE), codec), one, jnp.int32(1))
    for leaf, written in zip(jax.tree.leaves(out), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(leaf, jnp.zeros_like(leaf).at[1].set(written))


def test_codes_of_another_form_become_dense():
    """They alone: the cache is not."""
    one = ql.quaxify(lax.dynamic_update_slice)(CacheArray.empty(SHAPE, "q4_0"), normal(*SHAPE), (0, 0, 0))
    write = ql.quaxify(lambda w, x: lax.dynamic_update_slice(w, x[None], (0, 0, 0, 0)))
    empty = CacheArray.empty((3, *SHAPE), "q8_0")
    with pytest.warns(ql.MaterialisationWarning, match="dynamic_update_slice") as warned:
        out = write(empty, one)
    assert f"; CacheArray was made dense, {4 * math.prod(SHAPE):,} bytes" in str(warned[0].message)
    with ql.on_materialise("error"):
        want = write(empty, ql.materialise(one))
    assert isinstance(out, CacheArray)
    np.testing.assert_array_equal(ql.materialise(out), ql.materialise(want))


@pytest.mark.slow
def test_of_many_texts_in_a_loop():
    """The text is an axis of `vmap`, the token one of a scan, and the heads are written one by one."""
    x = normal(2, *SHAPE, seed=3)

    def step(cache, row):
        token, i = row
        return lax.dynamic_update_slice(cache, token[None, :1], (i, 0, 0)), token

    def run(cache, x):
        return lax.scan(step, cache, (x, jnp.arange(6)))[0]

    empty = CacheArray.empty(SHAPE, "int8")
    caches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), empty)
    with ql.on_materialise("error"):
        out = jax.jit(jax.vmap(ql.quaxify(run)))(caches, x)
    expected = jnp.zeros((2, *SHAPE)).at[:, :, :1].set(rounded(x[:, :, :1], "int8"))
    np.testing.assert_allclose(out.materialise(), expected, atol=1e-7)


def test_a_part_of_the_elements_that_share_a_scale():
    cache = CacheArray.empty(SHAPE, "int8")
    with pytest.warns(ql.MaterialisationWarning, match="dynamic_update_slice"):
        out = ql.quaxify(lax.dynamic_update_slice)(cache, jnp.ones((1, 1, 2)), (0, 0, 3))
    np.testing.assert_array_equal(out, jnp.zeros(SHAPE).at[0, 0, 3:5].set(1))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("product", ["qhgd,khd->hgqk", "hgqk,khd->qhgd"])
def test_products_of_attention(product, codec):
    """With their derivatives, against float64."""
    write = ql.quaxify(functools.partial(lax.dynamic_update_slice, start_indices=(0, 0, 0)))
    cache = write(CacheArray.empty(SHAPE, codec), normal(*SHAPE, seed=4))
    x = normal(2, 3, 2, 64, seed=5) if product.startswith("q") else normal(3, 2, 2, 6, seed=5)
    run = lambda x, w: jnp.einsum(product, x, w)
    with ql.on_materialise("error"):
        y, pull = jax.vjp(lambda x: ql.quaxify(run)(x, cache), x)
    dense = np.asarray(cache.materialise(), np.float64)
    np.testing.assert_allclose(y, np.einsum(product, np.asarray(x, np.float64), dense), rtol=1e-5, atol=1e-5)
    names, w, out = product.replace("->", ",").split(",")
    back = np.einsum(f"{out},{w}->{names}", np.ones(y.shape), dense)
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], back, rtol=1e-5, atol=1e-5)


def test_the_type_in_a_table():
    (row,) = ql.summary({"key": CacheArray.empty((16, 2, 64), "q8_0", dtype=jnp.bfloat16)}).rows
    assert (row.type, row.dtype) == ("CacheArray[q8_0]", "bfloat16")
    assert row.stored_bytes == 16 * 2 * (64 + 2 * 2)


def test_codecs_that_do_not_exist():
    with pytest.raises(ValueError, match="There is no codec 'int9'"):
        CacheArray.empty(SHAPE, "int9")
