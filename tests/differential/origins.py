"""Where the value of a program comes from: whether it is passed to `quaxify` and to the transforms inside of
it, closed over there, or made there.

Each is a function of the leaves that a value is made of, and gives the program's result: `make` builds the
value, or its array; `quaxify` does nothing to programs on arrays; `inside` puts the inner transforms around
the steps, `chain(x, ops)`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

import quaxlike as ql

from .operations import VALUE, operands_of
from .transforms import AS_OPERAND, INNER, OUTER, Function, scaled

Origin = Callable[..., Any]

ORIGINS: dict[str, Origin] = {}

WHOLE = {"closed_over_inside", "closed_over_twice", "made_inside_of_array"}
"""Those where the inner transforms are of an array, and the steps see all of the value, whatever they are."""

OF_TREES = {
    "closed_over": frozenset(AS_OPERAND),
    "made": frozenset(AS_OPERAND),
    "made_inside": {"jit"} | INNER.keys() & OUTER.keys(),
}
"""The inner transforms that a value goes through whose leaves JAX sees there: those that neither carry it nor
differentiate with respect to it, or if the steps begin with the leaves, those that take any tree."""


def _origin(of: Origin) -> Origin:
    ORIGINS[of.__name__] = of
    return of


OF_OPERANDS = {"grad_by_operands", "jvp_along_operands"}
"""The inner transforms that differentiate with respect to the operands of the steps."""

TRACED = {"argument", "argument_of_inner_level", "closed_over_inside"}
"""Those where the steps see the tracer of a value."""


def allowed(origin: str, inner: tuple[str, ...]) -> bool:
    """Whether a value of this origin goes through these inner transforms. A function with a custom derivative
    may not close over what is differentiated, says JAX."""
    if origin in ("closed_over_inside", "closed_over_twice") and any(x.startswith("custom_") for x in inner):
        return False
    return origin not in OF_TREES or OF_TREES[origin].issuperset(inner)


def takes(origin: str, text: str, inner: tuple[str, ...]) -> bool:
    """Whether an operation takes a value of this origin: to JAX the arguments of a function with a custom
    derivative are trees, of which the user's rules see the leaves, unless they are tracers. So are other
    Values that are closed over, if it differentiates with respect to them."""
    if origin == "closed_over_twice" and VALUE in operands_of(text) and not OF_OPERANDS.isdisjoint(inner):
        return False
    return origin in TRACED or not any(name in text for name in ("custom.", "jax.nn."))


@_origin
def argument(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    return quaxify(inside(chain))(make(leaves), ops)


@_origin
def argument_of_inner_level(
    make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any
) -> Any:
    """Two levels pass it by."""
    return quaxify(quaxify(quaxify(inside(chain)), False), False)(make(leaves), ops)


@_origin
def closed_over(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    x = make(leaves)
    return quaxify(lambda s: inside(chain)(x, scaled(ops, s)))(1.0)


@_origin
def closed_over_inside(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    return quaxify(lambda x, ops: inside(_of_array(chain, lambda: x))(ops["z"], ops))(make(leaves), ops)


@_origin
def closed_over_twice(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    x = make(leaves)
    return quaxify(lambda z: inside(_of_array(chain, lambda: x))(z, ops))(ops["z"])


@_origin
def made(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    return quaxify(lambda leaves, ops: inside(chain)(make(leaves), ops))(leaves, ops)


@_origin
def made_inside(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    like_leaves = jtu.tree_map(lambda x: 0.5 * x, leaves)
    # To a transform what its function returns is a tree, of whose leaves it takes squares and cotangents.
    dense = lambda leaves, ops: ql.materialise(chain(make(leaves), ops))
    return quaxify(inside(dense))(leaves, ops | {"z": like_leaves})


@_origin
def made_inside_of_array(make: Any, quaxify: Any, inside: Any, chain: Function, leaves: Any, ops: Any) -> Any:
    made = lambda leaves, ops: inside(_of_array(chain, lambda: make(leaves)))(ops["z"], ops)
    return quaxify(made)(leaves, ops)


def _of_array(chain: Function, x: Callable[[], Any]) -> Function:
    """The steps on a value, as a function of an array: the operands are multiplied by its sum."""
    return lambda z, ops: chain(x(), scaled(ops, jnp.sum(jnp.real(z))))
