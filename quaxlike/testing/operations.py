"""A few programs for each primitive, for testing a type's rules."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .programs import Program, plain

_Run = Callable[..., Any]
_Shape = tuple[int, ...]

# Any operands other than `x` are plain arrays. Their shapes are functions of the shape of `x`.
OPERANDS: dict[str, Callable[[_Shape], _Shape]] = {
    "y": lambda s: s,
    "s": lambda s: (),
    "m": lambda s: (s[-1] if s else 1, 3),
    "q": lambda s: (3, s[-2] if len(s) > 1 else s[0] if s else 1),
    "r": lambda s: s[-1:],
}

# Primitives with operands other than one or two arrays of the same shape. Each program is tried on the
# materialised array first, and skipped if that raises an error. All windows have at least one axis: otherwise
# XLA crashes. Note that `tests/differential` parses these expressions to generate programs with other
# operands.
LISTED: dict[str, list[_Run]] = {
    "argmax": [lambda x: jnp.argmax(x, 0)],
    "argmin": [lambda x: jnp.argmin(x, 0)],
    "broadcast_in_dim": [lambda x: jnp.broadcast_to(x, (2, *x.shape)), lambda x: x[..., None]],
    "clamp": [lambda x, s: lax.clamp(-s, x, s)],
    "concatenate": [
        lambda x: lax.concatenate([x, x], 0),
        lambda x, y: lax.concatenate([x, y], 0),
        lambda x, y: lax.concatenate([y, x], x.ndim - 1),
    ],
    "convert_element_type": [lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.int32)],
    "dot_general": [
        lambda x, r: x @ r,
        lambda x, m: x @ m,
        lambda x, q: q @ x,
        lambda x, m: jnp.einsum("ij,kj->ki", x, m.T),
        lambda x, q: jnp.einsum("i,ij->j", q[0], x),
        lambda x, y: jnp.einsum("bij,bj->bi", x, y[:, 0]),
        lambda x: x @ x,
        lambda x: x @ x.T,
    ],
    "dynamic_slice": [lambda x: lax.dynamic_slice(x, (1,) * x.ndim, (1,) * x.ndim)],
    "dynamic_update_slice": [
        lambda x: lax.dynamic_update_slice(x, x[:1], (1,) * x.ndim),
        lambda x, y: lax.dynamic_update_slice(y, x, (0,) * x.ndim),
    ],
    "fft": [lambda x: jnp.fft.fft(x)],
    "gather": [lambda x: x[jnp.array([0, -1, 0])], lambda x: jnp.take(x, jnp.array([0, 0]), -1)],
    "integer_pow": [lambda x: x**3],
    "jit": [lambda x: jax.jit(lambda x: x)(x)],
    # Types are free to represent the factors differently, so these are only tested indirectly.
    "lu": [lambda x, y: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(x), y)],
    "pad": [lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(1, 1, 0)] * x.ndim)],
    "polygamma": [lambda x, s: lax.polygamma(s, x)],
    "qr": [lambda x: jnp.linalg.qr(x, mode="r")],
    "reduce_precision": [lambda x: lax.reduce_precision(x, 5, 10)],
    "reduce_window_max": [
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, *(2,) * (x.ndim - 1)), (1,) * x.ndim, "SAME")
    ],
    "reduce_window_min": [
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, *(2,) * (x.ndim - 1)), (1,) * x.ndim, "SAME")
    ],
    "reduce_window_sum": [
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, *(1,) * (x.ndim - 1)), (1,) * x.ndim, "SAME")
    ],
    "reshape": [
        lambda x: x.reshape(-1),
        lambda x: x.reshape((*x.shape[::-1], 1)),
        lambda x: x.reshape(2, -1),
    ],
    "rev": [lambda x: lax.rev(x, (0,)), lambda x: lax.rev(x, tuple(range(x.ndim)))],
    "scatter": [lambda x, s: x.at[0].set(s), lambda x, y: y.at[...].set(x)],
    "scatter-add": [lambda x, s: x.at[0].add(s), lambda x, y: y.at[...].add(x)],
    "scatter-mul": [lambda x, s: x.at[0].multiply(s)],
    "select_n": [
        lambda x, y: lax.select_n(y > 1, x, y),
        lambda x, y: lax.select_n(y > 1, y, x),
        lambda x: lax.select_n(jnp.array(True), -x, x),
    ],
    "slice": [lambda x: x[:1], lambda x: x[1:], lambda x: x[..., ::2]],
    "sort": [lambda x: lax.sort(x, dimension=0)],
    "split": [lambda x: jnp.split(x, 2)[1]],
    "squeeze": [lambda x: lax.squeeze(x[:1], [0])],
    "stack": [lambda x: jnp.stack([x, x])],
    "tile": [lambda x: jnp.tile(x, 2)],
    "top_k": [lambda x: lax.top_k(x, 1)[0]],
    "transpose": [lambda x: x.T, lambda x: jnp.moveaxis(x, 0, -1)],
    "triangular_solve": [lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True, lower=True)],
    "unstack": [lambda x: jnp.unstack(x)[0]],
}
LISTED |= {
    f"reduce_{name}": [lambda x, f=f: f(x), lambda x, f=f: f(x, axis=0), lambda x, f=f: f(x, axis=-1)]
    for name, f in {
        "sum": jnp.sum,
        "max": jnp.max,
        "min": jnp.min,
        "prod": jnp.prod,
        "and": jnp.all,
        "or": jnp.any,
    }.items()
}
LISTED |= {
    f.__name__: [lambda x, f=f: f(x, axis=0), lambda x, f=f: f(x, axis=x.ndim - 1)]
    for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
}


def operations(primitives: Iterable[str]) -> dict[str, Program]:
    """Returns programs binding each of these primitives, keyed by name."""
    found: dict[str, Program] = {}
    for name in sorted(set(primitives)):
        runs = LISTED.get(name) or _elementwise(name)
        for i, run in enumerate(runs):
            found[f"rule: {name}" + (f" ({i + 1})" if len(runs) > 1 else "")] = Program(_alone(run))
    return found


def _alone(f: _Run) -> Callable[[Any], Any]:
    """Uses plain arrays for all operands other than `x`."""
    _, *others = inspect.signature(f).parameters.values()
    letters = [p.name for p in others if p.default is p.empty]
    return lambda x: f(x, *(_operand(letter, x) for letter in letters))


def _operand(letter: str, x: Any) -> jax.Array:
    shape = OPERANDS[letter](x.shape)
    return plain(jax.ShapeDtypeStruct(shape, x.dtype)) if shape else jnp.asarray(1.5).astype(x.dtype)


def _elementwise(name: str) -> list[_Run]:
    """Returns calls to the `jax.lax` function with this name, if it accepts one or two arrays."""
    f = getattr(lax, name, None)
    if not callable(f) or isinstance(f, type):
        return []
    arity = sum(p.default is p.empty for p in inspect.signature(f).parameters.values())
    if arity == 1:
        return [f]
    if arity == 2:
        return [
            lambda x, y: f(x, y),
            lambda x, y: f(y, x),
            lambda x: f(x, x),
            lambda x, s: f(x, s),
            lambda x, s: f(s, x),
        ]
    return []
