"""The ops and state groups in a recurrent step, and the relations between them.

Learners keep one trace for each `Relation`. Any effect of a trained weight on the state must either be
captured as a relation or be reported to the user. Otherwise its gradient would be silently dropped.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from ..core import compat
from ..core.high_level import as_call
from ..core.source_lines import lines_of
from ..primitives import DefinedPrimitive
from .primitive import RULES, ETPPrimitive

# The parameter holding the jaxpr of each inlined call.
INLINED = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
}

# Given a variable of the step and its value, returns this value without a derivative.
Fixed = Callable[[Any, Any], Any]


def in_any_derivative(atom: Any, value: Any) -> Any:
    return lax.stop_gradient(value)


def at_values(values: Mapping[Any, Any]) -> Fixed:
    """Fixes variables at their `values`, which are computed outside the function to differentiate.

    A derivative of the whole learner (as in meta-learning) still sees them, unlike with `stop_gradient`.
    """
    return lambda atom, value: value_at(values, atom)


def value_at(values: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An equation with trainable weights."""

    index: int
    """The position of this equation in the step."""
    eqn: JaxprEqn
    weights: dict[str, int]
    """The operand index for each trainable weight."""

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
        """Returns a rule of the primitive, with this equation's parameters already applied."""
        return self.plain_rule(slot, **self.primitive.plain_params(self.eqn.params))

    def plain_rule(self, slot: str, **params: Any) -> Callable[..., Any]:
        """Returns a rule of the primitive. Its error messages mention the rule."""
        rule = self.primitive.slot(slot).rule

        def call(*args: Any) -> Any:
            try:
                return rule(*args, **params)
            except (TypeError, AttributeError, ValueError) as error:
                raise TypeError(f"{self._told(slot)} failed with {type(error).__name__}: {error}.") from error

        return call

    def run(self, slot: str, *args: Any, like: Any) -> Any:
        """Calls a rule and checks its output against the shapes of `like` (an array or a dict)."""
        result = self.rule(slot)(*args)
        if _form(result) != _form(like):
            raise self.wrong_result(slot, _form(like), result)
        return result

    def wrong_result(self, slot: str, expected: str, found: Any) -> TypeError:
        return TypeError(f"{self._told(slot)} must return {expected}; found {_form(found)}.")

    def _told(self, slot: str) -> str:
        return f"rule {slot!r} of ETP primitive {self.primitive.name!r}, {RULES[slot]},"

    def has_rule(self, slot: str) -> bool:
        return self.primitive.slot(slot).registered

    @property
    def told(self) -> str:
        """The name of the primitive and the equation's source line, for error messages."""
        line = next((f" at {line}" for line in lines_of(self.eqn)), "")
        return f"{self.primitive.name!r}{line}"

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        return bind(self.eqn, operands)

    def with_fixed_weights(self, operands: Sequence[Any], fixed: Fixed) -> list[Any]:
        weights, atoms = self.weights.values(), self.eqn.invars
        return [fixed(atoms[i], x) if i in weights else x for i, x in enumerate(operands)]

    def bind_with_fixed_weights(self, operands: Sequence[Any], fixed: Fixed) -> list[Any]:
        """Binds the primitive with its weights held fixed in y. Its other results have no traces, so they are
        still differentiated.
        """
        results = bind(self.eqn, self.with_fixed_weights(operands, fixed))
        if len(results) == 1:
            return results
        i = self.primitive.y_outvar_index
        return with_items(bind(self.eqn, operands), [i], [results[i]])

    def operands(self, operands: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Selects just the input and the weights from a list of operands."""
        i = self.primitive.x_invar_index
        x = None if i is None else operands[i]
        return x, {key: operands[j] for key, j in self.weights.items()}


def _form(x: Any) -> str:
    """Describes a rule's output, for error messages."""
    if isinstance(x, Mapping):
        parts = ", ".join(f"{key!r}: {_form(x[key])}" for key in sorted(x, key=str))
        return f"a dict {{{parts}}}"
    if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"an array of shape {tuple(x.shape)}"
    return repr(x)


def widest(*dtypes: Any) -> Any:
    """Returns the promoted dtype. Unlike NumPy, this can combine float16 with bfloat16."""

    def wider(a: Any, b: Any) -> Any:
        try:
            return np.promote_types(a, b)
        except TypeError:
            return np.dtype(np.float32)

    return functools.reduce(wider, dtypes)


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of states with the same shape, depending on each other elementwise."""

    states: tuple[int, ...]
    shape: tuple[int, ...]
    components: tuple[tuple[int, bool], ...]
    """The real components of the states. Each of these is a pair of a state and whether this is its imaginary
    part.
    """
    dtype: Any
    """The dtype to use for the components and traces.

    Traces decay at the same rate as the states, so they need at least the same precision. (For example in
    bfloat16, multiplying by 0.999 has no effect.)
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
    """Indicates that the output y of `op` affects the states in `group` without going through another op."""

    op: int
    group: int
    lead: int
    """The number of leading axes that the states have but y doesn't."""


def with_items(values: Sequence[Any], indices: Sequence[int], new: Iterable[Any]) -> list[Any]:
    """Returns a copy of `values` with new items at these indices."""
    out = list(values)
    for i, x in zip(indices, new, strict=True):
        out[i] = x
    return out


def bind(eqn: JaxprEqn, operands: Sequence[Any], written: JaxprEqn | None = None) -> list[Any]:
    """Binds an equation's primitive. If `written` is passed then its source location is used instead."""
    with compat.source_of(eqn if written is None else written):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def inline(jaxpr: Any, args: Sequence[Any], call: JaxprEqn | None = None) -> list[Any]:
    """Evaluates a jaxpr, inlining all calls.

    The equations of a jaxpr cached by JAX don't have a source location in the user's code. These get the
    call's location, so error messages can still refer to a line.
    """
    opened = compat.open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=True))
    env |= dict(zip(opened.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        written = eqn if call is None or any(lines_of(eqn)) else call
        name, params = as_call(eqn.primitive, eqn.params)
        if name in INLINED:
            results = inline(params[INLINED[name]], operands, written)
        elif name == "custom_vjp_call":
            results = _forward_differentiable(eqn)(*operands)
        else:
            results = bind(_inlined_inside(eqn), operands, written)
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in opened.outvars]


def _inlined_inside(eqn: JaxprEqn) -> JaxprEqn:
    """Replaces all jaxprs within an equation by forward-differentiable versions."""
    if not any(_has_custom_vjp(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)):
        return eqn

    def retraced(inner: Any) -> Any:
        return jax.make_jaxpr(lambda *args: inline(inner, args))(*inner.in_avals)

    def change(x: Any) -> Any:
        return retraced(x) if isinstance(x, compat.ClosedJaxpr) else x

    params = {
        key: tuple(map(change, x)) if isinstance(x, tuple) else change(x) for key, x in eqn.params.items()
    }
    return eqn.replace(params=params)


def _has_custom_vjp(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        name, params = as_call(eqn.primitive, eqn.params)
        if name == "custom_vjp_call" or any(map(_has_custom_vjp, jaxprs_in_params(params))):
            return True
    return False


def _forward_differentiable(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """Makes a `jax.custom_vjp` function forward-differentiable.

    JAX doesn't allow this by itself. However the backward pass is linear, so transposing it gives the forward
    derivative.
    """

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        return bind(eqn, args)

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, x in enumerate(primals) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

        def of_moving(*moved: Any) -> list[Any]:
            return bind(eqn, with_items(primals, moving, moved))

        out, pull = jax.vjp(of_moving, *(primals[i] for i in moving))
        floats = [i for i, x in enumerate(out) if jnp.issubdtype(x.dtype, jnp.inexact)]

        no_tangents = [np.zeros(x.shape, jax.dtypes.float0) for x in out]

        def pull_floats(cotangents: Sequence[Any]) -> tuple[Any, ...]:
            return pull(with_items(no_tangents, floats, cotangents))

        try:
            push = jax.linear_transpose(pull_floats, [out[i] for i in floats])
            (pushed,) = push(tuple(tangents[i] for i in moving))
        except (NotImplementedError, AssertionError, ValueError) as error:
            raise TypeError(
                "a function in the step has a derivative by jax.custom_vjp whose backward function is not "
                "linear in the cotangent, so that it has no forward derivative, which learners need. Define "
                "the derivative by jax.custom_jvp"
            ) from error
        return out, with_items(no_tangents, floats, pushed)

    return call


def refuse_hidden_ops(eqn: JaxprEqn) -> None:
    """Raises an error for ops inside a loop or a derivative: their gradient would be dropped."""
    primitive = eqn.primitive
    if isinstance(primitive, DefinedPrimitive) and isinstance(primitive.root, ETPPrimitive):
        raise ValueError(
            f"ETP primitive {primitive.root.name!r} is batched or differentiated inside the step "
            f"(it became {primitive.name!r}), where no traces of its weights can be kept; map or "
            "differentiate the learner instead"
        )
    name, params = as_call(primitive, eqn.params)
    for jaxpr in jaxprs_in_params(params):
        for inner in jaxpr.eqns:
            if isinstance(inner.primitive, ETPPrimitive):
                raise ValueError(
                    f"ETP primitive {inner.primitive.name!r} is inside `{name}`, where no "
                    "traces of its weights can be kept; write the step without it"
                )
            refuse_hidden_ops(inner)
