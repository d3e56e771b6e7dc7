"""`jax.custom_batching.custom_vmap` on Values: the function, and the rule where it is batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap, sequential_vmap

import quaxlike as ql
from tests.samples import normal, once


@once
def w():
    return ql.LoraArray(
        ql.NF4Array.quantize(normal(8, 8), block_size=32), normal(2, 8), normal(8, 2), alpha=2
    )


@once
def stack():
    return jax.tree.map(lambda x: jnp.stack([x, x, x]), w())


X, XS = normal(8), normal(3, 8)


@custom_vmap
def product(w, x):
    return {"y": w @ x, "w": w}


@product.def_vmap
def _product(axis_size, in_batched, w, x):
    """Tells that it was used by a factor of ten."""
    assert axis_size == 3
    y = 10 * jnp.einsum("...ij,...j->...i", w, x)
    return {"y": y, "w": w}, {"y": any(in_batched), "w": in_batched[0]}


@pytest.fixture(autouse=True)
def _nothing_dense():
    with jax.numpy_rank_promotion("allow"), ql.on_materialise("error"):
        yield


def close(found, expected):
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(ql.materialise(found), expected, rtol=1e-4, atol=1e-4)


def dense(w):
    with ql.on_materialise("allow"):
        return w.materialise()


@pytest.mark.parametrize("jitted", [False, True])
class TestBatches:
    def run(self, jitted, f, *args):
        return jax.jit(f)(*args) if jitted else f(*args)

    @pytest.mark.slow
    def test_none(self, jitted):
        out = self.run(jitted, ql.quaxify(product), w(), X)
        assert type(out["w"]) is ql.LoraArray
        close(out["y"], dense(w()) @ X)

    @pytest.mark.quick("True-False")
    @pytest.mark.parametrize("inside", [False, True])
    def test_of_arrays(self, jitted, inside):
        over = lambda f: jax.vmap(f, in_axes=(None, 0), out_axes={"y": 0, "w": None})
        f = ql.quaxify(over(product)) if inside else over(ql.quaxify(product))
        out = self.run(jitted, f, w(), XS)
        assert type(out["w"]) is ql.LoraArray
        assert out["w"].shape == w().shape
        close(out["y"], 10 * XS @ dense(w()).T)

    @pytest.mark.quick(2)
    @pytest.mark.parametrize("inside", [False, True])
    def test_of_values(self, jitted, inside):
        f = ql.quaxify(jax.vmap(product)) if inside else jax.vmap(ql.quaxify(product))
        out = self.run(jitted, f, stack(), XS)
        assert out["w"].shape == (3, 8, 8)
        close(out["y"], 10 * XS @ dense(w()).T)

    @pytest.mark.quick("True")
    def test_of_a_part_of_a_value(self, jitted):
        """The adapters are batched and the base is not: the rule sees a stack."""
        axes = jax.tree.map(lambda trained: 0 if trained else None, ql.trainable(w()))
        a, b = jax.tree.leaves(stack())[-2:]
        mixed = ql.LoraArray(w().base, a, b, alpha=2)
        f = jax.vmap(ql.quaxify(product), in_axes=(axes, None))
        out = self.run(jitted, f, mixed, X)
        close(out["y"], 10 * np.broadcast_to(dense(w()) @ X, (3, 8)))

    @pytest.mark.slow
    def test_one_after_the_other(self, jitted):
        f = ql.quaxify(lambda w, xs: jax.vmap(sequential_vmap(lambda w, x: w @ x), (None, 0))(w, xs))
        close(self.run(jitted, f, w(), XS), XS @ dense(w()).T)

    @pytest.mark.slow
    def test_tangents(self, jitted):
        f = lambda x, t: jax.jvp(lambda x: ql.quaxify(product)(w(), x)["y"], (x,), (t,))
        close(self.run(jitted, f, X, 2 * X)[1], 2 * dense(w()) @ X)
        over = lambda x, t: jax.jvp(
            lambda x: jax.vmap(lambda x: ql.quaxify(product)(w(), x)["y"])(x), (x,), (t,)
        )
        close(self.run(jitted, over, XS, 2 * XS)[1], 20 * XS @ dense(w()).T)


def test_results_that_do_not_fit():
    @custom_vmap
    def f(w, x):
        return w @ x

    f.def_vmap(lambda axis_size, in_batched, w, x: ((x @ w.T, x), (True, True)))
    with pytest.raises(ValueError, match=r"vmap rule of .* returned results"):
        jax.vmap(ql.quaxify(f), in_axes=(None, 0))(w(), XS)
