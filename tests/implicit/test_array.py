"""Shape and dtype of ImplicitArrays, casting, nesting, materialising."""

import dataclasses
import inspect
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.implicit import (
    ImplicitArray,
    OriginArray,
    UninitializedAval,
    aux_field,
    implicit,
    materialize_nested,
    register,
)
from tests.samples import normal

from .types import Codes, Strict


class Bare(ImplicitArray, warn_on_materialize=False):
    """Of which only `materialize` says what it is."""

    array: jax.Array

    def materialize(self):
        return self.array.astype(jnp.bfloat16)[..., None]


class TestShapeAndDtype:
    @pytest.mark.slow
    def test_given(self):
        x = Codes(jnp.ones((2, 3), jnp.int8), jnp.ones(2), shape=(2, 3), dtype=jnp.bfloat16)
        assert (x.shape, x.dtype, x.ndim, x.size) == ((2, 3), jnp.bfloat16, 2, 6)
        assert x.materialise().dtype == jnp.bfloat16

    def test_from_materialize(self):
        x = Bare(jnp.ones((2, 3)))
        assert (x.shape, x.dtype) == ((2, 3, 1), jnp.bfloat16)

    def test_computed(self):
        class Computed(Bare):
            def compute_shape(self):
                return (*self.array.shape, 1)

            def compute_dtype(self):
                return jnp.bfloat16

            def materialize(self):
                raise AssertionError("is not needed")

        x = Computed(jnp.ones((2, 3)))
        assert (x.shape, x.dtype) == ((2, 3, 1), jnp.bfloat16)

    def test_by_default(self):
        class Fixed(ImplicitArray):
            array: jax.Array
            default_shape = (4,)
            default_dtype = jnp.float32

            def materialize(self):
                return jnp.broadcast_to(self.array, (4,))

        x = Fixed(jnp.ones(()))
        assert (x.shape, x.dtype) == ((4,), jnp.float32)
        stacked = jax.vmap(Fixed)(jnp.ones(3))
        assert stacked.shape == (3, 4)

    def test_by_a_factory(self):
        @dataclasses.dataclass
        class Fixed(ImplicitArray):
            array: jax.Array
            shape: tuple[int, ...] = dataclasses.field(default_factory=lambda: (4,))
            dtype: Any = dataclasses.field(default_factory=lambda: jnp.float16)

            def materialize(self):
                return jnp.broadcast_to(self.array, self.shape).astype(self.dtype)

        x = Fixed(jnp.ones(()))
        assert (x.shape, x.dtype) == ((4,), jnp.float16)

    def test_given_comes_before_computed(self):
        class Computed(Bare):
            def compute_shape(self):
                return (7,)

        with pytest.warns(UserWarning, match=r"Computed has shape \(7,\), but its materialize\(\) returns"):
            Computed(jnp.ones(2))
        assert Computed(jnp.ones(2), shape=(2, 1)).shape == (2, 1)

    def test_a_mismatch_warns(self):
        with pytest.warns(UserWarning, match=r"Bare has shape \(5,\), .* returns shape \(2, 1\)") as caught:
            Bare(jnp.ones(2), shape=(5,))
        assert caught[0].filename.endswith(".py")
        with pytest.warns(UserWarning, match="Bare has dtype float32, .* returns dtype bfloat16"):
            Bare(jnp.ones(2), dtype=jnp.float32)

    def test_nothing_says_it(self):
        class Circular(ImplicitArray):
            array: jax.Array

            def materialize(self):
                return self.array.reshape(self.shape)

        with pytest.raises(UninitializedAval, match=r"materialize\(\) reads `self.shape`.* Pass `shape=`"):
            Circular(jnp.ones(3))
        assert Circular(jnp.ones(6), shape=(2, 3)).shape == (2, 3)

    def test_of_shapes(self):
        x = Bare(jax.ShapeDtypeStruct((2, 3), jnp.float32))
        assert (x.shape, x.dtype) == ((2, 3, 1), jnp.bfloat16)

    def test_a_type_that_refuses(self):
        class Refusing(ImplicitArray):
            array: jax.Array

            def materialize(self):
                raise RuntimeError("this is too large")

        x = Refusing(jnp.ones(3), shape=(3,), dtype=jnp.float32)
        assert x.shape == (3,)
        with ql.on_materialise("allow"), pytest.raises(RuntimeError, match="too large"):
            implicit(jnp.sin)(x)

    @pytest.mark.slow
    def test_static_fields(self):
        (field,) = [f for f in dataclasses.fields(Codes) if f.name == "bits"]
        assert field.metadata["static"]
        assert field.default == 8
        assert len(jax.tree.leaves(Codes.quantize(normal(2, 3)))) == 2

    def test_static_fields_that_compare_equal(self):
        class Scaled(ImplicitArray, warn_on_materialize=False):
            codes: jax.Array
            scale: Any = aux_field()

            def materialize(self):
                scale = jnp.asarray(self.scale[0])
                return self.codes.astype(scale.dtype) * scale

        def of(scale):
            return Scaled(jnp.ones(1, jnp.int8), (scale,))

        assert (of(2).dtype, of(2.0).dtype) == (jnp.int32, jnp.float32)
        assert of(2.0).materialise().dtype == jnp.float32

    @pytest.mark.parametrize("promotion", ["standard", "strict"])
    def test_numbers_have_weak_types(self, promotion):
        class Scaled(ImplicitArray, warn_on_materialize=False):
            array: jax.Array
            scale: float

            def materialize(self):
                return self.array * self.scale

        with jax.numpy_dtype_promotion(promotion):
            x = Scaled(jnp.ones(3, jnp.bfloat16), 2.0)
            assert x.dtype == x.materialise().dtype == jnp.bfloat16
            assert jax.eval_shape(lambda x: x, x).dtype == jnp.bfloat16

    def test_it_is_an_array(self):
        assert issubclass(ImplicitArray, OriginArray)
        assert isinstance(jnp.ones(3), OriginArray)
        assert isinstance(Bare(jnp.ones(3)), ql.ArrayValue)
        assert not isinstance("text", OriginArray)
        assert inspect.isabstract(ImplicitArray)


class TestShapeFollowsTheFields:
    """A shape that was given stays true when the leaves are mapped over, sliced or stacked."""

    stacked = staticmethod(lambda: Codes.quantize(normal(5, 4, 3)))

    @pytest.mark.slow
    def test_vmap(self):
        seen = []

        def f(w):
            seen.append(w.shape)
            return w.materialize()

        out = jax.vmap(f)(self.stacked())
        assert seen == [(4, 3)]
        np.testing.assert_array_equal(out, self.stacked().materialise())

    @pytest.mark.slow
    def test_scan(self):
        seen = []

        def body(carry, w):
            seen.append(w.shape)
            return carry + w.materialise(), None

        out, _ = jax.lax.scan(body, jnp.zeros((4, 3)), self.stacked())
        assert set(seen) == {(4, 3)}
        np.testing.assert_allclose(out, self.stacked().materialise().sum(0), rtol=1e-6)

    @pytest.mark.slow
    def test_slices(self):
        assert jax.tree.map(lambda x: x[0], self.stacked()).shape == (4, 3)
        assert jax.tree.map(lambda x: x[1:3], self.stacked()).shape == (2, 4, 3)
        assert jax.tree.map(lambda x: x[0, 0], self.stacked()).shape == (3,)

    @pytest.mark.slow
    def test_stacks(self):
        parts = [Codes.quantize(w) for w in normal(5, 4, 3)]
        whole = jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
        assert whole.shape == (5, 4, 3)
        np.testing.assert_array_equal(whole.materialise(), self.stacked().materialise())

    @pytest.mark.slow
    def test_what_is_vmapped_out(self):
        made = jax.vmap(Codes.quantize)(normal(5, 4, 3))
        assert made.shape == (5, 4, 3)
        assert jax.vmap(jax.vmap(Codes.quantize))(normal(2, 5, 4, 3)).shape == (2, 5, 4, 3)

    @pytest.mark.slow
    def test_structures_agree(self):
        """A row of a stack is a value like one that was made alone: both may be branches of a cond."""
        stack = jax.vmap(Codes.quantize)(normal(5, 4, 3))
        row, alone = jax.tree.map(lambda x: x[0], stack), Codes.quantize(normal(5, 4, 3)[0])
        assert jax.tree.structure(row) == jax.tree.structure(alone)
        out = jax.lax.cond(True, lambda: row, lambda: alone)
        assert out.shape == (4, 3)

    @pytest.mark.slow
    def test_a_leaf_that_all_share(self):
        class Shared(ImplicitArray, warn_on_materialize=False):
            codes: jax.Array
            scale: jax.Array

            def materialize(self):
                return self.codes.reshape(self.shape) * self.scale

        x = Shared(jnp.ones((2, 6)), jnp.float32(2), shape=(2, 3, 2))
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), x)
        assert stack.shape == (4, 2, 3, 2)
        np.testing.assert_array_equal(jax.vmap(lambda x: x.materialize())(stack), 2.0)
        stack = eqx.tree_at(lambda x: x.scale, stack, x.scale)
        axes = eqx.tree_at(lambda x: x.scale, jax.tree.map(lambda _: 0, stack), None)
        assert jax.vmap(lambda x: jnp.zeros(x.shape), (axes,))(stack).shape == (4, 2, 3, 2)

    @pytest.mark.slow
    def test_replace(self):
        x = Codes.quantize(normal(4, 3))
        y = dataclasses.replace(x, scale=x.scale * 2)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(y.materialise(), 2 * x.materialise())
        z = eqx.tree_at(lambda x: x.scale, x, x.scale * 2)
        np.testing.assert_array_equal(z.materialise(), y.materialise())


class TestFieldsThatAreGivenInAnyCase:
    def test_dtype(self):
        class Packed(ImplicitArray):
            array: jax.Array
            dtype: jnp.dtype = aux_field()
            bits: int = aux_field(default=4, metadata=None)

            def materialize(self):
                return self.array.astype(self.dtype)

        array = jnp.ones((2, 3), jnp.int8)
        for x in (
            Packed(array, dtype=jnp.bfloat16),
            Packed(array, jnp.bfloat16),
            Packed(array, "bfloat16", 4),
        ):
            assert (x.dtype, x.bits) == (jnp.bfloat16, 4)
            assert x.materialise().dtype == jnp.bfloat16
            assert x.astype(jnp.float16).dtype == jnp.float16
            assert dataclasses.replace(x, array=2 * array).dtype == jnp.bfloat16
            assert dataclasses.replace(x, dtype=jnp.float16).dtype == jnp.float16

    def test_shape(self):
        class Flat(ImplicitArray):
            array: jax.Array
            shape: tuple[int, ...]
            dtype: jnp.dtype = jnp.float32

            def materialize(self):
                return self.array.reshape(self.shape)

        class Longer(Flat):
            bits: int = aux_field(default=4)

        x = Flat(jnp.arange(6.0), (2, 3))
        assert (x.shape, x.dtype) == ((2, 3), jnp.float32)
        assert dataclasses.replace(x, shape=(3, 2)).materialise().shape == (3, 2)
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x)
        assert stack.materialise().shape == stack.shape == (2, 2, 3)
        y = Longer(jnp.arange(6), (3, 2), jnp.int32, 8)
        assert (y.shape, y.dtype, y.bits) == ((3, 2), jnp.int32, 8)


class TestAstype:
    @pytest.mark.slow
    def test_returns_a_new_array(self):
        x = Codes.quantize(normal(4, 3))
        y = x.astype(jnp.bfloat16)
        assert (x.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)
        assert type(y) is Codes
        assert y.shape == x.shape
        np.testing.assert_allclose(y.materialise().astype(jnp.float32), x.materialise(), rtol=1e-2)

    @pytest.mark.slow
    def test_is_cast_even_if_materialize_does_not(self):
        x = Bare(jnp.ones((2, 3))).astype(jnp.float16)
        assert x.dtype == x.materialise().dtype == jnp.float16
        assert implicit(jnp.negative)(x).dtype == jnp.float16

    def test_under_jit(self):
        x = Codes.quantize(normal(4, 3))
        assert jax.jit(lambda x: x.astype(jnp.bfloat16))(x).dtype == jnp.bfloat16

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_earlier_casts_count(self, wrap):
        class Plain(ImplicitArray, warn_on_materialize=False):
            array: jax.Array

            def materialize(self):
                return self.array

        x, f16, f32 = Plain(jnp.float32(1.2345678)), jnp.float16, jnp.float32

        def cast(x, *dtypes):
            for dtype in dtypes:
                x = x.astype(dtype)
            return x

        for dtypes in [(jnp.int32, f32), (f16, f32), (jnp.int32, bool, f32), (f16, f32, f16), (f32, f16)]:
            y = wrap(lambda x, dtypes=dtypes: cast(x, *dtypes))(x)
            assert isinstance(y, Plain)
            expected = cast(x.array, *dtypes)
            for found in (y.materialise(), implicit(jnp.abs)(y)):
                np.testing.assert_array_equal(found, jnp.abs(expected), strict=True)
        assert jax.tree.structure(cast(x, f32, f16, f32, f16)) == jax.tree.structure(cast(x, f16))

    @pytest.mark.slow
    def test_handlers_do_not_skip_an_earlier_cast(self):
        x, half = normal(2, 4), Codes.quantize(normal(4, 3)).astype(jnp.float16)
        with ql.on_materialise("error"):
            implicit(jnp.matmul)(x.astype(jnp.float16), half)
            with pytest.raises(ql.MaterialisationError, match="Codes would be made dense"):
                implicit(jnp.matmul)(x, half.astype(jnp.float32))
        found = implicit(jnp.matmul)(x, half.astype(jnp.float32))
        np.testing.assert_array_equal(found, x @ half.materialise().astype(jnp.float32))


class Outer(ImplicitArray, warn_on_materialize=False):
    """Doubles what is inside, by operations on it."""

    inner: ImplicitArray

    def materialize(self):
        return self.inner * 2.0


class OuterByNumpy(Outer):
    def materialize(self):
        return jnp.multiply(self.inner, 2.0)


class TestNesting:
    @pytest.mark.parametrize("cls", [Outer, OuterByNumpy])
    def test_children_dispatch(self, cls):
        x = cls(Codes.quantize(normal(4, 3)))
        once = materialize_nested(x)
        assert type(once) is Codes  # by the rule of `mul`, not by materialising
        np.testing.assert_allclose(materialize_nested(x, full=True), 2 * x.inner.materialise(), rtol=1e-6)
        np.testing.assert_array_equal(x.materialise(), materialize_nested(x, full=True))
        assert (x.shape, x.dtype) == ((4, 3), jnp.float32)

    @pytest.mark.quick("jit")
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_deep(self, wrap):
        x = Outer(Outer(Outer(Codes.quantize(normal(4, 3)))))
        expected = 8 * x.inner.inner.inner.materialise()
        np.testing.assert_allclose(wrap(implicit(jnp.negative))(x), -expected, rtol=1e-6)

    def test_exceptions_are_not_swallowed(self):
        class Broken(Outer):
            def materialize(self):
                if isinstance(self.inner, jax.ShapeDtypeStruct):
                    return self.inner
                raise ZeroDivisionError("mine")

        x = Broken(Codes.quantize(normal(4, 3)), shape=(4, 3), dtype=jnp.float32)
        for full in (False, True):
            with pytest.raises(ZeroDivisionError, match="mine"):
                materialize_nested(x, full=full)

    def test_an_array_is_left_as_it_is(self):
        x = jnp.ones(3)
        assert materialize_nested(x) is x
        assert materialize_nested(x, full=True) is x

    @pytest.mark.slow
    def test_other_values_inside(self):
        x = Outer(ql.Int8Array.quantize(normal(4, 8)))
        np.testing.assert_allclose(x.materialise(), 2 * ql.materialise(x.inner), rtol=1e-6)


class TestWarnings:
    def _loud(self):
        class Loud(ImplicitArray):
            array: jax.Array

            def materialize(self):
                return self.array

        return Loud

    def test_once_per_call_site(self):
        x = self._loud()(jnp.ones(3))
        f = implicit(lambda x: jnp.sin(x))
        with pytest.warns(ql.MaterialisationWarning, match=r"^sin: no rule for \(Loud f32\[3\]\)") as caught:
            [f(x) for _ in range(3)]
        assert len(caught) == 1
        assert caught[0].filename == __file__

    @pytest.mark.slow
    def test_can_be_switched_off_for_a_type(self):
        implicit(jnp.sin)(Bare(jnp.ones(3)))

    @pytest.mark.parametrize("value", ["0", "false", "no", "off"])
    def test_the_environment_is_read_at_call_time(self, monkeypatch, value):
        x = self._loud()(jnp.ones(3))
        monkeypatch.setenv("WARN_ON_MATTER", value)
        implicit(lambda x: jnp.cos(x))(x)
        monkeypatch.setenv("WARN_ON_MATTER", "1")
        with pytest.warns(ql.MaterialisationWarning):
            implicit(lambda x: jnp.cos(x))(x)

    def test_a_policy_wins(self):
        x = self._loud()(jnp.ones(3))
        with warnings.catch_warnings(), ql.on_materialise("allow"):
            warnings.simplefilter("error")
            implicit(lambda x: jnp.tan(x))(x)
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            implicit(lambda x: jnp.tan(x))(Bare(jnp.ones(3)))


class TestCommuting:
    def _types(self):
        class Commuting(Bare):
            pass

        class Ordered(Bare, commute_ops=False):
            pass

        return Commuting, Ordered

    @pytest.mark.slow
    def test_operands_are_swapped(self):
        commuting, ordered = self._types()
        x = jnp.ones(3)
        for cls, expected in ((commuting, 3.0), (ordered, 1.5)):

            @register("max")
            def _(x: cls, y: jax.Array, **params):
                return jnp.full_like(x.materialize(), 3.0)

            y = jnp.full((3, 1), 1.5, jnp.bfloat16)
            np.testing.assert_array_equal(implicit(jax.lax.max)(cls(x), y), 3.0)
            np.testing.assert_array_equal(implicit(jax.lax.max)(y, cls(x)), expected)

    @pytest.mark.slow
    def test_only_of_commutative_primitives(self):
        commuting, _ = self._types()

        @register("sub")
        def _(x: commuting, y: jax.Array, **params):
            raise AssertionError("x - y is not y - x")

        y = jnp.zeros((3, 1), jnp.bfloat16)
        np.testing.assert_array_equal(implicit(jax.lax.sub)(y, commuting(jnp.ones(3))), -1.0)

    def test_it_is_reported(self):
        commuting, _ = self._types()

        @register("min")
        def _(x: commuting, y: jax.Array, **params):
            return y

        (row,) = ql.explain(jax.lax.min)(jnp.zeros((3, 1), jnp.bfloat16), commuting(jnp.ones(3))).rows
        assert row.outcome == "default"
        assert "with operands swapped" in row.notes


class TestDefaultHandlers:
    def test_of_a_class(self):
        class Wild(Bare):
            @classmethod
            def default_handler(cls, primitive, *args, params):
                return primitive.name

        class Wilder(Bare):
            @classmethod
            def default_handler(cls, primitive, *args, params):
                raise AssertionError

        rules = ql.RuleSet()

        @register("sin", rules=rules)
        def _(x: Wild, **params):
            return NotImplemented

        out = Wild.default(jax.lax.sin_p, [Wild(jnp.ones(3))], {})
        assert out == "sin"
        with pytest.raises(TypeError, match=r"`add` matches, and its operands Wild, Wilder each have a"):
            implicit(jax.lax.add)(Wild(jnp.ones(3)), Wilder(jnp.ones(3)))

    @pytest.mark.parametrize("kind", ["static", "plain"])
    def test_static_and_plain_methods(self, kind):
        class Static(Bare):
            @staticmethod
            def default_handler(primitive, *args, params=None):
                return primitive.bind(args[0].array, **params)

        class Plain(Bare):
            def default_handler(self, primitive, *args, params=None):
                assert self is args[0]
                return primitive.bind(self.array, **params)

        cls = Static if kind == "static" else Plain
        np.testing.assert_array_equal(implicit(jax.lax.neg)(cls(jnp.ones(3))), -jnp.ones(3))


@pytest.mark.slow
def test_strict_types_are_kept():
    x, w = normal(2, 4), Strict.quantize(normal(4, 3))
    np.testing.assert_allclose(implicit(jnp.matmul)(x, w), x @ w.materialise(), rtol=1e-5)


def test_a_field_by_keyword():
    field = aux_field(default=3, kw_only=True)
    assert field.kw_only
