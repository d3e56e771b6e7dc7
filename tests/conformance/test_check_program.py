"""`check_program` passes functions that take any kind of array, and names the line of those that do not."""

import inspect
import sys

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing import check_program
from quaxlike.testing.functions import TRANSFORMS
from quaxlike.testing.modes import run_all
from quaxlike.testing.programs import Program
from quaxlike.testing.zoo import ZOO
from tests.samples import Lazy, array, normal, random_key, wrong_types

pytestmark = pytest.mark.usefixtures("default_promotion")

X, Y = normal(3, 3), array(np.arange(1.0, 4.0))


# Functions that take any kind of array ------------------------------------------------------------


def _layer(w, y):
    return jnp.tanh(w @ y) + jnp.where(y > 0, y, 0.0)


@jax.jit
def _jitted(x):
    return jnp.array(x) + jnp.array([x[0, 0], x[1, 1], 1.0])


def _loops(x):
    x = lax.scan(lambda c, row: (c * row, c), x[0], x)[0]
    return lax.while_loop(lambda c: jnp.sum(c**2) < 100.0, lambda c: 2.0 * c + 1.0, x)


def _branches(x):
    return lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)


def _reads_its_type(x):
    assert isinstance(x, jax.Array)
    assert not isinstance(x, np.ndarray)
    return x.astype(x.dtype).reshape(x.shape) * (2.0 if x.weak_type else 3.0) + x.ndim


def _rows(labels, logits):
    return jax.nn.log_softmax(logits)[jnp.arange(labels.size), labels], {"most": jnp.argmax(logits, -1)}


def _parameters(params, x):
    return params["w"] @ x + params["scale"] * params["name"].count("a")


def _with_key(key, x):
    return x + jax.random.normal(key, x.shape)


RIGHT = Lazy(
    {
        "layer": lambda: (_layer, X, Y),
        "jitted": lambda: (_jitted, X),
        "loops": lambda: (_loops, X),
        "branches": lambda: (_branches, X),
        "type": lambda: (_reads_its_type, X),
        "rows": lambda: (_rows, array([0, 2, 1]), X),
        "pytree": lambda: (
            _parameters,
            {"w": X, "scale": np.float32(2.0) * np.ones(3, np.float32), "name": "a"},
            Y,
        ),
        "key": lambda: (_with_key, random_key(0), X),
        "module": lambda: (lambda layer, x: layer(x), eqx.nn.Linear(3, 3, key=random_key(0)), Y),
        "partial": lambda: (jax.tree_util.Partial(_layer, X), Y),
        "Value": lambda: (lambda w, x: w @ x, ql.LoraArray(X, X[:1], X[:, :1]), Y),
    }
)


@pytest.mark.slow
def test_a_function_for_any_kind_of_array_passes():
    report = check_program(_layer, X, Y, which=["refuses", "stacked"], transforms=["eager", "jit", "grad"])
    assert len(report.checks) == 6
    assert not report.failures, report


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_functions_for_any_kind_of_array_pass(name):
    fn, *args = RIGHT[name]
    report = check_program(fn, *args)
    assert not report.failures, report
    assert {t for check in report.checks for t in check.results if check.results[t] == "ok"} >= {
        "eager",
        "jit",
    }


# Functions that ask an array for something else; the line that does ends in a mark ----------------


def _norm_of_numpy(x):
    scale = np.linalg.norm(x)  # here
    return x / scale


def _asarray(x):
    return x + np.asarray(x)  # here


def _float(x):
    scale = 2.0
    scale *= float(x[0, 0])  # here
    return x * scale


def _item(x):
    return x * x.sum().item()  # here


def _if(x):
    if x.sum() > 0:  # here
        return x
    return -x


def _while(x):
    while x.sum() < 10:  # here
        x = x + 1.0
    return x


def _range(x):
    for _ in range(jnp.argmax(x)):  # here
        x = 2.0 * x
    return x


def _assertion(x):
    assert jnp.all(jnp.isfinite(x))  # here
    return x


def _list(x):
    return jnp.array(x.tolist())  # here


def _in_a_helper(x):
    return 2.0 * _float(x)


def _in_a_jit(x):
    x = jax.jit(lambda x: x + 1.0)(x)
    return x * float(jnp.sum(x))  # here


def _isinstance(x):
    scale = 1.0
    if isinstance(x, jax.core.Tracer):  # here
        scale = 2.0
    return x * scale


def _type_in_an_expression(x):
    scale = 2.0 if type(x) is type(jnp.ones(())) else 3.0  # here
    return x * scale


def _type_in_a_result(x):
    y = jnp.sin(x)
    return y * (2.0 if type(x) is type(jnp.ones(())) else 3.0)  # here


def _type_raises(x):
    if type(x) is not type(jnp.ones(())):
        raise TypeError("not an array")  # here
    return x


@jax.jit
def _jitted_type(x):
    return x + 1.0


def _type_of_a_jit(x):
    y = _jitted_type(x)
    if type(y) is not type(jnp.ones(())):  # here
        y = y + 1.0
    return y


def _private(x):
    return x + jax.device_put(x._value)  # here


def _pointer(x):
    return x * (x.unsafe_buffer_pointer() > 0)  # here


def _dtype(x):
    if x.dtype == jnp.float32:  # here
        return 2.0 * x
    return 3.0 * x


WRONG = [
    *(_norm_of_numpy, _asarray, _float, _item, _if, _while, _range, _assertion, _list),
    *(_in_a_helper, _in_a_jit, _isinstance, _type_in_an_expression, _type_in_a_result, _type_raises),
    *(_type_of_a_jit, _private, _pointer, _dtype),
]


def _marked_line(fn):
    fn = _float if fn is _in_a_helper else fn
    lines, first = inspect.getsourcelines(fn)
    (found,) = (first + i for i, line in enumerate(lines) if line.endswith("# here\n"))
    return f"{__file__}:{found} ({fn.__name__})"


@pytest.mark.quick("_dtype")
@pytest.mark.parametrize("fn", WRONG)
def test_the_line_is_named(fn):
    report = check_program(fn, X, transforms=["eager"])
    assert report.failures, report
    assert {check.culprit.partition(", which")[0] for check in report.failures} == {_marked_line(fn)}
    assert _marked_line(fn) in str(report)


@pytest.mark.slow
def test_the_line_that_writes_to_an_array_is_named():
    def writes(x):
        x[0] = 1.0
        return jnp.sum(x)

    given = np.ones(3, np.float32)
    report = check_program(writes, given, transforms=["eager"])
    (line,) = {check.culprit for check in report.failures}
    assert line == f"{__file__}:{inspect.getsourcelines(writes)[1] + 1} (writes)"
    assert given[0] == 1.0
    given[:] = 2.0
    check_program(writes, given, transforms=["eager"])
    assert given[0] == 2.0  # a copy was written to


@pytest.mark.slow
def test_a_weak_type_is_part_of_the_array():
    def reads(x):
        return x * (2.0 if x.weak_type else 1.0)

    report = check_program(reads, jnp.asarray(2.0), which=["non-linear"], transforms=["eager"])
    assert report.failures[0].culprit.endswith(f"{inspect.getsourcelines(reads)[1] + 1} (reads)")


@pytest.mark.slow
def test_a_weak_type_may_be_lost():
    assert not check_program(lambda x, y: x * y, jnp.asarray(2.0), Y.astype(jnp.bfloat16)).failures


@wrong_types
def test_the_line_that_a_library_calls_is_named_beside_the_users():
    (failure,) = check_program(_norm_of_numpy, X, which=["refuses"], transforms=["eager"]).failures
    assert ", which calls " in failure.culprit
    assert "numpy" in failure.culprit.partition(", which calls ")[2]
    assert failure.message.startswith(
        "eager: Refused: `array` of Python or NumPy needs the elements of a Value"
    )


# Arguments and transforms -------------------------------------------------------------------------


@pytest.mark.slow
def test_each_argument_is_tried_on_its_own():
    report = check_program(lambda x, y: x * float(jnp.sum(y)), X, Y, which=["refuses"], transforms=["eager"])
    assert {check.name: check.results["eager"] for check in report.checks} == {
        "refuses, argument 0": "ok",
        "refuses, argument 1": "failed",
        "refuses, all arguments": "failed",
    }


def test_what_arrays_cannot_do_either_is_left_out():
    report = check_program(_float, X, which=["passes through"])
    assert report.checks[0].results == {"eager": "ok"} | dict.fromkeys(TRANSFORMS[1:], "-")


def test_a_string_is_one_transform():
    report = check_program(jnp.sin, X, which="refuses", transforms="jit")
    assert report.checks[0].results == {"jit": "ok"}


def test_numbers_of_one_byte():
    for fn in (lambda x: x.astype(jnp.float8_e4m3fn), lambda x: x.astype(jnp.float8_e5m2) * 2):
        assert not check_program(fn, Y, which=["refuses"], transforms=["eager", "grad"]).failures
    assert not check_program(lambda x: x, Y.astype(jnp.float8_e5m2), transforms=["eager"]).failures


def test_integers_are_not_differentiated():
    report = check_program(lambda x: x + 1, jnp.arange(3), which=["refuses"])
    assert report.checks[0].results == dict.fromkeys(TRANSFORMS[:5], "ok") | {"jvp": "-", "grad": "-"}


@pytest.mark.slow
def test_derivatives_are_compared():
    def stops(x):
        if hasattr(x, "quax_value"):
            x = lax.stop_gradient(x)
        return 2.0 * x

    (check,) = check_program(stops, X, which=["refuses"]).failures
    assert {mode for mode, result in check.results.items() if result == "failed"} == {"jvp", "grad"}
    assert check.culprit.endswith(f"{inspect.getsourcelines(stops)[1] + 1} (stops)")


def test_a_transform_that_does_not_compile_does_not_take_others_with_it():
    primitive = jexc.Primitive("not_lowered")
    primitive.def_abstract_eval(lambda x: x)

    def on(mode, program, x):
        return primitive.bind(x) if mode == "grad" else program.run(x)

    found = run_all({"sine": Program(jnp.sin, modes=("jit", "grad"))}, on, X)
    assert np.array_equal(found["sine", "jit"], jnp.sin(X))
    assert "not_lowered" in str(found["sine", "grad"])


@pytest.mark.slow
def test_kinds_of_ones_own():
    make = lambda x: ql.LoraArray(x, x[:1], x[:, :1]) if x.ndim == 2 else None
    report = check_program(lambda w, y: w @ y, X, Y, which={"LoRA": make})
    assert [check.name for check in report.checks] == ["LoRA, argument 0"]
    assert not report.failures, report


def test_tolerances():
    unequal = lambda x: x + 1e-2 * isinstance(x, jax.core.Tracer)
    options = {"which": ["refuses"], "transforms": ["eager"]}
    assert check_program(unequal, X, **options).failures
    assert not check_program(unequal, X, **options, atol=1e-1).failures
    assert not check_program(unequal, X, **options, rtol=1e-1).failures


def test_the_trace_function_of_a_debugger_is_kept():
    before = sys.gettrace()
    check_program(_type_raises, X, transforms=["eager"])
    assert sys.gettrace() is before


# Errors -------------------------------------------------------------------------------------------


def test_errors_of_the_function_itself_are_raised():
    with pytest.raises(ZeroDivisionError):
        check_program(lambda x: x * (1 / 0), X)


def test_arguments_without_arrays_are_refused():
    with pytest.raises(ValueError, match="an array among the arguments that Values can take the place of"):
        check_program(lambda x: x, 1.0)


@wrong_types
def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"which of check_program is among .*'passes through'.*'waits'"):
        check_program(jnp.sin, X, which=["waits"])
    with pytest.raises(ValueError, match=r"transforms of check_program are among .*'eager'.*'pmap'"):
        check_program(jnp.sin, X, transforms=["pmap"])


def test_every_kind_stands_for_the_array():
    for name, make in ZOO.items():
        value = make(X)
        assert ql.is_value(value), name
        assert value.shape == X.shape
        dense = ql.testing.reveal(value)
        assert np.array_equal(dense, X.astype(dense.dtype)), name
