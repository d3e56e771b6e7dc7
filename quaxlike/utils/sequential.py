"""Functions that `jax.vmap` runs one after the other."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import ad, batching, mlir

_P = ParamSpec("_P")
_R = TypeVar("_R")


def sequential_vmap_with_vjp(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function run sequentially under `jax.vmap`: once for each item, in a `jax.lax.scan`.

    For functions that do not batch, or whose batch does not fit into memory. It has derivatives of
    any order, in forward and reverse mode, which run sequentially too. Reverse mode computes the
    function anew, as under `jax.checkpoint`.

    **Arguments:**

    - `func`: a function from pytrees to a pytree of arrays. It is traced at each call, and may
        close over traced values.

    **Returns:**

    The same function, but for what `jax.vmap` makes of it.

    !!! example

        ```python
        solve = sequential_vmap_with_vjp(lambda matrix, b: jnp.linalg.solve(matrix, b))
        jax.vmap(solve)(matrices, bs)  # one solve at a time
        ```
    """

    call: Callable[..., Any] = func

    @functools.wraps(func)
    def sequential(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        arrays, others = _parted(leaves, is_array)

        def of_arrays(*arrays: Any) -> Any:
            args, kwargs = jax.tree.unflatten(in_tree, _merged(is_array, arrays, others))
            return call(*args, **kwargs)

        traced, out = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        # What `func` closes over becomes an operand, for transforms to see it.
        n = len(traced.consts)
        operands = [*traced.consts, *arrays]
        outs = _bind(lambda *xs: eval_jaxpr(traced.jaxpr, xs[:n], *xs[n:]), operands)
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return sequential


def _parted(xs: Iterable[Any], mask: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The items where the mask is true, and the others."""
    pairs = list(zip(xs, mask, strict=True))
    return [x for x, m in pairs if m], [x for x, m in pairs if not m]


def _merged(mask: Sequence[bool], xs: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """What `_parted` has parted."""
    where_true, where_false = iter(xs), iter(others)
    return [next(where_true if m else where_false) for m in mask]


def _bind(fun: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    return sequential_call_p.bind(*operands, jaxpr=jax.make_jaxpr(fun)(*operands))


def _call(*operands: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr
) -> tuple[list[Any], list[int]]:
    is_mapped = [axis is not None for axis in axes]
    mapped, shared = _parted(operands, is_mapped)
    mapped_axes, _ = _parted(axes, is_mapped)
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(mapped, mapped_axes, strict=True)]

    def step(carry: None, items: list[Any]) -> tuple[None, list[Any]]:
        # Another vmap around this one has to find the call again.
        return None, sequential_call_p.bind(*_merged(is_mapped, items, shared), jaxpr=jaxpr)

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
        varying, fixed = _parted(primals, varies)

        def of_varying(*varying: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*_merged(varies, varying, fixed))
            return _parted(outs, has_tangent)[0]

        return jax.jvp(of_varying, varying, list(tangents))[1]

    nonzero, _ = _parted(tangents, varies)
    given = _bind(tangents_out, [*primals, *nonzero])
    without, _ = _parted(outs, [not has for has in has_tangent])
    zeros = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in without]
    return outs, _merged(has_tangent, given, zeros)


def _transpose(cts: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    linear, known = _parted(operands, is_linear)
    avals = [x.aval for x in linear]
    is_given = [type(ct) is not ad.Zero for ct in cts]
    given, _ = _parted(cts, is_given)

    def transposed(*operands: Any) -> list[Any]:
        known, cts = operands[: is_linear.count(False)], operands[is_linear.count(False) :]

        def of_linear(*linear: Any) -> list[Any]:
            outs = jaxpr_as_fun(jaxpr)(*_merged(is_linear, linear, known))
            return _parted(outs, is_given)[0]

        return jax.linear_transpose(of_linear, *avals)(list(cts))

    return _merged(is_linear, _bind(transposed, [*known, *given]), [None] * len(known))


# A call of `jaxpr`, whose constants are concrete. Every derivative of it is again such a call, so
# that it is sequential as well.
sequential_call_p = Primitive("sequential_call")
sequential_call_p.multiple_results = True
sequential_call_p.def_impl(_call)
sequential_call_p.def_effectful_abstract_eval(
    lambda *avals, jaxpr: (jaxpr.out_avals, jaxpr.effects)
)
ad.primitive_jvps[sequential_call_p] = _jvp
ad.primitive_transposes[sequential_call_p] = _transpose
batching.primitive_batchers[sequential_call_p] = _batch
mlir.register_lowering(sequential_call_p, mlir.lower_fun(_call, multiple_results=True))
