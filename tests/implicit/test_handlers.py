"""`implicit` in its three forms, and handlers."""

import threading
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.implicit import (
    ImplicitArray,
    default_handler,
    implicit,
    materialize_handler,
    register,
    use_implicit,
)
from tests.samples import array, normal

from .types import Codes, Strict


class Box(ImplicitArray, warn_on_materialize=False):
    array: jax.Array

    def materialize(self):
        return self.array


X = array(np.arange(3.0))


class TestImplicit:
    def test_as_a_function(self):
        assert use_implicit is implicit
        np.testing.assert_array_equal(implicit(jnp.negative)(Box(X)), -X)

    def test_as_a_decorator(self):
        @implicit
        def f(x, *, factor):
            return x * factor

        np.testing.assert_array_equal(f(Box(X), factor=2.0), 2 * X)
        assert f.__name__ == "f"

    @pytest.mark.slow
    def test_as_a_context(self):
        w, x = Strict.quantize(normal(4, 3)), normal(2, 4)
        with implicit:
            y = x @ w
            with implicit:
                z = (Box(X) + 1.0) * 2.0
        np.testing.assert_allclose(y, x @ w.materialise(), rtol=1e-5)
        np.testing.assert_array_equal(z, 2 * X + 2)

    def test_a_context_in_which_something_raises(self):
        with pytest.raises(KeyError, match="mine"), implicit:
            raise KeyError("mine")
        with implicit:
            assert (Box(X) + 1.0)[0] == 1.0

    @pytest.mark.slow
    def test_contexts_of_threads(self):
        done = []

        def run():
            with implicit:
                done.append((Box(X) + 1.0).sum())

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [6.0] * 8


class TestRegister:
    def test_by_name_or_primitive(self):
        rules = ql.RuleSet()

        @register(jax.lax.sin_p, rules=rules)
        @register("cos", rules=rules)
        def _(x: Box, **params):
            return x.array * 7.0

        for f in (jax.lax.sin, jax.lax.cos):
            np.testing.assert_array_equal(ql.quaxify(f, rules=rules)(Box(X)), 7 * X)

    @pytest.mark.slow
    @pytest.mark.parametrize("annotated", [True, False])
    def test_the_primitive_as_first_argument(self, annotated):
        rules = ql.RuleSet()
        if annotated:

            def handler(primitive: jexc.Primitive, x: Box, **params):
                return default_handler(primitive, x.array + 1.0, **params)

        else:

            def handler(primitive, x: Box, **params):
                return default_handler(primitive, x.array + 1.0, **params)

        register(["neg", "abs"], rules=rules)(handler)
        np.testing.assert_array_equal(ql.quaxify(jax.lax.neg, rules=rules)(Box(X)), -(X + 1))
        np.testing.assert_array_equal(ql.quaxify(jax.lax.abs, rules=rules)(Box(-X)), jnp.abs(1 - X))

    @pytest.mark.slow
    def test_the_primitive_under_another_name(self):
        rules = ql.RuleSet()

        @register(["sin", "add"], rules=rules)
        def _(p, x: Box, **params):
            return 7.0 * (x.array if p is jax.lax.sin_p else p)

        @register("cos", rules=rules)
        def _(primitive: Any, x: Box, **params):
            return default_handler(primitive, x.array, **params) * 7.0

        @register("neg", rules=rules)
        def _(prim, *xs: Box, **params):
            return default_handler(prim, *(x.array for x in xs), **params) * 7.0

        np.testing.assert_array_equal(ql.quaxify(jax.lax.sin, rules=rules)(Box(X)), 7 * X)
        np.testing.assert_array_equal(ql.quaxify(jax.lax.cos, rules=rules)(Box(X)), 7 * jnp.cos(X))
        np.testing.assert_array_equal(ql.quaxify(jax.lax.neg, rules=rules)(Box(X)), -7 * X)
        # Beside another operand it is an operand itself.
        np.testing.assert_array_equal(ql.quaxify(jax.lax.add, rules=rules)(X + 1, Box(X)), 7 * (X + 1))

    def test_precedence(self):
        rules = ql.RuleSet()

        @register("sin", rules=rules, precedence=1)
        def _(x: ImplicitArray, **params):
            return X * 2.0

        with pytest.warns(ql.RuleWarning, match="takes 2 operand.*`sin` has 1"):

            @register("sin", rules=rules)
            def _(x: Any, y: Box, **params):
                raise AssertionError

        np.testing.assert_array_equal(ql.quaxify(jax.lax.sin, rules=rules)(Box(X)), 2 * X)

    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"No JAX primitive is called 'dot_generl'\. Did you mean"):
            register("dot_generl")

    @pytest.mark.parametrize("hint", [Any, jax.Array, jax.Array | Any])
    def test_a_handler_for_all_types_is_left_out(self, hint):
        def handler(x, **params):
            raise AssertionError

        rules = ql.RuleSet()
        handler.__annotations__["x"] = hint
        with pytest.warns(ql.RuleWarning, match=r"handler .* for 'sin' names no type of array") as met:
            register("sin", rules=rules)(handler)
        assert [w.filename for w in met] == [__file__]
        assert not list(rules)

    @pytest.mark.slow
    @pytest.mark.parametrize("hint", [Codes | Any, jax.Array | Codes | Any, Any | Codes])
    def test_a_union_that_names_a_type_is_for_that_type(self, hint):
        rules = ql.RuleSet()

        def less(x, y, **params):
            return jax.lax.lt(*(ql.materialise(each) + 0.0 for each in (x, y)))

        less.__annotations__ = {"x": hint, "y": hint}
        register("lt", rules=rules)(less)
        codes = Codes.quantize(jnp.eye(2) + 1)
        run = ql.quaxify(jax.lax.lt, rules=rules)
        with ql.on_materialise("error"):
            for xs in ((codes, jnp.ones((2, 2))), (jnp.ones((2, 2)), codes), (codes, codes)):
                np.testing.assert_array_equal(run(*xs), jax.lax.lt(*ql.materialise(xs)))
            with pytest.raises(ql.MaterialisationError, match="lt: no rule for"):
                run(codes, Box(jnp.ones((2, 2))))


class TestFallbacks:
    def test_default_handler(self):
        np.testing.assert_array_equal(
            default_handler(jax.lax.transpose_p, jnp.ones((2, 3)), permutation=(1, 0)), jnp.ones((3, 2))
        )

    def test_materialize_handler(self):
        out = materialize_handler(jax.lax.concatenate_p, Box(X), X, params={"dimension": 0})
        np.testing.assert_array_equal(out, jnp.concatenate([X, X]))

    @pytest.mark.parametrize("explicit", [True, False])
    def test_what_a_handler_asks_for_is_no_loss(self, explicit):
        class Loud(ImplicitArray):
            array: jax.Array

            def materialize(self):
                return self.array

            @classmethod
            def default_handler(cls, primitive, *args, params=None):
                return super().default_handler(primitive, *args, params=params)

        rules = ql.RuleSet()
        if explicit:

            @register("neg", rules=rules)
            def _(primitive, x: Loud, **params):
                return Loud.default_handler(primitive, x, params=params)

        run = ql.quaxify(jax.lax.neg, rules=rules)
        with ql.on_materialise("error"):
            if explicit:
                np.testing.assert_array_equal(run(Loud(X)), -X)
            else:
                with pytest.raises(ql.MaterialisationError, match="neg: no rule for"):
                    run(Loud(X))

    def test_without_parameters(self):
        np.testing.assert_array_equal(Box.default_handler(jax.lax.neg_p, Box(X)), -X)
        np.testing.assert_array_equal(materialize_handler(jax.lax.neg_p, Box(X)), -X)


@pytest.mark.slow
@pytest.mark.parametrize("product", [lambda x, w: x @ w, jnp.matmul])
@pytest.mark.parametrize("transform", ["jit", "scan", "checkpoint"])
def test_handlers_are_called_for_what_is_made_inside_of_a_transform(transform, product):
    calls = []

    class Counted(ImplicitArray):
        array: jax.Array

        def materialize(self):
            raise AssertionError("made dense")

    @register("dot_general")
    def _(x: jax.Array, w: Counted, **params: Any):
        calls.append(transform)
        return jax.lax.dot_general_p.bind(x, w.array, **params)

    make = lambda w: Counted(w, shape=w.shape, dtype=w.dtype)
    apply = lambda x, w: product(x, make(w))
    run = {
        "jit": jax.jit(apply),
        "scan": lambda x, w: jax.lax.scan(lambda h, w: (apply(h, w), None), x, w[None])[0],
        "checkpoint": jax.checkpoint(apply),
    }[transform]
    np.testing.assert_array_equal(implicit(run)(X, 2 * jnp.eye(3)), 2 * X)
    assert calls == [transform]
