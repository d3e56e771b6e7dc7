"""Units in a library that knows nothing of them: a damped oscillator, solved by diffrax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.unitful import DimensionError, Unit, Unitful, any_unit
from tests.samples import Late

diffrax = Late("diffrax")

pytestmark = pytest.mark.usefixtures("default_promotion")

# Stiffness, friction, mass; the start; the end, the step.
UNITS = (("N/m", "kg/s", "kg"), ("m", "m/s"), "s", "s")
NUMBERS = ((2.0, 0.1, 1.0), (1.0, 0.0), 3.0, 0.1)
VALUES = jax.tree.map(lambda x, unit: Unitful(jax.device_put(x), unit), NUMBERS, UNITS)


def oscillator(t, state, args):
    x, v = state
    k, c, m = args
    return v, -(k * x + c * v) / m


def solve(args, start, t1, dt, *, field=oscillator, solver=None, **options):
    term = diffrax.ODETerm(field)
    return diffrax.diffeqsolve(term, solver or diffrax.Tsit5(), 0 * t1, t1, dt, start, args, **options).ys


def last_place(*inputs, **options):
    return solve(*inputs, **options)[0][-1]


def same(x, array, unit, rtol=1e-5):
    assert x.unit == Unit(unit)
    np.testing.assert_allclose(x.array, array, rtol=rtol)


def exact(t, args, start):
    """Underdamped, in float64."""
    (k, c, m), (x, v) = args, start
    decay, omega = c / (2 * m), np.sqrt(k / m - (c / (2 * m)) ** 2)
    b = (v + decay * x) / omega
    return np.exp(-decay * t) * (x * np.cos(omega * t) + b * np.sin(omega * t))


@pytest.mark.slow
def test_state_and_time_carry_units():
    xs, vs = ql.quaxify(solve)(*VALUES)
    same(xs[-1], exact(3.0, *NUMBERS[:2]), "m", rtol=1e-4)
    same(xs, solve(*NUMBERS)[0], "m")
    same(vs, solve(*NUMBERS)[1], "m/s")


@pytest.mark.slow
def test_saved_along_the_way():
    ts = jnp.linspace(0.0, 3.0, 5)
    f = lambda args, start, t1, dt, ts: solve(args, start, t1, dt, saveat=diffrax.SaveAt(ts=ts))
    xs, vs = ql.quaxify(f)(*VALUES, Unitful(ts, "s"))
    same(xs, exact(np.asarray(ts), *NUMBERS[:2]), "m", rtol=1e-3)
    assert vs.unit == Unit("m/s")


@pytest.mark.slow
def test_adaptive_steps():
    def scaled(t, state, args):  # both in metres, since the error is one number
        x, v = state
        k, c, m = args
        omega = jnp.sqrt(k / m)
        return omega * v, -omega * x - c / m * v

    def f(args, start, t1, dt, atol):
        controller = diffrax.PIDController(rtol=1e-6, atol=atol)
        return last_place(args, start, t1, dt, field=scaled, stepsize_controller=controller)

    start = (VALUES[1][0], Unitful(0.0, "m"))
    out = ql.quaxify(f)(VALUES[0], start, *VALUES[2:], Unitful(1e-6, "m"))
    same(out, exact(3.0, *NUMBERS[:2]), "m", rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_adaptive_steps_of_a_state_in_several_units(jit):
    def f(args, start, t1, dt, atol):
        controller = diffrax.PIDController(rtol=1e-6, atol=atol, dtmin=1e-6 * t1, dtmax=t1)
        return last_place(args, start, t1, dt, stepsize_controller=controller)

    run = jax.jit(ql.quaxify(f)) if jit else ql.quaxify(f)
    same(run(*VALUES, 1e-6 * any_unit), exact(3.0, *NUMBERS[:2]), "m", rtol=1e-4)
    inside = lambda *inputs: f(*inputs, 1e-6 * any_unit)
    same(ql.quaxify(inside)(*VALUES), exact(3.0, *NUMBERS[:2]), "m", rtol=1e-4)
    grads = ql.quaxify(jax.grad(inside))(*VALUES)
    gradients_agree(grads, jax.grad(lambda *inputs: f(*inputs, 1e-6))(*NUMBERS))
    with pytest.raises(DimensionError, match=r"found \(dimensionless, m\)"):
        run(*VALUES, 1e-6)


def gradients_agree(grads, expected):
    for g, e, u in zip(grads, expected, UNITS[0], strict=True):
        same(g, e, Unit("m") / Unit(u), rtol=1e-4)


@pytest.mark.slow
def test_forward_gradient_with_respect_to_a_parameter():
    f = lambda k, args, start, t1, dt: last_place(
        (k, *args[1:]), start, t1, dt, adjoint=diffrax.ForwardMode()
    )
    out = ql.quaxify(jax.jacfwd(f))(VALUES[0][0], *VALUES)
    h = 1e-5
    differences = [exact(3.0, (2.0 + d, 0.1, 1.0), NUMBERS[1]) for d in (h, -h)]
    same(out, (differences[0] - differences[1]) / (2 * h), Unit("m") / Unit("N/m"), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "DirectAdjoint"])
def test_reverse_gradient_with_respect_to_the_parameters(adjoint):
    f = lambda *inputs: last_place(*inputs, adjoint=getattr(diffrax, adjoint)())
    gradients_agree(ql.quaxify(jax.grad(f))(*VALUES), jax.grad(f)(*NUMBERS))


@pytest.mark.slow
def test_gradient_by_the_numbers():
    """Differentiated outside: each gradient has the structure of what it is taken by."""
    grads = jax.grad(lambda args: ql.quaxify(last_place)(args, *VALUES[1:]).array)(VALUES[0])
    expected = jax.grad(last_place)(*NUMBERS)
    for g, e, u in zip(grads, expected, UNITS[0], strict=True):
        same(g, e, u, rtol=1e-4)


@pytest.mark.slow
def test_gradient_by_one_number():
    """Differentiated outside: a branch of a backward loop gives a unit, another a derivative with none."""

    def place(k, x, v, t1):
        return solve(k, (x, v), t1, t1 / 4, field=lambda t, y, k: (y[1], -k * y[0]))[0][-1]

    rest = (1.0, 0.0, 1.0)
    units = map(Unitful, rest, ("m", "m/s", "s"))
    grad = jax.grad(lambda k: ql.quaxify(place)(Unitful(k, "s^-2"), *units).array)(2.0)
    np.testing.assert_allclose(grad, jax.grad(place)(2.0, *rest), rtol=1e-5)


@pytest.mark.slow
def test_reverse_gradient_where_places_are_saved_along_the_way():
    """Speeds that are saved have zeros for cotangents, which branches of plain arrays hand on."""

    def place(k, x, v, t1):
        saveat = diffrax.SaveAt(ts=jnp.array([0.5, 1.0]) * t1)
        field = lambda t, y, k: (y[1], -k * y[0])
        return solve(k, (x, v), t1, t1 / 4, field=field, saveat=saveat, solver=diffrax.Euler())[0][-1]

    numbers = (2.0, 1.0, 0.0, 1.0)
    inputs = map(Unitful, numbers, ("s^-2", "m", "m/s", "s"))
    same(ql.quaxify(jax.grad(place))(*inputs), jax.grad(place)(*numbers), "m*s^2")


@pytest.mark.slow
def test_a_mistake_in_the_equations_is_found_while_tracing():
    forgotten_mass = lambda t, y, args: (y[1], -(args[0] * y[0] + args[1] * y[1]))
    with pytest.raises(DimensionError, match=r"takes arrays in the same unit; found \(m·s⁻¹, m·kg·s⁻¹\)"):
        ql.quaxify(lambda *inputs: solve(*inputs, field=forgotten_mass))(*VALUES)


def pendulum(t, state, args):
    angle, speed = state
    gravity, length = args
    return speed, -gravity / length * jnp.sin(angle)


# Solved for an angle, which has no unit, beside a speed. The first mistake is the forgotten length.
MISTAKES = {
    "length": (lambda t, y, a: (y[1], -a[0] * jnp.sin(y[0])), r"`add` .* found \(s⁻¹, m·s⁻¹\)"),
    "speed": (lambda t, y, a: (y[1] * a[1], -a[0] / a[1] * jnp.sin(y[0])), r"`add` .* \(dimensionless, m\)"),
    "angle": (lambda t, y, a: (y[1], -a[0] / a[1] * jnp.sin(y[1])), r"`sin` .* found \(s⁻¹\)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["Tsit5", "Euler", "Heun"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_equations_of_a_pendulum(mistake, solver):
    args = Unitful(9.81, "m/s^2"), Unitful(2.0, "m")
    start, t1, dt = (jnp.array(0.3), Unitful(0.1, "1/s")), Unitful(1.5, "s"), Unitful(0.01, "s")
    solver = getattr(diffrax, solver)()
    swing = lambda field: ql.quaxify(lambda *inputs: solve(*inputs, field=field, solver=solver))
    assert swing(pendulum)(args, start, t1, dt)[1].unit == Unit("1/s")
    wrong, match = MISTAKES[mistake]
    with pytest.raises(DimensionError, match=match + r"(.|\n)*\n  at .*test_unitful_diffrax.py"):
        swing(wrong)(args, start, t1, dt)
