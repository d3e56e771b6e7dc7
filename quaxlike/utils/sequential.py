"""Functions that `jax.vmap` runs one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._checked import checked
from ..primitives.forms import merge, split

_P = ParamSpec("_P")
_R = TypeVar("_R")


@checked
def sequential_vmap_with_vjp(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function run sequentially under `jax.vmap`: once for each item, in a `jax.lax.scan`.

    Use it for functions that do not batch, or whose batch does not fit into memory. It has derivatives of any
    order, in forward and reverse mode, which run sequentially too. Reverse mode recomputes the function, as
    under `jax.checkpoint`.

    **Arguments:**

    - `func`: a function from pytrees to a pytree of arrays. It is traced at each call, and may
        close over traced values. Collectives over a mapped axis are an error.

    **Returns:**

    The same function, except under `jax.vmap`.

    !!! example

        ```python
        from quaxlike.utils import sequential_vmap_with_vjp

        solve = sequential_vmap_with_vjp(lambda matrix, b: jnp.linalg.solve(matrix, b))
        # one solve at a time
        jax.vmap(solve)(jnp.stack([jnp.eye(3)] * 8), jnp.ones((8, 3)))
        ```
    """

    call: Callable[..., Any] = func

    @functools.wraps(func)
    def sequential(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        arrays, others = split(is_array, leaves)

        def of_arrays(*arrays: Any) -> Any:
            args, kwargs = jax.tree.unflatten(in_tree, merge(is_array, arrays, others))
            return call(*args, **kwargs)

        traced, out = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        # Values that `func` closes over become operands, so that transforms see them.
        n = len(traced.consts)
        operands = [*traced.consts, *arrays]
        outs = _bind(lambda *xs: eval_jaxpr(traced.jaxpr, xs[:n], *xs[n:]), operands)
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return sequential


def _bind(fun: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    return sequential_call_p.bind(*operands, jaxpr=jax.make_jaxpr(fun)(*operands))


def _call(*operands: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, jaxpr: ClosedJaxpr
) -> tuple[list[Any], Sequence[int | None]]:
    if any(getattr(effect, "name", None) == axis.name for effect in jaxpr.effects):
        raise NotImplementedError(
            f"A function under sequential_vmap_with_vjp has a collective over the axis {axis.name!r} of a "
            "vmap around it, but is run for one item after the other. Move the collective out of it."
        )
    if all(dim is None for dim in dims):
        outs = sequential_call_p.bind(*operands, jaxpr=jaxpr)
        return outs, [None] * len(outs)
    is_mapped = [dim is not None for dim in dims]
    _, shared = split(is_mapped, operands)
    pairs = zip(operands, dims, strict=True)
    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in pairs if dim is not None]

    def step(carry: None, items: list[Any]) -> tuple[None, list[Any]]:
        # Bind again, so that another vmap around this one finds the call.
        return None, sequential_call_p.bind(*merge(is_mapped, items, shared), jaxpr=jaxpr)

    _, outs = jax.lax.scan(step, None, mapped)
    return outs, [0] * len(outs)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr
) -> tuple[list[Any], list[Any]]:
    # Two calls, so that reverse mode evaluates the first and transposes the second.
    outs = sequential_call_p.bind(*primals, jaxpr=jaxpr)
    varies = [type(t) is not ad.Zero for t in tangents]
    has_tangent = [jnp.issubdtype(out.dtype, jnp.inexact) for out in outs]

    def tangents_out(*operands: Any) -> list[Any]:
        primals, tangents = operands[: len(varies)], operands[len(varies) :]
        varying, fixed = split(varies, primals)

        def of_varying(*varying: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*merge(varies, varying, fixed))
            return split(has_tangent, outs)[0]

        return jax.jvp(of_varying, varying, list(tangents))[1]

    nonzero, _ = split(varies, tangents)
    given = _bind(tangents_out, [*primals, *nonzero])
    _, without = split(has_tangent, outs)
    zeros = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in without]
    return outs, merge(has_tangent, given, zeros)


def _transpose(cts: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    linear, known = split(is_linear, operands)
    avals = [x.aval for x in linear]
    is_given = [type(ct) is not ad.Zero for ct in cts]
    given, _ = split(is_given, cts)

    def transposed(*operands: Any) -> list[Any]:
        known, cts = operands[: is_linear.count(False)], operands[is_linear.count(False) :]

        def of_linear(*linear: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*merge(is_linear, linear, known))
            return split(is_given, outs)[0]

        return list(jax.linear_transpose(of_linear, *avals)(list(cts)))

    return merge(is_linear, _bind(transposed, [*known, *given]), [None] * len(known))


# A call of `jaxpr`, whose constants are concrete. Every derivative of it is again such a call, so
# that it is sequential as well.
sequential_call_p = Primitive("sequential_call")
sequential_call_p.multiple_results = True
sequential_call_p.def_impl(_call)
sequential_call_p.def_effectful_abstract_eval(lambda *avals, jaxpr: (jaxpr.out_avals, jaxpr.effects))
ad.primitive_jvps[sequential_call_p] = _jvp
ad.primitive_transposes[sequential_call_p] = _transpose
batching.fancy_primitive_batchers[sequential_call_p] = _batch
mlir.register_lowering(sequential_call_p, mlir.lower_fun(_call, multiple_results=True))
