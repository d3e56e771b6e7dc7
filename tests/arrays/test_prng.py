"""Keys as Values give the numbers of JAX's own keys; Philox gives those of its authors."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays import prng
from quaxlike.arrays.prng.philox import philox4x32_block
from tests.samples import Late

stats = Late("scipy.stats")

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg", "philox4x32"]

PROGRAMS = {
    "split": lambda k: jax.random.split(k),
    "split into a shape": lambda k: jax.random.split(k, (2, 3)),
    "clone": jax.random.clone,
    "fold_in": lambda k: jax.random.fold_in(k, 7),
    "key_data": jax.random.key_data,
    "bits": lambda k: [jax.random.bits(k, (5,), d) for d in (jnp.uint8, jnp.uint16, jnp.uint32)],
    "normal": lambda k: jax.random.normal(k, (3, 2)),
    "uniform": lambda k: jax.random.uniform(k, (4,)),
    "randint": lambda k: jax.random.randint(k, (4,), 0, 10),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (4,)),
    "categorical": lambda k: jax.random.categorical(k, jnp.zeros(3)),
    "permutation": lambda k: jax.random.permutation(k, 5),
    "choice": lambda k: jax.random.choice(k, 5, (2,), replace=False),
    "gamma": lambda k: jax.random.gamma(k, 2.0, (2,)),
    "two keys": lambda k: jax.random.normal(jax.random.split(k)[1], (2,)),
    "vmap inside": lambda k: jax.vmap(lambda k: jax.random.uniform(k))(jax.random.split(k, 3)),
    "scan": lambda k: jax.lax.scan(lambda k, _: (jax.random.split(k)[0], jax.random.uniform(k)), k, length=3),
    "scan of keys": lambda k: jax.lax.scan(
        lambda c, k: (c + jax.random.uniform(k), None), 0.0, jax.random.split(k, 4)
    ),
    "while": lambda k: jax.lax.fori_loop(0, 3, lambda i, k: jax.random.fold_in(k, i), k),
    "cond": lambda k: jax.lax.cond(True, lambda k: jax.random.split(k)[0], lambda k: k, k),
    "stacked": lambda k: jnp.stack([k, jax.random.split(k)[1]])[1],
    "reshaped": lambda k: jnp.concatenate([jnp.reshape(jax.random.split(k, 4), (2, 2)).T] * 2),
    "shuffled": lambda k: jax.random.split(k, 4)[jnp.array([2, 0])],
}


def _data(tree):
    """Keys, of both kinds, as their words."""

    def words(x):
        if isinstance(x, prng.KeyArray):
            return x.data
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jtu.tree_map(words, tree, is_leaf=ql.is_value)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_of_jax(name, impl, default_promotion):
    f, key = PROGRAMS[name], prng.key(3, impl)
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(f))(key)
    # Functions of the bits may be rounded otherwise when they are compiled together.
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6 if x.dtype == jnp.float32 else 0)
    jtu.tree_map(same, _data(found), _data(f(key.to_jax())))


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_under_an_outer_vmap(impl):
    with ql.on_materialise("error"):
        keys = ql.quaxify(jax.random.split)(prng.key(0, impl), 4)
        assert (keys.shape, len(keys)) == ((4,), 4)
        split = jax.vmap(ql.quaxify(jax.random.split))(keys)
        assert split.shape == (4, 2)
        found = jax.vmap(ql.quaxify(lambda k: jax.random.normal(k, (3,))))(keys)
    if "rbg" not in impl:  # whose numbers under vmap are not those of a loop
        expected = jnp.stack([jax.random.normal(k.to_jax(), (3,)) for k in keys])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_conversions(impl):
    key = prng.key(5, impl)
    assert prng.KeyArray.from_jax(key.to_jax()).impl == impl
    np.testing.assert_array_equal(prng.KeyArray.from_jax(key.to_jax()).data, key.data)
    assert key.dtype == key.to_jax().dtype
    assert [leaf.dtype for leaf in jtu.tree_leaves(key)] == [jnp.uint32]


# Of Random123, `kat_vectors`: counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.quick("counter1-key1-expected1", "counter2-key2-expected2")
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = lambda xs: [jnp.asarray(x, jnp.uint32) for x in xs]
    assert [int(w) for w in philox4x32_block(words(key), words(counter))] == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
def test_philox_bits_are_uniform(dtype):
    bits = np.asarray(ql.quaxify(jax.random.bits)(prng.key(1, "philox4x32"), (40_000,), dtype))
    width = 8 * bits.dtype.itemsize
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(40_000 * width)
    counts = np.bincount(bits >> (width - 8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_philox_numbers_are_normal_and_independent():
    a, b = ql.quaxify(jax.random.split)(prng.key(2, "philox4x32"))
    x, y = (np.asarray(ql.quaxify(jax.random.normal)(k, (20_000,))) for k in (a, b))
    assert stats.kstest(x, "norm").pvalue > 1e-4
    for other in (y, np.roll(x, 1)):
        assert abs(np.corrcoef(x, other)[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.slow
def test_philox_keys_do_not_collide(x64):
    split = ql.quaxify(jax.random.split)(prng.key(0, "philox4x32"), 1000)
    folded = jax.vmap(lambda i: ql.quaxify(jax.random.fold_in)(prng.key(0, "philox4x32"), i))(
        jnp.arange(1000)
    )
    words = np.concatenate([split.data, folded.data])
    assert len(np.unique(words, axis=0)) == 2000
    wide = ql.quaxify(jax.random.bits)(split[0], (1000,), jnp.uint64)
    assert len(np.unique(np.asarray(wide) >> 32)) > 990
    assert not np.array_equal(prng.key(1, "philox4x32").data, prng.key(1 + 2**32, "philox4x32").data)


def test_words_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"of rbg takes uint32 data of shape \(\*shape, 4\); found uint32 .*\(2,\)"
    ):
        prng.KeyArray(jnp.zeros(2, jnp.uint32), "rbg")
    with pytest.raises(ValueError, match=r"found float32 of shape \(2,\)"):
        prng.KeyArray(jnp.zeros(2))
    with pytest.raises(ValueError, match="takes a key of threefry2x32"):
        prng.KeyArray.from_jax(jnp.zeros(2))
