"""What the annotations of rules mean to dispatch: aliases, dtypes and shapes; rules that can never match."""

import functools
import importlib
import sys
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, NewType, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typing_extensions
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Inexact, Int, Key, Num, ScalarLike, Shaped

import quaxlike as ql
from quaxlike.core import compat
from quaxlike.core.rules.annotations import annotation_of
from quaxlike.core.rules.registry import as_primitive
from tests.samples import array, wrong_types

_T = TypeVar("_T")


class V(ql.ArrayValue):
    array: jax.Array
    own_dtypes = True

    def materialise(self):
        return self.array


class Of(ql.ArrayValue, Generic[_T]):
    array: jax.Array

    def materialise(self):
        return self.array


class _HasArray(Protocol):
    array: jax.Array


class _Multiplies(Protocol):
    def __mul__(self, other: Any) -> Any: ...


def _scale(factor, x: V, y: jax.Array, **params) -> V:
    return V(factor * x.array)


class _Times(eqx.Module):
    factor: float

    def __call__(self, x: V, y: jax.Array, **params) -> V:
        return _scale(self.factor, x, y)


def _register(hints, rules, primitive="mul"):
    """A rule for a `V` and an operand for each of the hints, which returns the place of its hint."""
    for i, hint in enumerate(hints):

        def rule(x, y, i=i, **params):
            return V(jnp.broadcast_to(jnp.float32(i), x.shape))

        rule.__annotations__ = {"x": V, "y": hint}
        rule.__defaults__ = (i,)
        _without_default(rule)
        ql.register(primitive, rules=rules)(rule)


def _without_default(rule):
    """Makes the parameter `i` of a rule one that comes by keyword alone."""
    import inspect

    signature = inspect.signature(rule)
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY) if p.name == "i" else p for p in signature.parameters.values()
    ]
    rule.__signature__ = signature.replace(parameters=parameters)


def _decorated(rule):
    @functools.wraps(rule)
    def wrapped(*args, **kwargs):
        return rule(*args, **kwargs)

    return wrapped


def _chosen(rules, x, y, f=lax.mul):
    out = ql.quaxify(f, rules=rules)(V(x), y)
    return float(out.array.ravel()[0])


X2, X1, X0 = array(np.ones((2, 2))), array(np.ones(2)), array(np.ones(()))


class TestKindsOfArrays:
    def test_rank_and_dtype_decide(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a b"], Int[Array, "a b"], Float[Array, "a"], Bool[Array, "..."]], rules)
        cases = [(X2, 0), (X2.astype(int), 1), (X1, 2), (X1 > 0, 3), (X0 > 0, 3)]
        for y, place in cases:
            run = ql.quaxify(lambda x, y: lax.mul_p.bind(x, y), rules=rules)
            for wrap in (lambda f: f, jax.jit):
                assert float(wrap(run)(V(X2), y).array.ravel()[0]) == place
        with (
            ql.on_materialise("error"),
            pytest.raises(ql.MaterialisationError, match=r"nearest rule: mul\(V, "),
        ):
            run(V(X1), X1.astype(int))

    @pytest.mark.slow
    def test_axes_of_one_name_have_one_size(self):
        rules = ql.RuleSet()

        @ql.register("dot_general", rules=rules)
        def _(x: Float[V, "n k"], y: Float[Array, "k m"], **params):
            return V(jnp.full((x.shape[0], y.shape[1]), 1.0))

        @ql.register("dot_general", rules=rules)
        def _(x: Float[V, "n k"], y: Float[Array, "n m"], **params):
            return V(jnp.full((x.shape[1], y.shape[1]), 2.0))

        @ql.register("dot_general", rules=rules)
        def _(x: Float[V, "k n"], y: Float[Array, "m n"], **params):
            return V(jnp.full((x.shape[0], y.shape[0]), 3.0))

        def product(x_shape, y_shape, x_axis, y_axis):
            dot = lambda x, y: lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))
            return float(ql.quaxify(dot, rules=rules)(V(jnp.ones(x_shape)), jnp.ones(y_shape)).array[0, 0])

        assert product((2, 3), (3, 4), 1, 0) == 1
        assert product((2, 3), (2, 4), 0, 0) == 2
        assert product((2, 3), (4, 3), 1, 1) == 3
        with pytest.raises(ql.AmbiguousRuleError):
            product((2, 2), (2, 4), 1, 0)

    def test_more_axes_of_one_name_are_more_specific(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a b"]], rules)

        @ql.register("mul", rules=rules)
        def _(x: Float[V, "a ... b"], y: Float[Array, "a b"], **params):
            return V(jnp.full(x.shape, 9.0))

        @ql.register("concatenate", rules=rules)
        def _(*xs: Float[V, "n"], dimension, **params):
            return V(jnp.full(sum(x.size for x in xs), 9.0))

        assert _chosen(rules, X2, X2) == 9
        with ql.on_materialise("error"):
            join = ql.quaxify(lambda *xs: jnp.concatenate(xs), rules=rules)
            assert join(V(X1), V(X1)).shape == (4,)
            with pytest.raises(ql.MaterialisationError):
                join(V(X1), V(jnp.ones(3)))

    def test_tracers_count_by_their_types(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a b"], Float[Array, "a"], Float[Array, ""]], rules)
        run = ql.quaxify(lambda x, y: lax.mul_p.bind(x, y), rules=rules)
        np.testing.assert_array_equal(run(V(X2), X2).array, 0 * X2)
        np.testing.assert_array_equal(jax.vmap(run)(V(X2), X2).array, X2)  # rows
        np.testing.assert_array_equal(jax.vmap(run, (None, 0))(V(X1), X1).array, 2 * X2)
        np.testing.assert_array_equal(jax.jvp(lambda y: run(V(X1), y).array, (X1,), (X1,))[0], X1)

    def test_the_more_specific_goes_before(self):
        rules = ql.RuleSet()
        hints = [
            jax.Array,
            Num[Array, "..."],
            Float[Array, "..."],
            Float[Array, "a _ ..."],
            Float32[Array, "a b"],
            Float32[Array, "a a"],
            Float32[Array, "2 2"],
            Float32[Array, "3 3"],
        ]
        _register(hints, rules)
        half = jnp.float16
        cases = [(X0 > 0, 0), (X0.astype(int), 1), (X0, 2), (X2.astype(half), 3), (jnp.ones((2, 3)), 4)]
        for y, place in [*cases, (jnp.ones((4, 4)), 5), (X2, 6), (jnp.ones((3, 3)), 7)]:
            run = ql.quaxify(lambda x, y: lax.mul_p.bind(x, y), rules=rules)
            assert float(run(V(y), y).array.ravel()[0]) == place
        ql.check_ambiguities(V, rules=rules)

    def test_a_size_is_more_specific_than_it_or_one(self):
        rules = ql.RuleSet()
        _register([Float[Array, "#3"], Float[Array, "3"]], rules)
        ql.check_ambiguities(V, rules=rules)
        assert _chosen(rules, X1, jnp.ones(1), lax.mul_p.bind) == 0
        assert _chosen(rules, jnp.ones(3), jnp.ones(3), lax.mul_p.bind) == 1

    def test_of_other_dtypes_none_has_to_be_more_specific(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a 2"], Int[Array, "2 a"]], rules)
        ql.check_ambiguities(V, rules=rules)

    def test_neither_of_two_is_more_specific(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a b"], Inexact[Array, "2 b"]], rules)
        assert _chosen(rules, X1, jnp.ones((3, 2)), lax.mul_p.bind) == 0
        with pytest.raises(ql.AmbiguousRuleError, match="2 b"):
            _chosen(rules, X2, X2)
        with pytest.raises(ql.AmbiguousRuleError, match="1 ambiguous"):
            ql.check_ambiguities(V, rules=rules)

    def test_kinds_of_values(self):
        rules = ql.RuleSet()

        @ql.register("neg", rules=rules)
        def _(x: Float[V, "a"], **params):
            return x.array

        @ql.register("neg", rules=rules)
        def _(x: Float[V, "a b"] | Int[Array, "a"], **params):
            return 7 * x.array

        for x, want in ((X1, X1), (X2, 7 * X2)):
            np.testing.assert_array_equal(ql.quaxify(lax.neg, rules=rules)(V(x)), want)
        np.testing.assert_array_equal(ql.quaxify(lax.neg, rules=rules)(V(X0)), -X0)

    def test_numbers_are_arrays_without_axes(self):
        rules = ql.RuleSet()
        _register([ScalarLike, Float[ArrayLike, "n"]], rules)
        run = ql.quaxify(lambda x, y: lax.mul_p.bind(x, y), rules=rules)
        for y, place in ((2.0, 0), (np.float32(2), 0), (X0, 0), (np.ones(2, np.float32), 1), (X1, 1)):
            assert float(run(V(X1), y).array[0]) == place

    def test_rules_by_kind_are_explained(self):
        rules = ql.RuleSet()
        _register([Float[Array, "a b"], Float[Array, "a"]], rules)
        report = ql.explain(lax.mul, rules=rules)(V(X1), X1)
        assert [(row.outcome, "test_annotations.py" in row.rule) for row in report.rows] == [("rule", True)]
        assert "Array, 'a'])" in repr(list(rules))

    def test_a_declined_rule(self):
        rules, calls = ql.RuleSet(), []

        @ql.register("mul", rules=rules)
        def _(x: V, y: jax.Array, **params):
            return x

        @ql.register("mul", rules=rules)
        def _(x: V, y: Float[Array, "a"], **params):
            calls.append(y)
            return NotImplemented

        assert isinstance(ql.quaxify(lax.mul, rules=rules)(V(X1), X1), V)
        assert len(calls) == 1

    def test_keys(self):
        key = jax.random.key(0)
        assert annotation_of(Key[Array, ""]).takes(jax.Array, lambda: jax.typeof(key))
        assert not annotation_of(Key[Array, ""]).takes(jax.Array, lambda: jax.typeof(X0))
        assert not annotation_of(Float[Array, ""]).takes(jax.Array, lambda: jax.typeof(key))

    @pytest.mark.parametrize(
        ("dims", "yes", "no"),
        [
            ("n n", [(2, 2)], [(2, 3), (2,)]),
            ("n n+1", [(2, 3), (2, 4)], [(2,)]),
            ("*b n", [(2,), (2, 3, 4)], [()]),
            ("n ... n", [(2, 2), (2, 5, 6, 2)], [(2,), (2, 3)]),
            ("#n n", [(1, 3), (3, 3)], [(2, 3), (3, 1)]),
            ("#3", [(1,), (3,)], [(2,)]),
            ("rows=3 _ _x", [(3, 1, 2)], [(2, 1, 2)]),
            ("...", [(), (1, 2)], []),
        ],
    )
    def test_shapes(self, dims, yes, no):
        takes = annotation_of(Shaped[Array, dims]).takes
        for shape in (*yes, *no):
            found = takes(jax.Array, lambda shape=shape: jax.core.ShapedArray(shape, jnp.float32))
            assert found == (shape in yes), shape


class TestTheSameOperands:
    @pytest.mark.parametrize(
        "hints",
        [
            (Float[Array, "n m"], Float[Array, "a b"]),
            (jax.Array, Shaped[Array, "..."]),
            (jax.Array, jax.Array | None),
            (V, Annotated[V, "the other"]),
        ],
    )
    def test_is_an_error_that_names_both(self, hints):
        def first(x, y, **params): ...

        def second(x, y, **params): ...

        rules = ql.RuleSet()
        first.__annotations__, second.__annotations__ = ({"x": V, "y": hint} for hint in hints)
        ql.register("mul", rules=rules)(first)
        line = first.__code__.co_firstlineno
        match = rf"mul\(.*annotations.py:{line + 2} is for the same operands as .*annotations.py:{line},"
        with pytest.raises(ql.RuleError, match=match):
            ql.register("mul", rules=rules)(second)
        assert [rule.function for rule in rules] == [first]

    def test_of_the_same_name(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: V, y: jax.Array, **params): ...

        with pytest.raises(ql.RuleError, match="for the same operands"):

            @ql.register("mul", rules=rules)
            def _(x: V, y: jax.Array, **params): ...

    def test_a_definition_that_runs_again_replaces(self):
        rules = ql.RuleSet()

        def define(factor):
            @ql.register("sin", rules=rules)
            def _(x: V, **params):
                return x.array * factor

        for factor in (2, 3):
            define(factor)
            np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=rules)(V(X1)), factor * X1)

    def test_cells_and_modules(self, tmp_path, monkeypatch):
        cell = "@ql.register('sin', rules=rules)\ndef {}(x: V, **params): return x.array * {}"
        names = {"ql": ql, "V": V, "rules": ql.RuleSet(), "__name__": "__main__"}
        for i, text in enumerate([cell.format("_", 2), cell.format("_", 3), "\n" + cell.format("_", 4)]):
            exec(compile(text, f"cell{i}", "exec"), names)
        np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=names["rules"])(V(X1)), 4 * X1)
        with pytest.warns(ql.RuleWarning, match=r"cell3:1 replaces .* at cell2:2"):
            exec(compile(cell.format("renamed", 5), "cell3", "exec"), names)

        path = tmp_path / "some_rules.py"
        text = "import jax, quaxlike as ql\nfrom tests.core.test_annotations import V\nrules = ql.RuleSet()\n"
        path.write_text(
            text.replace("rules = ", "if 'rules' not in globals(): rules = ") + cell.format("_", 2)
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        module = importlib.import_module("some_rules")
        path.write_text(path.read_text().replace("* 2", "* 3\n"))
        importlib.invalidate_caches()
        importlib.reload(module)
        np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=module.rules)(V(X1)), 3 * X1)

    def test_one_for_exactly_two_values_beside_one_for_either_side(self):
        for turn in (1, -1):
            rules = ql.RuleSet()

            def both(x: V, y: V, **params):
                return 2 * x.array

            def either(primitive, x, y, **params):
                return 7 * X1

            steps = [
                lambda rules=rules, either=either: ql.register_on_either_side("mul", V, rules=rules)(either),
                lambda rules=rules, both=both: ql.register("mul", rules=rules)(both),
            ]
            for step in steps[::turn]:
                step()
            run = ql.quaxify(lax.mul, rules=rules)
            np.testing.assert_array_equal(run(V(X1), V(X1)), 2 * X1)
            np.testing.assert_array_equal(run(V(X1), X1), 7 * X1)


_New = NewType("_New", V)
_Alias = typing_extensions.TypeAliasType("_Alias", "V | jax.Array")
_Pair = typing_extensions.TypeAliasType("_Pair", _T | jax.Array, type_params=(_T,))
_Bound = TypeVar("_Bound", bound="V")
_Either = TypeVar("_Either", V, Of)


class TestAliases:
    @pytest.mark.parametrize(
        "hint",
        [
            _New,
            _Alias,
            _Pair[V],
            _Bound,
            _Either,
            Annotated[V, "documented"],
            "V",
            typing.Union[V, None],  # noqa: UP007
            Annotated[_New | None, 1] | Of[int],
            NewType("Twice", _New),
        ],
    )
    def test_mean_what_they_stand_for(self, hint):
        def rule(x, **params):
            return 7 * x.array

        rules = ql.RuleSet()
        rule.__annotations__["x"] = hint
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ql.register("sin", rules=rules)(rule)
            with ql.on_materialise("error"):
                np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=rules)(V(X1)), 7 * X1)

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="a statement of Python 3.12")
    def test_the_statement(self):
        names = {"V": V, "jax": jax, "ql": ql, "rules": ql.RuleSet()}
        exec("type A = V | jax.Array\ntype B[T] = T | A\n@ql.register('mul', rules=rules)\n"
             "def rule(x: A, y: B[V], **params): return 7 * x.array", names)  # fmt: skip
        np.testing.assert_array_equal(ql.quaxify(lax.mul, rules=names["rules"])(V(X1), X1), 7 * X1)

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="a statement of Python 3.12")
    def test_a_statement_that_loses_its_argument(self):
        names = {"V": V, "Float": Float, "ql": ql, "rules": ql.RuleSet()}
        with pytest.raises(TypeError, match=r'`A\[V\]` .* count as `Any`. Write .* `Float\[V, "n m"\]`'):
            exec("type A[T] = Float[T, 'n m']\n@ql.register('sin', rules=rules)\n"
                 "def rule(x: A[V], **params): return x", names)  # fmt: skip

    def test_local_names_behind_a_decorator(self):
        rules = ql.RuleSet()

        class Local(V):
            pass

        @ql.register("sin", rules=rules)
        @_decorated
        def _(x: "Local", **params):
            return Local(7 * x.array)

        np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=rules)(Local(X1)).array, 7 * X1)

    def test_subscripted_classes(self):
        rules = ql.RuleSet()

        @ql.register("sin", rules=rules)
        def _(x: Of[int], **params):
            return 7 * x.array

        np.testing.assert_array_equal(ql.quaxify(lax.sin, rules=rules)(Of(X1)), 7 * X1)

    @pytest.mark.quick(6)
    @pytest.mark.parametrize(
        "hint", [np.ndarray, np.float32, type(X1), jax.core.Tracer, float, np.ndarray | V]
    )
    @pytest.mark.parametrize("y", [X1, np.ones(2, np.float32), 1.0])
    def test_plain_operands(self, hint, y):
        rules = ql.RuleSet()
        _register([hint], rules)
        with ql.on_materialise("error"):
            run = ql.quaxify(lambda x, y: lax.mul_p.bind(x, y), rules=rules)
            assert float(run(V(X1), y).array[0]) == float(jax.jit(run)(V(X1), y).array[0]) == 0


class TestRulesThatCanNeverMatch:
    def test_a_default_of_an_operand(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: V, y: jax.Array | None = None, **params):
            return 7 * x.array

        @ql.register("select_n", rules=rules)
        def _(which: jax.Array, x: V, y: jax.Array | V = None, *, more=1, **params):
            return (7 if y is None else 8) * x.array

        @ql.register("integer_pow", rules=rules)
        def _(x: V, y=2, **params):  # a parameter
            return y * x.array

        np.testing.assert_array_equal(ql.quaxify(lax.mul, rules=rules)(V(X1), X1), 7 * X1)
        select = ql.quaxify(lambda x, *more: lax.select_n(jnp.zeros(2, int), x, *more), rules=rules)
        np.testing.assert_array_equal(select(V(X1)), 7 * X1)
        np.testing.assert_array_equal(select(V(X1), X1), 8 * X1)
        np.testing.assert_array_equal(ql.quaxify(lambda x: x**3, rules=rules)(V(X1)), 3 * X1)

    @pytest.mark.parametrize(
        ("primitive", "rule", "match"),
        [
            ("mul", lambda x, y, z, **params: x, r"takes 3 operand\(s\), and `mul` has 2"),
            ("mul", lambda x, **params: x, r"takes 1 operand\(s\), and `mul` has 2"),
            ("neg", lambda x, y, *rest, **params: x, r"takes 2 operand\(s\), and `neg` has 1"),
            ("reduce_sum", lambda x, axes, **params: x, r"`axes` is a parameter of `reduce_sum`"),
        ],
    )
    def test_the_number_of_operands(self, primitive, rule, match):
        rule.__annotations__ = dict.fromkeys("xyz", V) | {"axes": tuple, "rest": V}
        rule.__module__ = __name__
        with pytest.raises(TypeError, match=rf"The rule {primitive}\(.* can never match: .*{match}"):
            ql.register(primitive, rules=ql.RuleSet())(rule)

    @pytest.mark.parametrize(
        ("hint", "named"),
        [
            (list, "list"),
            (str, "str"),
            (None, ""),
            (tuple[V, ...], r"tuple\[.*V, \.\.\.\]"),
            (type[V], r"type\[.*V\]"),
            (typing.Literal["a"], r"Literal\['a'\]"),
            (Sequence[V], r".*Sequence\[.*V\]"),
            (Mapping, "Mapping"),
            (_HasArray, "_HasArray"),
            (_Multiplies, "_Multiplies"),
        ],
    )
    def test_no_operand(self, hint, named):
        def rule(x, y, **params): ...

        rule.__annotations__ = {"x": V, "y": hint}
        never = rf"mul\(V, .*\) at .* can never match: no operand `y` is of type {named}"
        with pytest.raises(TypeError, match=never):
            ql.register("mul", rules=ql.RuleSet())(rule)

    def test_protocols_name_no_class_beside_one_that_is_named(self):
        rules = ql.RuleSet()

        @ql.register("mul", rules=rules)
        def _(x: _HasArray | V, y: _Multiplies | jax.Array, **params):
            return x

        out = ql.quaxify(jnp.multiply, rules=rules)(V(array(3)), array(3))
        assert isinstance(out, V)

        def rule(x: _HasArray, y: V, **params): ...

        with pytest.raises(TypeError, match="_HasArray is only checked on instances, but classes select"):
            ql.register("mul", rules=rules)(rule)

    def test_a_parameter_that_the_primitive_lacks(self):
        rules = ql.RuleSet()

        @ql.register("dot_general", rules=rules)
        def _(x: V, y: jax.Array, *, dimension_number, **params): ...

        match = "requires `dimension_number`, which is no parameter of `dot_general`. Did you mean"
        with pytest.raises(ql.RuleError, match=match):
            ql.quaxify(jnp.dot, rules=rules)(V(array(3)), array(3))

    @pytest.mark.slow
    def test_the_number_of_operands_is_that_of_every_call(self):
        from quaxlike.core import primitive_names as names

        met: dict[Any, set[int]] = {}

        def walk(jaxpr):
            for eqn in compat.open_jaxpr(jaxpr).eqns:
                met.setdefault(eqn.primitive, set()).add(len(eqn.invars))
                for inside in jax.extend.core.jaxprs_in_params(eqn.params):
                    walk(inside)

        args = [jax.ShapeDtypeStruct((2, 2), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for namespace in names.MODULES.values():
                for name, function in vars(namespace).items():
                    if (
                        callable(function)
                        and not isinstance(function, type)
                        and not name.startswith(("_", "set_"))
                    ):
                        for call in names.CALLS:
                            try:
                                walk(jax.make_jaxpr(lambda *xs, f=function, call=call: call(f, *xs))(*args))
                            except Exception:
                                continue
        known = {p: compat.arity_of(p) for p in met}
        assert sum(n is not None for n in known.values()) > 60
        assert not {p: (n, met[p]) for p, n in known.items() if n is not None and met[p] != {n}}


class TestCallables:
    """A rule need not be a function: the annotations of the one behind it count."""

    @pytest.mark.parametrize(
        "rule", [functools.partial(_scale, 2.0), functools.partial(jax.jit(_scale), 2.0), _Times(2.0)]
    )
    def test_select_their_types(self, rule):
        rules = ql.RuleSet()
        ql.register("mul", rules=rules)(rule)
        x = array([1.0, 2.0])
        assert jnp.array_equal(ql.quaxify(jnp.multiply, rules=rules)(V(x), x).array, 2 * x)
        with pytest.raises(ql.MaterialisationError, match="no rule for"), ql.on_materialise("error"):
            ql.quaxify(jnp.multiply, rules=rules)(x, V(x))
        (found,) = rules
        assert __file__ in repr(found)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "primitives"),
        [
            ("multiply", ["mul"]),
            ("matmul", ["dot_general"]),
            ("einsum", ["dot_general"]),
            ("where", ["select_n"]),
            ("equal", ["eq"]),
            ("mean", ["reduce_sum", "div"]),
            ("relu", ["max"]),
            ("astype", ["convert_element_type"]),
            ("while_loop", ["while"]),
            ("matmul_p", ["dot_general"]),
            ("jnp.multiply", ["mul"]),
        ],
    )
    def test_functions_of_jax(self, name, primitives):
        listed = " or ".join(map(repr, primitives))
        with pytest.raises(ValueError, match=rf"called '{name}'\. Did you mean {listed}, by which `jax\."):
            ql.register(name)

    @wrong_types
    @pytest.mark.parametrize("function", [jnp.multiply, lax.mul, np.multiply, jax.jit(lax.mul)])
    def test_functions_themselves(self, function):
        with pytest.raises(TypeError, match=r'Write `@quaxlike\.register\("mul"\)` above a rule'):
            ql.register(function)

    @wrong_types
    @pytest.mark.parametrize("function", [lax.dot_general, lax.scan, lax.conv_general_dilated])
    def test_functions_named_like_their_primitive(self, function):
        name = function.__name__
        with pytest.raises(TypeError, match=rf'Write `@quaxlike\.register\("{name}"\)` above a rule'):
            ql.register(function)

    def test_no_names(self):
        with pytest.raises(ValueError, match="at least one primitive; found an empty sequence"):
            ql.register([])

    @wrong_types
    def test_a_rule_is_not_run(self):
        def rule(x: V, **params):
            raise AssertionError

        with pytest.raises(TypeError, match=r'Write `@quaxlike\.register\("name"\)` above a rule'):
            ql.register(rule)

    def test_primitives_by_name(self):
        assert as_primitive("mul") is lax.mul_p
