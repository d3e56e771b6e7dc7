"""Primitives that carry a function of elements: `at[...].apply`, reductions, windows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import DimensionError, Unit, Unitful
from quaxlike.core import compat
from tests.samples import array

X = array(np.arange(16.0).reshape(4, 4) + 1)
NAMES = ("a", "b")
WRAPPERS = {
    "unit": lambda x: Unitful(x, "m"),
    "names of a unit": lambda x: NamedArray(Unitful(x, "m"), NAMES),
    "unit of names": lambda x: Unitful(NamedArray(x, NAMES), "m"),
}


def norm(x, y):
    return jnp.sqrt(x * x + y * y)


def quotient(x, y):
    return x / y


def window(fn, start=0.0):
    return lambda x: lax.reduce_window(x, start, fn, (2, 2), (1, 1), "VALID")


def select_and_scatter(select, scatter):
    """A function of an array and of what is scattered into windows of it, by its primitive."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    params = {"window_dimensions": (2, 2), "window_strides": (1, 1), "padding": ((0, 0), (0, 0))}
    for key, fn in (("select", select), ("scatter", scatter)):
        jaxpr = jax.make_jaxpr(fn)(number, number)
        params |= {f"{key}_jaxpr": jaxpr.jaxpr, f"{key}_consts": ()}
    primitive = compat.named_primitives()["select_and_scatter"][0]
    return lambda x, source: primitive.bind(x, source, jnp.float32(0), **params)


def array_of(x):
    while isinstance(x, ql.AnnotatedArray):
        x = x.array
    return x


def layers_of(x):
    return [type(x), *layers_of(x.array)] if isinstance(x, ql.AnnotatedArray) else []


KEEP_THE_UNIT = {
    "doubles": lambda x: x.at[1].apply(lambda v: 2 * v),
    "absolute": lambda x: x.at[1].apply(lambda v: jnp.where(v > 0, v, -v)),
    "norm": lambda x: x.at[1, 2].apply(lambda v: norm(v, v)),
    "zero": lambda x: x.at[1].apply(jnp.zeros_like),
    "infinity": lambda x: x.at[1].apply(lambda v: v * jnp.inf),
    "jitted": jax.jit(lambda x: x.at[1].apply(jax.jit(lambda v: -v))),
    "of each row": jax.vmap(lambda x: x.at[1].apply(lambda v: 2 * v)),
    "reduce": lambda x: lax.reduce(x, 0.0, norm, (0,)),
    "reduce all": lambda x: lax.reduce(x, 0.0, norm, (0, 1)),
    "reduce_window": window(norm),
    "reduce_window by a monoid": window(lax.add),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("program", KEEP_THE_UNIT)
def test_a_function_that_keeps_the_unit(program, wrap):
    fn, x = KEEP_THE_UNIT[program], WRAPPERS[wrap](X)
    out, expected = ql.quaxify(fn)(x), fn(X)
    assert jnp.allclose(array_of(out), expected)
    assert [kind for kind in layers_of(out) if kind is Unitful] == [Unitful]
    if "names" in wrap and expected.ndim:
        assert NamedArray in layers_of(out)


CHANGE_THE_UNIT = {
    "square": (lambda x: x.at[1].apply(jnp.square), "m²"),
    "ratio": (lambda x: x.at[1].apply(lambda v: v / v), "dimensionless"),
    "sign": (lambda x: x.at[1].apply(jnp.sign), "dimensionless"),
    "one": (lambda x: x.at[1].apply(jnp.ones_like), "dimensionless"),
    "exponential": (lambda x: x.at[1].apply(jnp.exp), "`exp` takes arrays without a dimension"),
    "plus one": (lambda x: x.at[1].apply(lambda v: v + 1.0), "`add` takes arrays in the same unit"),
    "jitted": (jax.jit(lambda x: x.at[1].apply(jax.jit(jnp.square))), "m²"),
    "of each row": (jax.vmap(lambda x: x.at[1].apply(jnp.square)), "m²"),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a * b + b * b, (0,)), "m²"),
    "reduce from a number": (lambda x: lax.reduce(x, 1.0, norm, (0,)), "dimensionless"),
    "reduce_window": (window(quotient), "dimensionless"),
}


@pytest.mark.quick(25)
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("program", CHANGE_THE_UNIT)
def test_a_function_that_changes_the_unit(program, wrap):
    fn, message = CHANGE_THE_UNIT[program]
    with pytest.raises(DimensionError, match=message):
        ql.quaxify(fn)(WRAPPERS[wrap](X))


@pytest.mark.slow
def test_any_function_of_numbers_without_a_unit():
    x = Unitful(X, "")
    for program, (fn, _) in CHANGE_THE_UNIT.items():
        assert jnp.allclose(ql.materialise(ql.quaxify(fn)(x)), fn(X), equal_nan=True), program


@pytest.mark.slow
def test_several_arrays_at_once():
    places = jnp.arange(16).reshape(4, 4)

    def largest(x, y):
        (a, i), (b, j) = x, y
        return jnp.where(a > b, a, b), jnp.where(a > b, i, j)

    run = lambda x: lax.reduce((x, places), (-jnp.inf, 0), largest, (1,))
    values, at = ql.quaxify(run)(Unitful(X, "m"))
    assert (values.unit, type(at)) == (Unit("m"), type(places))
    assert jnp.array_equal(values.array, X.max(1))
    assert jnp.array_equal(at, run(X)[1])


def test_the_unit_of_what_is_scattered_into_windows():
    source = jnp.ones((3, 3))
    fn = select_and_scatter(lax.ge, lax.add)
    for x in (wrap(X) for wrap in WRAPPERS.values()):
        out = ql.quaxify(fn)(x, Unitful(source, "s"))
        assert jnp.array_equal(array_of(out), fn(X, source))
        assert Unitful in layers_of(out)
    with pytest.raises(DimensionError, match="s²"):
        ql.quaxify(select_and_scatter(lax.ge, lax.mul))(X, Unitful(source, "s"))
    with pytest.raises(DimensionError, match="log"):
        ql.quaxify(select_and_scatter(lambda x, y: jnp.log(x) > y, lax.add))(Unitful(X, "m"), source)


def test_the_names_of_axes_that_are_left():
    x = NamedArray(X, NAMES)
    run = lambda fn: ql.quaxify(fn)(x).names
    assert run(lambda x: lax.reduce(x, 0.0, norm, (0,))) == ("b",)
    assert run(window(norm)) == run(window(lax.add)) == NAMES
    assert run(lambda x: x.at[1].apply(jnp.exp)) == NAMES


class Framed(ql.AnnotatedArray):
    frame: str = eqx.field(static=True)


def test_metadata_that_a_function_keeps_or_loses():
    keep, lose = (lambda x: x.at[1].apply(lambda v: lax.reduce_precision(v, 5, 10))), KEEP_THE_UNIT["norm"]
    out = ql.quaxify(keep)(Framed(X, "earth"))
    assert out.frame == "earth"
    assert jnp.array_equal(out.array, keep(X))
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="mul"):
        ql.quaxify(lose)(Framed(X, "earth"))
    with ql.on_materialise("allow"):
        out = ql.quaxify(lose)(Framed(X, "earth"))
    assert not ql.is_value(out)
    assert jnp.array_equal(out, lose(X))


def test_zeros_to_which_a_function_is_applied_are_no_placeholder():
    with pytest.raises(DimensionError, match="dimensionless"):
        ql.quaxify(lambda x: x + jnp.zeros((4, 4)).at[0].apply(lambda v: v + 1))(Unitful(X, "m"))
