"""Programs each applying a single transform from JAX or Equinox to one array.

They are written for plain arrays of any shape, and each is linear in its array. `check_type` runs them on
Values as well.
"""

# pyright: reportMissingParameterType=false

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

P = jax.P
MODES = ("eager", "jit", "vmap", "grad")


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of one array, together with some properties."""

    run: Callable[[Any], Any]
    has_rows: bool = False
    """Whether this only accepts arrays that have a leading axis."""
    dense_unless_linear: bool = False
    """Whether non-linear Values are materialised.

    This is the case if there aren't any tangents of the same class, i.e. for the output of a custom
    derivative (other than the identity), and for the inputs of a linear solve.
    """
    splits_rows: bool = False
    """Whether the leading axis is sharded over devices."""
    modes: tuple[str, ...] = MODES
    """The modes in which to run this."""

    def takes(self, aval: Any) -> bool:
        return bool(aval.shape and aval.shape[0]) or not self.has_rows


LINEAR: dict[str, Program] = {}


def program(f: Callable[[Any], Any] | None = None, **known: Any) -> Any:
    """Registers a function as a program under its own name."""
    if f is None:
        return functools.partial(program, **known)
    LINEAR[f.__name__.lstrip("_")] = Program(f, **known)
    return f


def steps(x: Any) -> jax.Array:
    """Returns the values to use in loops, with the dtype of `x`."""
    return jnp.array((1.0, -2.0, 3.0, 0.5)).astype(x.dtype)


def plain(x: Any) -> jax.Array:
    """Returns a plain array with the shape and dtype of `x`. Its elements are distinct unless rounded."""
    return (1.0 + jnp.cos(jnp.arange(x.size, dtype=float))).astype(x.dtype).reshape(x.shape)


def mesh(size: int | None = None) -> jax.sharding.Mesh:
    """Returns a mesh with `size` devices. Default: all available devices."""
    devices = jax.devices()[:size]
    return jax.make_mesh((len(devices),), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def mesh_for(x: Any) -> jax.sharding.Mesh:
    """Returns a mesh with as many devices as the rows of `x` can be divided between."""
    n = len(jax.devices())
    return mesh(next(i for i in range(n, 0, -1) if x.shape[0] % i == 0))


def linear(x):
    return x * 2.0 + x


@program
def eager(x):
    return linear(x)


@program
def jit(x):
    return jax.jit(linear)(x)


@program
def jit_inline(x):
    return jax.jit(linear, inline=True)(x)


@program
def jnp_functions(x):
    return jnp.sum(jnp.multiply(x, 2.0))


@program
def cond(x):
    return lax.cond(steps(x)[0] > 0, linear, lambda x: -x, x)


@program
def cond_of_value_and_array(x):
    return lax.cond(steps(x)[0] > 0, linear, lambda x: jnp.zeros(x.shape, x.dtype), x)


@program
def switch(x):
    return lax.switch(1, [linear, lambda x: -x, lambda x: x], x)


@program
def fori_loop(x):
    return lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x, x)


@program
def while_loop(x):
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 0.5 + x, c[1] + 1), (x, 0))[0]


@program
def scan_carry(x):
    return lax.scan(lambda c, y: (c * y, None), x, steps(x))[0]


@program
def scan_ys(x):
    return lax.scan(lambda c, y: (c, x * y), 0.0, steps(x))[1]


@program(has_rows=True)
def scan_rows(x):
    return lax.scan(lambda c, row: (c, row * 2.0), 0.0, x)[1]


@program
def scan_carry_becomes_value(x):
    return lax.scan(lambda c, y: (c * 0.5 + x, None), jnp.zeros(x.shape, x.dtype), steps(x))[0]


@program
def scan_of_length_zero(x):
    return lax.scan(lambda c, y: (c + x, None), x, jnp.zeros((0,)))[0]


@program(has_rows=True)
def map_in_batches(x):
    return lax.map(lambda row: row * 2.0, x, batch_size=2)


@program
def checkpoint(x):
    return jax.checkpoint(linear)(x)


@program
def checkpoint_with_policy(x):
    return jax.checkpoint(linear, policy=jax.checkpoint_policies.dots_saveable)(x)


@program
def scan_of_checkpoint(x):
    return lax.scan(jax.checkpoint(lambda c, y: (c * y + x, None)), x, steps(x))[0]


@jax.custom_jvp
def _triple(x):
    return x * 3.0


_triple.defjvp(lambda primals, tangents: (_triple(primals[0]), tangents[0] * 3.0))


@program(dense_unless_linear=True)
def custom_jvp(x):
    return _triple(x)


@jax.custom_vjp
def _scaled(x, s):
    return x * 3.0 * s


_scaled.defvjp(lambda x, s: (_scaled(x, s), s), lambda s, ct: (ct * 3.0 * s, None))


@program(dense_unless_linear=True)
def custom_vjp(x):
    return _scaled(x, 2.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(f, x):
    return f(x)


_apply.defvjp(lambda f, x: (f(x), x), lambda f, res, ct: (ct * 2.0,))


@program(dense_unless_linear=True)
def custom_vjp_nondiff_argnums(x):
    return _apply(lambda x: x * 2.0, x)


@jax.custom_vjp
def _two_results(x, y):
    return x * 3.0, y


_two_results.defvjp(
    lambda x, y: (_two_results(x.value, y.value), x.perturbed),
    lambda perturbed, cts: (cts[0] * 3.0, None),
    symbolic_zeros=True,
)


@program(dense_unless_linear=True)
def custom_vjp_symbolic_zeros(x):
    return _two_results(x, 1.0)[0]


@program
def shard_map_replicated(x):
    return jax.shard_map(linear, mesh=mesh(), in_specs=P(), out_specs=P())(x)


@program(has_rows=True, splits_rows=True)
def shard_map_sharded(x):
    return jax.shard_map(linear, mesh=mesh_for(x), in_specs=P("i"), out_specs=P("i"))(x)


@program(has_rows=True, splits_rows=True)
def shard_map_unchecked(x):
    f = jax.shard_map(linear, mesh=mesh_for(x), in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return f(x)


@program(has_rows=True, splits_rows=True)
def shard_map_with_array(x):
    f = jax.shard_map(lambda y, x: x * y, mesh=mesh_for(x), in_specs=(P("i"), P("i")), out_specs=P("i"))
    return f(plain(x), x)


@program(dense_unless_linear=True)
def custom_linear_solve(x):
    def solve(matvec, b):
        return b * 0.5

    return lax.custom_linear_solve(lambda v: v * 2.0, x, solve, solve, symmetric=True)


@program(dense_unless_linear=True)
def custom_root(x):
    return lax.custom_root(lambda v: v * 2.0 - x, x, lambda f, guess: guess * 0.5, lambda g, y: y * 0.5)


@program
def optimization_barrier(x):
    return lax.optimization_barrier((x, 1.0))[0]


@program
def device_put(x):
    return jax.device_put(x)


@program
def device_put_sharding(x):
    return jax.device_put(x, jax.NamedSharding(mesh(), P()))


@program
def stop_gradient(x):
    return lax.stop_gradient(x) * 1.0 + x


@program(has_rows=True, splits_rows=True)
def with_sharding_constraint(x):
    return lax.with_sharding_constraint(x, jax.NamedSharding(mesh_for(x), P("i")))


@program
def copy(x):
    return jnp.copy(x)


@program
def checkpoint_names(x):
    return checkpoint_name(x, "x")


@program
def composite(x):
    return lax.composite(linear, "my.linear")(x)


@program
def platform_dependent(x):
    return lax.platform_dependent(x, cpu=linear, default=linear)


@program
def debug_callback(x):
    jax.debug.callback(lambda v: None, x)
    return linear(x)


@program(has_rows=True)
def associative_scan(x):
    return lax.associative_scan(jnp.add, x)


@program(has_rows=True)
def vectorize(x):
    return jnp.vectorize(lambda row: row * 2.0, signature="(n)->(n)")(x)


@jax.custom_batching.custom_vmap
def _batchable(x):
    return linear(x)


@_batchable.def_vmap
def _batch(axis_size, in_batched, x):
    return linear(x), in_batched[0]


@program
def custom_vmap(x):
    return _batchable(x)


@program(has_rows=True)
def custom_vmap_in_vmap(x):
    return jax.vmap(_batchable)(x)


@program(has_rows=True)
def vmap_inside(x):
    return jax.vmap(lambda row: row * 2.0)(x)


@program
def jvp_inside(x):
    return jax.jvp(linear, (x,), (x,))[1]


@program
def grad_inside(x):
    return jax.grad(lambda x: jnp.sum(linear(x)))(x)


@program
def vjp_inside(x):
    out, pullback = jax.vjp(linear, x)
    return pullback(out)[0]


@program
def sum_of_cotangents(x):
    _, pullback = jax.vjp(lambda z: (z, z), jnp.zeros(x.shape, x.dtype))
    return pullback((2.0 * x, x))[0]


@program
def linearize_inside(x):
    _, f = jax.linearize(linear, x)
    return f(x)


@program
def linear_transpose(x):
    return jax.linear_transpose(linear, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)[0]


@program
def grad_of_checkpoint(x):
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(linear)(x)))(x)


@program(dense_unless_linear=True)
def grad_of_custom_vjp(x):
    return jax.grad(lambda x: jnp.sum(_scaled(x, 2.0)))(x)


@program
def grad_of_scan(x):
    return jax.grad(lambda x: jnp.sum(scan_carry(x)))(x)


@program
def jit_of_grad_of_scan_of_checkpoint(x):
    return jax.jit(jax.grad(lambda x: jnp.sum(scan_of_checkpoint(x))))(x)


@program
def ref_of_array(x):
    ref = jax.new_ref(jnp.zeros(x.shape, x.dtype))
    ref[...] = plain(x)
    return x * ref[...]


@program
def eqx_filter_jit(x):
    return eqx.filter_jit(linear)(x)


@program(has_rows=True)
def eqx_filter_vmap(x):
    return eqx.filter_vmap(lambda row: row * 2.0)(x)


@program
def eqx_filter_checkpoint(x):
    return eqx.filter_checkpoint(linear)(x)


@program
def eqx_filter_grad(x):
    return eqx.filter_grad(lambda x: jnp.sum(linear(x)))(x)


@program
def eqx_filter_vjp(x):
    out, pullback = eqx.filter_vjp(linear, x)
    return pullback(out)[0]


@program
def eqx_filter_jvp(x):
    return eqx.filter_jvp(linear, (x,), (x,))[1]


@program
def eqx_filter_closure_convert(x):
    return eqx.filter_closure_convert(linear, x)(x)


@program
def eqx_error_if(x):
    return eqx.error_if(x, steps(x)[0] < 0, "negative")


def _eqx_while_loop(x, **kwargs):
    init = (x, jnp.array(0))
    return eqxi.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 0.5 + x, c[1] + 1), init, **kwargs)[0]


@program(dense_unless_linear=True)
def eqx_while_loop_checkpointed(x):
    return _eqx_while_loop(x, kind="checkpointed", max_steps=4)


@program
def eqx_while_loop_bounded(x):
    return _eqx_while_loop(x, kind="bounded", max_steps=4)


@program
def eqx_while_loop_lax(x):
    return _eqx_while_loop(x, kind="lax")
