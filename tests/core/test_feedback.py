"""What authors of types and rules are told about mistakes."""

import sys
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import wrong_types


class Boxed(ql.ArrayValue):
    array: Any

    def materialise(self):
        return self.array


@pytest.fixture
def rules():
    return ql.RuleSet()


class TestRegistration:
    def test_a_rule_is_for_some_type(self, rules):
        with pytest.raises(
            TypeError, match=r"The rule `rule` at .*test_feedback.py:\d+ has no annotation on `x`"
        ):

            @ql.register("tanh", rules=rules)
            def rule(x, **params): ...

    def test_also_all_of_several(self, rules):
        with pytest.raises(TypeError, match="has no annotation on `xs`"):

            @ql.register("concatenate", rules=rules)
            def rule(*xs, dimension): ...

    def test_a_parameter_without_its_star(self, rules):
        with pytest.raises(TypeError, match=r"can never match: `dimension_numbers` .*Put a `\*` before it"):

            @ql.register("dot_general", rules=rules)
            def rule(x: Boxed, y: jax.Array, dimension_numbers, **params): ...

        with pytest.raises(
            TypeError, match=r"dot_general\(Boxed, .*Array, Any\) .* can never match: `dimension_num"
        ):

            @ql.register("dot_general", rules=rules)
            def annotated(x: Boxed, y: jax.Array, dimension_numbers: Any, **params): ...

    def test_of_every_primitive_once_it_is_met(self, rules):
        @ql.register("cumsum", rules=rules)
        def rule(x: Boxed, axis: Any, **params): ...

        with pytest.raises(TypeError, match=r"cumsum\(Boxed, Any\) at .* can never match: `axis` is a param"):
            ql.quaxify(jnp.cumsum, rules=rules)(Boxed(jnp.ones(3)))

    def test_beside_a_type_of_values_an_operand_may_be_anything(self, rules):
        @ql.register("select_n", rules=rules)
        def rule(which, *cases: Boxed):
            return cases[0]

        out = ql.quaxify(lambda x: jax.lax.select_n(jnp.array(True), x, x), rules=rules)(Boxed(jnp.ones(3)))
        assert isinstance(out, Boxed)

    def test_parameters_and_the_primitive_need_none(self, rules):
        @ql.register("dot_general", rules=rules)
        def rule(
            primitive: jax.extend.core.Primitive,
            x: Boxed,
            y: Any,
            *,
            dimension_numbers,
            precision=None,
            **params,
        ):
            return jnp.zeros(())

        out = ql.quaxify(lambda x: x @ jnp.ones(3), rules=rules)(Boxed(jnp.ones(3)))
        assert out == 0


ON_THE_WAY = {
    "by quaxify": ql.quaxify(jnp.sin),
    "jitted": ql.quaxify(jax.jit(jnp.sin)),
    "by another function": ql.quaxify(jnp.vectorize(jnp.sin)),
    "in a branch": ql.quaxify(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.sin, x)),
}


@pytest.fixture
def short_stack():
    """Python gives up early: what is endless ends sooner."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(traceback.extract_stack()) + 600)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.quick(2)
@pytest.mark.usefixtures("short_stack")
@pytest.mark.parametrize("call", ON_THE_WAY.values(), ids=ON_THE_WAY)
def test_a_rule_that_calls_itself(rules, call):
    @ql.register("sin", rules=rules)
    def rule(x: Boxed, **params):
        return call(Boxed(x.array))

    with pytest.raises(ql.RuleError, match=r"The rule sin\(Boxed\) at .* calls `sin` on operands"):
        jax.jit(ql.quaxify(lambda x: -jnp.sin(x), rules=rules))(Boxed(jnp.ones(3)))

    # What is memoised on the way, by plum and beartype, is as it was.
    @ql.register_on_either_side("add", Boxed, rules=rules)
    def add(primitive, x, y, **params):
        return ql.quaxify(primitive.bind)(*(v.array if ql.is_value(v) else v for v in (x, y)))

    assert ql.quaxify(lambda x: x + x, rules=rules)(Boxed(jnp.ones(3)))[0] == 2


@pytest.mark.usefixtures("short_stack")
def test_two_rules_that_call_each_other(rules):
    @ql.register("sin", rules=rules)
    def sin(x: Boxed, **params):
        return ql.quaxify(jnp.cos)(x)

    @ql.register("cos", rules=rules)
    def cos(x: Boxed, **params):
        return ql.quaxify(jnp.sin)(x)

    with pytest.raises(
        ql.RuleError, match=r"The rule (sin|cos)\(Boxed\) at .* calls `(sin|cos)` on operands"
    ):
        ql.quaxify(jnp.sin, rules=rules)(Boxed(jnp.ones(3)))


@wrong_types
@pytest.mark.parametrize("bind", [jax.lax.sin_p.bind, jnp.sin], ids=["bind", "jnp"])
def test_a_rule_that_binds_its_own_value(rules, bind):
    @ql.register("sin", rules=rules)
    def rule(x: Boxed, **params):
        return bind(x, **(params if bind is not jnp.sin else {}))

    with pytest.raises((RuntimeError, TypeError), match=r"inside a rule: call `quaxify` on the parts"):
        ql.quaxify(jnp.sin, rules=rules)(Boxed(jnp.ones(3)))


class _OnItself(Boxed):
    @staticmethod
    def default(primitive, values, params):
        return ql.quaxify(primitive.bind)(*values, **params)


class _OfItself(Boxed):
    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        return ql.quaxify(lambda x: x * 1.0)(self)


@pytest.mark.usefixtures("short_stack")
@pytest.mark.parametrize(("cls", "hook"), [(_OnItself, "default"), (_OfItself, "materialise")])
def test_a_hook_that_calls_itself(cls, hook):
    message = rf"`{cls.__name__}.{hook}` at .*test_feedback.py:\d+ computes with the Value itself"
    with pytest.raises(ql.RuleError, match=message):
        ql.quaxify(jnp.sin)(cls(jnp.ones(3)))


@pytest.mark.slow
def test_a_type_computes_on_after_an_endless_recursion():
    """Wherever on the way the stack ended: what compares types memoises its errors."""
    before, here = sys.getrecursionlimit(), len(traceback.extract_stack())
    for room in range(500, 530):  # a turn of the recursion is of 30 calls

        class Other(Boxed): ...

        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def rule(x: Other, y: Other, **params):
            return x

        sys.setrecursionlimit(here + room)
        try:
            with pytest.raises((ql.RuleError, RecursionError)):
                ql.quaxify(lambda x: x * 2.0, rules=rules)(_OfItself(jnp.ones(3)))
        finally:
            sys.setrecursionlimit(before)
        assert ql.quaxify(lambda x: x * 2.0, rules=rules)(Other(jnp.ones(3)))[0] == 2.0


def test_other_recursion_is_what_it_was():
    def endless(x: Any) -> Any:
        return endless(x + 1)

    with pytest.raises(RecursionError):
        ql.quaxify(endless)(Boxed(jnp.ones(())))


def test_the_nearest_rules_are_first_those_of_the_type():
    rules = ql.RuleSet()

    @ql.register("mul", rules=rules)
    def rule(x: Boxed, y: Boxed, **params): ...

    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as error:
        ql.quaxify(lambda x: x * jnp.ones(3), rules=rules)(Boxed(jnp.ones(3)))
    nearest = [line for line in str(error.value).splitlines() if "nearest rule" in line]
    assert "mul(Boxed, Boxed)" in nearest[0]


class TestOutsideOfQuaxify:
    @wrong_types
    def test_functions_of_jax_numpy(self):
        message = "A Boxed was passed to `dot` outside `quaxlike.quaxify`. Wrap the function"
        with pytest.raises(TypeError, match=message):
            jnp.dot(Boxed(jnp.ones(3)), jnp.ones(3))
        with pytest.raises(TypeError, match="`sum` but no `filter_spec` selects it"):
            ql.quaxify(lambda x, y: jnp.sum(y), (False, (True, False), True))(
                Boxed(jnp.ones(3)), Boxed(jnp.ones(3))
            )

    @pytest.mark.parametrize("call", [np.asarray, np.sum, lambda x: np.array([x]), jnp.asarray])
    def test_numpy(self, call):
        with pytest.raises(TypeError, match=r"A Boxed was passed to NumPy outside `quaxlike.quaxify`"):
            call(Boxed(jnp.ones(3)))

    def test_inside_of_it_numpy_is_given_the_elements(self):
        closed_over = Boxed(jnp.ones(3))
        with ql.on_materialise("allow"):
            ql.quaxify(lambda x: np.testing.assert_array_equal(np.asarray(closed_over), np.ones(3)))(
                closed_over
            )


def test_aval_that_contradicts_materialise():
    class Wrong(Boxed):
        def aval(self):
            return jax.core.ShapedArray((7,), jnp.float32)

    with (
        jax.enable_checks(True),
        pytest.raises(ValueError, match=r"Wrong.aval\(\) says float32\[7\], but mater"),
    ):
        _ = Wrong(jnp.ones(3)).shape


class _Unordered:
    """A key of dictionaries that cannot be sorted."""


def test_static_fields_hold_what_can_be_compared():
    class Tagged(Boxed):
        tags: Any = eqx.field(static=True)

    metre = _Unordered()
    out = jax.jit(ql.quaxify(lambda x: x))(Tagged(jnp.ones(3), {metre: 1, _Unordered(): 2}))
    assert out.tags[metre] == 1

    class Hidden(Boxed):
        tags: Any = eqx.field(static=True)

    with pytest.raises(TypeError, match=r"Hidden.tags is a static field, so it cannot hold an array"):
        Hidden(jnp.ones(3), {metre: np.ones(3), _Unordered(): 2})


@pytest.mark.parametrize("static", [np.ones(3), jnp.ones(3), {"shift": np.ones(3)}, [jnp.ones(3)]], ids=type)
def test_arrays_in_static_fields_are_refused_each_time(static):
    class Tagged(Boxed):
        tags: Any = eqx.field(static=True)

    Tagged(jnp.ones(3), "first")
    with pytest.raises(TypeError, match=r"Tagged.tags is a static field, so it cannot hold an array"):
        Tagged(jnp.ones(3), static)
