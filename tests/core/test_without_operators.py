"""A type without `ArrayOperators` has those of arrays within `quaxify`; elsewhere they are errors."""

import copy
import operator
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays import unitful
from tests.samples import array


class Own(ql.ArrayValue):
    array: jax.Array

    def materialise(self) -> jax.Array:
        return 2 * self.array


class NoArray(ql.Value):
    array: jax.Array

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        return self.array


W = Own(array([0.0, 1.0, 0.0, 2.0]))
X = array(np.arange(1.0, 5.0))
DENSE = array([0.0, 2.0, 0.0, 4.0])

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, divmod),
    *(operator.pow, operator.matmul, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
    operator.ge,
]
OTHERS = {
    **{"-x": operator.neg, "+x": operator.pos, "abs": abs, "round": round, "len": len, "iter": list},
    **{
        "index": lambda x: x[1],
        "T": lambda x: x.T,
        "sum": lambda x: x.sum(),
        "at": lambda x: x.at[0].set(1.0),
    },
    **{"float": lambda x: float(x[1]), "in": lambda x: 4.0 in x, "item": lambda x: x[0].item()},
    **{"any": lambda x: bool(x.any()), "slice": lambda x: x[1:3], "nbytes": lambda x: x.itemsize},
}


@pytest.mark.slow
def test_a_weight_that_is_closed_over_is_not_compared_as_a_pytree():
    prune = lambda w, x: jnp.where(w != 0, x, 0.0).sum()
    expected = prune(DENSE, X)
    for run in (ql.quaxify(lambda x: prune(W, x)), jax.jit(ql.quaxify(lambda x: prune(W, x)))):
        assert run(X) == expected
    assert ql.quaxify(lambda x: jax.jit(prune)(W, x))(X) == expected
    assert ql.quaxify(lambda a, x: jax.jit(lambda a: prune(Own(a), x))(a))(W.array, X) == expected


def same(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(ql.materialise(a), b), x, y, is_leaf=ql.is_value)


@pytest.mark.quick("other0-add", "other0-gt")
@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("other", [X, np.arange(1.0, 5.0, dtype=np.float32), 2.0, "itself"])
def test_operators_of_two_operands_where_a_level_dispatches(op, other):
    if op is operator.matmul and isinstance(other, float):
        return
    value = Own(X)
    dense = value.materialise()
    if isinstance(other, str):
        same(ql.quaxify(lambda: op(value, value))(), op(dense, dense))
        return
    same(ql.quaxify(lambda: op(value, other))(), op(dense, other))
    same(ql.quaxify(lambda: op(other, value))(), op(other, dense))


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_and_methods_where_a_level_dispatches(name):
    same(ql.quaxify(lambda: OTHERS[name](W))(), OTHERS[name](DENSE))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("other", [X, 2.0, W, np.asarray(X)], ids=["array", "number", "value", "numpy"])
def test_outside_operators_are_errors_that_name_the_mixin(op, other):
    for call in (lambda: op(W, other), lambda: op(other, W)):
        with pytest.raises(TypeError, match=r"Own was passed to .* outside(?s:.*)`quaxlike.ArrayOperators`"):
            call()


@pytest.mark.parametrize("name", OTHERS)
def test_outside_the_others_are_errors_that_name_the_mixin(name):
    with pytest.raises(
        (TypeError, AttributeError), match=r"name `quaxlike\.ArrayOperators` before `ArrayValue`"
    ):
        OTHERS[name](W)


@pytest.mark.parametrize("ask", [bool, operator.not_, lambda w: 1 if w and 1 else 2, lambda w: 1 if w else 2])
def test_truth(ask):
    with pytest.raises(TypeError, match="Own was passed to `bool` outside"):
        ask(W)
    with pytest.raises(TypeError, match="passed to `bool` outside"):
        ask(NoArray(X))
    with pytest.raises(ValueError, match="more than one element"):
        ql.quaxify(lambda: ask(W))()
    one = Own(jnp.array(0.0))
    assert ql.quaxify(lambda: ask(one))() == ask(one.materialise())
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(ql.quaxify(lambda w: ask(Own(w))))(one.array)


def test_format():
    one = Own(jnp.array(1.25))
    for run in (ql.quaxify(format), ql.quaxify(lambda x, spec: format(one, spec))):
        assert run(one, ".2f") == "2.50"
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="format: Own"):
            run(one, ".2f")
    assert f"{one}" == "Own(array=weak_f32[])"
    with pytest.raises(TypeError, match=r"Own was passed to `format\(\.\.\., '\.2f'\)` outside"):
        format(one, ".2f")
    length = unitful.Unitful(jnp.array(1.25), "m")
    assert ql.quaxify(format)(length, ".1f") == format(length, ".1f") == "1.2 m"


def test_messages_say_how_to_compare_pytrees():
    for compare in (operator.eq, operator.ne):
        with pytest.raises(TypeError, match=r"`equinox\.tree_equal`"):
            compare(W, W)
        with pytest.raises(TypeError, match=r"`equinox\.tree_equal`"):
            compare(NoArray(X), NoArray(X))
    assert eqx.tree_equal(W, Own(W.array))
    assert not eqx.tree_equal(W, Own(W.array + 1))


def test_a_level_that_does_not_select_it_is_named():
    with pytest.raises(TypeError, match="but no `filter_spec` selects it"):
        ql.quaxify(lambda w: w != 0, filter_spec=False)(W)


def test_what_is_no_operand_is_left_to_python():
    assert (W == None) is False  # noqa: E711
    assert (W != "text") is True
    with pytest.raises(TypeError, match="unsupported operand"):
        W + "text"


def test_the_operator_of_the_other_operand_is_tried():
    class Theirs:
        def __rmul__(self, other):
            return "theirs"

        __rmatmul__ = __rmul__

    assert W @ Theirs() == "theirs"
    assert W * Theirs() == "theirs"
    same(W * ql.TrainableArray(X), DENSE * X)  # whose operators take both


def test_a_type_that_is_an_array_to_jax_stays_one():
    class Converted(Own):
        def __jax_array__(self):
            return self.materialise()

    same(Converted(X) * X, 2 * X * X)
    same(Converted(X) == X, 2 * X == X)


class _Mixin:
    def __mul__(self, other):
        return "mixin"

    def __eq__(self, other):
        return "equal"

    def sum(self):
        return "sum"


def test_an_override_finds_the_mixin_behind_by_super():
    class Override(Own, _Mixin):
        def __mul__(self, other):
            return super().__mul__(other), "and more"

        def sum(self):
            return super().sum(), "and more"

        def __add__(self, other):
            return super().__add__(other)

    class Other(Own, _Mixin):
        pass

    class Both(Override, Other):
        pass

    for cls in (Override, Both):
        x = cls(X)
        assert (x * x, x * 2, x.sum()) == (("mixin", "and more"),) * 2 + (("sum", "and more"),)
        with pytest.raises(TypeError, match="passed to `\\+`"):
            x + 1


def test_operators_of_a_mixin_behind_are_kept():
    class Mine(Own, _Mixin):
        pass

    class Derived(Mine):
        pass

    for cls in (Mine, Derived):
        x = cls(X)
        assert (x * 2, x == x, x.sum()) == ("mixin", "equal", "sum")
        assert (x != x) is False  # the opposite of its own `==`
        with pytest.raises(TypeError, match="passed to `\\+`"):
            x + 1


def test_fields_may_have_names_of_arrays():
    class Fields(Own):
        device: str = eqx.field(static=True)
        T: jax.Array

    x = Fields(X, "here", X + 1)
    assert x.device == "here"
    assert x.T is x.T
    with pytest.raises(TypeError, match="missing"):
        Fields(X)  # pyright: ignore[reportCallIssue]


def test_nothing_takes_it_for_a_sequence_or_a_number():
    for name in ("__len__", "__getitem__", "__float__", "__index__", "__neg__", "T", "sum", "__dlpack__"):
        assert not hasattr(W, name)
        assert not hasattr(Own, name)
    assert ql.quaxify(lambda: hasattr(W, "__len__"))()
    for convert in (jnp.asarray, np.asarray, lambda w: np.asarray([w])):
        with pytest.raises(TypeError, match="Wrap the function that uses it in `quaxify`"):
            convert(W)


def test_copies_and_containers():
    assert eqx.tree_equal(copy.deepcopy(W), pickle.loads(pickle.dumps(W)))
    assert W in [W]
    assert {W: 1}[W] == 1
    assert len({W, Own(W.array)}) == 2
    with pytest.raises(TypeError, match="passed to `==` outside"):
        W in [Own(W.array)]  # noqa: B015


@pytest.mark.quick("array_equiv")
@pytest.mark.parametrize("function", [np.array_equal, np.array_equiv])
def test_numpy_does_not_take_a_refusal_for_an_answer(function):
    metres, seconds = unitful.Unitful(X, "m"), unitful.Unitful(X, "s")
    for run in (function, ql.quaxify(function), ql.quaxify(lambda x, y: function(metres, y))):
        assert run(metres, metres) is True
        assert run(metres, 2 * metres) is False
        with pytest.raises(unitful.DimensionError, match="same unit"):
            run(metres, seconds)
    with pytest.raises(TypeError, match=f"Own was passed to `numpy.{function.__name__}` outside"):
        function(W, W)
    assert ql.quaxify(function)(W, DENSE) is True
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="eq"):
        ql.quaxify(function)(W, DENSE)
    assert np.shape(W) == (4,)


class Doubled(ql.ArrayValue):
    of: jax.Array | ql.ArrayValue

    def materialise(self):
        return 2 * ql.materialise(self.of)


@ql.register("sin")
def _(x: Doubled, **params):
    return ql.quaxify(jnp.sin)(x.of * 2)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: ql.quaxify(f),
        lambda f: ql.quaxify(ql.quaxify(f)),
        lambda f: ql.quaxify(lambda x: ql.quaxify(ql.quaxify(f))(x)),
        lambda f: jax.jit(ql.quaxify(jax.jit(ql.quaxify(f)))),
    ],
)
def test_operators_in_a_rule_at_every_number_of_levels(wrap):
    # The rule runs at the outer level: the inner ones pass its operand on as an array.
    x = Doubled(Doubled(X))
    np.testing.assert_array_equal(ql.materialise(wrap(jnp.sin)(x)), jnp.sin(4 * X))


def test_no_operators_on_what_a_filter_in_a_rule_does_not_select():
    rules = ql.RuleSet()

    @ql.register("cos", rules=rules)
    def _(x: Doubled, **params):
        return ql.quaxify(lambda x: x * 2, filter_spec=False)(x.of)

    with pytest.raises(TypeError, match="no `filter_spec` selects it"):
        ql.quaxify(jnp.cos, rules=rules)(Doubled(Doubled(X)))
