"""The transforms that programs go through.

Each takes `f(x, ops)` and gives a function of the same arguments: `x` is an array, or a tree of arrays, and
`ops` a dict of the other operands, in which `ops["z"]` is a plain array like `x`, for what needs another one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

import quaxlike as ql

Function = Callable[[Any, dict[str, Any]], Any]

INNER: dict[str, Callable[[Function], Function]] = {}
OUTER: dict[str, Callable[[Function], Function]] = {}
ROWS = {"vmap", "vmap_of_columns", "scan_rows", "map_rows", "loop_over_rows"}
"""Those whose function sees one row of `x` at a time."""

AS_OPERAND = {
    "jit",
    "checkpoint",
    "level",
    "level_that_passes_by",
    "jit_between_levels",
    "closed_over",
    "vmap_over_factor",
    "scan_constant",
    "scan_carry_from_array",
    "cond_value_taken",
    "cond_array_taken",
    "switch",
    "where",
    "write_to_buffer",
    "add_to_buffer",
    "grad_by_operands",
    "jvp_along_operands",
    "linear_transpose",
    "shard_map",
}
"""Those that neither differentiate with respect to `x` nor start a loop with it."""


def _inner(transform: Callable[[Function], Function]) -> Callable[[Function], Function]:
    INNER[transform.__name__] = transform
    return transform


def _outer(transform: Callable[[Function], Function]) -> Callable[[Function], Function]:
    OUTER[transform.__name__] = transform
    return transform


def _both(transform: Callable[[Function], Function]) -> Callable[[Function], Function]:
    return _inner(_outer(transform))


def _inexact(tree: Any) -> list[Any]:
    return [x for x in jtu.tree_leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]


def _sum(f: Function) -> Function:
    return lambda x, ops: sum(jnp.sum(jnp.real(y)) for y in _inexact(f(x, ops)))


def _squares(f: Function) -> Function:
    return lambda x, ops: sum(jnp.sum(jnp.real(y * jnp.conj(y))) for y in _inexact(f(x, ops)))


def _weighted(f: Function) -> Function:
    """A sum in which no two elements count the same."""

    def loss(x: Any, ops: Any) -> Any:
        leaves = map(jnp.asarray, _inexact(f(x, ops)))
        return sum((jnp.sum(jnp.real(y * _weights(y.shape, y.dtype))) for y in leaves), 0.0)

    return loss


def _weights(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.cos(1.0 + jnp.arange(math.prod(shape))).reshape(shape).astype(dtype)


@_inner
def jit(f: Function) -> Function:
    return jax.jit(f)


@_both
def checkpoint(f: Function) -> Function:
    return jax.checkpoint(f)


@_inner
def level(f: Function) -> Function:
    """Another level of `quaxify`, to which the tracer of a value is an array."""
    return ql.quaxify(f)


@_inner
def level_that_passes_by(f: Function) -> Function:
    return ql.quaxify(f, False)


@_inner
def jit_between_levels(f: Function) -> Function:
    return ql.quaxify(jax.jit(ql.quaxify(f)))


@_outer
def grad(f: Function) -> Function:
    return jax.grad(_weighted(f))


@_outer
def grad_and_result(f: Function) -> Function:
    return jax.grad(lambda x, ops: (_weighted(f)(x, ops), f(x, ops)), has_aux=True)


@_inner
def grad_of_sum(f: Function) -> Function:
    return jax.grad(_sum(f))


@_both
def grad_of_squares(f: Function) -> Function:
    return jax.grad(_squares(f))


@_inner
def grad_by_operands(f: Function) -> Function:
    return jax.grad(_squares(f), argnums=1)


@_inner
def value_and_grad(f: Function) -> Function:
    return jax.value_and_grad(_squares(f))


@_inner
def grad_allow_int(f: Function) -> Function:
    return lambda x, ops: jax.grad(lambda s: _squares(f)(s[0], ops) * s[1], allow_int=True)((x, 2.0))


@_both
def jvp(f: Function) -> Function:
    return lambda x, ops: jax.jvp(lambda x: f(x, ops), (x,), (x,))


@_both
def jvp_along_array(f: Function) -> Function:
    return lambda x, ops: jax.jvp(lambda x: f(x, ops), (x,), (ops["z"],))[1]


@_inner
def jvp_along_operands(f: Function) -> Function:
    return lambda x, ops: jax.jvp(lambda s: f(x, scaled(ops, s)), (1.0,), (1.0,))[1]


@_outer
def jvp_along_some(f: Function) -> Function:
    """Every second leaf has a tangent: for types of several leaves, those that are frozen, or the others."""
    return _of_some(jvp_along_array, f, 0)


@_outer
def jvp_along_others(f: Function) -> Function:
    return _of_some(jvp_along_array, f, 1)


@_outer
def grad_of_some(f: Function) -> Function:
    return _of_some(grad, f, 1)


@_both
def vjp(f: Function) -> Function:
    def pulled(x: Any, ops: Any) -> Any:
        out, pull = jax.vjp(lambda x: f(x, ops), x)
        return pull(out)[0]

    return pulled


@_both
def linearize(f: Function) -> Function:
    def pushed(x: Any, ops: Any) -> Any:
        out, push = jax.linearize(lambda x: f(x, ops), x)
        return out, push(ops["z"])

    return pushed


@_both
def hvp(f: Function) -> Function:
    def product(x: Any, ops: Any) -> Any:
        return jax.jvp(lambda x: jax.grad(_squares(f))(x, ops), (x,), (x,))[1]

    return product


@_inner
def jacfwd(f: Function) -> Function:
    return jax.jacfwd(f)


@_inner
def jacrev(f: Function) -> Function:
    return jax.jacrev(f)


@_inner
def hessian(f: Function) -> Function:
    return jax.hessian(_squares(f))


@_inner
def step_of_gradient(f: Function) -> Function:
    return lambda x, ops: x - 0.1 * jax.grad(_squares(f))(x, ops)


@_inner
def custom_jvp(f: Function) -> Function:
    called = jax.custom_jvp(f)
    called.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return lambda x, ops: called(x, ops)


@_inner
def custom_vjp(f: Function) -> Function:
    called = jax.custom_vjp(f)
    called.defvjp(lambda x, ops: (f(x, ops), (x, ops)), lambda res, ct: jax.vjp(f, *res)[1](ct))
    return lambda x, ops: called(x, ops)


@_inner
def custom_vjp_by_hand(f: Function) -> Function:
    """Of the product with the value: its cotangents are made by the user's own code."""

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return jnp.sum(x * y)

    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda res, ct: (ct * res[1], ct * res[0]))
    return lambda x, ops: product(x, f(x, ops))


@_both
def vmap_over_factor(f: Function) -> Function:
    return lambda x, ops: jax.vmap(lambda s: f(x, scaled(ops, s)))(jnp.array([1.0, -2.0]))


@_outer
def vmap_over_leaves(f: Function) -> Function:
    return lambda x, ops: jax.vmap(f, in_axes=(0, None))(_stack(x), ops)


@_outer
def scan_over_leaves(f: Function) -> Function:
    return lambda x, ops: lax.scan(lambda c, x: (c, f(x, ops)), 0, _stack(x))[1]


@_inner
def vmap(f: Function) -> Function:
    return lambda x, ops: jax.vmap(_with_z(f), (0, 0, None))(x, ops["z"], ops)


@_inner
def vmap_of_columns(f: Function) -> Function:
    """Along the last axis, which is put last again; `f` sees the other ones."""
    return lambda x, ops: jax.vmap(_with_z(f), (0, 0, None), out_axes=-1)(x, ops["z"], ops)


@_inner
def scan_rows(f: Function) -> Function:
    return lambda x, ops: lax.scan(lambda c, row: (c, _with_z(f)(*row, ops)), 0, (x, ops["z"]))[1]


@_inner
def map_rows(f: Function) -> Function:
    return lambda x, ops: lax.map(lambda row: _with_z(f)(*row, ops), (x, ops["z"]), batch_size=2)


@_inner
def loop_over_rows(f: Function) -> Function:
    return lambda x, ops: jnp.stack([_with_z(f)(x[i], ops["z"][i], ops) for i in range(x.shape[0])])


@_both
def scan_carry(f: Function) -> Function:
    return lambda x, ops: lax.scan(lambda c, s: (f(c, scaled(ops, s)), None), x, jnp.array([1.0, 0.5]))[0]


@_inner
def scan_constant(f: Function) -> Function:
    def scanned(x: Any, ops: Any) -> Any:
        return lax.scan(lambda c, s: (c + s, f(x, scaled(ops, s))), 0.0, jnp.array([1.0, 0.5]))[1]

    return scanned


@_inner
def map_over_multiples(f: Function) -> Function:
    """As many results as there are rows: what belongs to iterations and what belongs to rows looks alike."""
    return lambda x, ops: lax.map(
        lambda s: f(x * s.astype(x.dtype), ops), 1.0 + jnp.arange(x.shape[0] if x.ndim else 2)
    )


@_inner
def scan_carry_from_array(f: Function) -> Function:
    """The carry starts as an array, and the value is added to it."""
    return lambda x, ops: lax.scan(lambda c, _: (c + f(x, ops), None), _zeros(f, x, ops), length=2)[0]


@_inner
def fori_carry(f: Function) -> Function:
    return lambda x, ops: lax.fori_loop(0, 2, lambda i, c: f(c, ops), x)


@_inner
def while_carry(f: Function) -> Function:
    step = lambda ops: lambda c: (f(c[0], ops), c[1] + 1)
    return lambda x, ops: lax.while_loop(lambda c: c[1] < 2, step(ops), (x, 0))[0]


@_inner
def average_in_loop(f: Function) -> Function:
    return lambda x, ops: lax.fori_loop(0, 2, lambda i, c: 0.5 * c + 0.5 * f(x, ops), x)


@_inner
def cond_value_taken(f: Function) -> Function:
    return lambda x, ops: lax.cond(jnp.array(True), lambda: f(x, ops), lambda: f(ops["z"], ops))


@_inner
def cond_array_taken(f: Function) -> Function:
    return lambda x, ops: lax.cond(jnp.array(False), lambda: f(x, ops), lambda: f(ops["z"], ops))


@_inner
def cond_before(f: Function) -> Function:
    """What `f` sees is the value on one side, the array on the other."""
    return lambda x, ops: f(lax.cond(jnp.array(False), lambda: x, lambda: ops["z"]), ops)


@_inner
def cond_of_two_values(f: Function) -> Function:
    return lambda x, ops: lax.cond(jnp.array(True), lambda: f(x, ops), lambda: f(2 * x, ops))


@_inner
def switch(f: Function) -> Function:
    branches = [lambda x, ops: f(x, ops), lambda x, ops: f(ops["z"], ops), lambda x, ops: -f(x, ops)]
    return lambda x, ops: lax.switch(jnp.array(1), branches, x, ops)


@_inner
def where(f: Function) -> Function:
    return lambda x, ops: jtu.tree_map(
        lambda a, b: jnp.where(jnp.array(False), a, b), f(x, ops), f(ops["z"], ops)
    )


@_inner
def write_to_buffer(f: Function) -> Function:
    def written(x: Any, ops: Any) -> Any:
        out = f(x, ops)
        return jnp.stack([f(ops["z"], ops)] * 3).at[1].set(out)

    return written


@_inner
def add_to_buffer(f: Function) -> Function:
    return lambda x, ops: jnp.stack([f(ops["z"], ops)] * 3).at[1].add(f(x, ops))


@_inner
def linear_transpose(f: Function) -> Function:
    return lambda x, ops: jax.linear_transpose(lambda z: f(z, ops), ops["z"])(f(x, ops))


@_inner
def shard_map(f: Function) -> Function:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


@_inner
def closed_over(f: Function) -> Function:
    """The value is not an argument of what is transformed."""
    return lambda x, ops: jax.jit(lambda s: f(x, scaled(ops, s)))(1.0)


def _of_some(transform: Callable[[Function], Function], f: Function, first: int) -> Function:
    """The transform with respect to every second leaf, from the first or the second on."""

    def of_some(x: Any, ops: dict[str, Any]) -> Any:
        leaves, tree = jtu.tree_flatten(x)

        def of(some: Any, _: Any) -> Any:
            mixed = list(leaves)
            mixed[first::2] = some
            return f(jtu.tree_unflatten(tree, mixed), ops)

        return transform(of)(leaves[first::2], {"z": jtu.tree_leaves(ops["z"])[first::2]})

    return of_some


def _stack(tree: Any) -> Any:
    return jtu.tree_map(lambda x: jnp.stack([x, 0.5 * x]).astype(x.dtype), tree)


def scaled(ops: dict[str, Any], s: Any) -> dict[str, Any]:
    """The operands, those that are inexact times the number `s`."""
    scale = lambda x: x * jnp.asarray(s, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    return jtu.tree_map(scale, ops, is_leaf=ql.is_value)


def _with_z(f: Function) -> Callable[[Any, Any, Any], Any]:
    return lambda x, z, ops: f(x, ops | {"z": z})


def _zeros(f: Function, x: Any, ops: Any) -> Any:
    out = jax.eval_shape(f, ops["z"], ops)
    return jtu.tree_map(lambda y: jnp.zeros(y.shape, y.dtype), out)
