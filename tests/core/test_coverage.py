"""Which rules there are, and that no two of them are in each other's way."""

import importlib
import inspect
import itertools
import pkgutil

import jax
import pytest
from jaxtyping import ArrayLike

import quaxlike as ql
import quaxlike.arrays
from quaxlike.core.rules import GLOBAL
from tests.samples import wrong_types


class A(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


class B(A):
    pass


class C(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


def _source(fn) -> str:
    return f"{inspect.getsourcefile(fn)}:{inspect.getsourcelines(fn)[1]}"


RULES = ql.RuleSet()


@ql.register(["sin", "cos"], rules=RULES)
def of_a(x: A, **params):
    raise NotImplementedError


@ql.register("add", rules=RULES)
def of_c(x: C, y: ArrayLike | ql.ArrayValue, **params):
    raise NotImplementedError


@ql.register("concatenate", rules=RULES)
def of_several(*xs: C, **params):
    raise NotImplementedError


class TestRulesFor:
    def test_sorted_by_primitive_with_places(self):
        assert [(r.primitive.name, r.source) for r in ql.rules_for(A, rules=RULES)] == [
            ("cos", _source(of_a)),
            ("sin", _source(of_a)),
        ]

    def test_rules_of_a_base_class_count(self):
        assert ql.rules_for(B, rules=RULES) == ql.rules_for(A, rules=RULES)

    def test_varargs_and_unions(self):
        assert [r.primitive.name for r in ql.rules_for(C, rules=RULES)] == ["add", "concatenate"]

    @pytest.mark.slow
    def test_global(self):
        names = {r.primitive.name for r in ql.rules_for(ql.LoraArray)}
        assert "dot_general" in names
        assert names == {r.primitive.name for r in GLOBAL if r in ql.rules_for(ql.LoraArray)}

    def test_repr(self):
        (_, concatenate) = ql.rules_for(C, rules=RULES)
        assert repr(concatenate) == f"concatenate(*C) at {_source(of_several)}"


class TestCompare:
    def test_both_ways(self):
        diff = ql.compare_rules(A, C, rules=RULES)
        assert (diff.only_first, diff.only_second, diff.both) == (["cos", "sin"], ["add", "concatenate"], [])
        assert diff.rules["sin"] == (tuple(ql.rules_for(A, rules=RULES)[1:]), ())

    def test_prints_as_a_table(self):
        diff = ql.compare_rules(A, B, rules=RULES)
        assert str(diff).splitlines() == [
            "primitive  A    B",
            "cos        yes  yes",
            "sin        yes  yes",
        ]
        assert repr(diff) == str(diff)


def _plant():
    rules = ql.RuleSet()

    @ql.register("add", rules=rules)
    def left(x: A, y: ArrayLike | ql.ArrayValue, **params):
        return "left"

    @ql.register("add", rules=rules)
    def right(x: ArrayLike | ql.ArrayValue, y: C, **params):
        return "right"

    return rules, left, right


class TestAmbiguities:
    @pytest.mark.slow
    def test_planted(self):
        rules, left, right = _plant()
        with pytest.raises(ql.AmbiguousRuleError) as caught:
            ql.check_ambiguities(rules=rules)
        head, first, second, *_ = str(caught.value).splitlines()
        assert head == "1 ambiguous pair(s) of rules:"
        assert (first.strip(), second.strip()) == (
            f"add(A, {_any()}) at {_source(left)}",
            f"add({_any()}, C) at {_source(right)}",
        )

    def test_only_for_the_types_asked_for(self):
        rules, *_ = _plant()
        ql.check_ambiguities(A, B, rules=rules)
        for types in ((A, C), (B, C), (A, B, C)):
            with pytest.raises(ql.AmbiguousRuleError, match="1 ambiguous pair"):
                ql.check_ambiguities(*types, rules=rules)

    def test_a_rule_for_both_decides(self):
        rules, *_ = _plant()

        @ql.register("add", rules=rules)
        def _(x: A, y: C, **params):
            return "both"

        ql.check_ambiguities(A, B, C, rules=rules)

    def test_precedence_decides(self):
        rules, *_ = _plant()

        @ql.register("add", rules=rules, precedence=1)
        def _(x: A, y: ArrayLike | ql.ArrayValue, **params):
            return "left"

        ql.check_ambiguities(A, B, C, rules=rules)

    def test_rules_for_as_many_operands(self):
        rules = ql.RuleSet()

        @ql.register("concatenate", rules=rules)
        def _(x: A, y: ArrayLike | ql.ArrayValue, **params):
            return "two"

        @ql.register("concatenate", rules=rules)
        def _(x: A, y: C, z: C, **params):
            return "three"

        ql.check_ambiguities(A, B, C, rules=rules)

    def test_layers_decide(self):
        """What a private set says is asked before the global rules, so that the two cannot clash."""
        rules = ql.RuleSet()

        @ql.register("dot_general", rules=rules)
        def _(x: ArrayLike | ql.ArrayValue, y: A, **params):
            return NotImplemented

        ql.check_ambiguities(A, ql.LoraArray, rules=rules)

    @pytest.mark.slow
    def test_varargs(self):
        rules = ql.RuleSet()

        @ql.register("concatenate", rules=rules)
        def several(*xs: A | jax.Array, **params):
            return NotImplemented

        @ql.register("concatenate", rules=rules)
        def two(x: jax.Array | C, y: jax.Array | A, **params):
            return NotImplemented

        with pytest.raises(ql.AmbiguousRuleError):
            ql.check_ambiguities(rules=rules)

    @pytest.mark.slow
    def test_rules_of_abstract_classes(self):
        """The clash is between types that derive from what the rules name."""
        rules = ql.RuleSet()
        abstract = next(c for c in ql.NF4Array.__mro__ if inspect.isabstract(c))

        @ql.register("add", rules=rules)
        def _(x: abstract, y: ArrayLike | ql.ArrayValue, **params):
            return NotImplemented

        @ql.register("add", rules=rules)
        def _(x: ArrayLike | ql.ArrayValue, y: abstract, **params):
            return NotImplemented

        with pytest.raises(ql.AmbiguousRuleError):
            ql.check_ambiguities(rules=rules)

    def test_what_it_finds_is_what_dispatch_raises(self):
        rules, *_ = _plant()
        x = jax.numpy.ones(3)
        with pytest.raises(ql.AmbiguousRuleError, match=r"`add` of \(B, C\) is ambiguous"):
            ql.quaxify(jax.lax.add, rules=rules)(B(x), C(x))


def _any() -> str:
    rules, left, _ = _plant()
    (rule,) = [r for r in rules if r.function is left or r.source == _source(left)]
    return repr(rule).removeprefix("add(A, ").rpartition(") at ")[0]


def _shipped() -> list[type[ql.Value]]:
    for module in pkgutil.walk_packages(quaxlike.arrays.__path__, "quaxlike.arrays."):
        importlib.import_module(module.name)
    found, todo = [], [ql.Value]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.startswith("quaxlike.") and not inspect.isabstract(cls) and cls not in found:
            found.append(cls)
    return sorted(found, key=lambda cls: cls.__name__)


class TestShipped:
    def test_the_types_are_found(self):
        assert {ql.LoraArray, ql.NF4Array} < set(_shipped())

    @pytest.mark.slow
    def test_no_two_rules_are_ambiguous(self):
        ql.check_ambiguities()

    @pytest.mark.slow
    def test_no_two_rules_are_ambiguous_for_all_types_together(self):
        ql.check_ambiguities(*_shipped())

    @pytest.mark.slow
    def test_every_pair_of_types(self):
        for pair in itertools.combinations_with_replacement(_shipped(), 2):
            ql.check_ambiguities(*pair)

    @pytest.mark.slow
    def test_no_rule_is_on_plain_arrays(self):
        """Importing an array type changes nothing for code that does not use it."""
        covered = {rule for cls in _shipped() for rule in ql.rules_for(cls)}
        ours = [rule for rule in GLOBAL if rule.function.__module__.startswith("quaxlike.")]
        assert len(ours) > 100
        assert [rule for rule in ours if rule not in covered] == []


@wrong_types
@pytest.mark.parametrize("call", [ql.rules_for, ql.check_ambiguities, lambda x: ql.compare_rules(x, x)])
@pytest.mark.parametrize("x", ["LoraArray", 5, int])
def test_what_is_no_class_of_values(call, x):
    with pytest.raises(TypeError, match=r"takes classes of Values, such as ql\.LoraArray; found"):
        call(x)
