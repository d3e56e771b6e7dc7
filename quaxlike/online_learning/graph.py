"""The parts of a recurrent network's step that matter for learning forward in time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from ..core import compat
from ..primitives import DefinedPrimitive
from .primitive import ETPPrimitive

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An equation in which trainable weights are used."""

    index: int
    """The index of the equation."""
    eqn: JaxprEqn
    weights: dict[str, int]
    """The positions of the trainable operands."""

    @property
    def primitive(self) -> ETPPrimitive:
        return cast(ETPPrimitive, self.eqn.primitive)

    @property
    def x_var(self) -> Any:
        i = self.primitive.x_invar_index
        return None if i is None else self.eqn.invars[i]

    @property
    def y_var(self) -> Any:
        return self.eqn.outvars[self.primitive.y_outvar_index]

    @property
    def weight_vars(self) -> dict[str, Any]:
        return {key: self.eqn.invars[i] for key, i in self.weights.items()}

    def rule(self, slot: str) -> Callable[..., Any]:
        """A rule of the primitive, with the parameters of the equation filled in."""
        rule = self.primitive.slot(slot).rule
        return lambda *args: rule(*args, **self.eqn.params)

    def has_rule(self, slot: str) -> bool:
        return self.primitive.slot(slot).registered

    def operands(self, operands: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """The input and the weights among the operands."""
        i = self.primitive.x_invar_index
        x = None if i is None else operands[i]
        return x, {key: operands[j] for key, j in self.weights.items()}


@dataclasses.dataclass(frozen=True)
class Group:
    """States of one shape that depend on each other elementwise."""

    states: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
    """The y of `op` acts on the states of `group`, without another op in between."""

    op: int
    group: int
    lead: int
    """The number of axes that the states have in front of y's."""


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def inline(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr, and the calls in it equation by equation."""
    opened = compat.opened(jaxpr)
    env = dict(zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=True))
    env |= dict(zip(opened.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _INLINED:
            inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            results = inline(inner, operands)
        else:
            results = bind(eqn, operands)
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in opened.outvars]


def refuse_hidden_ops(eqn: JaxprEqn) -> None:
    """Raises for operations inside loops and derivatives, whose gradient would be missing."""
    primitive = eqn.primitive
    if isinstance(primitive, DefinedPrimitive) and isinstance(primitive.root, ETPPrimitive):
        raise ValueError(
            f"ETP primitive {primitive.root.name!r} is batched or differentiated inside the step "
            f"(it became {primitive.name!r}), where no traces of its weights can be kept; map or "
            "differentiate the learner instead"
        )
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            if isinstance(inner.primitive, ETPPrimitive):
                raise ValueError(
                    f"ETP primitive {inner.primitive.name!r} is inside `{primitive.name}`, where no "
                    "traces of its weights can be kept; write the step without it"
                )
            refuse_hidden_ops(inner)
