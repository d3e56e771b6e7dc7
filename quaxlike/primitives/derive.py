"""Differentiates, transposes and batches a primitive, using either a handwritten rule or a derived form.

Batching is always outermost: the derivative of a batched primitive is defined to be its parent's derivative,
batched. So a handwritten derivative is used regardless of whether you differentiate or `vmap` first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import mapped_aval
from jax.interpreters import ad

from .forms import Arrays, Batching, Jvp, Params, Transpose, Vjp, is_zero, merge, split, zero_tangent
from .parameters import unflatten, without_form, without_tree
from .primitive import DefinedPrimitive

_LEAF = jtu.tree_structure(0)


def jvp(p: DefinedPrimitive, primals: Arrays, tangents: Arrays, /, **params: Any) -> tuple[Any, Any]:
    out = p.bind(*primals, **params)
    results = out if p.multiple_results else [out]
    tangents_out = result_tangents(p, primals, results, tangents, params)
    return out, (tangents_out if p.multiple_results else tangents_out[0])


def transpose(p: DefinedPrimitive, cotangent: Any, /, *operands: Any, **params: Any) -> list[Any]:
    cotangents = cotangent if p.multiple_results else [cotangent]
    return _cotangents(p, cotangents, operands, params)


# Forward mode -------------------------------------------------------------------------------------


def result_tangents(
    p: DefinedPrimitive, primals: Arrays, results: Arrays, tangents: Arrays, params: Params
) -> list[Any]:
    """Returns the results' tangents, which are symbolic zeros if they don't depend on the operands."""
    nonzero = tuple(not is_zero(t) for t in tangents)
    zeros = [zero_tangent(x) for x in results]
    if not any(nonzero):
        return zeros
    if p.form == "batch":
        return _batched_tangents(p, primals, results, tangents, params)
    if (by_hand := _jvp_by_hand(p, primals, tangents, zeros, params)) is not None:
        return by_hand
    outputs = p.nonzero_tangents(nonzero, [jax.typeof(x) for x in primals], params)
    if not any(outputs):
        return zeros
    kept = results if p.rules.vjp_with_results else []
    form = Jvp(nonzero, outputs, p.rules.vjp_with_results)
    live, _ = split(nonzero, tangents)
    out = p.jvp_p.bind(*primals, *kept, *live, **with_form(params, form))
    return merge(outputs, out, split(outputs, zeros)[1])


def _batched_tangents(
    p: DefinedPrimitive, primals: Arrays, results: Arrays, tangents: Arrays, params: Params
) -> list[Any]:
    form, below = without_form(params)
    assert p.parent is not None
    parent = p.parent
    nonzero = [not is_zero(t) for t in tangents]
    outputs: list[bool] = []

    def per_example(primals: list[Any], results: list[Any], live: list[Any]) -> list[Any]:
        zeros = [zero_tangent(x) for x, nz in zip(primals, nonzero, strict=True) if not nz]
        out = result_tangents(parent, primals, results, merge(nonzero, live, zeros), below)
        outputs[:] = [not is_zero(t) for t in out]
        return split(outputs, out)[0]

    dims = list(form.dims)
    vmapped = form.vmap(per_example, (dims, [0] * len(results), split(nonzero, dims)[0]))
    live = vmapped(list(primals), list(results), split(nonzero, tangents)[0])
    zeros = [zero_tangent(x) for x in results]
    return merge(outputs, live, split(outputs, zeros)[1])


def _jvp_by_hand(
    p: DefinedPrimitive, primals: Arrays, tangents: Arrays, zeros: Arrays, params: Params
) -> list[Any] | None:
    if p.rules.jvp is None:
        return None
    in_tree, static = without_tree(params)
    tangents = [None if is_zero(t) else t for t in tangents]
    out = p.rules.jvp(unflatten(in_tree, primals), unflatten(in_tree, tangents), **static)
    if out is NotImplemented:
        return None
    leaves = flatten_like(
        p.results_tree(map(jax.typeof, primals), params), out, f"the jvp rule of {p.name!r}"
    )
    return [zero if t is None else t for t, zero in zip(leaves, zeros, strict=True)]


# Reverse mode -------------------------------------------------------------------------------------


def _cotangents(p: DefinedPrimitive, cotangents: Arrays, operands: Arrays, params: Params) -> list[Any]:
    """Returns the cotangents for the undefined operands, and None for zeros and all other operands."""
    undefined = tuple(ad.is_undefined_primal(x) for x in operands)
    nonzero = tuple(not is_zero(ct) for ct in cotangents)
    if not any(nonzero):
        return [None] * len(operands)
    live, _ = split(nonzero, cotangents)
    parent = p.parent
    if parent is not None and p.form == "batch":
        return _batched_cotangents(p, cotangents, operands, params)
    if parent is not None and p.form == "jvp":
        return _transpose_jvp(parent, live, nonzero, operands, params)
    if parent is not None and p.form == "vjp":
        return _transpose_vjp(parent, live, nonzero, operands, params)
    if parent is not None and p.form == "transpose":
        return _transpose_transpose(parent, cotangents, operands, params)
    if (by_hand := _transpose_by_hand(p, cotangents, operands, params)) is not None:
        return by_hand
    linear = tuple(x.aval if u else None for x, u in zip(operands, undefined, strict=True))
    held = split(undefined, operands)[1]
    out = p.transpose_p.bind(*held, *live, **with_form(params, Transpose(linear, nonzero)))
    return merge(undefined, out, [None] * len(held))


def _transpose_jvp(
    parent: DefinedPrimitive, live: list[Any], nonzero: tuple[bool, ...], operands: Arrays, params: Params
) -> list[Any]:
    form, below = without_form(params)
    primals, results, tangents = form.groups(operands)
    _require_defined(parent, [*primals, *results])
    wanted = [ad.is_undefined_primal(t) for t in tangents]
    # `nonzero` has an entry for each tangent returned by this form. In contrast the rules require an entry
    # for each result of the parent, so fill in the missing ones.
    cotangents = tuple(merge(form.outputs, nonzero, [False] * form.outputs.count(False)))
    full = merge(cotangents, live, [None] * cotangents.count(False))
    out = _vjp_by_hand(parent, full, primals, results, below)
    if out is None:
        mask = tuple(merge(form.nonzero, wanted, [False] * form.nonzero.count(False)))
        form_out = Vjp(mask, cotangents)
        found = parent.vjp_p.bind(*primals, *live, **with_form(below, form_out))
        out = merge(mask, found, [None] * mask.count(False))
    of_tangents = split(form.nonzero, out)[0]
    of_tangents = [ct if w else None for ct, w in zip(of_tangents, wanted, strict=True)]
    return [None] * (len(primals) + len(results)) + of_tangents


def _transpose_vjp(
    parent: DefinedPrimitive, live: list[Any], nonzero: tuple[bool, ...], operands: Arrays, params: Params
) -> list[Any]:
    form, below = without_form(params)
    primals, cotangents = operands[: len(form.nonzero)], operands[len(form.nonzero) :]
    _require_defined(parent, primals)
    wanted = [ad.is_undefined_primal(ct) for ct in cotangents]
    mask = tuple(merge(form.nonzero, nonzero, [False] * form.nonzero.count(False)))
    outputs = tuple(merge(form.cotangents, wanted, [False] * form.cotangents.count(False)))
    out = parent.jvp_p.bind(*primals, *live, **with_form(below, Jvp(mask, outputs)))
    return [None] * len(primals) + merge(wanted, out, [None] * wanted.count(False))


def _transpose_transpose(
    parent: DefinedPrimitive, cotangents: Arrays, operands: Arrays, params: Params
) -> list[Any]:
    form, below = without_form(params)
    num_held = form.mask.count(False)
    held, linear = operands[:num_held], operands[num_held:]
    _require_defined(parent, held)
    wanted = [ad.is_undefined_primal(x) for x in linear]
    full = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = parent.bind(*merge(form.mask, full, held), **below)
    results = out if parent.multiple_results else [out]
    of_linear = split(form.cotangents, results)[0]
    return [None] * num_held + [ct if w else None for ct, w in zip(of_linear, wanted, strict=True)]


def _batched_cotangents(
    p: DefinedPrimitive, cotangents: Arrays, operands: Arrays, params: Params
) -> list[Any]:
    form, below = without_form(params)
    assert p.parent is not None
    parent = p.parent
    undefined = [ad.is_undefined_primal(x) for x in operands]
    nonzero = [not is_zero(ct) for ct in cotangents]
    outputs: list[bool] = []

    def of_example(operand: Any, dim: int | None) -> ad.UndefinedPrimal:
        aval = operand.aval
        return ad.UndefinedPrimal(aval if dim is None else mapped_aval(form.size, dim, aval))

    unknown = [of_example(x, d) for x, d, u in zip(operands, form.dims, undefined, strict=True) if u]
    zeros = [
        ad.Zero(mapped_aval(form.size, 0, ct.aval))
        for ct, nz in zip(cotangents, nonzero, strict=True)
        if not nz
    ]

    def per_example(held: list[Any], live: list[Any]) -> list[Any]:
        ops = merge(undefined, unknown, held)
        out = _cotangents(parent, merge(nonzero, live, zeros), ops, below)
        outputs[:] = [ct is not None and not is_zero(ct) for ct in out]
        return split(outputs, out)[0]

    held_dims = split(undefined, form.dims)[1]
    live, _ = split(nonzero, cotangents)
    out = form.vmap(per_example, (held_dims, [0] * len(live)))(split(undefined, operands)[1], live)
    dims, others = split(outputs, form.dims)
    # If an operand isn't batched then it was broadcast over the batch, so sum over its cotangents.
    placed = [ct.sum(0) if d is None else jnp.moveaxis(ct, 0, d) for ct, d in zip(out, dims, strict=True)]
    return merge(outputs, placed, [None] * len(others))


def _vjp_by_hand(
    p: DefinedPrimitive, cotangents: Arrays, primals: Arrays, results: Arrays, params: Params
) -> list[Any] | None:
    if p.rules.vjp is None:
        return None
    in_tree, static = without_tree(params)
    out_tree = p.results_tree(map(jax.typeof, primals), params)
    kept = [jtu.tree_unflatten(out_tree, results)] if p.rules.vjp_with_results else []
    cotangent = jtu.tree_unflatten(out_tree, cotangents)
    out = p.rules.vjp(cotangent, *kept, *unflatten(in_tree, primals), **static)
    if out is NotImplemented:
        return None
    return operand_leaves(p.name, "vjp", in_tree, len(primals), out)


def _transpose_by_hand(
    p: DefinedPrimitive, cotangents: Arrays, operands: Arrays, params: Params
) -> list[Any] | None:
    if p.rules.transpose is None:
        return None
    in_tree, static = without_tree(params)
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands]
    live = [None if is_zero(ct) else ct for ct in cotangents]
    cotangent = jtu.tree_unflatten(p.results_tree(avals, params), live)
    out = p.rules.transpose(cotangent, *unflatten(in_tree, operands), **static)
    if out is NotImplemented:
        return None
    return operand_leaves(p.name, "transpose", in_tree, len(operands), out)


def _require_defined(p: DefinedPrimitive, operands: Arrays) -> None:
    if any(map(ad.is_undefined_primal, operands)):
        raise TypeError(
            f"cannot transpose a derivative of primitive {p.name!r} with respect to the point where it was "
            "taken: it is not linear in that"
        )


# Batching -----------------------------------------------------------------------------------------


def batch(
    p: DefinedPrimitive, axis: Any, operands: Arrays, dims: Arrays, /, **params: Any
) -> tuple[Any, Any]:
    # JAX uses a bare `object()` if an axis doesn't have a name.
    axis_name = None if type(axis.name) is object else axis.name
    if all(d is None for d in dims) and not _uses_axis(p, axis_name, operands, params):
        out = p.bind(*operands, **params)
        return out, ([None] * len(out) if p.multiple_results else None)
    if (by_hand := _batch_by_hand(p, axis.size, operands, dims, params)) is not None:
        return by_hand
    form = Batching(tuple(dims), axis.size, axis_name, axis.spmd_name)
    out = p.batch_p.bind(*operands, **with_form(params, form))
    return (out, [0] * len(out)) if p.multiple_results else (out[0], 0)


def _uses_axis(p: DefinedPrimitive, name: Any, operands: Arrays, params: Params) -> bool:
    if name is None:
        return False
    effects = p.jaxpr([jax.typeof(x) for x in operands], params).effects
    return any(getattr(effect, "name", None) == name for effect in effects)


def _batch_by_hand(
    p: DefinedPrimitive, size: Any, operands: Arrays, dims: Arrays, params: Params
) -> tuple[Any, Any] | None:
    if p.rules.batching is None:
        return None
    in_tree, static = without_tree(params)
    by_hand = p.rules.batching(size, unflatten(in_tree, operands), unflatten(in_tree, dims), **static)
    if by_hand is NotImplemented:
        return None
    out, out_dims = by_hand
    if not p.multiple_results:
        return out, out_dims
    out_leaves, out_tree = jtu.tree_flatten(out)
    return out_leaves, flatten_like(out_tree, out_dims, f"the batching rule of {p.name!r}")


# Parameters and leaves ----------------------------------------------------------------------------


def with_form(params: Params, form: Any) -> Params:
    return {**params, "forms": (*params.get("forms", ()), form)}


def flatten_like(tree: Any, value: Any, what: str) -> list[Any]:
    """Returns the leaves of `value`, which should have the structure `tree`. It may have None in place of a
    leaf, or be None as a whole.
    """
    if value is None:
        return [None] * tree.num_leaves
    try:
        return tree.flatten_up_to(value)
    except ValueError as error:
        found = jtu.tree_structure(value)
        raise TypeError(f"{what} returned the structure {found}, expected {tree}") from error


def operand_leaves(name: str, rule: str, in_tree: Any, num_leaves: int, value: Any) -> list[Any]:
    trees = [_LEAF] * num_leaves if in_tree is None else jtu.treedef_children(in_tree)
    if not isinstance(value, tuple | list) or len(value) != len(trees):
        raise TypeError(
            f"the {rule} rule of primitive {name!r} must return a tuple with a cotangent, or "
            f"None, for each of its {len(trees)} operands, got {value!r}"
        )
    leaves = zip(trees, value, strict=True)
    what = f"the {rule} rule of {name!r}"
    return [leaf for tree, ct in leaves for leaf in flatten_like(tree, ct, what)]
