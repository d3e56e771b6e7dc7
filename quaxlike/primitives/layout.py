"""The layout of a defined primitive's operands, results and parameters, as seen by its rules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.tree_util as jtu
from jax.interpreters import ad

if TYPE_CHECKING:
    from .define import DefinedPrimitive

Params = dict[str, Any]

_LEAF = jtu.tree_structure(0)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The hand-written rules; see `define_primitive`."""

    jvp: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    vjp_with_results: bool = False
    transpose: Callable[..., Any] | None = None
    batching: Callable[..., Any] | None = None


def is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or jax.typeof(tangent).dtype == jax.dtypes.float0


def zero_tangent(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def with_form(params: Params, form: Any) -> Params:
    return {**params, "forms": (*params.get("forms", ()), form)}


def without_form(params: Mapping[str, Any]) -> tuple[Any, Params]:
    *below, form = params["forms"]
    rest = {name: value for name, value in params.items() if name != "forms"}
    return form, ({**rest, "forms": tuple(below)} if below else rest)


def without_tree(params: Mapping[str, Any]) -> tuple[Any, Params]:
    static = {name: value for name, value in params.items() if name != "in_tree"}
    return params.get("in_tree"), static


def unflatten(in_tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaves) if in_tree is None else jtu.tree_unflatten(in_tree, leaves)


def flatten_like(tree: Any, value: Any, what: str) -> list[Any]:
    """The leaves of `value`, which has the structure `tree`, with None allowed for a leaf or for all."""
    if value is None:
        return [None] * tree.num_leaves
    try:
        return tree.flatten_up_to(value)
    except ValueError as error:
        found = jtu.tree_structure(value)
        raise TypeError(f"{what} returned the structure {found}, expected {tree}") from error


def operand_leaves(p: "DefinedPrimitive", rule: str, in_tree: Any, num_leaves: int, value: Any) -> list[Any]:
    trees = [_LEAF] * num_leaves if in_tree is None else jtu.treedef_children(in_tree)
    if not isinstance(value, tuple | list) or len(value) != len(trees):
        raise TypeError(
            f"the {rule} rule of primitive {p.name!r} must return a tuple with a cotangent, or "
            f"None, for each of its {len(trees)} operands, got {value!r}"
        )
    leaves = zip(trees, value, strict=True)
    what = f"the {rule} rule of {p.name!r}"
    return [leaf for tree, ct in leaves for leaf in flatten_like(tree, ct, what)]
