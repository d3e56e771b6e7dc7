import itertools
import logging
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaxlike.utils import key_chain


def data(key):
    return np.asarray(jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key)


def expected(rng, shape, n):
    """Item `n`, one key at a time."""
    keys = [jax.random.fold_in(key, n) for key in jax.random.split(rng, math.prod(shape))]
    rows = np.array([data(key) for key in keys])
    return rows.reshape(*shape, *data(rng).shape)


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1,), [2, 2]])
def test_items(make, shape):
    rng = make(7)
    items = list(itertools.islice(key_chain(rng, shape), 3))
    for n, item in enumerate(items):
        assert item.shape == (*shape, *rng.shape)
        assert item.dtype == rng.dtype
        np.testing.assert_array_equal(data(item), expected(rng, tuple(shape), n))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_other_generators(impl):
    rng = jax.random.key(3, impl=impl)
    item = next(key_chain(rng, 2))
    assert jax.random.key_impl(item) == jax.random.key_impl(rng)
    assert item.shape == (2,)
    legacy = jax.random.PRNGKey(3, impl=impl)
    with jax.default_prng_impl(impl):
        np.testing.assert_array_equal(next(key_chain(legacy, 2)), data(item))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [4, np.int64(4), (4,)])
def test_integer_shape(shape):
    rng = jax.random.key(0)
    np.testing.assert_array_equal(data(next(key_chain(rng, shape))), expected(rng, (4,), 0))


def test_no_keys():
    assert next(key_chain(jax.random.key(0), (0, 2))).shape == (0, 2)


@pytest.mark.slow
@given(st.integers(0, 2**31 - 1))
def test_items_differ_from_each_other(seed):
    chain = key_chain(jax.random.key(seed), 2)
    rows = np.concatenate([data(next(chain)) for _ in range(8)])
    assert len(np.unique(rows, axis=0)) == 16


@pytest.mark.slow
def test_chains_do_not_disturb_each_other():
    rng = jax.random.key(0)
    first, second = key_chain(rng), key_chain(rng)
    for _ in range(3):
        assert data(next(first)).tolist() == data(next(second)).tolist()


@pytest.mark.slow
def test_endless_and_lazy(monkeypatch: pytest.MonkeyPatch):
    splits: list[int] = []
    split = jax.random.split
    monkeypatch.setattr(jax.random, "split", lambda *args: splits.append(1) or split(*args))
    chain = key_chain(jax.random.key(0))
    assert iter(chain) is chain
    assert splits == []
    assert len(list(itertools.islice(chain, 50))) == 50
    assert splits == [1]


@pytest.mark.slow
def test_no_compilation_for_a_new_chain(caplog: pytest.LogCaptureFixture):
    def compiled(rng):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
            list(itertools.islice(key_chain(rng, 5), 3))
        return [record for record in caplog.records if "Compiling" in record.getMessage()]

    jax.clear_caches()
    assert compiled(jax.random.key(0))
    assert not compiled(jax.random.key(1))


# Inside transforms


@pytest.mark.slow
def test_under_jit():
    def take(rng):
        chain = key_chain(rng, 2)
        return [next(chain), next(chain)]

    rng = jax.random.key(0)
    for n, item in enumerate(jax.jit(take)(rng)):
        np.testing.assert_array_equal(data(item), expected(rng, (2,), n))


@pytest.mark.slow
def test_under_vmap():
    rngs = jax.random.split(jax.random.key(0), 3)
    items = jax.vmap(lambda rng: next(key_chain(rng)))(rngs)
    for rng, item in zip(rngs, items, strict=True):
        np.testing.assert_array_equal(data(item), expected(rng, (), 0))


@pytest.mark.slow
def test_a_chain_that_is_first_asked_inside_a_transform():
    rng = jax.random.key(0)
    chain = key_chain(rng)
    inside = jax.jit(lambda: next(chain))()
    np.testing.assert_array_equal(data(inside), expected(rng, (), 0))
    # Nothing of the transform is left in the chain.
    np.testing.assert_array_equal(data(next(chain)), expected(rng, (), 1))


@pytest.mark.slow
def test_with_a_model():
    keys = key_chain(jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=next(keys)), eqx.nn.Linear(3, 1, key=next(keys))])
    assert model(jnp.ones(2)).shape == (1,)


# Errors


def test_negative_shape():
    with pytest.raises(ValueError, match=r"must have no negative number, found \(2, -1\)"):
        key_chain(jax.random.key(0), (2, -1))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_several_keys(make):
    with pytest.raises(
        ValueError, match=r"`rng` must be one key, found .* Map over several keys with jax.vmap"
    ):
        key_chain(jax.random.split(make(0), 3))


def test_shape_of_floats():
    with pytest.raises(TypeError, match=r"2\.0"):
        key_chain(jax.random.key(0), (2.0,))  # pyright: ignore[reportArgumentType]
