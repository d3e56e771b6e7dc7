"""Rows of Values whose type does not say by `leading_axis` which axis of its leaves is cut."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import array


class Twice(ql.ArrayValue):
    array: Any

    def materialise(self):
        return 2 * self.array


class Refusing(Twice):
    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        raise ValueError("Refusing to materialise.")


class Transposed(Twice):
    def materialise(self):
        return self.array.T


class TransposedRefusing(Refusing):
    def aval(self):
        return jax.core.ShapedArray(self.array.shape[::-1], self.array.dtype)


class Sums(Twice):
    def materialise(self):
        return jnp.cumsum(self.array, 0)


class Labelled(Twice):
    """What the static field says of two axes is not true of a row."""

    labels: tuple[str, ...] = eqx.field(static=True, default=("i", "j"))


class NoRows(Twice):
    def leading_axis(self):
        return NotImplemented


@ql.register("neg")
def _(x: Twice, **params):
    return type(x)(-x.array)


X = array(np.arange(9.0).reshape(3, 3))
NEGATED = ql.quaxify(lambda x: jax.lax.map(lambda row: -row, x))


@pytest.mark.quick("Refusing")
@pytest.mark.parametrize("cls", [Twice, Refusing])
def test_rows_of_the_leaves_are_rows_of_the_array(cls):
    with ql.on_materialise("error"):
        found = NEGATED(cls(X))
    assert type(found) is cls
    np.testing.assert_array_equal(found.array, -X)


NO_HOOK = r"define `\w+.leading_axis"


@pytest.mark.quick(
    "Transposed-define `\\\\w+.leading_axis",
    "Labelled-define `\\\\w+.leading_axis",
    "NoRows-A row of this NoRows is not of its type",
)
@pytest.mark.parametrize(
    ("cls", "hint"),
    [
        *((cls, NO_HOOK) for cls in (Transposed, Sums, Labelled)),
        (NoRows, "A row of this NoRows is not of its type"),
    ],
)
def test_other_rows_are_those_of_the_dense_array(cls, hint):
    found = NEGATED(cls(X))
    np.testing.assert_array_equal(ql.materialise(found), -cls(X).materialise())
    with (
        ql.on_materialise("error"),
        pytest.raises(ql.MaterialisationError, match=hint),
    ):
        NEGATED(cls(X))


def test_shapes_tell_that_an_array_which_refuses_is_cut_elsewhere():
    with pytest.raises(ValueError, match="Refusing to materialise"):
        NEGATED(TransposedRefusing(X))


class Scaled(ql.ArrayValue):
    """Stacks of it are none: the scales would be those of columns."""

    array: Any
    scale: Any

    def materialise(self):
        return self.array * self.scale


@ql.register("mul")
def _(x: Scaled, y: jax.Array, **params):
    return Scaled(x.array, x.scale * y) if y.ndim == 0 else NotImplemented


@pytest.mark.slow
def test_results_of_iterations_are_stacked_where_their_leaves_are_rows():
    f = lambda x: jax.lax.map(lambda y: x * y, jnp.arange(3.0))
    x = Scaled(jnp.arange(1.0, 4.0), jnp.array(2.0))
    np.testing.assert_array_equal(ql.quaxify(f)(x), f(x.materialise()))
    out = ql.quaxify(lambda x: jax.lax.map(lambda _: -x, jnp.arange(3)))(Twice(X))
    assert type(out) is Twice
    np.testing.assert_array_equal(out.array, jnp.broadcast_to(-X, (3, 3, 3)))


def test_square_leaves_that_are_cut_along_another_axis_are_not_sharded_along_this_one():
    mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    f = jax.shard_map(lambda x: -x, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    np.testing.assert_array_equal(ql.materialise(ql.quaxify(f)(Twice(X))), -2 * X)
    with pytest.raises(ValueError, match=r"Define `Transposed.shard_spec\(spec\)`"):
        ql.quaxify(f)(Transposed(X))


class Holder(ql.ArrayValue):
    """Its fields are called as the parameters of a function that replaces fields might be."""

    value: ql.ArrayValue
    x: ql.ArrayValue

    def materialise(self):
        return ql.materialise(self.value) - ql.materialise(self.x)


@pytest.mark.slow
@pytest.mark.parametrize("part", [Twice, Transposed, NoRows])
def test_fields_of_any_name_that_hold_values(part):
    held = Holder(part(X), part(X**2))
    dense = ql.materialise(held)
    rows = ql.quaxify(lambda v: jax.lax.map(lambda row: row.sum(), v))(held)
    np.testing.assert_array_equal(rows, dense.sum(1))
    either = ql.quaxify(lambda v, p: jax.lax.cond(p, lambda: v, lambda: jnp.zeros_like(X)))
    for p in (True, False):
        np.testing.assert_array_equal(ql.materialise(either(held, p)), dense if p else 0 * X)


class Strict(ql.ArrayValue):
    array: jax.Array
    scale: jax.Array
    on_materialise = "error"

    def materialise(self):
        return self.array * self.scale


class StrictNoRows(Strict):
    def leading_axis(self):
        return NotImplemented


@ql.register("neg")
def _(x: Strict, **params):
    return type(x)(-x.array, x.scale)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Strict, r"Strict: the scan stacks its leaves\. Define `Strict\.leading_axis\(\)`"),
        (StrictNoRows, "a stack of them along a new leading axis is not of its type"),
    ],
)
def test_stacked_results_that_cannot_be_stacked(cls, message):
    x = cls(jnp.ones(3), jnp.float32(2))
    f = lambda x: jax.lax.scan(lambda c, _: (c, -x), 0.0, length=2)[1]
    with pytest.raises(ql.MaterialisationError, match=message) as caught:
        ql.quaxify(f)(x)
    assert "promote" not in str(caught.value)
    assert "the other side" not in str(caught.value)
    with ql.on_materialise("allow"):
        np.testing.assert_array_equal(ql.quaxify(f)(x), -2 * np.ones((2, 3)))
