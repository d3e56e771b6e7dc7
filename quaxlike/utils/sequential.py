"""A differentiable version of `jax.custom_batching.sequential_vmap`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._checked import checked

_P = ParamSpec("_P")
_R = TypeVar("_R")
# A jaxpr with its constants. (JAX 0.10 has a separate class for this, but later versions don't.)
_Closed = Any


@checked
def sequential_vmap_with_vjp(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function to run sequentially under `jax.vmap`, using a `jax.lax.scan` over the batch.

    Use this for functions that can't be batched, or use too much memory when batched. Derivatives of any
    order are also evaluated sequentially, in both forward and reverse mode. Reverse mode recomputes the
    function, much like `jax.checkpoint`.

    **Arguments:**

    - `func`: a function from pytrees to a pytree of arrays. It is traced on every call, and may close over
        tracers. It must not have a collective over an axis being mapped.

    **Returns:**

    A function equal to `func`, except under `jax.vmap`.

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
        arrays, others = eqx.partition((args, kwargs), lambda x: isinstance(x, jax.Array | np.ndarray))

        def of_arrays(arrays: Any) -> Any:
            args, kwargs = eqx.combine(arrays, others)
            return call(*args, **kwargs)

        traced, out = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
        # Turn any closed-over values into operands. (Transforms only look at the operands of a primitive.)
        opened = getattr(traced, "jaxpr", traced)
        outs = _bind(
            lambda consts, xs: eval_jaxpr(opened, consts, *xs), traced.consts, jax.tree.leaves(arrays)
        )
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return sequential


def _bind(fun: Callable[..., Any], *args: Any) -> list[Any]:
    return sequential_call_p.bind(*jax.tree.leaves(args), jaxpr=jax.make_jaxpr(fun)(*args))


def _call(*operands: Any, jaxpr: _Closed) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, jaxpr: _Closed
) -> tuple[list[Any], Sequence[int | None]]:
    if any(getattr(effect, "name", None) == axis.name for effect in jaxpr.effects):
        raise NotImplementedError(
            f"A function under sequential_vmap_with_vjp has a collective over the axis {axis.name!r} of a "
            "vmap around it, but is run for one item after the other. Move the collective out of it."
        )
    if all(dim is None for dim in dims):
        outs = sequential_call_p.bind(*operands, jaxpr=jaxpr)
        return outs, [None] * len(outs)
    shared, mapped = eqx.partition(list(operands), [dim is None for dim in dims])
    mapped = [None if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(mapped, dims, strict=True)]

    def step(carry: None, items: list[Any]) -> tuple[None, list[Any]]:
        # Bind the primitive again rather than inlining the jaxpr, so that an outer vmap is sequential too.
        return None, sequential_call_p.bind(*eqx.combine(items, shared), jaxpr=jaxpr)

    _, outs = jax.lax.scan(step, None, mapped)
    return outs, [0] * len(outs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: _Closed) -> tuple[list[Any], list[Any]]:
    # Two separate calls, so that reverse mode can evaluate the first and transpose the second.
    outs = sequential_call_p.bind(*primals, jaxpr=jaxpr)
    tangents = [None if type(t) is ad.Zero else t for t in tangents]
    varying, fixed = eqx.partition(list(primals), [t is not None for t in tangents])
    has_tangent = [jnp.issubdtype(out.dtype, jnp.inexact) for out in outs]

    def tangents_out(varying: Any, fixed: Any, tangents: Any) -> list[Any]:
        def of_varying(varying: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*eqx.combine(varying, fixed))
            return [out for out, has in zip(outs, has_tangent, strict=True) if has]

        return jax.jvp(of_varying, [varying], [tangents])[1]

    given = iter(_bind(tangents_out, varying, fixed, tangents))
    pairs = zip(outs, has_tangent, strict=True)
    return outs, [next(given) if has else ad.Zero(jax.typeof(out).to_tangent_aval()) for out, has in pairs]


def _transpose(cts: Sequence[Any], *operands: Any, jaxpr: _Closed) -> list[Any]:
    linear = [x.aval if ad.is_undefined_primal(x) else None for x in operands]
    known = [None if ad.is_undefined_primal(x) else x for x in operands]
    is_given = [type(ct) is not ad.Zero for ct in cts]

    def transposed(known: Any, cts: Any) -> list[Any]:
        def of_linear(linear: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*eqx.combine(linear, known))
            return [out for out, given in zip(outs, is_given, strict=True) if given]

        return jax.linear_transpose(of_linear, linear)(cts)[0]

    cts = [ct for ct, given in zip(cts, is_given, strict=True) if given]
    found = iter(_bind(transposed, known, cts))
    return [None if aval is None else next(found) for aval in linear]


# Calls `jaxpr`, which has no traced constants. Its JVP and transpose are also calls of this primitive, so
# derivatives are sequential as well.
sequential_call_p = Primitive("sequential_call")
sequential_call_p.multiple_results = True
sequential_call_p.def_impl(_call)
sequential_call_p.def_effectful_abstract_eval(lambda *avals, jaxpr: (jaxpr.out_avals, jaxpr.effects))
ad.primitive_jvps[sequential_call_p] = _jvp
ad.primitive_transposes[sequential_call_p] = _transpose
batching.fancy_primitive_batchers[sequential_call_p] = _batch
mlir.register_lowering(sequential_call_p, mlir.lower_fun(_call, multiple_results=True))
sequential_call_p.to_lojax = _call  # the hijax equivalent of a lowering, for high-level primitives
