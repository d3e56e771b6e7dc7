"""The equation for making a Value from its leaves, bound by `trace.stage` inside a transform.

When a level evaluates this equation, the result is the Value. Any transform in between only sees an array, so
the equation has a derivative and a batching rule, which must be equivalent to those of `materialise`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..jaxprs.linearity import has_tangent, held, is_linear, linear_part
from ..jaxprs.slots import LeafLayout
from ..levels import not_dispatched
from ..policy import dense
from ..trace import Operands, Params, QuaxTrace, builtin, stage, value_p
from ..values import Value, materialise, materialise_p, materialised
from .control_flow import stacks
from .linear import jvp_along

_HINT = (
    "It was made inside of a transform, and passed to a function of JAX. Use its operators (`@` for "
    "`jnp.matmul`), which follow its rules there, or call `quaxify` around the function."
)


@builtin("quaxlike_value")
def _value(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    # If this level doesn't dispatch on the Value, bind the equation again, for an outer level.
    value = jtu.tree_unflatten(params["treedef"], operands)
    return value if trace.dispatches_on(value) else stage(value)


@value_p.def_abstract_eval
def _aval(*avals: Any, treedef: Any) -> Any:
    return LeafLayout(treedef, avals).aval


@value_p.def_impl
def _undispatched(*leaves: Any, treedef: Any) -> Any:
    """Raises an error: no level dispatched on the Value. For example, a function was traced inside `quaxify`,
    but is called outside it."""
    raise RuntimeError(not_dispatched(jtu.tree_unflatten(treedef, leaves), "a JAX function"))


mlir.register_lowering(value_p, mlir.lower_fun(_undispatched, multiple_results=False))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, treedef: Any) -> tuple[Any, Any]:
    """Returns a Value as the tangent. Nonlinear parts (e.g. NF4 inside a quantity) are materialised.

    If the type itself isn't linear, the tangent is an array instead.
    """
    value: Value = jtu.tree_unflatten(treedef, primals)
    out = stage(value)
    if not has_tangent(jax.typeof(out)) or all(type(t) is ad.Zero for t in tangents):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    if is_linear(value):
        leaves = [
            ad.instantiate_zeros(t) if has_tangent(jax.typeof(x)) else x
            for x, t in zip(primals, tangents, strict=True)
        ]
        return out, value_p.bind(*leaves, treedef=treedef)

    structure: Any = None

    def linear(*leaves: Any) -> list[Any]:
        nonlocal structure
        to_dense = functools.partial(dense, what="the derivative of a Value", hint=_HINT)
        part = linear_part(jtu.tree_unflatten(treedef, leaves), to_dense)
        structure = jtu.tree_structure(part)
        return jtu.tree_leaves(part)

    moved, along = jvp_along(linear, primals, tangents)
    if jtu.treedef_is_leaf(structure):
        return out, along[0]
    leaves = [t if has_tangent(jax.typeof(x)) else x for x, t in zip(moved, along, strict=True)]
    return out, value_p.bind(*leaves, treedef=structure)


def _transpose(ct: Any, *leaves: Any, treedef: Any) -> Sequence[Any]:
    undefined = [ad.is_undefined_primal(x) for x in leaves]
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in leaves if ad.is_undefined_primal(x)]
    # Don't instantiate symbolic zeros, to avoid computing with them.
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if unknown else None for x, unknown in zip(leaves, undefined, strict=True)]

    value: Value = jtu.tree_unflatten(treedef, leaves)
    for part in (value, *held(value)):
        # The leaves' cotangents are plain arrays, but `ct` may be e.g. a quantity. The type specifies how to
        # convert between the two.
        if (factor := part.cotangent_factor(ct.dtype)) is not None:
            ct = jnp.multiply(ct, stage(factor))

    def of_undefined(*parts: Any) -> Any:
        parts_left = iter(parts)
        whole = [next(parts_left) if u else x for x, u in zip(leaves, undefined, strict=True)]
        return materialised(jtu.tree_unflatten(treedef, whole))

    try:
        found = jax.linear_transpose(of_undefined, *avals)(ct)
    except NotImplementedError:  # JAX can differentiate e.g. a scatter, but not transpose it
        found = jax.vjp(of_undefined, *[jnp.zeros(a.shape, a.dtype) for a in avals])[1](ct)
    cts = iter(found)
    return [next(cts) if unknown else None for unknown in undefined]


def _batching(operands: Sequence[Any], dims: Sequence[Any], *, treedef: Any) -> tuple[Any, int]:
    """Stacks Values into a single Value, if stacking their leaves results in one."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    leaves = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    # Stacking the leaves doesn't necessarily stack the arrays. For example, a static field may list the axes.
    one = LeafLayout(treedef, tuple(jexc.mapped_aval(size, 0, jax.typeof(x)) for x in leaves))
    if stacks(one, size):
        return value_p.bind(*leaves, treedef=treedef), 0

    def to_dense(*row: Any) -> Any:
        return dense(jtu.tree_unflatten(treedef, row), "a stack of Values", hint=_HINT)

    return jax.vmap(to_dense)(*leaves), 0


ad.primitive_jvps[value_p] = _jvp
ad.primitive_transposes[value_p] = _transpose
batching.primitive_batchers[value_p] = _batching


# `quaxlike.materialise` inside a transform.


@builtin("quaxlike_materialise")
def _materialise(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    return materialise(operands[0])


materialise_p.def_impl(lambda x: x)
materialise_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(materialise_p, lambda ctx, x: [x])
ad.deflinear2(materialise_p, lambda ct, x: [ct])
batching.defvectorized(materialise_p)
