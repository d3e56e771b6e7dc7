"""`dot_axes` against `dot_general` itself, and a rule that uses it, as the tutorial writes it."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import ArrayLike

import quaxlike as ql
from tests.samples import normal

_NUMBERS = [
    (((1,), (0,)), ((), ())),
    (((1,), (1,)), ((0,), (2,))),
    (((0, 2), (1, 0)), ((), ())),
    (((), ()), ((2, 0), (0, 1))),
    (((), ()), ((), ())),
]


def _operands(numbers):
    """Two arrays with three axes; sizes are equal where axes are paired, and different elsewhere."""
    sizes = [[2, 3, 4], [5, 6, 7]]
    for left, right in numbers:
        for own, other in zip(left, right, strict=True):
            sizes[1][other] = sizes[0][own]
    return [normal(*shape) for shape in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("on_left", [True, False])
@pytest.mark.parametrize("numbers", _NUMBERS)
def test_every_axis_is_paired_or_arrives_where_it_says(numbers, on_left):
    x, y = _operands(numbers)
    out = jax.lax.dot_general(x, y, numbers)
    operands = (x, y) if on_left else (y, x)
    both = ql.dot_axes(*operands, numbers, on_left=on_left)
    for operand, axes in zip(operands, both, strict=True):
        assert sorted((*axes.contracting, *axes.batch, *axes.free)) == [0, 1, 2]
        assert tuple(axes.in_result) == (*axes.batch, *axes.free)
        assert all(out.shape[at] == operand.shape[axis] for axis, at in axes.in_result.items())
    own, other = both
    assert sorted({*own.in_result.values(), *other.in_result.values()}) == [*range(out.ndim)]
    for one, two in itertools.chain(
        zip(own.contracting, other.contracting, strict=True), zip(own.batch, other.batch, strict=True)
    ):
        assert operands[0].shape[one] == operands[1].shape[two]
    # Scaling along an axis of an operand is scaling along that axis of the product.
    for operand, axes in zip(operands, both, strict=True):
        for axis, at in axes.in_result.items():
            scale = normal(operand.shape[axis])
            scaled = jnp.moveaxis(jnp.moveaxis(operand, axis, -1) * scale.reshape(1, 1, -1), -1, axis)
            pair = [scaled if z is operand else z for z in (x, y)]
            by_axis = scale.reshape([-1 if i == at else 1 for i in range(out.ndim)])
            np.testing.assert_allclose(
                jax.lax.dot_general(*pair, numbers), out * by_axis, rtol=1e-4, atol=1e-5
            )


class _RowScaled(ql.ArrayValue):
    """The type of the tutorial on types of one's own."""

    array: ArrayLike
    scale: ArrayLike
    on_materialise = "error"

    def materialise(self):
        return self.array * self.scale[..., None]


@ql.register_on_either_side("dot_general", _RowScaled, other=ArrayLike)
def _product(primitive, x, y, *, dimension_numbers, **params):
    on_left = isinstance(x, _RowScaled)
    w, other = (x, y) if on_left else (y, x)
    axes, _ = ql.dot_axes(w, other, dimension_numbers, on_left=on_left)
    rows = [axes.in_result.get(axis) for axis in range(w.scale.ndim)]
    if None in rows:
        return NotImplemented
    operands = (w.array, other) if on_left else (other, w.array)
    y = ql.quaxify(primitive.bind)(*operands, dimension_numbers=dimension_numbers, **params)
    return y * jax.lax.broadcast_in_dim(w.scale, y.shape, rows)


@pytest.mark.slow
@pytest.mark.parametrize("batch_axis", [0, 1])
def test_a_rule_that_uses_it_holds_however_a_model_is_called(batch_axis):
    w = _RowScaled(normal(4, 3), normal(4, seed=1))
    dense = w.array * w.scale.reshape(-1, 1)
    model = eqx.nn.Linear(3, 4, use_bias=False, key=jax.random.key(0))
    adapted = eqx.tree_at(lambda m: m.weight, model, w)
    x = normal(5, 3)
    batched = jnp.moveaxis(x, 0, batch_axis)
    for fn in (ql.quaxify(jax.vmap(adapted, batch_axis)), jax.vmap(ql.quaxify(adapted), batch_axis)):
        np.testing.assert_allclose(fn(batched), x @ dense.T, rtol=1e-6)
    on_the_right = lambda w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    np.testing.assert_allclose(ql.quaxify(on_the_right)(w), x @ dense.T, rtol=1e-6)
    stack = _RowScaled(normal(2, 4, 3), normal(2, 4, seed=1))
    got = ql.quaxify(jax.vmap(lambda w, x: w @ x, in_axes=(0, None)))(stack, x[0])
    np.testing.assert_allclose(got, (stack.array * stack.scale[..., None]) @ x[0], rtol=1e-6)
