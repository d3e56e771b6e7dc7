"""`AnnotatedArray`: everything that a subclass gets without a rule of its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import DimensionError, Unitful
from quaxlike.arrays.zero import Full
from tests.samples import normal


class Tagged(ql.AnnotatedArray):
    tag: str = eqx.field(static=True)

    on_materialise = "error"


@ql.register_on_either_side(("add", "sub"), Tagged, other=Tagged)
def _alike(primitive: Primitive, x, y, **params):
    return x.with_array(Tagged.bind(primitive, (x, y), params))


class Loose(ql.AnnotatedArray):
    tag: str = eqx.field(static=True)


X = normal(2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.T,
        lambda x: x[1],
        lambda x: x[:, 1:, ::2],
        lambda x: x[jnp.array([1, 0])],
        lambda x: x.reshape(6, 4),
        lambda x: jnp.flip(x, 1),
        lambda x: jnp.squeeze(x[:1], 0),
        lambda x: jnp.broadcast_to(x, (5, 2, 3, 4)),
        lambda x: jnp.concatenate([x, x], 1),
        lambda x: jnp.stack([x, x]),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jnp.split(x, 2)[1],
        lambda x: jax.lax.scan(lambda c, row: (c, row + row), 0.0, x)[1],
        lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + x, x),
        lambda x: jax.lax.cond(True, lambda: x, lambda: jnp.zeros((2, 3, 4))),
        lambda x: jax.vmap(lambda row: row + row, in_axes=1)(x),
        lambda x: jax.jvp(lambda x: x + x, (x,), (x,))[1],
        lambda x: jnp.zeros((2, 2, 3, 4)).at[1].set(x),
    ],
)
def test_primitives_that_move_elements_keep_the_metadata(function):
    out = ql.quaxify(function)(Tagged(X, "a"))
    assert isinstance(out, Tagged)
    assert out.tag == "a"
    assert jnp.array_equal(out.array, function(X))
    assert out.dtype == function(X).dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    "join",
    {
        "concatenate": lambda x, y: jnp.concatenate([x, y]),
        "pad": lambda x, y: jax.lax.pad(x, y[0, 0, 0], [(0, 1, 0)] * 3),
        "select_n": lambda x, y: jax.lax.select_n(jnp.array(True), x, y),
        "dynamic_update_slice": lambda x, y: jax.lax.dynamic_update_slice(x, y[:1], (1, 0, 0)),
        "scatter": lambda x, y: x.at[jnp.array([1])].set(y[:1]),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_arrays_are_joined_if_their_metadata_are_alike(join):
    primitive, function = join
    x, y = Tagged(X, "a"), Tagged(-X, "a")
    out = ql.quaxify(function)(x, y)
    assert out.tag == "a"
    assert jnp.array_equal(out.array, function(X, -X))
    with pytest.raises(ql.MaterialisationError, match=primitive):
        ql.quaxify(function)(x, Tagged(-X, "b"))


@pytest.mark.parametrize("join", [jnp.stack, jnp.concatenate, jnp.vstack])
def test_an_array_is_joined_alone(join):
    out = ql.quaxify(lambda x: join([x]))(Tagged(X, "a"))
    assert out.tag == "a"
    assert jnp.array_equal(out.array, join([X]))


def test_without_a_rule_the_array_alone_is_used():
    out = ql.quaxify(jnp.sin)(Loose(X, "a"))
    assert not ql.is_value(out)
    assert jnp.array_equal(out, jnp.sin(X))
    with pytest.raises(ql.MaterialisationError, match=r"register\(\"sin\"\)"):
        ql.quaxify(jnp.sin)(Tagged(X, "a"))


def test_rule_for_several_is_of_its_class_alone():
    class Sorted(Loose):
        pass

    @Sorted.rule_for_several("sort")
    def _sort(primitive, *xs, **params):
        return [xs[0].with_array(out) for out in Sorted.bind(primitive, xs, params)]

    assert isinstance(ql.quaxify(jnp.sort)(Sorted(X, "a")), Sorted)
    assert not ql.is_value(ql.quaxify(jnp.sort)(Loose(X, "a")))


@pytest.mark.slow
def test_the_array_may_be_a_value():
    base, a, b = normal(4, 3), normal(2, 3), normal(4, 2)
    lora = ql.LoraArray(base, a, b)
    rows = ql.quaxify(lambda x: jax.lax.stop_gradient(x).T)(Tagged(lora, "a"))
    assert isinstance(rows.array, ql.LoraArray)
    assert jnp.allclose(ql.materialise(rows), ql.materialise(lora).T)


class Foreign(ql.ArrayValue):
    """It has one rule, and is never materialised."""

    array: jax.Array

    on_materialise = "error"

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise AssertionError("materialised")


@ql.register("atan2")
def _(x: jax.Array, y: Foreign):
    return Foreign(jnp.atan2(x, y.array))


def test_a_primitive_without_a_rule_leaves_other_operands_as_they_are():
    out = ql.quaxify(jnp.atan2)(Loose(X, "a"), Foreign(X))
    assert isinstance(out, Foreign)
    assert jnp.array_equal(out.array, jnp.atan2(X, X))
    first, second = ql.explain(jnp.atan2)(Loose(X, "a"), Foreign(X)).rows
    assert (first.outcome, first.bytes, second.outcome) == ("materialised", X.nbytes, "rule")
    with pytest.raises(ql.MaterialisationError, match=r"; Tagged would be made dense"):
        ql.quaxify(jnp.atan2)(Tagged(X, "a"), Foreign(X))


def test_units_and_names_are_annotated_arrays():
    assert issubclass(Unitful, ql.AnnotatedArray)
    assert issubclass(NamedArray, ql.AnnotatedArray)


@pytest.mark.parametrize("derivative", [jax.custom_jvp, jax.custom_vjp])
def test_a_class_that_promotes_arrays_alone_is_first_met_by_a_custom_derivative(derivative):
    class Counted(ql.AnnotatedArray):
        count: int = eqx.field(static=True)

        @classmethod
        def promote(cls, array, like=None):
            return cls(jnp.asarray(0.0), 0).with_array(array)

    f = derivative(lambda x: x)
    if derivative is jax.custom_jvp:
        f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    else:
        f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    out = jax.jit(ql.quaxify(lambda x: f(x)))(Counted(X, 2))
    assert isinstance(out, Counted)
    assert out.count == 2


@pytest.mark.parametrize(("cls", "metadata"), [(Tagged, "a"), (Unitful, "m"), (NamedArray, "ab")])
def test_indices_that_are_values(cls, metadata):
    x = cls(X[0], metadata)
    i = Full(1, (), jnp.int32)
    for f in (lambda x, i: x[i], _slice_at):
        out, expected = ql.quaxify(f)(x, i), f(X[0], jnp.int32(1))
        assert isinstance(out, cls)
        assert jnp.array_equal(out.array, expected)


def _slice_at(x, i):
    return jax.lax.dynamic_slice(x, (i, i), (2, 2), allow_negative_indices=False)


def test_an_index_with_a_unit_is_refused():
    i = Unitful(jnp.int32(1), "s")
    with pytest.raises(DimensionError, match="`dynamic_slice` meets arrays in different units"):
        ql.quaxify(_slice_at)(Unitful(X[0], "m"), i)
