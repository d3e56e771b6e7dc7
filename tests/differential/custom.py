"""Functions whose derivatives somebody defined, and calls that stage them, as programs name them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[..., Any]


def _pulled_back(f: Function, by: Function) -> Function:
    """`f`, with `by(cotangent, x)` for its derivative in reverse mode."""
    called = jax.custom_vjp(f)
    called.defvjp(lambda x: (f(x), x), lambda x, ct: (by(ct, x),))
    return called


def _pushed(f: Function, by: Function) -> Function:
    """`f`, with `by(tangent, x)` for its derivative in both modes."""
    called = jax.custom_jvp(f)
    called.defjvp(lambda primals, tangents: (f(*primals), by(*tangents, *primals)))
    return called


def _pulled_back_through(f: Function, by: Function) -> Function:
    """`f` of the array, whose cotangent is that of `f`, changed by a function of it."""
    return _pulled_back(f, lambda ct, x: by(jax.vjp(f, x)[1](ct)[0]))


reversed_gradient = _pulled_back(lambda x: x, lambda ct, x: -ct)
scaled = _pulled_back(lambda x: x, lambda ct, x: 3 * ct)
clipped = _pulled_back(lambda x: x, lambda ct, x: ct * jnp.minimum(1, 1 / (1 + jnp.sum(abs(ct)))))
clipped_each = _pulled_back(lambda x: x, lambda ct, x: jnp.where(abs(ct) < 1, ct, 0 * ct))
doubled = _pulled_back(lambda x: 2 * x, lambda ct, x: 2 * ct)
square = _pulled_back(lambda x: x * x, lambda ct, x: 2 * x * ct)
no_gradient = _pulled_back(lambda x: x + 1, lambda ct, x: None)
straight_through = _pulled_back(jnp.round, lambda ct, x: ct)
in_float32 = _pulled_back(lambda x: 2 * x, lambda ct, x: (2 * ct).astype(jnp.float32).astype(ct.dtype))
plus_one = _pulled_back(lambda x: x + jnp.ones(x.shape, x.dtype), lambda ct, x: -ct)
first_row = _pulled_back_through(lambda x: x[0], lambda ct: 2 * ct)
transposed = _pulled_back_through(lambda x: x.T, lambda ct: -ct)
total = _pulled_back_through(jnp.sum, lambda ct: 2 * ct)
gram = _pulled_back_through(lambda x: x @ x.T, lambda ct: ct)

other_tangent = _pushed(lambda x: x, lambda t, x: 3 * t)
relu_like = _pushed(lambda x: jnp.maximum(x, 0), lambda t, x: jnp.where(x > 0, t, 0))
damped = _pushed(lambda x: x, lambda t, x: t / (1 + jnp.real(x * jnp.conj(x))))
soft_sign = _pushed(jnp.sign, lambda t, x: t * (1 - jnp.tanh(x) ** 2))
no_tangent = _pushed(lambda x: 2 * x, lambda t, x: 0 * t)
dense_tangent = _pushed(lambda x: x, lambda t, x: t + 0 * jnp.ones(x.shape, x.dtype))
twice_reversed = _pulled_back(lambda x: reversed_gradient(2 * x), lambda ct, x: 2 * reversed_gradient(ct))


@jax.custom_jvp
def weighed(x: Any) -> Any:
    return _weighed(x, 2.0)


@jax.custom_jvp
def _weighed(x: Any, s: Any) -> Any:
    return x * s


_weighed.defjvps(lambda t, out, x, s: 3 * t * s, None)
weighed.defjvps(lambda t, out, x: -t + 0 * out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _power(x: Any, n: int) -> Any:
    return x**n


_power.defvjp(lambda x, n: (x**n, x), lambda n, x, ct: (n * x ** (n - 1) * ct,))


def cube(x: Any) -> Any:
    return _power(x, 3)


@jax.custom_vjp
def _of_two(x: Any, y: Any) -> Any:
    return x, x * y


_of_two.defvjp(lambda x, y: ((x, x * y), (x, y)), lambda res, cts: (cts[0] + res[1] * cts[1], 2 * cts[0]))


def of_two(x: Any) -> Any:
    return _of_two(x, 0.5 * x)[1]


@jax.custom_vjp
def _with_zeros(x: Any, y: Any) -> Any:
    return 2 * x


def _with_zeros_forward(x: Any, y: Any) -> Any:
    return 2 * x.value, None


_with_zeros.defvjp(_with_zeros_forward, lambda _, ct: (ct, None), symbolic_zeros=True)


def with_symbolic_zeros(x: Any) -> Any:
    return _with_zeros(x, jnp.zeros(()))


@jax.custom_gradient
def by_custom_gradient(x: Any) -> Any:
    return 2 * x, lambda ct: 5 * ct


CUSTOM = (
    "reversed_gradient",
    "scaled",
    "clipped",
    "clipped_each",
    "doubled",
    "square",
    "no_gradient",
    "straight_through",
    "in_float32",
    "plus_one",
    "first_row",
    "transposed",
    "total",
    "gram",
    "other_tangent",
    "relu_like",
    "damped",
    "soft_sign",
    "no_tangent",
    "dense_tangent",
    "twice_reversed",
    "weighed",
    "cube",
    "of_two",
    "with_symbolic_zeros",
    "by_custom_gradient",
)


# Calls of a function: as it is, or staged before anything is differentiated.


def now(f: Function) -> Function:
    return f


def jit(f: Function) -> Function:
    return jax.jit(lambda x: f(x))


def checkpoint(f: Function) -> Function:
    return jax.checkpoint(lambda x: f(x))


def cond(f: Function) -> Function:
    return lambda x: lax.cond(jnp.array(True), f, lambda x: -f(x), x)


def scan(f: Function) -> Function:
    return lambda x: lax.scan(lambda total, s: (total, f(x)), 0.0, jnp.ones(2))[1][1]


def carried(f: Function) -> Function:
    """Where it returns what it takes."""
    return lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x)


def vmap(f: Function) -> Function:
    return lambda x: jax.vmap(lambda s: f(x * s.astype(x.dtype)))(jnp.array([1.0, 2.0]))[1]


STAGED = ("now", "jit", "checkpoint", "cond", "scan", "carried", "vmap")
