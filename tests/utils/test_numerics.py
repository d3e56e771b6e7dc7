import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quaxlike.utils import dataclass, isin, kahan_summation
from tests.samples import array, normal, random_key

from . import fast_math
from .fast_math import assert_compensated

# isin


small = st.lists(st.integers(-3, 12), max_size=6)


@pytest.mark.slow
@given(small, small, st.integers(0, 10))
def test_isin_agrees_with_numpy(a, b, max_item):
    inside = [x for x in b if 0 <= x < max_item]
    expected = np.isin(np.array(a, int), np.array(inside, int))
    for to_array in (lambda x: np.array(x, int), lambda x: jnp.array(x, int), list):
        found = isin(to_array(a), to_array(b), max_item)
        assert found.dtype == bool
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_shape_of_the_query():
    a = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(isin(a, jnp.array([[1], [5]]), 6), [[0, 1, 0], [0, 0, 1]])
    assert isin(3, 3, 5).shape == ()
    assert bool(isin(3, 3, 5))


@pytest.mark.slow
def test_negatives_never_wrap():
    assert not isin(jnp.array([-1, 9]), jnp.array([9, -1]), 10)[0]
    assert not jnp.any(isin(jnp.arange(10), jnp.array([-1, -10]), 10))


@pytest.mark.slow
def test_items_outside_of_the_table():
    assert not jnp.any(isin(jnp.array([10, 11, 10**6]), jnp.array([10, 11, 10**6]), 10))


@pytest.mark.slow
@pytest.mark.parametrize("empty", [[], array([], int), np.array([], int)])
def test_empty(empty):
    assert isin(empty, [1, 2], 5).shape == (0,)
    assert not jnp.any(isin([1, 2], empty, 5))
    assert not jnp.any(isin([0, 1], [0, 1], 0))
    assert isin(empty, empty, 0).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, jnp.int32])
@pytest.mark.parametrize("max_item", [3, 300])
def test_any_integer_type(dtype, max_item):
    a = jnp.array([0, 2, 100, 127], dtype)
    np.testing.assert_array_equal(isin(a, jnp.array([2, 127], dtype), max_item), [0, 1, 0, max_item == 300])


@pytest.mark.slow
def test_large_numbers_are_not_cut_off():
    large = np.array([2**32 + 3, 2**63 - 1, -(2**63)])
    np.testing.assert_array_equal(isin(large, [3], 10), [False] * 3)
    np.testing.assert_array_equal(isin([3], large, 10), [False])
    assert not jnp.any(isin(jnp.array([2**32 - 1], jnp.uint32), [0, 9], 10))
    assert not jnp.any(isin(np.array([2**64 - 1, 2**63], np.uint64), [0, 9], 10))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_with_64_bit_integers():
    np.testing.assert_array_equal(isin(jnp.array([2**32 + 3, 3]), jnp.array([3]), 10), [False, True])


@pytest.mark.slow
def test_isin_under_transforms():
    f = lambda a, b: isin(a, b, 6)
    a, b = jnp.arange(6).reshape(2, 3), jnp.array([[0, 1], [3, 0]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(a, b), [[1, 1, 0], [1, 0, 0]])


@pytest.mark.quick("bad1-float32", "bad2-bool", "bad3-bool", "bad4-<U1")
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ([1.0], "float64"),
        (array(np.ones(2)), "float32"),
        ([True], "bool"),
        (array(True), "bool"),
        (["a"], "<U1"),
    ],
)
def test_only_integers(bad, found):
    with pytest.raises(TypeError, match=rf"isin: `a` must hold integers, found {found} .*jnp.isin"):
        isin(bad, [1], 5)
    with pytest.raises(TypeError, match=rf"isin: `b` must hold integers, found {found}"):
        isin([1], bad, 5)


def test_the_table_is_static():
    with pytest.raises(TypeError, match=r"`max_item` is the size of a table .* found a traced value"):
        jax.jit(isin)([1], [1], 5)
    assert jax.jit(isin, static_argnames="max_item")([1], [1], max_item=5)[0]
    assert isin([1], [1], np.int64(5))[0]
    with pytest.raises(ValueError, match="`max_item` must not be negative, found -1"):
        isin([1], [1], -1)


# kahan_summation


@pytest.mark.slow
@pytest.mark.parametrize("xs", [(1.5,), (1.5, 2.5), (1.0, -1.0), (1.5 + 0.5j, 2.5j)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_compensation_of_an_exact_sum_has_no_sign(xs, wrap):
    total, lost = wrap(kahan_summation)(*map(jnp.asarray, xs))
    _, again = wrap(lambda x, lost: kahan_summation(x, total, compensate=lost))(total, lost)
    for zero in (lost, again):
        assert not np.signbit([zero.real, zero.imag]).any()
        assert zero == 0


@dataclass
class Point:
    x: Any
    y: Any


floats32 = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.slow
@given(st.lists(floats32, min_size=1, max_size=24))
def test_agrees_with_fsum(values):
    xs = [np.float32(x) for x in values]
    total, lost = kahan_summation(*xs)
    assert total.dtype == lost.dtype == jnp.float32
    assert_compensated(xs, float(total), float(lost), np.dtype(np.float32))


@pytest.mark.slow
@given(st.lists(floats32, min_size=2, max_size=12), st.integers(0, 10))
def test_in_two_calls(values, split):
    assume(split < len(values))
    xs = [np.float32(x) for x in values]
    total, lost = kahan_summation(xs[0])
    total, lost = kahan_summation(total, *xs[1:split], compensate=lost)
    total, lost = kahan_summation(total, *xs[max(split, 1) :], compensate=lost)
    assert_compensated(xs, float(total), float(lost), np.dtype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_dtypes(dtype, transform):
    xs = normal(32, dtype=dtype)
    total, lost = transform(lambda xs: kahan_summation(*xs))(xs)
    assert total.dtype == dtype
    assert_compensated(list(xs), float(total), float(lost), dtype)


@pytest.mark.usefixtures("x64")
def test_double_precision():
    xs = [1.0, 1e100, 1.0, -1e100]
    total, lost = jax.jit(lambda *xs: kahan_summation(*xs))(*[jnp.array(x, jnp.float64) for x in xs])
    assert (float(total), float(lost)) == (2.0, 0.0)


@pytest.mark.slow
def test_summands_larger_than_the_sum():
    xs = [jnp.float32(x) for x in (1.0, 1e10, 1.0, -1e10)]
    assert float(sum(xs)) == 0.0, "what a plain sum gives"
    for f in (kahan_summation, jax.jit(kahan_summation)):
        total, lost = f(*xs)
        assert (float(total), float(lost)) == (2.0, 0.0)


@pytest.mark.slow
def test_what_is_lost_makes_the_sum_exact():
    total, lost = kahan_summation(jnp.float32(1e8), jnp.float32(1.0))
    assert float(total) == 1e8
    assert float(total) - float(lost) == 1e8 + 1


@pytest.mark.slow
@pytest.mark.parametrize("check", fast_math.CHECKS)
def test_checks(check):
    check()


_FAST = "--xla_cpu_enable_fast_math=true"
_FASTER = f"{_FAST} --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [_FAST, _FASTER])
def test_under_fast_math(flags):
    """In another process, since XLA reads its flags once."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.utils.fast_math"],
        cwd=root,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.slow
def test_the_flags_are_felt():
    """A sum that is not protected is lost under fast-math: the test above can fail."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "def f(s, x):\n"
        "    t = s + x\n"
        "    return (s - t) + x\n"
        "print(float(jax.jit(f)(jnp.float32(1e8), jnp.float32(1.0))))\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = lambda flags: (
        subprocess.run(
            [sys.executable, "-c", code], env={**env, "XLA_FLAGS": flags}, capture_output=True, text=True
        ).stdout
    )
    assert run("") == "1.0\n"
    assert run(_FAST) == "0.0\n"


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf])
def test_infinities(value):
    for xs in ([1.0, value], [value, 1.0], [value, value], [1.0, value, 2.0, 3.0]):
        total, lost = kahan_summation(*[jnp.float32(x) for x in xs])
        assert float(total) == value
        assert math.isfinite(float(lost))


def test_overflow_is_infinite():
    total, _ = kahan_summation(jnp.float32(3e38), jnp.float32(3e38))
    assert float(total) == math.inf


def test_nan_stays_nan():
    assert math.isnan(kahan_summation(jnp.float32(1), jnp.float32(jnp.nan))[0])
    assert math.isnan(kahan_summation(jnp.float32(jnp.inf), jnp.float32(-jnp.inf))[0])
    all_ones = jax.lax.bitcast_convert_type(jnp.uint32(2**32 - 1), jnp.float32)
    assert math.isnan(kahan_summation(all_ones, jnp.float32(1))[0])


@pytest.mark.slow
def test_trees():
    trees = [{"a": Point(jnp.full(2, x), None), "n": jnp.int32(x)} for x in (1, 2**30, 1, -(2**30))]
    trees = [jax.tree.map(lambda x: x.astype(jnp.float32) if x.ndim else x, t) for t in trees]
    total, lost = kahan_summation(*trees)
    assert total == {"a": Point(jnp.full(2, 2.0), None), "n": jnp.int32(2)}
    assert lost == {"a": Point(jnp.zeros(2), None), "n": jnp.int32(0)}


@pytest.mark.slow
def test_complex_numbers_by_their_parts():
    xs = [jnp.complex64(z) for z in (1 + 1e10j, 1e10 + 1j, 1 - 1e10j, -1e10 + 1j)]
    total, lost = kahan_summation(*xs)
    assert (complex(total), complex(lost)) == (2 + 2j, 0j)


def test_integers_are_exact():
    total, lost = kahan_summation(jnp.array([2**30, 1]), jnp.array([1, 2]), jnp.array([3, 4]))
    np.testing.assert_array_equal(total, [2**30 + 4, 7])
    np.testing.assert_array_equal(lost, [0, 0])
    assert lost.dtype == total.dtype == jnp.int32


def test_python_numbers_and_numpy():
    total, _ = kahan_summation(1.0, 2.0, np.float32(3.0))
    assert (float(total), total.dtype) == (6.0, jnp.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_broadcasting_and_promotion():
    total, lost = kahan_summation(jnp.ones((2, 1)), jnp.ones(3, int), 1)
    np.testing.assert_array_equal(total, np.full((2, 3), 3.0))
    assert lost.shape == (2, 3)


@pytest.mark.slow
def test_one_summand():
    total, lost = kahan_summation(jnp.ones(2))
    np.testing.assert_array_equal(total, [1, 1])
    np.testing.assert_array_equal(lost, [0, 0])


@pytest.mark.slow
def test_derivatives_are_those_of_the_sum():
    xs = [jnp.array([x, 2.0]) for x in (1.0, 1e10, 1.0)]
    value = lambda xs: jnp.sum(kahan_summation(*xs)[0] ** 2)
    plain = lambda xs: jnp.sum(sum(xs) ** 2)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd, jax.hessian):
        jax.tree.map(np.testing.assert_allclose, transform(value)(xs), transform(plain)(xs))
    lost = jax.jacrev(lambda x: kahan_summation(x, jnp.float32(1e8))[1])(jnp.float32(1.0))
    assert float(lost) == 0.0


@pytest.mark.slow
def test_compensation_is_differentiable_state():
    def run(x):
        step = lambda state, _: (kahan_summation(state[0], x, compensate=state[1]), None)
        (total, _), _ = jax.lax.scan(step, (jnp.zeros_like(x), jnp.zeros_like(x)), None, length=10)
        return total

    assert float(jax.grad(run)(jnp.float32(0.1))) == 10.0
    np.testing.assert_array_equal(jax.vmap(run)(jnp.full(2, 0.5)), [5, 5])


def test_no_summands():
    with pytest.raises(TypeError, match="kahan_summation needs at least one summand, found none"):
        kahan_summation()


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (True, "bool"),
        (array([True]), "bool"),
        ("a", "str"),
        (random_key(0), r"key<fry>"),
        (len, "builtin_function_or_method"),
    ],
)
def test_what_is_no_number(leaf, found):
    with pytest.raises(TypeError, match=rf"kahan_summation sums .* found {found} at \['a'\]"):
        kahan_summation({"a": leaf}, {"a": leaf})


def test_eight_bits_are_too_few():
    with pytest.raises(TypeError, match="floats of 16 bits or more; found float8_e4m3fn"):
        kahan_summation(jnp.ones(2, jnp.float8_e4m3fn))


def test_shapes_that_do_not_broadcast():
    with pytest.raises(
        ValueError, match=r"kahan_summation: the leaves at \[0\] do not fit \(float32\[2\], float32\[3\]\)"
    ):
        kahan_summation([jnp.ones(2)], [jnp.ones(3)])
    with pytest.raises(ValueError, match=r"(?s)'list'.*'tuple'"):
        kahan_summation([jnp.ones(2)], (jnp.ones(2),))
