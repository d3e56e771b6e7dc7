"""`quaxlike.numpy` is `jax.numpy`: the same names, and the same results on a type that passes all through."""

import copy
import inspect
import operator
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quaxlike as ql
import quaxlike.numpy as qnp
from quaxlike.arrays.unitful import Unitful
from tests.strict import Through

from .__main__ import PAGE, page_with, table
from .arguments import MODULES, UNTESTED, Draw, calls, function, functions


def _ours(name: str) -> Any:
    return operator.attrgetter(name)(qnp)


@pytest.mark.parametrize("prefix", MODULES)
def test_every_public_name_is_there(prefix: str):
    ours = _ours(prefix.rstrip(".")) if prefix else qnp
    names = [name for name in dir(MODULES[prefix]) if not name.startswith("_")]
    assert dir(ours) == names
    assert all(hasattr(ours, name) for name in names)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"quaxlike.numpy' has no attribute 'sine'; nor has 'jax.numpy'"):
        qnp.sine  # noqa: B018
    with pytest.raises(AttributeError, match=r"quaxlike.numpy.linalg' has no attribute 'nrm'"):
        qnp.linalg.nrm  # noqa: B018


def test_signature_and_documentation_are_kept():
    for name in ("sum", "linalg.norm", "fft.fft", "add", "einsum", "vectorize"):
        assert inspect.signature(_ours(name)) == inspect.signature(function(name))
        assert _ours(name).__doc__ == function(name).__doc__
        assert _ours(name).__name__ == function(name).__name__


def test_constants_and_dtypes_are_jax_own():
    for name in ("pi", "inf", "newaxis", "float32", "bfloat16", "ndarray", "finfo", "s_", "mgrid"):
        assert getattr(qnp, name) is getattr(jnp, name)


def test_found_once():
    assert qnp.sin is qnp.sin
    assert qnp.linalg is qnp.linalg


@pytest.mark.parametrize("name", ["sin", "absolute", "concatenate", "add", "linalg.norm"])
def test_copies_are_the_same_function(name):
    fn = _ours(name)
    assert copy.deepcopy(fn) is fn
    assert pickle.loads(pickle.dumps(fn)) is fn


_JOINED = {
    "multiply": (lambda np, x, y: np.multiply(x, y), "m^2"),
    "concatenate": (lambda np, x, y: np.concatenate([y, x]), "m"),
    "linalg.multi_dot": (lambda np, x, y: np.linalg.multi_dot([x, y[:, None]]), "m^2"),
    "vectorize": (lambda np, x, y: np.vectorize(lambda x, y: x - y)(x, y), "m"),
    "add.outer": (lambda np, x, y: np.add.outer(x, y), "m"),
    "c_": (lambda np, x, y: np.c_[x, y], "m"),
}


@pytest.mark.quick(
    "add.outer-jit", "c_-<lambda>", "vectorize-jit", "multiply-checkpoint", "concatenate-checkpoint"
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", _JOINED)
def test_what_is_made_inside_of_quaxify_meets_what_comes_from_outside(name, transform):
    """To a `quaxify` within, which they were, a Value from outside is a plain array."""
    run, unit = _JOINED[name]
    made, y = jnp.full(3, 2.0), jnp.array([1.0, 2.0, 4.0])
    out = ql.quaxify(lambda y: transform(lambda y: run(qnp, Unitful(made, "m"), y))(y))(Unitful(y, "m"))
    np.testing.assert_array_equal(ql.materialise(out / Unitful(1.0, unit)), run(jnp, made, y))


def test_what_the_running_quaxify_does_not_take():
    x = Unitful(2.0, "m")
    assert ql.quaxify(lambda y: qnp.multiply(x, y), False)(1.5) == Unitful(3.0, "m")


@pytest.mark.slow
def test_methods_of_ufuncs():
    x = Through(jnp.arange(6.0).reshape(2, 3))
    for actual, expected in [
        (qnp.add.reduce(x), jnp.add.reduce(x.array)),
        (qnp.multiply.accumulate(x), jnp.multiply.accumulate(x.array)),
        (qnp.subtract.outer(x, x), jnp.subtract.outer(x.array, x.array)),
        (qnp.add.at(x, 0, 1.0, inplace=False), jnp.add.at(x.array, 0, 1.0, inplace=False)),
    ]:
        assert isinstance(actual, Through)
        np.testing.assert_array_equal(actual.array, expected)
    assert qnp.add.nin == 2


@pytest.mark.slow
def test_what_makes_functions_and_what_takes_brackets():
    x = Through(jnp.arange(6.0).reshape(2, 3))
    for actual, expected in [
        (qnp.vectorize(lambda v: v * 2, signature="(n)->(n)")(x), x.array * 2),
        (qnp.frompyfunc(lambda a, b: a + b, 2, 1)(x, x), x.array * 2),
        (qnp.frompyfunc(jnp.add, 2, 1, identity=0).reduce(x), x.array.sum(0)),
        (qnp.r_[x, x], jnp.r_[x.array, x.array]),
        (qnp.c_[x, x], jnp.c_[x.array, x.array]),
    ]:
        assert isinstance(actual, Through)
        np.testing.assert_array_equal(actual.array, expected)


def _wrapped(tree: Any) -> Any:
    wrap = lambda x: Through(jnp.asarray(x)) if isinstance(x, np.ndarray) and x.dtype.kind in "fi" else x
    return jtu.tree_map(wrap, tree)


def _unwrapped(tree: Any) -> Any:
    is_value = lambda x: isinstance(x, Through)
    return jtu.tree_map(lambda x: x.array if is_value(x) else x, tree, is_leaf=is_value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in functions() if name not in UNTESTED])
@settings(max_examples=1)
@given(rows=st.integers(2, 3), columns=st.integers(2, 4), seed=st.integers(0, 99))
def test_results_are_those_of_jax(name: str, rows: int, columns: int, seed: int):
    for args, kwargs in calls(name, Draw(rows, columns, seed)):
        as_jax = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        try:
            with warnings.catch_warnings():
                expected = function(name)(*jtu.tree_map(as_jax, args), **kwargs)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError, NotImplementedError, IndexError):
            continue  # not what this function takes
        break
    else:
        raise AssertionError(f"No arguments for {name}: list them in CALLS.")
    if callable(expected):
        return  # see test_what_makes_functions_and_what_takes_brackets
    actual = _unwrapped(_ours(name)(*_wrapped(args), **kwargs))
    assert jtu.tree_structure(actual) == jtu.tree_structure(expected)
    for a, b in zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True):
        if not isinstance(b, jax.Array):
            assert isinstance(a, type(b)) or not isinstance(b, float | int)
            assert np.all(a == b)
            continue
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_page_lists_what_is_compared():
    page = PAGE.read_text(encoding="utf-8")
    if f"JAX {jax.__version__}:" in page:
        assert page == page_with(table()), "run `python -m tests.numpy_api`"
    missing = [name for name in functions() if name in UNTESTED and f"`{name}`" not in page]
    assert missing == []


@pytest.mark.slow
def test_a_shipped_type():
    w = ql.LoraArray(jnp.ones((4, 3)), a=jnp.ones((1, 3)), b=jnp.ones((4, 1)))
    with ql.on_materialise("error"):
        np.testing.assert_allclose(qnp.matmul(w, jnp.arange(3.0)), jnp.full(4, 6.0))
        np.testing.assert_allclose(qnp.einsum("oi,i->o", w, jnp.arange(3.0)), jnp.full(4, 6.0))


@pytest.mark.slow
def test_warnings_name_the_line_that_calls():
    """A function of `quaxlike.numpy` is no line of the user's: each call warns at its own line."""
    x = ql.LoraArray(jnp.ones((4, 3)), a=jnp.ones((1, 3)), b=jnp.ones((4, 1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qnp.sin(x)
        qnp.sin(x)
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert caught[0].lineno + 1 == caught[1].lineno


def test_it_says_which_array_api_it_follows():
    assert qnp.__array_api_version__ == jnp.__array_api_version__
    assert qnp.__array_namespace_info__().capabilities() == jnp.__array_namespace_info__().capabilities()
    with pytest.raises(AttributeError, match="no attribute '__array_api_version__'"):
        _ = qnp.linalg.__array_api_version__
