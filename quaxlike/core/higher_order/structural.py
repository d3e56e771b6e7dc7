"""Primitives that only move data, applied to each leaf, and a few others.

Some of these are Equinox's own primitives, without public names. Debug callbacks receive the Value itself.
(But `pure_callback` and `io_callback` require arrays: a Value is materialised under the policy, as for any
primitive without a rule.) Pallas kernels and references only accept plain arrays.

Only add a rule here if it is correct for *every* type. Anything depending on the leaves' meaning must be left
to the type's rules.
"""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive

from .. import compat
from ..jaxprs.linearity import has_tangent, is_linear, same_pattern
from ..jaxprs.slots import flatten, spread, unflatten
from ..jaxprs.unify import StructureError, convert_to, unify, widened, without_placeholder
from ..policy import by_default
from ..trace import Operands, Params, QuaxTrace, builtin, value_types
from ..values import aval_of, is_value
from .calls import leaf_layouts, leaf_shardings


@builtin(
    "copy",
    "copy_p",
    "stop_gradient",
    "name",
    "optimization_barrier",
    "non_differentiable_tangent",
)
def leafwise(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    leaves, slots = flatten(operands)
    if primitive.multiple_results:
        return unflatten(slots, primitive.bind(*leaves, **params))
    return unflatten(slots, [primitive.bind(leaf, **params) for leaf in leaves])[0]


@builtin("CheckpointName", "CheckpointNameFwd")
def _checkpoint_name(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Names a result for `jax.checkpoint`, under the flag `jax_remat3`."""
    # Each instance of this primitive is for a particular type of array, so create one for each leaf.
    hi = params["_prim"]
    leaves, slots = flatten(operands)
    return unflatten(slots, [type(hi)(hi.name, jax.typeof(leaf))(leaf) for leaf in leaves])


@builtin("pvary", "pcast")
def _pvary(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Makes each leaf vary over these axes, except those it already varies over."""
    leaves, slots = flatten(operands)
    out = []
    for leaf in leaves:
        # The array varies over an axis if any of its leaves does. Other leaves may not, so don't treat all
        # alike: casting a leaf that already varies would be an error.
        axes = tuple(a for a in params["axes"] if a not in compat.varying_axes(leaf))
        out.append(primitive.bind(leaf, **params | {"axes": axes}) if axes else leaf)
    return unflatten(slots, out)[0]


@builtin("device_put")
def _device_put(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    leaves, slots = flatten(operands)
    params = params | {
        "devices": leaf_shardings(params["devices"], slots),
        "srcs": leaf_shardings(params["srcs"], slots),
        "copy_semantics": spread(params["copy_semantics"], slots),
    }
    return unflatten(slots, primitive.bind(*leaves, **params))


@builtin("sharding_constraint")
def _sharding_constraint(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    leaves, slots = flatten(operands)
    shardings = leaf_shardings([params["sharding"]], slots)
    layouts = leaf_layouts([params["layout"]], slots)
    out = []
    for leaf, sharding, layout in zip(leaves, shardings, layouts, strict=True):
        free = frozenset(d for d in params["unconstrained_dims"] if d < np.ndim(leaf))
        own = {"sharding": sharding, "layout": layout, "unconstrained_dims": free}
        out.append(primitive.bind(leaf, **params | own))
    return unflatten(slots, out)[0]


@builtin("select_n")
def select(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Selects between whole Values if the predicate is a scalar, or between individual elements otherwise."""
    which, *cases = operands
    # One predicate per element would have to mix parts of both Values. This isn't possible on leaves: their
    # axes aren't the array's.
    if is_value(which) or np.shape(which) != ():
        return by_default(trace, primitive, operands, params)
    _, slots = flatten(cases)
    try:
        slot = functools.reduce(lambda a, b: unify(a, b, "select"), slots)
    except StructureError:
        # Without a type common to all cases, select between dense arrays, which is always correct.
        slot = slots[0].dense()
    if slot.treedef is None:
        return by_default(trace, primitive, operands, params)
    leaves = [flatten([convert_to(x, slot, primitive.name)])[0] for x in cases]
    return slot.unflatten([primitive.bind(which, *xs, **params) for xs in zip(*leaves, strict=True)])


@builtin("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")
def _write(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Writes a Value into a library's buffer. If the buffer is a plain array, it is first lifted to the
    Value's type."""
    updates = operands[1] if primitive.name == "dynamic_update_slice" else operands[2]
    # Only ever change the buffer's type: the program may rely on the type of the Value being written.
    if is_value(operands[0]) or not is_value(updates):
        return by_default(trace, primitive, operands, params)
    buffer = _lifted(operands[0], updates)
    if not is_value(buffer):
        return by_default(trace, primitive, operands, params)
    return trace.dispatch(primitive, [buffer, *operands[1:]], params)


def _lifted(buffer: Any, like: Any) -> Any:
    """Lifts a buffer to the type of a Value, which may have another shape. If its type can only lift arrays
    of the same shape, the buffer stays an array."""
    if is_value(buffer):
        return widened(buffer, like)
    try:
        out = widened(buffer, like)
        return out if not is_value(out) or aval_of(out).shape == buffer.shape else buffer
    except Exception:  # `promote` may raise any error
        return buffer


@builtin("add_any", "add_jaxvals")
def _add_jaxvals(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Adds two cotangents. Linear Values with the same pattern are added leaf by leaf."""
    x, y = operands
    if is_value(x) and is_value(y) and is_linear(x) and is_linear(y) and same_pattern(x, y):

        def add(p: Any, q: Any) -> Any:
            # Adding leaves without tangents would change the pattern. `same_pattern` has already found them
            # equal, so just return one of them.
            return primitive.bind(p, q, **params) if has_tangent(jax.typeof(p)) else p

        return jtu.tree_map(add, x, y)
    # JAX has a separate primitive for adding tangents, but types only register rules for `add`, so use these.
    out = trace.dispatch_key((jax.lax.add_p, *value_types(operands)), list(operands), {}, only_rules=True)
    return by_default(trace, primitive, operands, params) if out is NotImplemented else out


@builtin("convert_element_type")
def _convert_element_type(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Converts a Value to the dtype it already has. Loops do this if a carry starts with weak types."""
    (x,) = operands
    aval = aval_of(x)
    # A change of dtype is left to the type's rules. (The leaves' dtypes may have nothing to do with the
    # array's.)
    if params["new_dtype"] != aval.dtype or params["weak_type"] or params["sharding"] is not None:
        return by_default(trace, primitive, operands, params)
    out = jtu.tree_map(
        lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if _is_weak(leaf) else leaf, x
    )
    # The type may be weak by itself, e.g. if it materialises a Python number.
    return by_default(trace, primitive, operands, params) if aval_of(out).weak_type else out


def _is_weak(leaf: Any) -> bool:
    return getattr(jax.typeof(leaf), "weak_type", False)


@builtin("quaxlike_index")
def _index(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """Leaves indices unchanged if they are a Value from an outer level, which checks them on use."""
    return operands[0]


builtin("nonbatchable", "nontraceable", "nondifferentiable_backward")(leafwise)
builtin("select_if_vmap")(select)


@builtin("maybe_set")
def _maybe_set(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    """Writes a Value into a buffer in one of Equinox's loops, after lifting the buffer to its type."""
    which, buffer, x, *index = operands
    if any(map(is_value, (which, *index))):
        return by_default(trace, primitive, operands, params)
    buffer = _lifted(without_placeholder(buffer), x)
    x = widened(x, buffer)
    # With different structures, unrelated leaves would be matched up.
    if jtu.tree_structure(buffer) != jtu.tree_structure(x):
        return by_default(trace, primitive, operands, params)
    into, (slot,) = flatten([buffer])
    pairs = zip(into, flatten([x])[0], strict=True)
    return [slot.unflatten([primitive.bind(which, to, leaf, *index, **params)[0] for to, leaf in pairs])]


@builtin("debug_callback")
def _debug_callback(
    trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params
) -> Sequence[Any]:
    callback = params["callback"]
    leaves, slots = flatten(operands)

    def on_leaves(*leaves: Any) -> Any:
        return callback(*unflatten(slots, leaves))

    return primitive.bind(*leaves, **params | {"callback": on_leaves})


@builtin("debug_print")
def _debug_print(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> Sequence[Any]:
    leaves, slots = flatten(operands)
    # With a number in place of each leaf, the tree specifies where in the message each leaf is printed.
    inputs = unflatten(slots, range(len(leaves)))
    in_tree = jtu.tree_structure(jtu.tree_unflatten(params["in_tree"], inputs))
    return primitive.bind(*leaves, **params | {"in_tree": in_tree})


@builtin("pallas_call")
def _pallas_call(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> NoReturn:
    name = params.get("name") or compat.debug_info_of(params["jaxpr"]).func_name
    raise _takes_arrays(f"The Pallas kernel {name!r}", operands)


@builtin("new_ref", "ref", "mutable_array")
def _new_ref(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> NoReturn:
    raise _takes_arrays("`jax.new_ref`", operands)


def _takes_arrays(what: str, operands: Sequence[Any]) -> NotImplementedError:
    names = ", ".join(type(x).__name__ for x in operands if is_value(x))
    return NotImplementedError(
        f"{what} takes arrays; found {names}. Apply `quaxlike.materialise` to it first, pass its array "
        "fields one by one, or register a rule for the primitive."
    )
