"""Types and rules as they are written for quax: types refuse to materialise and do not say whether they are
linear; rules take Python numbers by their types."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import normal

X = normal(3)


def _refusing():
    """A new class, about which nobody has been warned, with rules of its own."""

    class Refusing(ql.ArrayValue):
        array: jax.Array

        def aval(self):
            return jax.core.ShapedArray(self.array.shape, self.array.dtype)

        def materialise(self):
            raise NotImplementedError("Refusing.")

    rules = ql.RuleSet()
    array = lambda x: getattr(x, "array", x)

    @ql.register(["sin", "cos", "neg", "reduce_and", "convert_element_type"], rules=rules)
    def _(primitive: jax.extend.core.Primitive, x: Refusing, **params):
        return Refusing(primitive.bind(x.array, **params))

    @ql.register_on_either_side(["mul", "add", "lt"], Refusing, rules=rules)
    def _(primitive, x, y, **params):
        return Refusing(primitive.bind(array(x), array(y), **params))

    return Refusing, rules


class TestNumbers:
    @pytest.mark.slow
    @pytest.mark.parametrize("hint", [float, int | float, float | int | ql.ArrayValue, bool | complex])
    @pytest.mark.parametrize("number", [1.5, np.float32(1.5), jax.device_put(np.float32(1.5))])
    def test_a_rule_for_numbers_takes_arrays(self, hint, number):
        cls, rules = _refusing()

        def rule(a, x: cls, **params):
            return cls(jax.lax.igamma(jnp.broadcast_to(a, x.shape), x.array))

        rule.__annotations__["a"] = hint
        ql.register("igamma", rules=rules)(rule)
        out = ql.quaxify(lambda x: jax.lax.igamma_p.bind(number, x), rules=rules)(cls(jnp.abs(X)))
        np.testing.assert_allclose(out.array, jax.lax.igamma(jnp.full(3, 1.5), jnp.abs(X)), rtol=1e-5)

    def test_one_for_arrays_comes_first(self):
        cls, rules = _refusing()

        @ql.register("igamma", rules=rules)
        def _(a: float | int, x: cls, **params):
            raise AssertionError

        @ql.register("igamma", rules=rules)
        def _(a: jax.Array, x: cls, **params):
            return x

        assert isinstance(ql.quaxify(lambda x: jax.lax.igamma_p.bind(1.5, x), rules=rules)(cls(X)), cls)


class TestControlFlow:
    def test_the_leaf_of_a_condition_decides(self):
        cls, rules = _refusing()
        loop = lambda x: jax.lax.while_loop(lambda c: jnp.all(c < 10.0), lambda c: c + 1.0, x)
        f = ql.quaxify(loop, rules=rules)
        with pytest.warns(ql.RuleWarning, match="Refusing decides about the condition of while_loop"):
            out = f(cls(X))
        np.testing.assert_array_equal(out.array, loop(X))
        np.testing.assert_array_equal(jax.jit(f)(cls(2 * X)).array, loop(2 * X))  # warned once

    @pytest.mark.parametrize("on", [True, False])
    def test_the_leaf_of_a_predicate_decides(self, on):
        cls, rules = _refusing()
        f = ql.quaxify(lambda p, x: jax.lax.cond(p, lambda: x, lambda: -x), rules=rules)
        with pytest.warns(ql.RuleWarning, match="Refusing decides about cond"):
            np.testing.assert_array_equal(f(cls(jnp.array(on)), X), X if on else -X)

    def test_what_has_more_leaves_or_materialises_is_asked(self):
        class Not(ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return ~self.array

        f = ql.quaxify(lambda p: jax.lax.cond(p, lambda: 1, lambda: 2))
        assert f(Not(jnp.array(True))) == 2

        class Pair(ql.ArrayValue):
            first: jax.Array
            second: jax.Array

            def aval(self):
                return jax.core.ShapedArray((), bool)

            def materialise(self):
                raise NotImplementedError("Refusing a pair.")

        with pytest.raises(NotImplementedError, match="Refusing a pair"):
            f(Pair(jnp.array(True), jnp.array(False)))


def _times(x, y):
    return jnp.sin(x) * y


class TestDerivatives:
    @staticmethod
    def function(symbolic_zeros=False):
        f = jax.custom_jvp(_times)

        def rule(primals, tangents):
            (x, y), (dx, dy) = primals, tangents
            zero = isinstance(dy, jax.custom_derivatives.SymbolicZero)
            return f(x, y), 7.0 * jnp.cos(x) * y * dx + (0.0 * x if zero else jnp.sin(x) * dy)

        f.defjvp(rule, symbolic_zeros=symbolic_zeros)
        return f

    @pytest.mark.quick("<lambda>-False")
    @pytest.mark.parametrize("symbolic_zeros", [False, True])
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_by_the_leaves(self, wrap, symbolic_zeros):
        cls, rules = _refusing()
        f = self.function(symbolic_zeros)
        run = wrap(ql.quaxify(f, rules=rules))
        y = jnp.cos(X)
        with pytest.warns(
            UserWarning, match="Refusing refuses to materialise, so it is differentiated by its"
        ):
            out, tangent = jax.jvp(run, (cls(X), cls(y)), (cls(2 * X), cls(0 * X)))
        np.testing.assert_allclose(out.array, _times(X, y), rtol=1e-6)
        np.testing.assert_allclose(tangent.array, 14 * jnp.cos(X) * y * X, rtol=1e-5)
        grad = jax.grad(lambda x: run(x, cls(y)).array.sum())(cls(X))  # warned once
        np.testing.assert_allclose(grad.array, 7 * jnp.cos(X) * y, rtol=1e-5)

    def test_a_type_that_says_that_it_is_not_linear(self):
        cls, rules = _refusing()

        class Curved(cls):
            linear = False

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(NotImplementedError, match="Refusing"):
                jax.jvp(
                    ql.quaxify(self.function(), rules=rules), (Curved(X), Curved(X)), (Curved(X), Curved(X))
                )


def test_a_stub_without_operands_is_a_warning():
    """quax's own example type has them, for primitives that it does not support."""

    def stub() -> jax.Array:
        raise NotImplementedError

    with pytest.warns(ql.RuleWarning, match="can never match: it takes 0 operand"):
        ql.register("all_gather")(stub)
