"""What a user is told about mistakes: what, where, expected, found, what to do."""

import functools
import inspect
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import array, drawn, random_key, wrong_types


class Box(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


X = array(np.ones((2, 3)))
ONES = array(np.ones(7))


class Odd(ql.ArrayValue):
    array: jax.Array
    option: object = eqx.field(static=True)

    def materialise(self):
        return self.array


class Points(ql.ArrayValue):
    """Points of the plane, whose coordinates cannot be made one array."""

    x: jax.Array
    y: jax.Array

    def aval(self):
        return jax.core.ShapedArray((*self.x.shape, 2), self.x.dtype)

    def materialise(self):
        raise TypeError("points are no array")


@pytest.fixture
def trusting():
    """Rules that were right are trusted, as they are for users."""
    with jax.enable_checks(False):
        yield


def _rule(primitive, function, annotation=Box):
    """A private set with one rule, and how messages name that rule."""
    rules = ql.RuleSet()
    function.__annotations__["x"] = annotation
    ql.register(primitive, rules=rules)(function)
    (rule,) = rules
    return rules, repr(rule)


class TestResultsOfRules:
    @pytest.mark.parametrize(
        ("primitive", "result", "message"),
        [
            (jax.lax.sin_p, ONES, r"must return float32\[2,3\], as `sin` does .*; found float32\[7\]"),
            (jax.lax.sin_p, Box(ONES), r"must return float32\[2,3\].*; found Box of float32\[7\]"),
            (jax.lax.sin_p, None, "must return an array or a Value; found None"),
            (jax.lax.sin_p, [X], r"must return an array or a Value; found \["),
            (jax.lax.sin_p, "text", "must return an array or a Value; found 'text'"),
            (jax.lax.sort_p, X, r"must return a sequence of 1 result\(s\); found float32\[2,3\]"),
            (jax.lax.sort_p, Box(X), r"must return a sequence of 1 result\(s\); found Box of float32\[2,3\]"),
            (jax.lax.sort_p, [X, X], r"must return a sequence of 1 result\(s\); found one of 2"),
            (jax.lax.sort_p, [ONES], r"must return float32\[2,3\] as result 0, .* found float32\[7\]"),
            (jax.lax.sort_p, [None], "must return an array or a Value as result 0; found None"),
        ],
    )  # fmt: skip
    def test_wrong(self, primitive, result, message):
        rules, name = _rule(primitive, lambda x, **params: result)
        params = {"dimension": 0, "is_stable": True, "num_keys": 1} if primitive.name == "sort" else {}
        params |= {"accuracy": None} if primitive.name == "sin" else {}
        run = ql.quaxify(lambda x: primitive.bind(x, **params), rules=rules)
        for f in (run, jax.jit(run), ql.quaxify(jax.jit(lambda x: primitive.bind(x, **params)), rules=rules)):
            with pytest.raises(ql.RuleError, match=message) as caught:
                f(Box(X))
            assert f"The rule {name} must" in str(caught.value)

    @pytest.mark.parametrize(
        "result", [np.ones((2, 3)), np.ones((2, 3), np.float32), array(np.ones((2, 3))), Box(X)], ids=repr
    )
    def test_right(self, result):
        rules, _ = _rule("sin", lambda x, **params: result)
        out = ql.materialise(ql.quaxify(jnp.sin, rules=rules)(Box(X)))
        assert (out.shape, out.dtype) == ((2, 3), jnp.float32)

    @pytest.mark.parametrize("result", [1.5, np.float32(1.5), np.float64(1.5), np.array(1.5)])
    def test_scalars_of_python_and_numpy(self, result):
        rules, _ = _rule("sin", lambda x, **params: result)
        assert ql.quaxify(lambda x: jnp.sin(x) * 2, rules=rules)(Box(jnp.float32(0))) == 3.0

    def test_checked_until_right_once(self, trusting):
        """The check costs as much as tracing the primitive, so a rule that was right is trusted."""
        results = [jnp.ones(7), X, jnp.ones(7)]
        rules, _ = _rule("sin", lambda x, **params: results.pop(0))
        f = ql.quaxify(jax.lax.sin, rules=rules)
        with pytest.raises(ql.RuleError):
            f(Box(X))
        assert f(Box(X)) is X
        assert f(Box(X)).shape == (7,)

    def test_checked_for_other_parameters(self, trusting):
        rules, _ = _rule("reduce_sum", lambda x, **params: jnp.ones(3))
        f = ql.quaxify(jnp.sum, rules=rules)
        f(Box(X), 0)
        with pytest.raises(ql.RuleError, match=r"must return float32\[2\].*; found float32\[3\]"):
            f(Box(X), 1)

    def test_checked_with_parameters_that_cannot_be_looked_up(self, trusting):
        sizes_p = jax.extend.core.Primitive("sizes")
        sizes_p.def_abstract_eval(lambda x, *, sizes: jax.core.ShapedArray(tuple(sizes), x.dtype))
        results = [X, jnp.ones(7), jnp.ones(7)]
        rules, _ = _rule(sizes_p, lambda x, **params: results.pop(0))
        f = ql.quaxify(lambda x: sizes_p.bind(x, sizes=[7]), rules=rules)
        with pytest.raises(ql.RuleError, match=r"must return float32\[7\].*; found float32\[2,3\]"):
            f(Box(X))
        assert f(Box(X)).shape == f(Box(X)).shape == (7,)

    def test_checked_for_other_shapes_while_tracing(self, trusting):
        rules, _ = _rule("sin", lambda x, **params: X)
        f = jax.jit(ql.quaxify(jax.lax.sin, rules=rules))
        f(Box(X))
        with pytest.raises(ql.RuleError, match=r"must return float32\[7\].*; found float32\[2,3\]"):
            f(Box(jnp.ones(7)))

    def test_checked_always_if_asked_for(self):
        results = [X, jnp.ones(7)]
        rules, _ = _rule("sin", lambda x, **params: results.pop(0))
        f = ql.quaxify(jax.lax.sin, rules=rules)
        with jax.enable_checks(True):
            f(Box(X))
            with pytest.raises(ql.RuleError):
                f(Box(X))

    def test_a_materialise_that_asks_for_its_own_dtype(self):
        """It is checked against `aval` once, not again for what it asks."""
        asked = []

        class Cautious(Box):
            def aval(self):
                return jax.core.ShapedArray(self.array.shape, self.array.dtype)

            def materialise(self):
                asked.append(self.dtype)
                return self.array

        with jax.enable_checks(True):
            assert Cautious(X).shape == (2, 3)
        assert asked == [X.dtype]

    def test_a_type_may_have_dtypes_of_its_own(self):
        class Own(Box):
            own_dtypes = True

        half = lambda x, **params: x.array.astype(jnp.float16)
        rules, _ = _rule("sin", half, ql.ArrayValue)
        f = ql.quaxify(jnp.sin, rules=rules)
        assert f(Own(X)).dtype == jnp.float16
        with (
            jax.enable_checks(True),
            pytest.raises(ql.RuleError, match=r"found float16.* set `own_dtypes = True` on Box\."),
        ):
            f(Box(X))
        rules, _ = _rule("sin", lambda x, **params: jnp.ones(7), ql.ArrayValue)
        with pytest.raises(ql.RuleError, match=r"found float32\[7\]\.\n"):
            ql.quaxify(jnp.sin, rules=rules)(Own(X))

    @pytest.mark.slow
    @pytest.mark.parametrize("result", [jnp.asarray, Box])
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda *xs: jax.jit(f)(*xs)])
    def test_another_dtype_is_a_warning_once_for_each_rule(self, result, wrap, trusting):
        def halved(x, y: jax.Array, **params):
            return result(x.array / 2 + y.astype(float))

        rules, name = _rule("add", halved)
        (rule,) = rules
        f = ql.quaxify(wrap(jax.lax.add), rules=rules)
        n = jnp.arange(6).reshape(2, 3)
        with pytest.warns(ql.RuleWarning, match=r"must return int32.* found .*float32.*`own_dtypes") as met:
            out = f(Box(n), n)
        (warning,) = met
        assert name in str(warning.message)
        assert f"{warning.filename}:{warning.lineno}" == rule.source
        np.testing.assert_array_equal(ql.materialise(out), 1.5 * np.asarray(n))
        f(Box(n + 1), n)  # warnings are errors
        f(Box(n[:1]), n[:1])
        ql.quaxify(jax.lax.add, rules=rules)(Box(n[0]), n[0])

    @pytest.mark.quick("jit-<lambda>0")
    @pytest.mark.parametrize("inner", [lambda f: f, lambda f: lambda *xs: jax.jit(f)(*xs)])
    @pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
    def test_another_shape_is_a_warning_once_for_a_type_that_refuses_to_materialise(
        self, inner, outer, trusting
    ):
        """The elements of such a type may be vectors, of which `eq` gives one boolean each."""

        def equal(x, y: Points, **params):
            return (x.x == y.x) & (x.y == y.y)

        rules, name = _rule("eq", equal, Points)
        (rule,) = rules
        f = outer(ql.quaxify(inner(jax.lax.eq), rules=rules))
        a, b = Points(jnp.arange(3.0), jnp.ones(3)), Points(jnp.zeros(3), jnp.ones(3))
        with pytest.warns(
            ql.RuleWarning, match=r"must return bool\[3,2\].* found bool\[3\].*`own_shapes = True`"
        ) as met:
            out = f(a, b)
        (warning,) = met
        assert name in str(warning.message)
        assert f"{warning.filename}:{warning.lineno}" == rule.source
        np.testing.assert_array_equal(out, [True, False, False])
        np.testing.assert_array_equal(f(a, a), [True, True, True])  # warnings are errors
        np.testing.assert_array_equal(jax.vmap(f)(a, a), [True, True, True])

    def test_a_type_may_have_shapes_of_its_own(self):
        class Vectors(Points):
            own_shapes = True

        class Plain(Points):
            own_shapes = False

        rules, _ = _rule("neg", lambda x, **params: type(x)(x.x[None], x.y[None]), Points)
        f = ql.quaxify(jnp.negative, rules=rules)
        with jax.enable_checks(True):
            assert f(Vectors(jnp.ones(3), jnp.ones(3))).shape == (1, 3, 2)
            with pytest.raises(
                ql.RuleError, match=r"found Points of .*\[1,3,2\].* set `own_shapes = True` on Points"
            ):
                f(Points(jnp.ones(3), jnp.ones(3)))
        with (
            jax.enable_checks(False),
            pytest.raises(ql.RuleError, match=r"found Plain of float32\[1,3,2\]\.\n"),
        ):
            f(Plain(jnp.ones(3), jnp.ones(3)))

    def test_another_shape_of_a_type_that_refuses_for_a_test(self, trusting):
        rules, _ = _rule("sin", lambda x, **params: jnp.ones(7), ql.ArrayValue)
        with pytest.raises(ql.RuleError, match=r"found float32\[7\]\.\n"):
            ql.quaxify(jnp.sin, rules=rules)(ql.testing.refuses(Box)(X))

    def test_another_shape_among_values_that_can_be_materialised(self, trusting):
        """The result for arrays is known, whatever the other operand is."""
        rules, _ = _rule("eq", lambda x, y: x.array[:1] == y.array[:1])
        with pytest.raises(ql.RuleError, match=r"must return bool\[2,3\].*; found bool\[1,3\]\."):
            ql.quaxify(jax.lax.eq, rules=rules)(Box(X), Box(X))

    def test_a_rule_reached_later_is_checked_too(self):
        """One that another rule declined to for the first call."""
        rules, _ = _rule("sin", lambda x, **params: X if x.shape == (2, 3) else NotImplemented)
        _, name = _rule("sin", wrong := lambda x, **params: X, ql.ArrayValue)
        ql.register("sin", rules=rules)(wrong)
        f = ql.quaxify(jax.lax.sin, rules=rules)
        f(Box(X))
        with pytest.raises(ql.RuleError, match=r"found float32\[2,3\]") as caught:
            f(Box(jnp.ones(7)))
        assert name in str(caught.value)


class TestParametersOfRules:
    def test_a_parameter_that_is_not_taken(self):
        rules, name = _rule("transpose", lambda x: x.array)
        with pytest.raises(ql.RuleError, match=r"does not take .* permutation. Add `\*\*params`") as caught:
            ql.quaxify(jnp.transpose, rules=rules)(Box(X))
        assert name in str(caught.value)

    def test_one_that_is_none_is_not_passed(self):
        """JAX adds parameters, whose default is None, in every release."""
        rules, _ = _rule("sin", lambda x: x.array)
        assert ql.quaxify(lambda x: jax.lax.sin_p.bind(x, accuracy=None), rules=rules)(Box(X)) is X

    def test_annotations_as_strings_may_name_what_the_rule_closes_over(self):
        class Local(Box):
            pass

        rules = ql.RuleSet()

        @ql.register("sin", rules=rules)
        def _(x: "Local", **params):
            return Local(jnp.sin(x.array))

        assert type(ql.quaxify(jnp.sin, rules=rules)(Local(X))) is Local
        assert type(ql.quaxify(jnp.sin, rules=rules)(Box(X))) is not Local

    def test_annotations_that_cannot_be_evaluated(self):
        with pytest.raises(TypeError, match=r"annotations of the rule .* cannot be evaluated.*NotDefined"):

            @ql.register("sin", rules=ql.RuleSet())
            def _(x: "NotDefined", **params):
                raise NotImplementedError


class TestPrimitives:
    def test_near_misses(self):
        with pytest.raises(ValueError, match=r"No JAX primitive is called 'dot_genral'. Did you mean 'dot_"):
            ql.register("dot_genral")

    def test_nothing_near(self):
        with pytest.raises(ValueError, match=r"called 'qqqqqqq'.$"):
            ql.register("qqqqqqq")

    @pytest.mark.parametrize("name", ["dot_general", "dot_general_p", "jit", "random_bits", "custom_lin"])
    def test_beyond_lax(self, name):
        rules = ql.RuleSet()

        @ql.register(name, rules=rules)
        def _(*args: Box, **params):
            raise NotImplementedError

        (rule,) = rules
        assert rule.primitive.name.startswith(name.removesuffix("_p")) or name == "jit"


class TestFilterSpec:
    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            ((True, (True, False)), "different lengths of tuple"),
            ((True, (True, False), False), "different lengths of tuple"),
            ((True, [True], False), "different types"),
        ],
    )
    def test_wrong_structure(self, spec, reason):
        with pytest.raises(
            ValueError, match="filter_spec of quaxify must be a bool, a function on leaves, or"
        ) as caught:
            ql.quaxify(jnp.sin, spec)(Box(X))
        assert f"found {spec!r} for PyTreeDef((*, (*,), {{}}))" in str(caught.value)
        assert reason in str(caught.value)
        assert caught.value.__cause__ is None

    @pytest.mark.parametrize("function", [ql.quaxify, ql.explain])
    @pytest.mark.parametrize(
        ("spec", "found"),
        [
            (X, r"array float32\[2, 3\]\. To"),
            (np.ones(2), r"ndarray float64\[2\]"),
            (Box(X), r"Box float32\[2, 3\]\. To"),
            (drawn(eqx.nn.Linear, 3, 2, key=random_key(0)), r"float32\[2, 3\] at \.weight of the Linear"),
            ({"x": X}, r"array float32\[2, 3\] at \['x'\] of the dict"),
            ((True, [X], {}), r"array float32\[2, 3\] at \[1\]\[0\] of the tuple"),
            (2.5, "2.5"),
            (1, "1"),
            ("all", "'all'"),
            (jax.ShapeDtypeStruct((3,), jnp.float32), r"ShapeDtypeStruct float32\[3\]"),
        ],
    )
    def test_of_an_argument(self, function, spec, found):
        name = function.__name__
        message = (
            rf"{name} takes as filter_spec .*; found .*{found}.* write `quaxlike\.{name}\(fn\)\(\.\.\.\)`"
        )
        with pytest.raises(TypeError, match=message):
            function(jnp.sin, spec)

    @pytest.mark.parametrize("function", [ql.quaxify, ql.explain])
    def test_of_a_class(self, function):
        with pytest.raises(TypeError, match=r"found the class Box\. .*`lambda x: isinstance\(x, Box\)`"):
            function(jnp.sin, Box)

    def test_of_functions_and_bools(self):
        spec = (False, (ql.is_value,), {})
        for good in (
            True,
            False,
            ql.is_value,
            functools.partial(isinstance),
            spec,
            jax.tree_util.Partial(bool, X),
        ):
            ql.quaxify(jnp.sin, good)

    def test_of_a_large_model(self):
        with pytest.raises(ValueError, match="filter_spec") as caught:
            ql.quaxify(lambda *xs: xs, (True,))(*[Box(X)] * 1000)
        assert len(str(caught.value)) < 800

    def test_not_callable(self, unchecked):
        with pytest.raises(TypeError, match=r"quaxify takes a callable; found 3\."):
            ql.quaxify(3)


class TestValues:
    @pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
    @pytest.mark.parametrize("static", [np.ones(2), X, {"a": [X]}], ids=["numpy", "jax", "in a dict"])
    def test_static_fields_that_hold_arrays(self, static):
        for _ in range(2):
            with pytest.raises(
                TypeError, match=r"Odd.option is a static field, .* cannot hold an array; found"
            ):
                Odd(X, static)

    @pytest.mark.quick("{'a': 1}")
    @pytest.mark.parametrize("static", [[1], {"a": 1}, {1, 2}], ids=repr)
    def test_static_fields_that_are_only_compared(self, static):
        """As JAX does, which compares them and does not hash them."""
        x = Odd(X, static)
        loop = lambda x: jax.lax.fori_loop(0, 2, lambda i, c: jax.lax.cond(i < 1, lambda: c, lambda: c), x)
        for f in (loop, jax.jit(loop), jax.checkpoint(loop), jax.vmap(lambda x: x)):
            for _ in range(2):
                assert eqx.tree_equal(ql.quaxify(f)(x), x)
        assert x.shape == (2, 3)

    def _loose(self):
        class Loose(ql.ArrayValue):
            array: object
            option: object = None

            def materialise(self):
                return self.array

        return Loose

    @pytest.mark.parametrize("option", ["text", jnp.sin], ids=["text", "function"])
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, jax.grad, lambda f: lambda x: jax.jit(f)(x)])
    def test_fields_that_are_not_arrays(self, option, wrap):
        value = self._loose()(X, option)
        message = r"Loose.option holds .* where an array is expected. .*eqx.field\(static=True\)"
        with pytest.raises(ValueError, match=message):
            ql.quaxify(wrap(jnp.sin))(value)

    @pytest.mark.parametrize("operand", ["text", None, object()], ids=["text", "None", "object"])
    def test_operands_that_are_not_arrays(self, operand):
        with pytest.raises(TypeError, match=r"add.*position 1"):
            ql.quaxify(lambda x: jax.lax.add(x, operand))(Box(X))
        with pytest.raises((TypeError, ValueError)):
            ql.quaxify(lambda x: x + operand)(Box(X))

    @pytest.mark.slow
    def test_outside_of_quaxify(self):
        with pytest.raises(RuntimeError, match=r"Box was passed to `sin` outside `quaxlike\.quaxify`"):
            jax.lax.sin(Box(X))
        conv = eqx.nn.Conv2d(1, 2, 3, key=jax.random.key(0))
        conv = eqx.tree_at(lambda conv: conv.weight, conv, Box(conv.weight))
        with pytest.raises(RuntimeError, match=r"Box was passed to `conv_general_dilated` outside"):
            conv(jnp.ones((1, 5, 5)))

    def test_aval_of_the_wrong_type(self):
        class Wrong(ql.ArrayValue):
            array: jax.Array

            def aval(self):
                return (2, 3)

            def materialise(self):
                return self.array

        with pytest.raises(
            ValueError, match=r"Wrong.aval\(\) must return a jax.core.ShapedArray .*; found \(2, 3\)"
        ):
            ql.quaxify(jax.lax.sin)(Wrong(X))


class TestHooks:
    """An error inside of a hook is the user's own, with a note that names the type and the hook."""

    class Raising(Box):
        def aval(self):
            return jax.core.ShapedArray((2, 3), jnp.float32)

        def materialise(self):
            raise KeyError("mine")

        @classmethod
        def promote(cls, array, like):
            raise KeyError("mine")

        def widen(self, like):
            raise KeyError("mine")

        def leading_axis(self):
            raise KeyError("mine")

        def shard_spec(self, spec):
            raise KeyError("mine")

    class Inherits(Raising):
        @staticmethod
        def default(primitive, values, params):
            raise KeyError("mine")

    @pytest.mark.parametrize(
        ("name", "cls", "use"),
        [
            ("Raising.materialise", Raising, lambda x, y: ql.materialise(x)),
            ("Raising.promote", Raising, lambda x, y: jax.lax.cond(True, lambda: x, lambda: X)),
            ("Inherits.widen", Inherits, lambda x, y: jax.lax.cond(True, lambda: x, lambda: y)),
            ("Inherits.leading_axis", Inherits, lambda x, y: jax.lax.map(lambda row: row, x)),
            ("Inherits.default", Inherits, lambda x, y: jnp.sin(x)),
            ("Raising.shard_spec", Raising, lambda x, y: ql.sharding.specs_for(x, lambda *_: jax.P(None))),
        ],
    )
    def test_named(self, name, cls, use):
        run = use if "shard_spec" in name else ql.quaxify(use)
        with pytest.raises(KeyError) as caught:
            run(cls(X), Box(X))
        assert caught.value.args == ("mine",)
        assert any(f"{name}`, which quaxlike asked for" in note for note in caught.value.__notes__)

    def test_a_type_error_where_a_shape_is_inferred(self):
        """JAX would put its own in place of a TypeError."""

        class Wrong(Box):
            def materialise(self):
                raise TypeError("mine")

        with pytest.raises(
            ValueError, match=r"Wrong has no shape: its hooks raise TypeError\('mine'\)"
        ) as caught:
            ql.quaxify(jnp.sin)(Wrong(X))
        assert any("Wrong.materialise`" in note for note in caught.value.__cause__.__notes__)


class TestLeaks:
    """A tracer that is kept beyond the quaxified function it belongs to."""

    def _leaked(self):
        kept = []
        ql.quaxify(kept.append)(Box(X))
        return kept[0]

    @pytest.mark.parametrize(
        "use",
        [
            lambda x: x + 1.0,
            lambda x: -x,
            lambda x: jnp.sin(x),
            lambda x: jax.lax.sin(x),
            lambda x: x[0],
            lambda x: jax.jit(lambda: x * 2.0)(),
            lambda x: jax.jit(lambda x: x * 2.0)(x),
            lambda x: ql.quaxify(lambda y: y + x)(Box(X)),
            lambda x: ql.quaxify(lambda y: jnp.dot(y, x.T))(X),
        ],
    )
    def test_use(self, use):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="Box leaked from the quaxified") as caught:
            use(self._leaked())
        assert f"{__file__}:" in str(caught.value)
        assert "Return it from the function instead" in str(caught.value)

    def test_it_can_be_shown(self):
        assert repr(self._leaked()) == "ValueTracer<Box[float32[2,3]]>"

    def test_within_it_is_no_leak(self):
        kept = []

        def f(x):
            kept.append(x)
            return jax.jit(lambda y: y + kept[0])(x)

        np.testing.assert_array_equal(ql.quaxify(f)(Box(X)), 2 * X)


class TestTracebacks:
    """Frames of JAX and quaxlike are left out, where JAX leaves out its own."""

    def _shown(self, f, *args):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (any error)
            f(*args)
        return "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_the_user_s_own_errors(self, wrap):
        def f(x):
            raise KeyError("mine")

        shown = self._shown(wrap(ql.quaxify(f)), Box(X))
        assert "quaxlike/core" not in shown
        assert "in f\n" in shown

    def test_errors_in_rules(self):
        def rule(x, **params):
            raise KeyError("mine")

        rules, _ = _rule("sin", rule)
        shown = self._shown(ql.quaxify(jnp.sin, rules=rules), Box(X))
        assert "quaxlike/core" not in shown
        assert "in rule\n" in shown

    def test_errors_about_rules(self):
        rules, name = _rule("sin", lambda x, **params: None)

        def f(x):
            return jnp.sin(x)

        shown = self._shown(ql.quaxify(f, rules=rules), Box(X)).splitlines()
        assert not any("site-packages" in line or "quaxlike/core" in line for line in shown)
        line = inspect.getsourcelines(f)[1] + 1
        assert any(f'test_errors.py", line {line}, in f' in text for text in shown)
        assert any(text.startswith(f"quaxlike.RuleError: The rule {name} must") for text in shown)


@wrong_types
@pytest.mark.parametrize("primitive", [5, lambda x: x, ["sin", None]])
def test_registering_for_what_is_no_primitive(primitive):
    with pytest.raises(TypeError, match="register takes a JAX primitive, its name, or a sequence"):
        ql.register(primitive)


@wrong_types
def test_rules_that_are_no_rule_set():
    with pytest.raises(TypeError, match=r"quaxify takes a quaxlike\.RuleSet as rules; found 5"):
        ql.quaxify(lambda x: x, rules=5)
