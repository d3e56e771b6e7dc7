"""Axes of adapters of any type, done part by part."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike import adapters
from tests.samples import normal

AT = np.array([1, 0, 1])


class Shifted(ql.AdaptedArray):
    """A weight, and a number for each output that is added to its row."""

    shift: jax.Array
    out_axes: tuple[int, ...] = eqx.field(static=True, default=(-2,))
    in_axes: tuple[int, ...] = eqx.field(static=True, default=(-1,))

    part_axes: ClassVar = {"shift": "out"}
    any_axes: ClassVar = True
    cuttable: ClassVar = ("out", "in")

    def materialise(self):
        axes = tuple(axis % self.w.ndim for axis in (*self.out_axes, *self.in_axes))
        batch = [i for i in range(self.w.ndim) if i not in axes]
        order = [*batch, *axes]
        rows = jnp.transpose(ql.materialise(self.base), order)
        shift = self.shift.reshape(*self.shift.shape, *[1] * len(self.in_axes))
        return jnp.transpose(rows + shift, np.argsort(order))


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.T,
        lambda w: jnp.moveaxis(w, 0, 1),
        lambda w: w[:, ::2],
        lambda w: w[..., 1:3],
        lambda w: lax.rev(w, (1, 2)),
        lambda w: jnp.split(w, 2, axis=1)[1],
        lambda w: lax.dynamic_slice_in_dim(w, 1, 2, axis=2),
        lambda w: w.reshape(2, 2, 2, 3),
        lambda w: jnp.expand_dims(w, 2),
        lambda w: jnp.stack([w, w], axis=2),
        lambda w: jnp.concatenate([w, w]),
        lambda w: w[AT],
    ],
)
def test_a_type_of_ones_own_stays_structured(change):
    w = Shifted(normal(2, 4, 3), normal(2, 4, seed=1))
    with ql.on_materialise("error"):
        found = ql.quaxify(change)(w)
    assert isinstance(found, Shifted)
    np.testing.assert_allclose(found.materialise(), change(w.materialise()), rtol=1e-6)


def test_what_a_type_does_not_say_is_dense():
    class Fixed(ql.AdaptedArray):
        shift: jax.Array
        part_axes: ClassVar = {"shift": "out"}

        def materialise(self):
            return ql.materialise(self.base) + self.shift[..., None]

    w = Fixed(normal(2, 4, 3), normal(2, 4, seed=1))
    for change in (lambda w: w[:, 1:], lambda w: jnp.swapaxes(w, 1, 2), lambda w: w.reshape(2, 2, 2, 3)):
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="Fixed"):
            ql.quaxify(change)(w)
        with ql.on_materialise("allow"):
            np.testing.assert_allclose(ql.quaxify(change)(w), change(w.materialise()), rtol=1e-6)
    assert ql.quaxify(lambda w: w[1:])(w).shift.shape == (1, 4)


@pytest.mark.slow
def test_a_shared_base_stays_shared():
    w = adapters.ScaledArray(normal(4, 3), normal(2, 4, seed=1), normal(2, 3, seed=2))
    for change in (lambda w: w[1:], lambda w: lax.rev(w, (0,)), lambda w: w[AT], lambda w: w[None]):
        found = ql.quaxify(change)(w)
        assert found.w.shape == (4, 3)
        np.testing.assert_allclose(found.materialise(), change(w.materialise()), rtol=1e-6)


@pytest.mark.quick("<lambda>2", "<lambda>3", "<lambda>4", "<lambda>5")
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[AT],
        lambda w: w[:, AT],
        lambda w: w[1:],
        lambda w: w.reshape(3, 2, 2, 4),
        lambda w: jnp.concatenate([w, w]),
        lambda w: jax.vmap(lambda w, i: w[i])(w, AT),
    ],
)
def test_a_part_may_have_one_entry_for_a_whole_batch(change):
    w = adapters.ScaledArray(normal(1, 4, 4), normal(3, 4, seed=1))
    found = ql.materialise(ql.quaxify(change)(w))
    np.testing.assert_allclose(found, change(w.materialise()), rtol=1e-6)


def test_matrices_of_a_stack_whose_inputs_come_first():
    w = adapters.HadamardArray(normal(2, 3, 4), normal(2, 4, 3, seed=1), out_axes=(-1,), in_axes=(-2,))
    found = ql.quaxify(lambda w: w[AT])(w)
    assert isinstance(found, adapters.HadamardArray)
    np.testing.assert_allclose(found.materialise(), w.materialise()[AT], rtol=1e-6)


def test_adapters_with_keys_of_their_own():
    key = jax.random.key(0)
    w = ql.LoraArray(normal(4, 4), normal(2, 4, seed=1), normal(4, 2, seed=2), dropout=0.5, key=key)
    with ql.on_materialise("error"):
        stack = ql.quaxify(lambda w: jnp.stack([w, w]))(w)
        first = ql.quaxify(lambda w: w[0])(stack)
    assert stack.key.shape == (2,)
    assert jax.tree.structure(first) == jax.tree.structure(w)
    np.testing.assert_array_equal(first.materialise(), w.materialise())
