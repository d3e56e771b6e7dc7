"""Layers under every transform, written as programs of a square weight matrix."""

# pyright: reportMissingParameterType=false

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .programs import Program, mesh, steps

P = jax.P


def layer(w, y):
    return jnp.tanh(w @ y) + y


@jax.custom_jvp
def _sine(y):
    return jnp.sin(y)


_sine.defjvp(lambda primals, tangents: (_sine(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def _layer_vjp(w, y):
    return layer(w, y)


_layer_vjp.defvjp(lambda w, y: (layer(w, y), (w, y)), lambda res, ct: (None, ct * jnp.cos(res[1])))


def _solve(w, y):
    def matvec(x):
        return 3.0 * x + w @ x

    def solver(matvec, b):
        return lax.fori_loop(0, 40, lambda _, x: (b - w @ x) / 3.0, jnp.zeros_like(b))

    return lax.custom_linear_solve(matvec, y, solver, symmetric=True)


def _shard_map(w, y):
    return jax.shard_map(layer, mesh=mesh(), in_specs=(P(), P()), out_specs=P())(w, y)


_LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "eager": layer,
    "vmap": lambda w, y: jax.vmap(layer, in_axes=(None, 0))(w, jnp.stack([y, 2 * y])),
    "jvp": lambda w, y: jax.jvp(lambda y: layer(w, y), (y,), (y,)),
    "vjp": lambda w, y: jax.vjp(lambda y: layer(w, y), y)[1](y),
    "linearize": lambda w, y: jax.linearize(lambda y: layer(w, y), y)[1](y),
    "hessian": lambda w, y: jax.hessian(lambda y: jnp.sum(layer(w, y) ** 2))(y),
    "scan": lambda w, y: lax.scan(lambda c, _: (layer(w, c), c), y, length=3),
    "scan of length zero": lambda w, y: lax.scan(lambda c, _: (layer(w, c), c), y, length=0),
    "while_loop": lambda w, y: lax.while_loop(
        lambda c: c[1] < 3, lambda c: (layer(w, c[0]), c[1] + 1), (y, 0)
    ),
    "cond": lambda w, y: lax.cond(y[0] > 0, lambda: layer(w, y), lambda: -y),
    "switch": lambda w, y: lax.switch(1, [lambda: y, lambda: layer(w, y)]),
    "checkpoint": lambda w, y: jax.grad(lambda y: jnp.sum(jax.checkpoint(layer)(w, y)))(y),
    "custom_jvp": lambda w, y: jax.jvp(lambda y: layer(w, _sine(y)), (y,), (y,)),
    "custom_vjp": lambda w, y: jax.grad(lambda y: jnp.sum(_layer_vjp(w, y)))(y),
    "shard_map": _shard_map,
    "custom_linear_solve": _solve,
    "filter_jit": lambda w, y: eqx.filter_jit(layer)(w, y),
    "filter_grad": lambda w, y: eqx.filter_grad(lambda y: jnp.sum(layer(w, y)))(y),
    "filter_vmap": lambda w, y: eqx.filter_vmap(layer, in_axes=(None, 0))(w, jnp.stack([y, 2 * y])),
    "filter_checkpoint": lambda w, y: eqx.filter_checkpoint(layer)(w, y),
    "filter_closure_convert": lambda w, y: eqx.filter_closure_convert(lambda y: layer(w, y), y)(y),
}


def _vector(w: Any) -> jax.Array:
    return jnp.resize(steps(w), w.shape[-1:])


@dataclasses.dataclass(frozen=True)
class LayerProgram(Program):
    """A program for a square matrix only."""

    modes: tuple[str, ...] = ("eager", "jit")

    def takes(self, aval: Any) -> bool:
        square = len(aval.shape) == 2 and aval.shape[0] == aval.shape[1] > 0
        return square and jnp.issubdtype(aval.dtype, jnp.inexact)


LAYERS = {f"layer: {name}": LayerProgram(lambda w, f=f: f(w, _vector(w))) for name, f in _LAYERS.items()}
