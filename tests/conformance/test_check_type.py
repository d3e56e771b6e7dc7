"""`check_type` finds what is wrong with a type, and names it; `refuses` makes types that cannot be lost."""

import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing import check_type, refuses
from quaxlike.testing.compare import disagreement
from quaxlike.testing.programs import LINEAR
from tests.samples import array, wrong_types
from tests.strict import strict


class Pair(ql.ArrayValue):
    """The sum of two arrays, right in all that it says."""

    a: Any
    b: Any
    linear = True

    def aval(self):
        return jax.core.ShapedArray(self.a.shape, self.a.dtype)

    def materialise(self):
        return self.a + self.b

    def leading_axis(self):
        return [0, 0]

    @classmethod
    def promote(cls, array, like):
        return cls(array, jnp.zeros_like(array))


def pair(cls: Any = Pair) -> Any:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
    return cls(x, 0.5 * x + 1)


class WrongShape(Pair):
    def aval(self):
        return jax.core.ShapedArray((*self.a.shape, 1), self.a.dtype)


class WrongDtype(Pair):
    def aval(self):
        return jax.core.ShapedArray(self.a.shape, jnp.float16)


class NotLinear(Pair):
    def materialise(self):
        return self.a * self.b


class WrongRows(Pair):
    def leading_axis(self):
        return [0, 1]


class PromoteForgets(Pair):
    @classmethod
    def promote(cls, array, like):
        return cls(array, array)


class PromoteStops(Pair):
    @classmethod
    def promote(cls, array, like):
        return cls(lax.stop_gradient(array), jnp.zeros_like(array))


class WrongSharding(Pair):
    def shard_spec(self, spec):
        return [jax.P(None, None, "i"), spec]


class _Holder:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)

    def __hash__(self) -> int:
        return 0


class HiddenArray(Pair):
    shift: Any = eqx.field(static=True, default_factory=lambda: _Holder(np.ones(3)))


class Cached(Pair):
    """Its shape is that of when it was made."""

    size_at_first: tuple[int, ...] = eqx.field(static=True, default=(3, 3))

    def aval(self):
        return jax.core.ShapedArray(self.size_at_first, self.a.dtype)

    def materialise(self):
        return (self.a + self.b).reshape(self.size_at_first)


class Transposes(Pair):
    pass


class ChangesDtype(Pair):
    pass


class DropsGradient(Pair):
    pass


class Defaults(Pair):
    @staticmethod
    def default(primitive, values, params):
        dense = [2 * x.a if isinstance(x, Defaults) else x for x in values]
        return primitive.bind(*dense, **primitive.get_bind_params(params))


@ql.register("sin")
def transposed(x: Transposes, **params):
    return jnp.sin(ql.materialise(x)).T


@ql.register("neg")
def narrowed(x: ChangesDtype, **params):
    return ChangesDtype(-x.a.astype(jnp.float16), -x.b.astype(jnp.float16))


@ql.register("mul")
def stopped(x: DropsGradient, y: jax.Array, **params):
    return DropsGradient(lax.stop_gradient(x.a) * y, x.b * y)


MINUS = {"minus": lambda x: -x}
ROWS = {"rows": lambda x: lax.map(lambda row: row * 2.0, x)}


@pytest.mark.quick("WrongShape-programs0-aval")
@pytest.mark.parametrize(
    ("cls", "programs", "culprit"),
    [
        (WrongShape, MINUS, "aval"),
        (WrongDtype, MINUS, "aval"),
        (NotLinear, MINUS, "linear"),
        (WrongRows, ROWS, "leading_axis"),
        (PromoteForgets, MINUS, "promote"),
        (PromoteStops, MINUS, "promote"),
        (WrongSharding, MINUS, "shard_spec"),
        (HiddenArray, MINUS, "static fields"),
        (Cached, MINUS, "leading_axis"),
        (Transposes, {"sine": jnp.sin}, "transposed"),
        (ChangesDtype, MINUS, "narrowed"),
        (DropsGradient, {"twice": lambda x: x * 2.0}, "stopped"),
        (Defaults, MINUS, "Defaults.default"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_seeded_mistake_is_found_and_named(cls, programs, culprit, default_promotion):
    report = check_type(pair(cls), programs=programs)
    culprits = {check.culprit for check in report.failures}
    lines = {
        f.__name__: f"{f.__code__.co_filename}:{f.__code__.co_firstlineno}"
        for f in (transposed, narrowed, stopped)
    }
    assert report.failures, report
    assert all(lines.get(culprit, culprit) in found for found in culprits), (culprits, report)
    assert lines.get(culprit, culprit) in str(report)


_X = np.array([1.0, np.nan, np.inf], np.float32)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ([_X], "structure"),
        (_X[None], "shape"),
        (_X.astype(np.float16), "dtype"),
        (np.float32([1.0, 0.0, np.inf]), "numbers"),
        (np.float32([1.0, np.nan, -np.inf]), "numbers"),
        (np.float32([np.nan, np.nan, np.inf]), "numbers"),
        (np.float32([1.001, np.nan, np.inf]), "numbers"),
        (np.float32([1.0001, np.nan, np.inf]), None),
    ],
)
def test_what_differs_is_told(found, kind):
    assert getattr(disagreement(found, _X), "kind", None) == kind


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_numbers_of_a_byte_or_less(dtype):
    x = np.array([1.0, 2.0, -4.0], dtype)
    assert disagreement(x, x) is None
    assert disagreement(-x, x).kind == "numbers"


@pytest.mark.slow
def test_a_type_of_one_byte(default_promotion):
    x = array([1.0, 2.0, -4.0], jnp.float8_e4m3fn)
    report = check_type(Pair(x, x), programs=[jnp.negative, lambda x: x.astype(jnp.float32)])
    assert not report.failures, report


def test_weak_types_and_nans_count_if_asked():
    weak = jnp.asarray(1.0)
    assert not disagreement(weak, jnp.float32(1))
    assert disagreement(weak, jnp.float32(1), weak_types=True).kind == "weak type"
    assert not disagreement(np.float32([1.0, 0.0, np.inf]), _X, nans=False)


def test_nothing_is_wrong_with_a_type_that_is_right(default_promotion):
    report = check_type(pair(), programs=[jnp.negative, jnp.sum])
    assert not report.failures, report
    assert {c.name: c.dense_at for c in report.checks if c.dense_at} == {
        "negative": "neg",
        "sum": "reduce_sum",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "x",
    [jax.device_put(1.0), array(np.arange(4)), array(np.ones((2, 0)))],
    ids=["scalar", "integers", "empty"],
)
def test_what_jax_cannot_do_is_no_failure(x, default_promotion):
    """Rows of a scalar, gradients by integers."""
    report = check_type(Pair(x, x + x), programs=dict([*LINEAR.items()][:14]))
    assert not report.failures, report
    assert any("ok" in check.results.values() for check in report.checks)


@pytest.mark.slow
def test_programs_by_name_or_in_a_sequence():
    names = lambda programs: [
        c.name for c in check_type(pair(), programs=programs).checks if "jit" in c.results
    ]
    assert names({"a": jnp.sin}) == ["a"]
    assert names([jnp.sin, jnp.cos]) == ["sin", "cos"]
    assert names([lambda x: x, lambda x: -x]) == ["<lambda> (0)", "<lambda> (1)"]


@wrong_types
def test_what_is_no_value_is_refused():
    with pytest.raises(TypeError, match=r"check_type takes a quaxlike.Value; found ArrayImpl"):
        check_type(jnp.ones(3))  # pyright: ignore[reportArgumentType]


class TestRefuses:
    @pytest.mark.slow
    def test_a_loss_is_a_failure_that_names_the_primitive(self):
        report = check_type(pair(refuses(Pair)), programs=MINUS)
        assert [c.name for c in report.failures] == ["minus"]
        assert "Pair refuses to materialise" in report.failures[0].message
        assert report.failures[0].dense_at == "neg"

    def test_it_goes_on_like_its_base(self):
        cls = refuses(ql.LoraArray)
        assert refuses(ql.LoraArray) is cls
        w = cls(jnp.ones((3, 3)), jnp.ones((1, 3)), jnp.ones((3, 1)))
        assert w.shape == (3, 3)
        np.testing.assert_allclose(ql.quaxify(jnp.matmul)(w, jnp.ones(3)), 6.0)
        with (
            pytest.raises(RuntimeError, match="LoraArray refuses to materialise"),
            ql.on_materialise("allow"),
        ):
            ql.quaxify(jnp.tanh)(w)
        assert type(pickle.loads(pickle.dumps(w))) is cls

    @pytest.mark.slow
    def test_as_a_decorator(self):
        assert not check_type(strict(jnp.ones(3)), programs=MINUS).failures

    @pytest.mark.slow
    def test_of_an_inferred_aval(self):
        class Half(ql.ArrayValue):
            x: Any

            def materialise(self):
                return self.x / 2

        assert refuses(Half)(jnp.ones(3)).shape == (3,)
        report = check_type(refuses(Half)(jnp.ones(3)), programs={})  # it is not taken to be linear
        assert not report.failures, report
