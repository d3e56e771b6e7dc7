"""A few programs for each primitive that a type may have rules for."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import lu_factor, lu_solve

from .programs import Program, plain

_Run = Callable[[Any], Any]


def _matrix(x: Any, *shape: int) -> jax.Array:
    return plain(jax.ShapeDtypeStruct(shape, x.dtype))


def _scalar(x: Any) -> jax.Array:
    return jnp.asarray(1.5).astype(x.dtype)


# Primitives that do not take just one or two arrays of the same shape. Each program is tried on the dense
# array first, and left out if that raises.
_LISTED: dict[str, list[_Run]] = {
    "argmax": [lambda x: jnp.argmax(x, 0)],
    "argmin": [lambda x: jnp.argmin(x, 0)],
    "broadcast_in_dim": [lambda x: jnp.broadcast_to(x, (2, *x.shape)), lambda x: x[..., None]],
    "clamp": [lambda x: lax.clamp(-_scalar(x), x, _scalar(x))],
    "concatenate": [
        lambda x: lax.concatenate([x, x], 0),
        lambda x: lax.concatenate([x, plain(x)], 0),
        lambda x: lax.concatenate([plain(x), x], x.ndim - 1),
    ],
    "convert_element_type": [lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.int32)],
    "dot_general": [
        lambda x: x @ _matrix(x, x.shape[-1]),
        lambda x: x @ _matrix(x, x.shape[-1], 3),
        lambda x: _matrix(x, 3, x.shape[-2]) @ x,
        lambda x: jnp.einsum("ij,kj->ki", x, _matrix(x, 3, x.shape[1])),
        lambda x: jnp.einsum("i,ij->j", _matrix(x, x.shape[0]), x),
        lambda x: jnp.einsum("bij,bj->bi", x, _matrix(x, x.shape[0], x.shape[2])),
        lambda x: x @ x,
        lambda x: x @ x.T,
    ],
    "dynamic_slice": [lambda x: lax.dynamic_slice(x, (1,) * x.ndim, (1,) * x.ndim)],
    "dynamic_update_slice": [
        lambda x: lax.dynamic_update_slice(x, x[:1], (1,) * x.ndim),
        lambda x: lax.dynamic_update_slice(plain(x), x, (0,) * x.ndim),
    ],
    "fft": [jnp.fft.fft],
    "gather": [lambda x: x[jnp.array([0, -1, 0])], lambda x: jnp.take(x, jnp.array([0, 0]), -1)],
    "integer_pow": [lambda x: x**3],
    "jit": [jax.jit(lambda x: x)],
    # What the factors are for: a type may keep them in a form of its own.
    "lu": [lambda x: lu_solve(lu_factor(x), jnp.ones(x.shape[:-1], x.dtype)[..., None])],
    "pad": [lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(1, 1, 0)] * x.ndim)],
    "polygamma": [lambda x: lax.polygamma(_scalar(x), x)],
    "qr": [lambda x: jnp.linalg.qr(x, mode="r")],
    "reduce_precision": [lambda x: lax.reduce_precision(x, 5, 10)],
    "reduce_window_max": [
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1,) * x.ndim, (1,) * x.ndim, "SAME")
    ],
    "reduce_window_min": [
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1,) * x.ndim, (1,) * x.ndim, "SAME")
    ],
    "reduce_window_sum": [lambda x: lax.reduce_window(x, 0.0, lax.add, (1,) * x.ndim, (1,) * x.ndim, "SAME")],
    "reshape": [
        lambda x: x.reshape(-1),
        lambda x: x.reshape((*x.shape[::-1], 1)),
        lambda x: x.reshape(2, -1),
    ],
    "rev": [lambda x: lax.rev(x, (0,)), lambda x: lax.rev(x, tuple(range(x.ndim)))],
    "scatter": [lambda x: x.at[0].set(_scalar(x)), lambda x: plain(x).at[...].set(x)],
    "scatter-add": [lambda x: x.at[0].add(_scalar(x)), lambda x: plain(x).at[...].add(x)],
    "scatter-mul": [lambda x: x.at[0].multiply(_scalar(x))],
    "select_n": [
        lambda x: lax.select_n(plain(x) > 1, x, plain(x)),
        lambda x: lax.select_n(plain(x) > 1, plain(x), x),
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
    "triangular_solve": [
        lambda x: lax.linalg.triangular_solve(x, _matrix(x, x.shape[0], 2), left_side=True, lower=True)
    ],
    "unstack": [lambda x: jnp.unstack(x)[0]],
}
_LISTED |= {
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
_LISTED |= {
    f.__name__: [lambda x, f=f: f(x, axis=0), lambda x, f=f: f(x, axis=x.ndim - 1)]
    for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
}


def operations(primitives: Iterable[str]) -> dict[str, Program]:
    """Programs that bind each of these primitives, by name."""
    found: dict[str, Program] = {}
    for name in sorted(set(primitives)):
        runs = _LISTED.get(name) or _elementwise(name)
        for i, run in enumerate(runs):
            found[f"rule: {name}" + (f" ({i + 1})" if len(runs) > 1 else "")] = Program(run)
    return found


def _elementwise(name: str) -> list[_Run]:
    """Calls of the function in `jax.lax` with the primitive's name, on one or two arrays."""
    f = getattr(lax, name, None)
    if not callable(f) or isinstance(f, type):
        return []
    arity = sum(p.default is p.empty for p in inspect.signature(f).parameters.values())
    if arity == 1:
        return [f]
    if arity == 2:
        return [
            lambda x: f(x, plain(x)),
            lambda x: f(plain(x), x),
            lambda x: f(x, x),
            lambda x: f(x, _scalar(x)),
            lambda x: f(_scalar(x), x),
        ]
    return []
