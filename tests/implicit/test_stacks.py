"""Stacks of ImplicitArrays: leaves with leading axes that the shape that was given does not have."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.implicit import ImplicitArray, implicit, register
from tests.samples import normal

from .types import Strict


class Rounded(ImplicitArray, warn_on_materialize=False):
    """One scale for all of an array, so that a stack of them has several."""

    codes: jax.Array
    scale: jax.Array

    def materialize(self):
        assert self.scale.ndim == 0
        return (self.codes.astype(self.scale.dtype) * self.scale).astype(self.dtype)

    @classmethod
    def quantize(cls, x):
        scale = jnp.abs(x).max() / 127
        return cls(jnp.round(x / scale).astype(jnp.int8), scale, shape=x.shape, dtype=x.dtype)


@register("dot_general")
def _(x: jax.Array, w: Rounded, **params):
    assert w.scale.ndim == 0
    return jax.lax.dot_general_p.bind(x, w.codes.astype(x.dtype), **params) * w.scale


class TestStacks:
    """Several arrays, each with its own scale: what is right for one of them is right for all."""

    @staticmethod
    def made(n):
        w = normal(n, 3, 3) * (10.0 ** jnp.arange(float(n)))[:, None, None]
        stack = jax.vmap(Rounded.quantize)(w)
        return stack, np.asarray(stack.codes) * np.asarray(stack.scale)[:, None, None]

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [3, 5])
    def test_it_is_materialised_item_by_item(self, n):
        stack, dense = self.made(n)
        np.testing.assert_array_equal(stack.materialise(), dense)
        np.testing.assert_array_equal(ql.materialise(stack), dense)
        np.testing.assert_array_equal(stack.materialize(), dense)
        half = dense.astype(np.float16)  # what was cast is rounded, also if it is cast back
        np.testing.assert_array_equal(stack.astype(jnp.float16).astype(jnp.float32), half.astype(np.float32))

    @pytest.mark.slow
    def test_stacks_of_stacks(self):
        stack, dense = self.made(3)
        twice = jax.tree.map(lambda *xs: jnp.stack(xs), stack, stack)
        assert twice.shape == (2, 3, 3, 3)
        np.testing.assert_array_equal(twice.materialise(), np.stack([dense, dense]))

    @pytest.mark.slow
    def test_a_leaf_that_all_items_share(self):
        stack, _ = self.made(3)
        shared = eqx.tree_at(lambda x: x.scale, stack, stack.scale[0])
        expected = np.asarray(stack.codes) * np.asarray(stack.scale[0])
        np.testing.assert_array_equal(shared.materialise(), expected)

    @pytest.mark.quick("3")
    @pytest.mark.parametrize("n", [3, 5])
    def test_scan_runs_over_the_items(self, n):
        stack, dense = self.made(n)
        chain = implicit(lambda x, s: jax.lax.scan(lambda h, w: (h @ w, None), x, s)[0])
        with ql.on_materialise("error"):
            out = chain(jnp.ones((2, 3)), stack)
        np.testing.assert_allclose(out, np.linalg.multi_dot([np.ones((2, 3)), *dense]), rtol=1e-5)

    @pytest.mark.slow
    def test_what_a_scan_stacks(self):
        w = normal(4, 3, 3)
        run = implicit(lambda w: jax.lax.scan(lambda c, x: (c, Rounded.quantize(x)), 0.0, w)[1])
        made, expected = run(w), jax.vmap(Rounded.quantize)(w)
        assert jax.tree.structure(made) == jax.tree.structure(expected)
        np.testing.assert_allclose(made.materialise(), expected.materialise(), rtol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_inside(self, wrap):
        stack, dense = self.made(3)
        x = jnp.ones((2, 3))
        run = lambda f, *args: wrap(implicit(f))(*args)
        np.testing.assert_array_equal(run(lambda s: s[1], stack), dense[1])
        np.testing.assert_array_equal(run(lambda s, i: s[i], stack, 2), dense[2])
        np.testing.assert_allclose(run(jax.vmap(lambda w: w + 1.0), stack), dense + 1)
        np.testing.assert_allclose(run(jax.vmap(lambda w: x @ w), stack), x @ dense, rtol=1e-6)
        np.testing.assert_allclose(run(lambda s: x @ s, stack), x @ dense, rtol=1e-6)
        np.testing.assert_allclose(wrap(jax.vmap(implicit(lambda w: x @ w)))(stack), x @ dense, rtol=1e-6)

    @pytest.mark.slow
    def test_nested_ones(self):
        class Twice(ImplicitArray, warn_on_materialize=False):
            inner: ImplicitArray
            scale: jax.Array

            def materialize(self):
                return self.inner * self.scale

        stack, dense = self.made(3)
        outer = jax.vmap(lambda x: Twice(x, x.scale, shape=x.shape))(stack)
        expected = dense * np.asarray(stack.scale)[:, None, None]
        np.testing.assert_allclose(outer.materialise(), expected, rtol=1e-6)

    def test_the_loss_says_what_can_be_done(self):
        stack, _ = self.made(3)
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match=r"stack, .*jax\.vmap"):
            implicit(jnp.matmul)(jnp.ones((2, 3)), stack)

    @pytest.mark.slow
    def test_one_array_made_whole_follows_its_handlers(self):
        whole = Strict.quantize(normal(5, 4, 3))
        out = implicit(jnp.matmul)(normal(5, 2, 4), whole)
        np.testing.assert_allclose(out, normal(5, 2, 4) @ whole.materialise(), rtol=1e-5)
