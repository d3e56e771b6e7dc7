"""Classes and handlers as they are written for eformer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import quaxlike as ql
from quaxlike.implicit import (
    ImplicitArray,
    OrginArray,
    OriginArray,
    aux_field,
    implicit,
    materialize_handler,
    register,
    ste,
)
from tests.samples import normal, wrong_types

X = normal(4, 3)


class Codes(ImplicitArray, warn_on_materialize=False):
    codes: jax.Array
    step: float = aux_field(default=0.5)

    def materialize(self):
        return self.codes * self.step

    def __post_init__(self):
        super().__post_init__()
        self.codes = jnp.asarray(self.codes)


class Halves(Codes):
    note: str = aux_field(default="")

    def __post_init__(self):
        super().__post_init__()


class ByHand(ImplicitArray, warn_on_materialize=False):
    """Has an `__init__`, about which Equinox would warn beside a `__post_init__`."""

    codes: jax.Array

    def __init__(self, codes):
        self.codes = codes + 1.0

    def materialize(self):
        return self.codes


@pytest.mark.slow
def test_post_init():
    for cls in (Codes, Halves):
        x = cls(np.asarray(X))
        assert isinstance(x.codes, jax.Array)
        np.testing.assert_array_equal(implicit(jnp.negative)(x), -0.5 * X)
    np.testing.assert_array_equal(ByHand(X).materialise(), X + 1)


class Declares(Codes):
    @property
    def aval(self):
        return jax.core.ShapedArray(self.codes.shape, jnp.float32)


class DeclaresByMethod(Codes):
    def aval(self):
        return super().aval()


@pytest.mark.parametrize("cls", [Codes, Declares, DeclaresByMethod])
def test_the_aval_is_a_property_or_a_method(cls):
    x = cls(X)
    assert (x.aval.shape, x.aval.dtype, x.aval.ndim) == (X.shape, X.dtype, 2)
    assert x.aval() == jax.typeof(X)
    assert "float32[4,3]" in repr(x.aval)
    with pytest.raises(AttributeError, match="unheard_of"):
        _ = x.aval.unheard_of
    np.testing.assert_array_equal(jax.jit(implicit(jnp.negative))(x), -0.5 * X)


class Nested(ImplicitArray, warn_on_materialize=False):
    inner: ImplicitArray
    scale: jax.Array
    name: str = aux_field(default="n")

    def materialize(self):
        return self.inner * self.scale


def test_the_methods_of_a_pytree():
    x = Nested(Codes(X), jnp.float32(3.0), name="m")
    with_keys, aux = x.tree_flatten_with_keys()
    assert [(str(key), type(part)) for key, part in with_keys] == [(".inner", Codes), (".scale", type(X))]
    children, _ = x.tree_flatten()
    assert all(part is other for part, (_, other) in zip(children, with_keys, strict=True))
    again = Nested.tree_unflatten(aux, [2 * children[1], children[1]])
    assert (type(again), again.name, again.inner) == (Nested, "m", 6.0)


class TestHandlers:
    def test_one_that_can_never_match_is_left_out(self):
        rules = ql.RuleSet()
        message = r"convert_element_type\(Codes, Any\) .* can never match: `new_dtype` is a parameter"
        with pytest.warns(ql.RuleWarning, match=message) as met:

            @register("convert_element_type", rules=rules)
            def by_position(primitive: Primitive, operand: Codes, new_dtype: Any):
                raise AssertionError("takes a parameter of the primitive by position")

        assert [w.filename for w in met] == [__file__]

        @register("convert_element_type", rules=rules)
        def by_keyword(primitive: Primitive, operand: Codes, **kwargs):
            return operand.astype(kwargs["new_dtype"])

        out = ql.quaxify(lambda x: x.astype(jnp.float16), rules=rules)(Codes(X))
        assert (type(out), out.dtype) == (Codes, jnp.float16)

    @pytest.mark.slow
    def test_one_that_is_found_out_later(self):
        """The parameters of `cumsum` are known once it is used."""
        rules = ql.RuleSet()

        @register("cumsum", rules=rules)
        def _(primitive, x: Codes, axis, reverse):
            raise AssertionError("takes parameters of the primitive by position")

        f = ql.quaxify(jnp.cumsum, rules=rules)
        with pytest.warns(ql.RuleWarning, match=r"cumsum\(Codes, Any, Any\) .* can never match"):
            out = f(Codes(X[0]))
        np.testing.assert_allclose(out, np.cumsum(X[0] * 0.5), rtol=1e-6)
        f(Codes(X[1]))  # warnings are errors

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "hint",
        [Sequence[Codes | jax.Array], list[Codes], tuple[Codes | jax.Array, ...], tuple[Codes, jax.Array]],
    )
    def test_a_sequence_of_operands(self, hint):
        rules = ql.RuleSet()
        calls = []

        def concatenate(primitive: Primitive, operands, *args, **kwargs):
            calls.append((primitive, [type(x) for x in operands], args))
            return jax.lax.concatenate([ql.materialise(x) for x in operands], *args, **kwargs)

        concatenate.__annotations__["operands"] = hint
        register("concatenate", rules=rules)(concatenate)
        out = ql.quaxify(lambda *xs: jnp.concatenate(xs), rules=rules)(Codes(X), Codes(2 * X))
        np.testing.assert_array_equal(out, np.concatenate([X * 0.5, X]))
        assert calls == [(jax.lax.concatenate_p, [Codes, Codes], ())]

    @pytest.mark.slow
    def test_a_sequence_of_operands_before_parameters(self):
        rules = ql.RuleSet()

        @register("concatenate", rules=rules)
        def _(operands: Sequence[Codes | jax.Array], dimension: int):
            return 7.0 * jax.lax.concatenate([ql.materialise(x) for x in operands], dimension)

        f = ql.quaxify(lambda *xs: jnp.concatenate(xs, 1), rules=rules)
        for xs in [(Codes(X), X), (X, Codes(X)), (X, X, Codes(X))]:
            np.testing.assert_array_equal(f(*xs), 7 * np.concatenate([*map(ql.materialise, xs)], 1))

    def test_what_is_no_sequence_of_arrays(self):
        with pytest.warns(ql.RuleWarning, match="names no type of array"):

            @register("broadcast_in_dim", rules=ql.RuleSet())
            def _(x: Any, shape: Sequence[int]): ...

    def test_materialize_handler_takes_whatever_can_be_materialized(self):
        class Lazy:
            def materialize(self):
                return X + 1.0

        out = materialize_handler(jax.lax.add_p, Lazy(), Codes(X))
        np.testing.assert_allclose(out, X * 1.5 + 1.0, rtol=1e-5)

    @wrong_types
    @pytest.mark.parametrize("precedence", ["high", 1.5, None])
    def test_a_precedence_that_is_no_number(self, precedence):
        for decorate in (register, ql.register):
            with pytest.raises(TypeError, match=f"integer as `precedence`; found {precedence!r}"):
                decorate("neg", precedence=precedence)


class TestResultsOfMaterialize:
    @staticmethod
    def types(result):
        class Style(ImplicitArray, warn_on_materialize=False):
            array: jax.Array

            def materialize(self):
                return result

        class Core(ql.ArrayValue):
            array: jax.Array

            def aval(self):
                return jax.typeof(self.array)

            def materialise(self):
                return result

        return Style, Core

    @pytest.mark.parametrize("result", [2.0, np.float32(2), np.ones((2, 3), np.float32), 3])
    def test_numbers_become_arrays(self, result):
        for cls in self.types(result):
            x = cls(jnp.asarray(result))
            assert isinstance(ql.materialise(x), jax.Array)
            np.testing.assert_array_equal(ql.materialise(x), result)
            np.testing.assert_array_equal(ql.quaxify(jnp.negative)(x), -result)

    @pytest.mark.slow
    @pytest.mark.parametrize("result", [[1.0, 2.0], None, "text"])
    def test_anything_else_is_an_error(self, result):
        style, core = self.types(result)
        message = r"(Style\.materialize|Core\.materialise)\(\) must return an array; found "
        for x in (style(X, shape=X.shape, dtype=X.dtype), core(X)):
            for f in (ql.materialise, ql.quaxify(jnp.negative), jax.jit(ql.materialise)):
                with pytest.raises(TypeError, match=message):
                    f(x)
        with pytest.raises(TypeError, match=message):
            style(X)


@dataclasses.dataclass
class Sixteenths(ImplicitArray):
    """Written as eformer's quantised classes are."""

    packed: jax.Array
    scale: jax.Array
    block: int = aux_field(default=8)

    @classmethod
    def quantize(cls, array: jax.Array) -> "Sixteenths":
        scale = jnp.max(jnp.abs(array), -1, keepdims=True) / 16
        packed = jnp.round(array / scale).astype(jnp.int8)
        return cls(packed=packed, scale=scale, shape=array.shape, dtype=array.dtype)

    def materialize(self):
        return (self.packed.astype(self.scale.dtype) * self.scale).reshape(self.shape).astype(self.dtype)


ArrayType = jax.Array | Sixteenths | Any
LOOSE = ql.RuleSet()
CALLS: list[str] = []


def _plain(x):
    return x.materialize() if isinstance(x, Sixteenths) else x


def _register_loosely():
    @register("dot_general", rules=LOOSE)
    def _(primitive: Primitive, lhs: ArrayType, rhs: ArrayType, *args, **kwargs) -> ArrayType:
        CALLS.append("dot_general")
        return jax.lax.dot_general(_plain(lhs), _plain(rhs), *args, **kwargs)

    @register("convert_element_type", rules=LOOSE)
    def _(primitive: Primitive, operand: ArrayType, **kwargs) -> ArrayType:
        CALLS.append("convert_element_type")
        operand.dtype = kwargs["new_dtype"]
        return operand

    @register("concatenate", rules=LOOSE)
    def _(primitive: Primitive, operands: Sequence[ArrayType], *args, **kwargs) -> ArrayType:
        CALLS.append("concatenate")
        return jax.lax.concatenate([*map(_plain, operands)], *args, **kwargs)


_register_loosely()


class TestLooseHandlers:
    W, INPUTS = normal(4, 8), normal(3, 4)

    @pytest.mark.slow
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_products(self, wrap):
        w = Sixteenths.quantize(self.W)
        CALLS.clear()
        run = lambda f: wrap(ql.quaxify(f, rules=LOOSE))
        with ql.on_materialise("error"):
            left = run(jnp.matmul)(self.INPUTS, w)
            np.testing.assert_allclose(left, self.INPUTS @ w.materialize(), rtol=1e-5)
            right = run(jnp.matmul)(w, self.W.T)
            np.testing.assert_allclose(right, w.materialize() @ self.W.T, rtol=1e-5)
            run(lambda w: jnp.concatenate([w, w]))(w)
        assert CALLS == ["dot_general", "dot_general", "concatenate"]

    @pytest.mark.slow
    def test_a_handler_sets_the_dtype_of_its_copy(self):
        w = Sixteenths.quantize(self.W)
        out = ql.quaxify(lambda w: w.astype(jnp.float16), rules=LOOSE)(w)
        assert (type(out), out.dtype, w.dtype) == (Sixteenths, jnp.float16, jnp.float32)
        out = ql.quaxify(jnp.matmul, rules=LOOSE)(self.INPUTS.astype(jnp.float16), out)
        assert out.shape == (3, 8)
        with pytest.raises(AttributeError, match="cannot assign to field 'dtype'"):
            w.dtype = jnp.float16

    @pytest.mark.slow
    def test_training(self):
        def loss(w):
            return (ql.quaxify(jnp.matmul, rules=LOOSE)(self.INPUTS, ste(Sixteenths.quantize)(w)) ** 2).sum()

        dense = Sixteenths.quantize(self.W).materialize()
        want = jax.grad(lambda w: ((self.INPUTS @ w) ** 2).sum())(dense)
        CALLS.clear()
        for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
            np.testing.assert_allclose(grad(self.W), want, rtol=1e-5)
        assert set(CALLS) == {"dot_general"}

    def test_the_spelling(self):
        assert OrginArray is OriginArray
        assert isinstance(X, OrginArray)

    @pytest.mark.slow
    def test_handlers_that_are_there_twice(self):
        rules = ql.RuleSet()

        @register("neg", rules=rules)
        def first(primitive: Primitive, x: ArrayType, **kwargs):
            raise AssertionError

        with pytest.warns(ql.RuleWarning, match=r"neg\(.*Sixteenths\) .* replaces neg"):

            @register("neg", rules=rules)
            def second(primitive: Primitive, x: ArrayType, **kwargs):
                return x.materialize()

        w = Sixteenths.quantize(self.W)
        np.testing.assert_array_equal(ql.quaxify(jax.lax.neg, rules=rules)(w), w.materialize())
