"""`Unitful`: pint and astropy as oracles, and what is refused while tracing."""

import functools
import sys
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.arrays.structured import DiagonalMatrix
from quaxlike.arrays.unitful import (
    DimensionError,
    Unit,
    Unitful,
    any_unit,
    from_astropy,
    from_pint,
    joule,
    kilogram,
    metre,
    newton,
    second,
    to_astropy,
    to_pint,
)
from quaxlike.arrays.zero import Full, Identity
from tests.samples import Late, array, normal, once

units = Late("astropy.units")

X = Unitful(array([1.0, 2.0, 3.0]), "m")
Y = Unitful(array([0.5, 4.0, 2.0]), "m")
T = Unitful(array([2.0, 1.0, 0.5]), "s")
NUMBERS = array([1.0, 2.0, 3.0])
A = Unitful(array([[4.0, 1.0], [1.0, 3.0]]), "kg")


def same(x, array, unit=""):
    assert Unit(unit) == (x.unit if isinstance(x, Unitful) else Unit())
    np.testing.assert_allclose(ql.materialise(x), array, rtol=2e-6)


# Units


def test_units_multiply_divide_and_have_rational_powers():
    assert newton * metre == joule == Unit("kg*m^2/s^2") == Unit({"kg": 1, "m": 2, "s": -2})
    assert metre / second**2 == Unit("m/s^2") == Unit("m s^-2") == Unit("m·s**-2")
    assert (metre**0.5) ** 2 == metre
    assert (metre ** Fraction(1, 3)).exponents == {"m": Fraction(1, 3)}
    assert Unit("1/s") == Unit("Hz")
    assert Unit("m^(1/2)") == metre**0.5
    assert (metre / metre).dimensionless
    assert str(newton) == "m·kg·s⁻²"
    assert eval(repr(metre**0.5)) == metre**0.5
    assert len({newton, Unit("N"), joule}) == 2


def test_a_unit_that_is_not_of_the_si_is_refused():
    with pytest.raises(ValueError, match=r"'kgg' is not a unit of the SI.*Did you mean 'kg'"):
        Unit("kgg")
    for text, advice in [
        ("km", r"Units have no prefixes here: write 1e3 \* Unitful\(x, 'm'\)\."),
        ("cm", r"write 1e-2 \* Unitful\(x, 'm'\)\."),
        ("mg", r"write 1e-6 \* Unitful\(x, 'kg'\)\."),
        ("kilometers", r"write 1e3 \* Unitful\(x, 'm'\)\."),
        ("meter", r"Known: m, .*Did you mean 'm'\?"),
        ("eV", r"Known: m, kg, [^?]*H\.$"),
    ]:
        with pytest.raises(ValueError, match=f"'{text}' is not a unit of the SI.*{advice}"):
            Unitful(1.0, text)
    with pytest.raises(ValueError, match=r"Cannot read the unit 'm\^\^2' from"):
        Unit("m^^2")
    with pytest.raises(AttributeError, match="immutable"):
        metre.name = "metre"


@pytest.mark.parametrize("number", [3.0, np.array([1.0, 2.0], np.float32), array([1.0, 2.0])])
def test_numbers_and_arrays_times_units(number):
    same(number * newton, number, "N")
    same(number / second, number, "1/s")
    same(number * metre * newton, number, "J")


def test_a_number_in_any_unit_takes_that_of_the_other():
    tolerance = 0.5 * any_unit
    same(X + tolerance, X.array + 0.5, "m")
    same(ql.quaxify(jnp.isclose)(X, Y, atol=tolerance), jnp.isclose(X.array, Y.array, atol=0.5))
    same(ql.quaxify(lambda x: x > tolerance)(T), T.array > 0.5)
    assert (tolerance + tolerance).unit == any_unit


# Against pint


@once
def registry():
    import pint

    return pint.UnitRegistry()


FUNCTIONS = {
    "neg": lambda xp, x, y, t: -x,
    "add": lambda xp, x, y, t: x + y,
    "subtract": lambda xp, x, y, t: x - y,
    "multiply": lambda xp, x, y, t: x * t,
    "divide": lambda xp, x, y, t: x / t,
    "ratio": lambda xp, x, y, t: x / y,
    "square": lambda xp, x, y, t: xp.square(x) + x**2,
    "cube": lambda xp, x, y, t: x**3,
    "power": lambda xp, x, y, t: x**1.5,
    "sqrt": lambda xp, x, y, t: xp.sqrt(x * t),
    "maximum": lambda xp, x, y, t: xp.maximum(x, y),
    "hypot": lambda xp, x, y, t: xp.sqrt(x * x + y * y),
    "arctan2": lambda xp, x, y, t: xp.arctan2(x, y),
    "remainder": lambda xp, x, y, t: xp.remainder(x, y),
    "exp": lambda xp, x, y, t: xp.exp(x / y),
    "sum": lambda xp, x, y, t: xp.sum(x),
    "mean": lambda xp, x, y, t: xp.mean(x),
    "std": lambda xp, x, y, t: xp.std(x),
    "var": lambda xp, x, y, t: xp.var(x),
    "max": lambda xp, x, y, t: xp.max(x),
    "prod": lambda xp, x, y, t: xp.prod(x),
    "cumsum": lambda xp, x, y, t: xp.cumsum(x),
    "dot": lambda xp, x, y, t: xp.dot(x, t),
    "compare": lambda xp, x, y, t: x > y,
    "argmax": lambda xp, x, y, t: xp.argmax(x),
    "where": lambda xp, x, y, t: xp.where(x > y, x, y),
    "concatenate": lambda xp, x, y, t: xp.concatenate([x, y]),
    "stack": lambda xp, x, y, t: xp.stack([x, y]),
    "sort": lambda xp, x, y, t: xp.sort(x),
    "reshape": lambda xp, x, y, t: xp.reshape(x, (3, 1)),
    "index": lambda xp, x, y, t: x[1:],
    "diff": lambda xp, x, y, t: xp.diff(x),
    "sign": lambda xp, x, y, t: xp.sign(x),
    "isfinite": lambda xp, x, y, t: xp.isfinite(x),
    "clip": lambda xp, x, y, t: xp.clip(x, y, y + y),
    "floor": lambda xp, x, y, t: xp.floor(x),
    "trapezoid": lambda xp, x, y, t: xp.trapezoid(x, t),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jit", [False, True])
def test_as_pint(name, jit, default_promotion):
    f = ql.quaxify(lambda x, y, t: FUNCTIONS[name](jnp, x, y, t))
    expected = FUNCTIONS[name](np, *(to_pint(q, registry()) for q in (X, Y, T)))
    out = (jax.jit(f) if jit else f)(X, Y, T)
    if isinstance(expected, registry().Quantity):
        expected = from_pint(expected)
        same(out, expected.array, expected.unit)
    else:
        same(out, expected)


@given(st.dictionaries(st.sampled_from(["m", "kg", "s", "A", "K"]), st.integers(-3, 3)), st.floats(0.1, 9))
def test_conversions_go_both_ways(exponents, number):
    x = Unitful(jnp.array(number), exponents)
    for there, back in ((to_astropy, from_astropy), (lambda x: to_pint(x, registry()), from_pint)):
        same(back(there(x)), x.array, x.unit)


def test_conversions_scale_to_the_base_units():
    same(from_pint(36.0 * registry().km / registry().hour), 10.0, "m/s")
    same(from_astropy(36.0 * units.km / units.h), 10.0, "m/s")
    with pytest.raises(ValueError, match="is not an SI unit"):
        from_pint(registry().Quantity(1.0, "bit"))


# Linear algebra


@pytest.mark.slow
def test_linear_algebra():
    a, b = A.array, jnp.array([1.0, 2.0])
    f = ql.quaxify
    same(f(jnp.linalg.det)(A), jnp.linalg.det(a), "kg^2")
    same(f(jnp.linalg.inv)(A), jnp.linalg.inv(a), "1/kg")
    same(f(jnp.linalg.solve)(A, Unitful(b, "m")), jnp.linalg.solve(a, b), "m/kg")
    same(f(jnp.linalg.cholesky)(A), jnp.linalg.cholesky(a), "kg^(1/2)")
    same(f(jnp.linalg.norm)(A), jnp.linalg.norm(a), "kg")
    same(f(jnp.linalg.eigh)(A)[0], jnp.linalg.eigh(a)[0], "kg")
    same(f(jnp.linalg.eigh)(A)[1], jnp.linalg.eigh(a)[1])
    same(f(jnp.linalg.svd)(A)[1], jnp.linalg.svd(a)[1], "kg")
    same(f(jnp.linalg.qr)(A)[0], jnp.linalg.qr(a)[0])
    same(f(jnp.linalg.qr)(A)[1], jnp.linalg.qr(a)[1], "kg")
    q, r, pivots = f(functools.partial(jax.scipy.linalg.qr, pivoting=True))(A)
    expected = jax.scipy.linalg.qr(a, pivoting=True)
    same(q, expected[0])
    same(r, expected[1], "kg")
    same(pivots, expected[2])


@pytest.mark.quick("1")
@pytest.mark.parametrize("n", [1, 3, 4])
def test_determinants(n):
    x = Unitful(normal(2, n, n), "m")
    det = jnp.linalg.det
    for f in (ql.quaxify(det), ql.quaxify(jax.vmap(det)), jax.vmap(ql.quaxify(det))):
        same(f(x), det(x.array), f"m^{n}")
    with pytest.raises(DimensionError, match=r"`slogdet` takes arrays without a dimension; found \(m\)"):
        ql.quaxify(jnp.linalg.slogdet)(x)


@pytest.mark.parametrize("largest", [jax.lax.top_k, jax.lax.approx_max_k, jax.lax.approx_min_k])
def test_the_largest_have_the_unit_and_their_places_none(largest):
    for f in (ql.quaxify(lambda x: largest(x, 2)), jax.jit(ql.quaxify(lambda x: largest(x, 2)))):
        values, places = f(Y)
        same(values, largest(Y.array, 2)[0], "m")
        same(places, largest(Y.array, 2)[1])


# What is refused, while tracing


def _filled(y, fill):
    """Steps of `y`, as solvers of equations make them: with buffers of zeros, one for numbers."""

    def body(carry):
        i, numbers, ks, y = carry
        ks = fill(ks, y)
        return i + 1, numbers.at[i].set(1.0), ks, y + ks[0]

    init, buffers = (0, jnp.zeros(4), jnp.zeros(2), y), lambda carry: (carry[1], carry[2])
    return eqx.internal.while_loop(
        lambda carry: carry[0] < 4, body, init, max_steps=4, buffers=buffers, kind="lax"
    )


@pytest.mark.quick(23)
@pytest.mark.parametrize(
    ("f", "match"),
    [
        (lambda x, t: x + t, r"`add` takes arrays in the same unit; found \(m, s\)"),
        (lambda x, t: x - 1.0, r"`sub` takes arrays in the same unit; found \(m, dimensionless\)"),
        (lambda x, t: x < t, r"`lt` takes arrays in the same unit"),
        (lambda x, t: jnp.exp(x), r"`exp` takes arrays without a dimension; found \(m\)"),
        (lambda x, t: x**t, r"`pow` takes arrays without a dimension"),
        (lambda x, t: x ** jnp.arange(3.0), "needs an exponent that is one number"),
        (lambda x, t: jnp.concatenate([x, t]), "`concatenate` takes arrays in the same unit"),
        (lambda x, t: x.at[0].set(t[0]), "`(scatter|dynamic_update_slice)` takes arrays in the same unit"),
        (lambda x, t: jnp.where(x > Y, x, t), "`select_n` takes arrays in the same unit"),
        (lambda x, t: jax.lax.population_count(x.astype(int)), "without a dimension"),
        (lambda x, t: jax.lax.erf_inv(x), "without a dimension"),
        (
            lambda x, t: jax.lax.cond(True, lambda: x, lambda: t),
            r"cannot be unified: .* s on one side, .* m on the other. Give both (.|\n)*test_unitful",
        ),
        (
            lambda x, t: jax.lax.cond(True, lambda: x[0], lambda: 1.0),
            "An array without a unit takes the place of one in m",
        ),
        (lambda x, t: jax.lax.cond(True, lambda: x, lambda: NUMBERS), "An array without a unit"),
        (lambda x, t: NUMBERS.at[0].set(x[0]), r"`scatter` takes .* same unit; found \(dimensionless, m\)"),
        (lambda x, t: x.at[0].set(NUMBERS[0]), r"found \(m, dimensionless\)"),
        (
            lambda x, t: jax.lax.fori_loop(0, 3, lambda i, c: c * t, x),
            r"The carry changed structure: carry .* cannot be unified: .* m on .* m·s on .*Give both sides",
        ),
        (lambda x, t: jax.lax.fori_loop(0, 3, lambda i, c: c + t, x), "`add` takes arrays in the same unit"),
        # Loop counters start from zero, but do not stay so.
        (lambda x, t: jax.lax.fori_loop(0, 3, lambda i, c: c + i * 1.0, x), r"found \(m, dimensionless\)"),
        (
            lambda x, t: jax.lax.fori_loop(0, 3, lambda i, c: (c[0] + c[1], c[1] + 1.0), (x, 0.0)),
            r"found \(m, dimensionless\)",
        ),
        (lambda x, t: jax.jit(lambda n: x**n)(2.0), "needs an exponent that is one number"),
        (
            lambda x, t: _filled(t[0], lambda ks, y: ks.at[0].set(y * x[0])),
            r"`add` takes arrays in the same unit; found \(s, m·s\)\.\n  at .*test_unitful.py",
        ),
        (
            lambda x, t: _filled(t[0], lambda ks, y: ks.at[0].set(x[0]).at[1].set(t[0])),
            r"`maybe_set` meets arrays in different units, \(no unit, m, s\)",
        ),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_dimensions_that_do_not_fit(f, match, jit):
    g = ql.quaxify(f)
    with pytest.raises(TypeError, match=match):
        (jax.jit(g) if jit else g)(X, T)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("f", "unit"),
    [
        (lambda x, y: x @ y, "m s"),
        (lambda x, y: jnp.linalg.solve(x, y), "s/m"),
        (lambda x, y: jnp.sqrt(x @ y), {"m": Fraction(1, 2), "s": Fraction(1, 2)}),
        (lambda x, y: jnp.sum(x * y), "m s"),
        (lambda x, y: (x * y) @ y, "m s^2"),
    ],
)
def test_a_unit_inside_of_a_matrix_beside_one_outside(f, unit):
    x, y = jnp.array([1.0, 2.0]), jnp.array([[3.0, 4.0], [5.0, 6.0]])
    found = ql.quaxify(f)(DiagonalMatrix(Unitful(x, "m")), Unitful(y, "s"))
    assert found.unit == Unit(unit)
    np.testing.assert_allclose(found.array, f(jnp.diag(x), y), rtol=1e-6)


def test_a_unit_is_not_dropped_silently():
    with pytest.raises(ql.MaterialisationError, match="Unitful"):
        float(X[0])
    with pytest.raises(DimensionError, match="No rule gives the unit of `bitcast_convert_type` of arrays in"):
        X.view(jnp.int32)
    assert float((X / Y)[0]) == 2.0


@pytest.mark.slow
def test_zero_infinity_and_nan_have_any_unit():
    for f in (
        lambda x: x > 0,
        lambda x: jnp.maximum(x, 0.0),
        lambda x: x < jnp.inf,
        lambda x: x + jnp.zeros(3),
    ):
        np.testing.assert_array_equal(ql.materialise(ql.quaxify(f)(X)), f(X.array))
    same(sum([X, Y]), X.array + Y.array, "m")
    # Through jit as well, where a zero keeps the unit of a product.
    for f in (lambda x: jnp.clip(x, 0), lambda x: jnp.pad(x, 1), lambda x: jax.jit(jnp.multiply)(x, 0)):
        same(ql.quaxify(f)(X), f(X.array), "m")


# Transforms


def test_derivatives_have_the_unit_of_the_quotient():
    fall = lambda t: 0.5 * (9.81 * metre / second**2) * t**2
    t = 2.0 * second
    same(fall(t), 19.62, "m")
    same(ql.quaxify(jax.grad(fall))(t), 19.62, "m/s")
    same(ql.quaxify(jax.grad(jax.grad(fall)))(t), 9.81, "m/s^2")
    same(ql.quaxify(lambda t: jax.jvp(fall, (t,), (t,))[1])(t), 39.24, "m")
    same(ql.quaxify(jax.jacfwd(fall))(t), 19.62, "m/s")
    energy = lambda m, v: 0.5 * m * v**2
    gm, gv = ql.quaxify(jax.grad(energy, (0, 1)))(3.0 * kilogram, 2.0 * metre / second)
    same(gm, 2.0, "m^2/s^2")
    same(gv, 6.0, "kg m/s")


def test_derivatives_by_the_numbers_keep_the_structure():
    x = jax.grad(lambda x: (x * x).sum().array)(X)
    same(x, 2 * X.array, "m")


def test_branches_of_a_backward_function_that_give_a_unit_or_none():
    """A derivative by the numbers has no unit; beside a branch that gives one it stays so."""

    @jax.custom_vjp
    def positive_part(x):
        return jnp.maximum(x, 0 * x)

    def backward(x, ct):
        return (jax.lax.cond(x > 0, lambda: ct, lambda: 0 * x),)

    positive_part.defvjp(lambda x: (positive_part(x), x), backward)
    f = lambda x: ql.quaxify(lambda x: positive_part(x) * x)(Unitful(x, "m")).array
    assert jax.grad(f)(3.0) == 6.0
    assert jax.grad(f)(-3.0) == 0.0


@pytest.mark.slow
def test_loops_keep_units():
    v = 2.0 * metre / second
    dt = 0.5 * second
    walk = lambda v, dt: jax.lax.fori_loop(0, 10, lambda i, x: x + v * dt, jnp.zeros(()))
    same(ql.quaxify(walk)(v, dt), 10.0, "m")
    same(ql.quaxify(jax.grad(walk))(v, dt), 5.0, "s")
    steps = lambda v, ts: jax.lax.scan(lambda x, t: (x + v * t, x * t), 0.0 * metre, ts)
    total, xs = ql.quaxify(steps)(v, T)
    same(total, 7.0, "m")
    same(xs, [0.0, 4.0, 3.0], "m s")
    until = lambda v, dt: jax.lax.while_loop(lambda x: x < v * dt * 3, lambda x: x + v * dt, jnp.zeros(()))
    same(ql.quaxify(until)(v, dt), 3.0, "m")


def euler(k, c, m, x, v, dt):
    """A damped oscillator."""

    def step(state, _):
        x, v = state
        return (x + v * dt, v - (k * x + c * v) / m * dt), x

    return jax.lax.scan(step, (x, v), None, length=20)[0][0]


def from_the_last_slope(k, c, m, x, v, dt):
    """The slopes start from placeholders, of which the first iteration makes metres per second."""

    def step(state, _):
        x, v, fx, fv = state
        x, v = x + fx * dt, v + fv * dt
        return (x, v, v, -(k * x + c * v) / m), None

    return jax.lax.scan(step, (x, v, jnp.zeros(()), jnp.zeros(())), None, length=20)[0][0]


def into_a_buffer(k, c, m, x, v, dt):
    def step(i, state):
        x, v, xs = state
        x, v = x + v * dt, v - (k * x + c * v) / m * dt
        return x, v, xs.at[i].set(x)

    return jax.lax.fori_loop(0, 20, step, (x, v, jnp.full(20, jnp.inf)))[2][-1]


@pytest.mark.slow
@pytest.mark.parametrize("solve", [euler, from_the_last_slope, into_a_buffer])
def test_an_oscillator_and_its_gradients(solve):
    names = ("N/m", "kg/s", "kg", "m", "m/s", "s")
    numbers = (2.0, 0.1, 1.0, 1.0, 0.5, 0.1)
    args = [Unitful(x, u) for x, u in zip(numbers, names, strict=True)]
    same(ql.quaxify(solve)(*args), solve(*numbers), "m")
    everything = tuple(range(6))
    expected = jax.grad(solve, everything)(*numbers)
    for g, e, u in zip(ql.quaxify(jax.grad(solve, everything))(*args), expected, names, strict=True):
        same(g, e, metre / Unit(u))


def test_vmap_inside_and_outside():
    f = lambda x, t: x / t * x
    same(jax.vmap(ql.quaxify(f))(X, T), X.array**2 / T.array, "m^2/s")
    same(ql.quaxify(jax.vmap(f))(X, T), X.array**2 / T.array, "m^2/s")


def test_nothing_is_left_at_run_time():
    f = lambda x, y, t: jnp.sqrt(x * y) / t + x.sum() / t
    with_units = jax.make_jaxpr(ql.quaxify(f))(X, Y, T)
    assert str(with_units) == str(jax.make_jaxpr(f)(X.array, Y.array, T.array))


def test_python_asks_for_the_number():
    for ask in (float, int, lambda x: x.tolist(), np.asarray):
        with pytest.raises(ql.MaterialisationError, match=r"unit would be lost: .*`x\.array`") as caught:
            ask(3 * metre)
        assert "allow" not in str(caught.value)


@pytest.mark.parametrize("module", ["pint", "astropy.units"])
def test_a_package_that_is_not_installed(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(ModuleNotFoundError, match=f"to_{package} needs {package}, .*pip install {package}"):
        (to_pint if package == "pint" else to_astropy)(X)


def test_printing():
    assert str(2.5 * newton) == "2.5 m·kg·s⁻²"
    assert f"{2.5 * newton:.2f} or {metre}" == "2.50 m·kg·s⁻² or m"
    for unit in (newton, metre**0.5, metre / metre):
        assert Unit(str(unit)) == unit
    assert eqx.tree_pformat(X) == "f32[3] m"
    assert repr((X,)) == f"(Unitful({X.array!r}, 'm'),)"
    assert "f32[3] m" in repr(eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(3, 3, key=jax.random.key(0)), X))


@pytest.mark.slow
def test_a_carry_without_leaves_that_changes_its_form():
    x = Unitful(Identity(3), "m")
    found = ql.quaxify(lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c * 2.0, x))(x)
    assert found.unit == metre
    np.testing.assert_array_equal(found.array, 4 * np.eye(3))


INTERPOLATIONS = {
    "clamped": lambda x, xp, fp, period: jnp.interp(x, xp, fp),
    "extrapolated": lambda x, xp, fp, period: jnp.interp(x, xp, fp, left="extrapolate", right="extrapolate"),
    "periodic": lambda x, xp, fp, period: jnp.interp(x, xp, fp, period=period),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", INTERPOLATIONS)
def test_interpolation(how):
    arrays = jnp.array([-1.0, 0.5, 1.5, 5.0]), jnp.arange(3.0), jnp.array([0.0, 10.0, 5.0]), jnp.array(2.5)
    x, xp, fp, period = map(Unitful, arrays, ("m", "m", "s", "m"))
    interp = INTERPOLATIONS[how]
    same(jax.jit(ql.quaxify(interp))(x, xp, fp, period), jax.jit(interp)(*arrays), "s")
    slope = jax.grad(lambda *args: jnp.sum(interp(*args)))
    same(jax.jit(ql.quaxify(slope))(x, xp, fp, period), jax.jit(slope)(*arrays), "s/m")
    with pytest.raises(DimensionError, match=r"arrays in the same unit; found \((m, s|s, m)\)"):
        ql.quaxify(interp)(x, fp, xp, period)


def test_only_the_smallest_numbers_stand_for_zero_in_comparisons():
    compare = ql.quaxify(lambda x: jnp.abs(x) <= 1e-14)
    same(compare(X), [False, False, False])
    with pytest.raises(DimensionError, match=r"found \(m, dimensionless\)"):
        ql.quaxify(lambda x: jnp.abs(x) <= 1e-12)(X)
    with pytest.raises(DimensionError, match=r"found \(m, dimensionless\)"):
        ql.quaxify(lambda x: x + 1e-14)(X)


def test_a_choice_by_an_array_of_one_number():
    x = Unitful(Full(0.25, (4,)), "m")
    with ql.on_materialise("allow"):
        found = ql.quaxify(lambda x: jnp.where(x != x, jnp.zeros(4), x))(x)
    assert found.unit == metre
    np.testing.assert_array_equal(ql.materialise(found.array), np.full(4, 0.25))


def test_derived_units_are_what_defines_them():
    """By the brochure of the SI."""
    names = ("m", "kg", "s", "A", "Hz", "N", "Pa", "J", "W", "C", "V", "F", "ohm", "S", "Wb", "T", "H")
    u = {name: Unit(name) for name in names}
    defined = {
        "Hz": u["s"] ** -1,
        "N": u["kg"] * u["m"] / u["s"] ** 2,
        "Pa": u["N"] / u["m"] ** 2,
        "J": u["N"] * u["m"],
        "W": u["J"] / u["s"],
        "C": u["A"] * u["s"],
        "V": u["W"] / u["A"],
        "F": u["C"] / u["V"],
        "ohm": u["V"] / u["A"],
        "S": u["A"] / u["V"],
        "Wb": u["V"] * u["s"],
        "T": u["Wb"] / u["m"] ** 2,
        "H": u["Wb"] / u["A"],
    }
    assert defined == {name: u[name] for name in defined}


def test_units_of_decompositions():
    """What has the unit of the matrix, its factors without one, and positions."""
    a = Unitful(normal(4, 4) + 5 * np.eye(4, dtype=np.float32), "m")
    units = lambda f: [
        str(getattr(x, "unit", "")) for x in jax.tree.leaves(ql.quaxify(f)(a), is_leaf=ql.is_value)
    ]
    assert units(jax.lax.linalg.lu) == ["m", "", ""]
    assert units(jnp.linalg.qr) == ["", "m"]
    assert units(lambda x: jnp.linalg.svd(x, full_matrices=False)) == ["", "m", ""]
    assert units(lambda x: jnp.linalg.eigh(x @ x.T / x[0, 0])) == ["m", ""]
    assert units(lambda x: jax.lax.top_k(x, 2)) == ["m", ""]
