"""What authors of types and rules are told about mistakes."""

import re
import sys
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.testing import check_type
from tests.samples import array, wrong_types


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


@pytest.mark.slow
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


class _Inferred(ql.ArrayOperators, Boxed):
    """Its shape follows from `materialise`."""


class _ByQuaxify(_Inferred):
    def materialise(self):
        return ql.quaxify(jnp.multiply)(self, 2.0)


class _ByOperator(_Inferred):
    def materialise(self):
        return self * 2.0


class _ByMaterialise(_Inferred):
    def materialise(self):
        return ql.materialise(self)


class _ByShape(_Inferred):
    def materialise(self):
        return jnp.zeros(self.shape)


class _ByDtype(_Inferred):
    def materialise(self):
        return self.array.astype(self.dtype)


class _ByAnotherType(_Inferred):
    def materialise(self):
        return ql.materialise(ql.LoraArray(self, jnp.ones((1, 3)), jnp.ones((3, 1))))


class _ByAnEqualOne(_Inferred):
    def materialise(self):
        return jax.jit(ql.quaxify(jax.nn.relu))(type(self)(self.array * 2))


class _ByLargerOnes(_Inferred):
    def materialise(self):
        return ql.quaxify(jnp.sum)(type(self)(self.array[None]), axis=0)


class _ByItsAval(Boxed):
    def aval(self):
        return jax.core.ShapedArray(self.shape, self.array.dtype)


class _Holding(ql.ArrayValue):
    value: ql.ArrayValue

    def materialise(self):
        return ql.quaxify(jnp.sin)(self.value)


OF_ITSELF = [
    _ByQuaxify,
    _ByOperator,
    _ByMaterialise,
    _ByShape,
    _ByDtype,
    _ByAnotherType,
    _ByAnEqualOne,
    _ByLargerOnes,
    _ByItsAval,
]
ASKED = {
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "called": ql.quaxify(jnp.sin),
    "jitted": lambda x: jax.jit(ql.quaxify(lambda x: x @ x))(x),
    "held": lambda x: _Holding(x).shape,
    "as a weight": lambda x: ql.quaxify(jnp.matmul)(
        ql.LoraArray(x, jnp.ones((1, 3)), jnp.ones((3, 1))), jnp.ones(3)
    ),
    "operator": lambda x: x * 2.0,
    "materialised": ql.materialise,
}


@pytest.mark.quick(6)
@pytest.mark.usefixtures("short_stack")
@pytest.mark.parametrize(
    ("cls", "ask"),
    # The last has no operators, and materialises without its shape.
    [(cls, ask) for ask in ASKED for cls in (OF_ITSELF[:-1] if ask[0] in "om" else OF_ITSELF)],
    ids=str,
)
def test_a_shape_that_needs_itself(cls, ask):
    message = rf"`{cls.__name__}\.\w+` at .*test_feedback.py:\d+ computes with the Value itself, and so calls"
    for _ in range(2):  # nothing of the first call is left
        with pytest.raises(ql.RuleError, match=message):
            ASKED[ask](cls(jnp.ones((3, 3))))


@pytest.mark.slow
def test_a_shape_that_needs_that_of_a_part_of_the_same_class():
    class Twice(ql.ArrayValue):
        part: Any

        def materialise(self):
            return ql.quaxify(lambda x: 2 * jnp.ones(x.shape) * x)(self.part)

    x = Twice(Twice(Twice(Twice(Twice(Twice(jnp.ones(3)))))))
    assert x.shape == (3,)
    np.testing.assert_array_equal(ql.materialise(x), 64 * np.ones(3))


def test_a_method_of_the_base_is_no_endless_one():
    class Doubled(Boxed):
        def materialise(self):
            return 2 * super().materialise()

    np.testing.assert_array_equal(ql.materialise(Doubled(jnp.ones(3))), 2 * np.ones(3))


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


@pytest.mark.slow
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
        message = "Boxed was passed to `dot` outside `quaxlike.quaxify`. Wrap the function"
        with pytest.raises(TypeError, match=message):
            jnp.dot(Boxed(jnp.ones(3)), jnp.ones(3))
        with pytest.raises(TypeError, match="`sum` but no `filter_spec` selects it"):
            ql.quaxify(lambda x, y: jnp.sum(y), (False, (True, False), True))(
                Boxed(jnp.ones(3)), Boxed(jnp.ones(3))
            )

    def test_it_is_one_type_of_error(self):
        for call in (jnp.sin, jax.lax.sin, np.asarray):
            with pytest.raises(RuntimeError, match=r"Boxed was passed to .* outside `quaxlike.quaxify`"):
                call(Boxed(jnp.ones(3)))

    @pytest.mark.parametrize("call", [np.asarray, np.sum, lambda x: np.array([x]), jnp.asarray])
    def test_numpy(self, call):
        with pytest.raises(TypeError, match=r"Boxed was passed to NumPy outside `quaxlike.quaxify`"):
            call(Boxed(jnp.ones(3)))

    def test_inside_of_it_numpy_is_given_the_elements(self):
        closed_over = Boxed(jnp.ones(3))
        with ql.on_materialise("allow"):
            ql.quaxify(lambda x: np.testing.assert_array_equal(np.asarray(closed_over), np.ones(3)))(
                closed_over
            )


class TestAvalThatContradictsMaterialise:
    @pytest.mark.parametrize("checks", [False, True])
    def test_at_the_first_use(self, checks):
        class Wrong(Boxed):
            def aval(self):
                return jax.core.ShapedArray((7,), jnp.float32)

        for ask in (lambda x: x.shape, ql.quaxify(jnp.sin), jax.jit(ql.quaxify(jnp.sin))):
            with (
                jax.enable_checks(checks),
                pytest.raises(ValueError, match=r"Wrong.aval\(\) says float32\[7\], but mater"),
            ):
                ask(Wrong(jnp.ones(3)))

    def test_dtype(self):
        class Half(Boxed):
            def aval(self):
                return jax.core.ShapedArray(self.array.shape, jnp.float16)

        with pytest.raises(ValueError, match=r"says float16\[3\], but .* shape \(3,\) and dtype float32"):
            _ = Half(jnp.ones(3)).dtype

    def test_once_for_each_class(self):
        made = []

        class Counted(Boxed):
            def aval(self):
                return jax.core.ShapedArray(self.array.shape, self.array.dtype)

            def materialise(self):
                made.append(self)
                return jnp.zeros(self.shape)  # which has been said

        with jax.enable_checks(False):  # with checks, each Value is asked
            for n in range(3):
                assert Counted(jnp.ones(n)).shape == (n,)
        assert len(made) == 1

    def test_a_type_may_refuse(self):
        class Refusing(Boxed):
            def aval(self):
                return jax.core.ShapedArray((7,), jnp.float32)

            def materialise(self):
                raise RuntimeError("refused")

        assert Refusing(jnp.ones(3)).shape == (7,)

    def test_check_type(self):
        class Wrong(Boxed):
            static_shape: tuple[int, ...] = eqx.field(static=True)

            def aval(self):
                return jax.core.ShapedArray(self.static_shape, jnp.float32)

        with jax.enable_checks(False):  # with checks, its shape is an error already
            assert Wrong(jnp.ones(3), (3,)).shape == (3,)
            failures = check_type(Wrong(jnp.ones(3), (4,)), programs={}).failures
        assert "Wrong.aval() says float32[4], but materialise() makes float32[3]" in str(failures)


class _NumPy(Boxed):
    def materialise(self):
        return jnp.asarray(np.sin(self.array))


class _NumPyUnderJit(_NumPy):
    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)


class _Length(Boxed):
    length: int

    def materialise(self):
        return jnp.zeros(self.length)


class _Sizes(Boxed):
    sizes: tuple[int, ...]

    def materialise(self):
        return self.array.reshape(self.sizes)


class _Sliced(Boxed):
    stop: int

    def materialise(self):
        return self.array[: self.stop]


class _Options(eqx.Module):
    length: int


class _Nested(Boxed):
    options: _Options

    def materialise(self):
        return jnp.zeros(self.options.length)


class _Asking(Boxed):
    def materialise(self):
        return jnp.zeros(int(self.array[0]))


IS_STATIC = r"is declared with `eqx.field\(static=True\)`: `{}` of {} is not"


@pytest.mark.parametrize("ask", [lambda x: jnp.zeros(x.shape), jax.jit(ql.quaxify(jnp.sin))], ids=["", "jit"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_NumPy(array(np.ones(4))), "NumPy cannot compute with what is traced: use `jax.numpy` in the hook"),
        (_Length(array(np.ones(4)), 4), IS_STATIC.format("length", "_Length")),
        (_Sizes(array(np.ones(4)), (2, 2)), IS_STATIC.format("sizes", "_Sizes")),
        (_Sliced(array(np.ones(4)), 2), IS_STATIC.format("stop", "_Sliced")),
        (_Nested(array(np.ones(4)), _Options(3)), IS_STATIC.format("options.length", "_Nested")),
        (_Asking(array(np.ones(4))), "does not know the numbers in the arrays: compute with `jax.numpy`"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_hook_that_cannot_be_traced(value, message, ask):
    with pytest.raises((ValueError, IndexError)) as caught:
        ask(value)
    assert re.search(message, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))


def test_a_hook_that_cannot_be_traced_and_has_a_shape():
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        jax.jit(ql.quaxify(jnp.sin))(_NumPyUnderJit(jnp.ones(4)))
    assert any("use `jax.numpy` in the hook" in note for note in caught.value.__notes__)


def test_other_errors_of_hooks_say_nothing_of_tracing():
    class Wrong(Boxed):
        def materialise(self):
            return self.array + None

    with pytest.raises(ValueError, match=r"Wrong has no shape: its hooks raise TypeError\(.*NoneType.*\)\.$"):
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


@pytest.mark.parametrize(
    "static", [np.ones(3), array(np.ones(3)), {"shift": np.ones(3)}, [array(np.ones(3))]], ids=type
)
def test_arrays_in_static_fields_are_refused_each_time(static):
    class Tagged(Boxed):
        tags: Any = eqx.field(static=True)

    Tagged(jnp.ones(3), "first")
    with pytest.raises(TypeError, match=r"Tagged.tags is a static field, so it cannot hold an array"):
        Tagged(jnp.ones(3), static)
