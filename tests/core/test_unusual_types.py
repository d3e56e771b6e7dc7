"""Types for which something does not hold that holds for most: nothing about them is guessed wrongly."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.unitful import Unitful
from tests.samples import array


class Plain(ql.ArrayValue):
    array: jax.Array

    linear = True

    def materialise(self):
        return 1 * self.array


@ql.register_on_either_side("mul", Plain, other=jax.Array)
def _(primitive, x, y, **params):
    x, y = (x, y) if isinstance(x, Plain) else (y, x)
    return NotImplemented if isinstance(y, Plain) else Plain(x.array * y)


# Rows that are those of the leaves only for some numbers and sizes


class Sums(ql.ArrayValue):
    steps: jax.Array

    def materialise(self):
        return jnp.cumsum(self.steps, axis=0)


class FromFirst(ql.ArrayValue):
    codes: jax.Array

    def materialise(self):
        return self.codes + self.codes[:1]


class Phases(ql.ArrayValue):
    z: jax.Array

    def materialise(self):
        return lax.complex(self.z.real, jnp.cumsum(self.z.imag, 0))


class Padded(ql.ArrayValue):
    array: jax.Array
    length: int = eqx.field(static=True)

    def materialise(self):
        keep = jnp.arange(self.array.shape[0]) < self.length
        return jnp.where(keep.reshape(-1, *[1] * (self.array.ndim - 1)), self.array, 0)


class Clipped(ql.ArrayValue):
    array: jax.Array
    largest: float = eqx.field(static=True)

    def materialise(self):
        return self.array * jnp.minimum(1.0, self.largest / jnp.linalg.norm(self.array))


_UNUSUAL_ROWS = {
    "integers": lambda: Sums(jnp.arange(9).reshape(3, 3)),
    "booleans": lambda: Sums(jnp.array([[True, False], [True, True]])),
    "codes": lambda: FromFirst(jnp.array([5, 1, 2], jnp.int8)),
    "complex": lambda: Phases(jnp.array([[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]])),
    "a length": lambda: Padded(jnp.ones((8, 4)), 5),
    "a limit": lambda: Clipped(jnp.array([[3.0, 4.0], [30.0, 40.0]]), 10.0),
}


@pytest.mark.quick("codes")
@pytest.mark.parametrize("make", _UNUSUAL_ROWS.values(), ids=_UNUSUAL_ROWS)
def test_rows_that_are_not_those_of_the_leaves(make):
    x = make()
    for program in (
        lambda x: lax.map(lambda row: 1 * row, x),
        lambda x: lax.scan(lambda carry, _: (carry, x), 0, jnp.arange(2))[1],
    ):
        found = ql.materialise(ql.quaxify(program)(x))
        np.testing.assert_allclose(found, program(x.materialise()), rtol=1e-6)


def test_padded_values_that_are_made_in_a_map():
    program = jax.vmap(lambda i: jnp.dot(Padded(i * jnp.ones(8), 5), jnp.ones(8)))
    np.testing.assert_allclose(ql.quaxify(program)(jnp.arange(7.0)), 5 * jnp.arange(7))


# Linear types whose leaves are not elements


class Scaled(ql.ArrayValue):
    codes: jax.Array
    scale: jax.Array

    linear = True

    def materialise(self):
        return self.codes.astype(self.scale.dtype) * self.scale


@ql.register_on_either_side("mul", Scaled, other=jax.Array)
def _(primitive, x, y, **params):
    x, y = (x, y) if isinstance(x, Scaled) else (y, x)
    return NotImplemented if isinstance(y, Scaled) or y.ndim else Scaled(x.codes, x.scale * y)


@jax.custom_vjp
def _half_of_squares(x):
    return 0.5 * jnp.sum(x * x)


_half_of_squares.defvjp(lambda x: (_half_of_squares(x), x), lambda x, ct: (ct * x,))


@jax.custom_vjp
def _times(x, s):
    return x * s


_times.defvjp(lambda x, s: (x * s, (x, s)), lambda kept, ct: (ct * kept[1], jnp.sum(ct * kept[0])))
_CODES = np.array([1, 2, 3], np.int8)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_scale_that_all_elements_share(transform):
    def by_scale(scale, codes):
        return ql.quaxify(_half_of_squares)(Scaled(codes, scale))

    def by_factor(factor, codes):
        product = ql.quaxify(_times)(Scaled(codes, jnp.float32(2)), factor)
        return jnp.sum(jnp.array([1.0, 5.0, 7.0]) * ql.materialise(product))

    assert transform(jax.grad(by_scale))(2.0, _CODES) == 28
    assert transform(jax.grad(by_factor))(3.0, _CODES) == 64


@pytest.mark.slow
def test_elements_that_are_stored_twice():
    class Coordinates(ql.ArrayValue):
        positions: jax.Array
        elements: jax.Array

        linear = True

        def materialise(self):
            return jnp.zeros(3).at[self.positions].add(self.elements)

    for positions, expected in (([0, 1, 2], [1.0, 2.0, 3.0]), ([0, 2, 2], [1.0, 5.0, 5.0])):
        gradient = jax.grad(lambda x, at: ql.quaxify(_half_of_squares)(Coordinates(at, x)))
        found = gradient(jnp.array([1.0, 2.0, 3.0]), jnp.array(positions))
        np.testing.assert_allclose(found, expected)


def test_leaves_that_materialise_does_not_use():
    class Dual(ql.ArrayValue):
        primal: jax.Array
        along: jax.Array

        linear = True

        def materialise(self):
            return self.primal

    @ql.register_on_either_side("mul", Dual, other=jax.Array)
    def _(primitive, x, y, **params):
        x, y = (x, y) if isinstance(x, Dual) else (y, x)
        return Dual(x.primal * y, x.along * y)

    @jax.custom_jvp
    def twice(x):
        return x * 2.0

    @twice.defjvp
    def _(primals, tangents):
        return primals[0] * 2.0, tangents[0] * 2.0

    x = Dual(jnp.ones(3), jnp.ones(3))
    _, along = jax.jvp(lambda x: ql.quaxify(twice)(x).along, (x,), (x,))
    np.testing.assert_allclose(along, 2)


@pytest.mark.slow
def test_a_linear_type_of_symbolic_size():
    @jax.custom_vjp
    def twice(x):
        return x * 2.0

    twice.defvjp(lambda x: (x * 2.0, None), lambda _, ct: (ct * 2.0,))
    (n,) = jax.export.symbolic_shape("n")
    program = jax.jit(lambda x: ql.materialise(ql.quaxify(twice)(Plain(x))))
    exported = jax.export.export(program)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    np.testing.assert_allclose(exported.call(jnp.ones((2, 3))), 2)


# Names of fields, and static fields


def test_fields_are_not_named_as_hooks():
    with pytest.raises(TypeError, match="OfLayer has a field 'linear', which is the name of a hook that"):

        class OfLayer(ql.ArrayValue):
            linear: eqx.nn.Linear

            def materialise(self):
                return self.linear.weight

    with pytest.raises(TypeError, match="has a field 'default'"):

        class WithDefault(ql.ArrayValue):
            default: jax.Array

            def materialise(self):
                return self.default

    with pytest.raises(TypeError, match="has a field 'shape', which is the name of a property that"):

        class WithShape(ql.ArrayValue):
            shape: tuple[int, ...] = eqx.field(static=True)

            def materialise(self):
                return jnp.zeros(self.shape)

    class Annotated(Plain):
        array: jax.Array | None = None
        linear: bool = False
        on_materialise: str = "warn"

    assert not Annotated.linear


def test_statics_that_compare_equal_inside_a_static():
    class Constants(ql.ArrayValue):
        values: tuple[float, ...] = eqx.field(static=True)

        def materialise(self):
            return jnp.asarray(self.values)

    found = [Constants(values).dtype for values in ((1, 1), (1.0, 1.0), (True, True), (1, 1))]
    assert found == ["int32", "float32", "bool", "int32"]


def test_a_value_in_a_static_field():
    class Holding(ql.ArrayValue):
        array: jax.Array
        other: ql.ArrayValue = eqx.field(static=True)

        def materialise(self):
            return self.array

    found = pytest.raises(
        TypeError, match=r"Holding.other is a static field.*a Value with arrays; found Plain"
    )
    with pytest.warns(UserWarning, match="being set as static"), found:
        Holding(jnp.ones(2), Plain(jnp.ones(2)))


def test_a_dtype_that_is_not_static():
    class Of(ql.ArrayValue):
        array: jax.Array
        kind: np.dtype

        def materialise(self):
            return self.array.astype(self.kind)

    with pytest.raises((TypeError, ValueError), match=r"Of.*kind"):
        ql.quaxify(jnp.sin)(Of(jnp.ones(2), np.dtype("float32")))


def test_an_optional_part_whose_annotation_cannot_be_resolved():
    class Refusing(ql.ArrayValue):
        array: "NotThere"
        rate: "NotThere | None" = None

        def aval(self):
            return jax.core.ShapedArray(self.array.shape, self.array.dtype)

        def materialise(self):
            raise ValueError("Refusing to materialise.")

    assert ql.is_value(Refusing(jnp.ones(2), None))
    assert not ql.is_value(Refusing(None, jnp.ones(2)))  # pyright: ignore[reportArgumentType]


# `materialise` and the results of rules


class Named(ql.ArrayValue):
    array: jax.Array
    name: str = eqx.field(static=True, default="a")

    on_materialise = "error"

    def materialise(self):
        return self.array


@pytest.mark.slow
def test_materialise_inside_a_transform():
    x = Named(jnp.arange(3.0))
    for program in (
        lambda x: jnp.sin(ql.materialise(x)),
        jax.jit(lambda x: jnp.sin(ql.materialise(x))),
        jax.vmap(lambda x: jnp.sin(ql.materialise(x))),
        lambda x: jax.lax.scan(lambda c, _: (c, jnp.sin(ql.materialise(x))), 0, None, 1)[1][0],
        lambda x: jax.jvp(lambda x: jnp.sin(ql.materialise(x)), (x,), (x,))[0],
        jax.checkpoint(lambda x: jnp.sin(ql.materialise(x))),
    ):
        for run in (ql.quaxify(program), jax.jit(ql.quaxify(program)), ql.quaxify(ql.quaxify(program))):
            np.testing.assert_allclose(run(x), np.sin(np.arange(3)), rtol=1e-6)
    of_plain = jax.grad(ql.quaxify(jax.jit(lambda y, x: jnp.sum(ql.materialise(x) * y))))(jnp.ones(3), x)
    np.testing.assert_allclose(of_plain, np.arange(3))
    y = ql.quaxify(
        lambda p, x, y: lax.cond(p, lambda x, y: ql.materialise(x), lambda x, y: ql.materialise(y), x, y)
    )(True, x, Named(jnp.ones(3), "b"))
    np.testing.assert_allclose(y, np.arange(3))


@pytest.mark.slow
def test_a_rule_that_returns_a_number():
    class Constant(ql.ArrayValue):
        form: tuple[int, ...] = eqx.field(static=True)
        value: float = eqx.field(static=True)

        def materialise(self):
            return jnp.full(self.form, self.value, jnp.float32)

    @ql.register("reduce_sum")
    def _(x: Constant, **params):
        return x.value * math.prod(x.form)

    x, y = Constant((3,), 2.0), jnp.ones(3, jnp.bfloat16)
    program = lambda x, y: x.sum() + y.astype(jnp.float32)
    kept = jax.config.jax_numpy_dtype_promotion
    with jax.numpy_dtype_promotion("standard"):
        mixed = lambda x, y: x.sum() + y
        assert ql.quaxify(mixed)(x, y).dtype == ql.quaxify(jax.jit(mixed))(x, y).dtype == jnp.float32
    assert jax.config.jax_numpy_dtype_promotion == kept
    np.testing.assert_allclose(ql.quaxify(program)(x, y), 7)


def test_a_default_that_declines():
    class Declining(ql.ArrayValue):
        array: jax.Array

        def materialise(self):
            return self.array

        @staticmethod
        def default(primitive, values, params):
            return NotImplemented

    np.testing.assert_allclose(ql.quaxify(jnp.negative)(Declining(jnp.ones(2))), -1)


def test_rules_for_custom_derivatives_are_never_called():
    rules = ql.RuleSet()
    with pytest.warns(ql.RuleWarning, match="A rule for `custom_jvp_call` is never called"):

        @ql.register("custom_jvp_call", rules=rules)
        def _(x: Plain, **params):
            return [x]


# Operands of NumPy, and buffers


def test_an_array_of_numpy_on_the_left_of_a_late_value():
    w, x = Plain(jnp.arange(3.0)), np.full(3, 2, np.float32)
    assert isinstance(ql.quaxify(lambda w: x * w)(w), Plain)
    late = jax.jit(lambda w: ql.quaxify(lambda: x * w)())(w)
    assert isinstance(late, Plain)
    np.testing.assert_allclose(late.array, 2 * np.arange(3))
    with pytest.raises(TypeError, match=r"Plain was passed to `\*` outside"):
        x * w

    class Converting(Plain):
        def __array__(self, *args, **kwargs):
            return np.asarray(self.array)

    np.testing.assert_allclose(x * Converting(jnp.ones(3)), 2)


def test_promote_cannot_lift_a_buffer_of_another_shape():
    class OfRows(ql.ArrayValue):
        array: jax.Array
        scale: jax.Array

        def materialise(self):
            return self.array * self.scale[..., None]

        @classmethod
        def promote(cls, array, like):
            return cls(array, jnp.ones(like.scale.shape))

    x = OfRows(jnp.ones((2, 3)), jnp.array([2.0, 3.0]))
    write = lambda x: lax.dynamic_update_slice(jnp.zeros((5, 3)), x, (1, 0))
    np.testing.assert_allclose(ql.quaxify(write)(x), write(x.materialise()))
    add = lambda x: jnp.zeros((5, 3)).at[jnp.array([0, 3])].add(x)
    np.testing.assert_allclose(ql.quaxify(add)(x), add(x.materialise()))


@pytest.mark.slow
def test_the_sharding_of_an_explicit_mesh():
    class Transposed(ql.ArrayValue):
        array: jax.Array

        def materialise(self):
            return self.array.T

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for shape in ((4, 4), (2, 4)):
            array = jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, jax.P("i", None)))
            x = Transposed(array)
            assert jax.typeof(x.materialise()) == x.aval()
            for program in (
                lambda x: lax.fori_loop(0, 2, lambda i, carry: carry * 2, x),
                lambda x: jax.grad(lambda x: jnp.sin(x).sum())(x),
            ):
                found = ql.materialise(ql.quaxify(program)(x))
                np.testing.assert_allclose(found, program(x.materialise()), rtol=1e-6)


# Static fields that are equal, but of different types


class Signed(ql.ArrayValue):
    array: jax.Array
    like: float = eqx.field(static=True)

    def materialise(self):
        return self.array * jnp.copysign(1.0, self.like)


_SHARED = array([2.0, 3.0])


@pytest.mark.parametrize(
    "f", [jnp.add, lambda x, y: jnp.concatenate([x, y]), lambda x, y: lax.select(False, x, y)]
)
def test_values_of_the_same_arrays_and_equal_statics(f):
    x, y = Signed(_SHARED, 0.0), Signed(_SHARED, -0.0)
    np.testing.assert_array_equal(ql.materialise(ql.quaxify(f)(x, y)), f(x.materialise(), y.materialise()))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: lax.cond(True, lambda: x, lambda: y),
        lambda x, y: lax.fori_loop(0, 1, lambda i, c: y, x),
    ],
)
def test_branches_of_equal_statics(f):
    x, y = Signed(_SHARED, 0.0), Signed(_SHARED + 1, -0.0)
    with pytest.raises(ql.StructureError, match="equal but of different types"):
        ql.quaxify(f)(x, y)


def _kept(x):
    return x


def _doubled(x):
    return x * 2


def test_programs_of_equal_statics():
    f = ql.quaxify(lambda x: lax.cond(True, _doubled, _kept, x))
    for like in (0.0, -0.0, 0.0):
        x = Signed(_SHARED, like)
        np.testing.assert_array_equal(ql.materialise(f(x)), 2 * x.materialise())


class Factor(eqx.Module):
    array: jax.Array
    by: float = eqx.field(static=True)


class OfFactors(ql.ArrayValue):
    of: dict[str, list[Factor]]

    def materialise(self):
        return sum(x.array * x.by for x in self.of["factors"])


@pytest.mark.slow
def test_equal_statics_of_modules_inside(default_promotion):
    for by in (2, 2.0, 2):
        x = OfFactors({"factors": [Factor(jnp.arange(3), by)]})
        dense = x.materialise()
        assert x.dtype == dense.dtype
        assert ql.quaxify(jnp.dot)(x, x).dtype == dense.dtype


# Types that only exist at their own sizes


class RowScaled(ql.ArrayValue):
    array: jax.Array
    scales: tuple[float, ...] = eqx.field(static=True)  # one for each row

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        return self.array * jnp.array(self.scales).reshape(-1, *[1] * (self.array.ndim - 1))


class SummedAlong(ql.ArrayValue):
    array: jax.Array
    axis: int = eqx.field(static=True)

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        return jnp.cumsum(self.array, axis=self.axis)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "x",
    [
        RowScaled(array(np.ones((3, 3))), (1.0, 10.0, 100.0)),
        RowScaled(array(np.arange(4.0)), (1.0, 10.0, 100.0, 1000.0)),
        SummedAlong(array(np.ones((4, 3))), 1),
    ],
)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.map(lambda row: row * 1, x),
        lambda x: lax.map(jnp.sum, x),
        lambda x: lax.scan(lambda c, _: (c, x), 0, None, length=4)[1],
    ],
)
def test_rows_of_types_that_exist_at_their_own_sizes(f, x):
    np.testing.assert_array_equal(ql.materialise(ql.quaxify(f)(x)), f(x.materialise()))


class Length(Unitful):
    pass


def test_classes_that_print_alike_are_named():
    x, y = Length(_SHARED, "m"), Unitful(_SHARED, "m")
    with pytest.raises(ql.StructureError, match=r"Unitful .* m on one side, Length .* m on the other. Make"):
        ql.quaxify(lambda x, y: lax.cond(True, lambda: x, lambda: y))(x, y)


# A `materialise` that JAX can differentiate, but not transpose


class Stored(ql.ArrayValue):
    array: jax.Array
    at: jax.Array

    linear = True

    def materialise(self):
        return jnp.zeros(6).at[self.at].set(self.array)


def test_the_gradient_of_a_type_made_inside_whose_scatter_has_no_transpose():
    at, x = jnp.array([4, 1]), jnp.array([1.0, -2.0])
    f = lambda x: jnp.sum(jnp.exp(Stored(x, at)))
    np.testing.assert_allclose(ql.quaxify(jax.grad(f))(x), jnp.exp(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("f", [jax.nn.relu, jax.nn.softplus, jnp.linalg.norm])
def test_the_gradient_of_a_custom_derivative_of_such_a_type(f):
    at, x = jnp.array([4, 1]), jnp.array([1.0, -2.0])
    grad = jax.grad(lambda x: jnp.sum(ql.materialise(ql.quaxify(f)(Stored(x, at)))))(x)
    dense = jax.grad(lambda x: jnp.sum(f(Stored(x, at).materialise())))(x)
    np.testing.assert_allclose(grad, dense, rtol=1e-6)
