"""Common subexpression elimination for recurrent steps.

Importantly, two equations are only merged if they compute both the same values *and* the same derivatives,
and have no effects. This means learners find the same relations regardless of whether the user wrote an
expression once or twice.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal

from ..core import compat
from ..core.high_level import as_call
from .graph import INLINED, bind, with_items

_COMMUTATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"))
_CUSTOM = frozenset(("custom_jvp_call", "custom_vjp_call"))
_IDENTITIES = frozenset(
    ("copy", "copy_p", "convert_element_type", "reshape", "broadcast_in_dim", "transpose", "slice", "squeeze")
)
_PASS_ON = frozenset(
    ("device_put", "sharding_constraint", "mesh_cast", "reshard", "pvary", "name", "optimization_barrier")
)


def merge_common(closed: Any) -> tuple[list[JaxprEqn], list[Any]]:
    """Merges equal equations in a jaxpr and removes identities. Returns the remaining equations and the
    outputs.

    Equations with effects are always kept.
    """
    jaxpr = compat.open_jaxpr(closed)
    consts = getattr(closed, "consts", ())
    # Comparing derivatives requires tracing them. So first check for equal values: without any, there is
    # nothing to merge.
    numbers = _Numbers(derivatives=False).of_equations(jaxpr, consts)
    if len({n for n in numbers if n is not None}) < len(jaxpr.eqns):
        numbers = _Numbers(derivatives=True).of_equations(jaxpr, consts)
    first: dict[Any, JaxprEqn] = {}
    known: dict[Any, Any] = {}  # maps each variable to its replacement
    constvars: dict[Hashable, Any] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        known[var] = constvars.setdefault(_of_array(const), var)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    eqns = []
    for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
        operands = list(map(read, eqn.invars))
        if number is None:
            known[eqn.outvars[0]] = operands[0]
        elif number in first:
            known |= zip(eqn.outvars, first[number].outvars, strict=True)
        else:
            first[number] = eqn.replace(invars=operands)
            eqns.append(first[number])
    return eqns, list(map(read, jaxpr.outvars))


def source_of(var: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """Returns a value's original variable, following equations that only name or place it."""
    for eqn in reversed(eqns):
        if eqn.primitive.name in _PASS_ON:
            var = next((a for a, out in zip(eqn.invars, eqn.outvars, strict=False) if out is var), var)
    return var


class _Numbers:
    """Performs value numbering: values computed in the same way are assigned the same number."""

    def __init__(self, derivatives: bool) -> None:
        self._derivatives = derivatives
        self._numbers: dict[Hashable, int] = {}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_equations(self, jaxpr: Any, consts: Sequence[Any]) -> list[int | None]:
        """Returns each equation's number, or None for identities."""
        return self._run(jaxpr, consts)[0]

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[int] | None = None
    ) -> tuple[list[int | None], tuple[int, ...]]:
        env: dict[Any, int] = {
            var: self._number(_of_array(x)) for var, x in zip(jaxpr.constvars, consts, strict=True)
        }
        if operands is None:
            operands = [self._number(("input", i, str(v.aval))) for i, v in enumerate(jaxpr.invars)]
        env |= zip(jaxpr.invars, operands, strict=True)

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return self._number(_of_array(np.asarray(atom.val, aval.dtype)))
            return env[atom]

        numbers: list[int | None] = []
        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if _is_identity(eqn):
                env[eqn.outvars[0]] = operands[0]
                numbers.append(None)
                continue
            name, params = as_call(eqn.primitive, eqn.params)
            if name in INLINED and not compat.has_effects(eqn):  # this can happen inside the jaxpr of a loop
                inner = params[INLINED[name]]
                consts = getattr(inner, "consts", ())
                env |= zip(eqn.outvars, self._run(compat.open_jaxpr(inner), consts, operands)[1], strict=True)
                continue
            if name in _COMMUTATIVE:
                operands.sort()
            number = self._number((self._of_equation(eqn), *operands))
            env |= {var: self._number((number, i)) for i, var in enumerate(eqn.outvars)}
            numbers.append(number)
        return numbers, tuple(map(read, jaxpr.outvars))

    def _of_equation(self, eqn: JaxprEqn) -> Hashable:
        """Returns a hashable key for the function an equation applies to its operands."""
        if compat.has_effects(eqn):
            return _Same(eqn)
        name, params = as_call(eqn.primitive, eqn.params)
        if name not in _CUSTOM:
            return (eqn.primitive, *((key, self._of(x)) for key, x in sorted(params.items())))
        derivative = self._of_derivative(eqn) if self._derivatives else None
        return name, self._of_value(params["call_jaxpr"]), derivative

    def _of_derivative(self, eqn: JaxprEqn) -> Hashable:
        primals: list[Any] = [v.aval for v in eqn.invars]
        moving = [i for i, aval in enumerate(primals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

        def push(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def of_moving(*moved: Any) -> list[Any]:
                return bind(eqn, with_items(primals, moving, moved))

            return jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents))

        jaxpr = jax.make_jaxpr(push)(primals, [primals[i] for i in moving])
        # Learners never differentiate twice, so ignore any derivatives inside this one.
        return self._of_value(jaxpr)

    def _of_value(self, jaxpr: Any) -> Hashable:
        """Returns a hashable key for the values computed by a jaxpr, ignoring any custom derivatives."""
        before, self._derivatives = self._derivatives, False
        try:
            return self._of(jaxpr)
        finally:
            self._derivatives = before

    def _of(self, x: Any) -> Hashable:
        """Returns a hashable key for an equation's parameter."""
        if hasattr(compat.open_jaxpr(x), "eqns"):
            jaxpr = compat.open_jaxpr(x)
            results = self._run(jaxpr, getattr(x, "consts", ()))[1]
            effects = _Same(x) if jaxpr.effects else None
            return "jaxpr", tuple(str(v.aval) for v in jaxpr.invars), results, effects
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            return _of_array(x)
        if isinstance(x, Mapping):
            return tuple((key, self._of(x[key])) for key in x)
        if isinstance(x, tuple | list):
            return type(x), *map(self._of, x)
        try:
            hash(x)
        except TypeError:
            return _Same(x)
        return type(x), x


class _Same:
    """Wraps an object to hash and compare it by identity."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __hash__(self) -> int:
        return id(self._held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held


def _of_array(x: Any) -> Hashable:
    """Returns a hashable key for an array. Arrays are compared by value, or by identity if the values aren't
    known on this host.
    """
    is_here = not isinstance(x, jax.Array) or (not isinstance(x, Tracer) and x.is_fully_addressable)
    dtype = jnp.result_type(x) if is_here else None
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return _Same(x)
    array = np.asarray(x, dtype)
    return array.shape, str(dtype), array.tobytes()


def _is_identity(eqn: Any) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name not in _IDENTITIES or len(eqn.invars) > 1:
        return False
    of, to = eqn.invars[0].aval, eqn.outvars[0].aval
    if (of.shape, of.dtype) != (to.shape, to.dtype) or params.get("sharding") is not None:
        return False
    if params.get("dimensions") and name == "reshape":
        return False
    return name != "transpose" or tuple(params["permutation"]) == tuple(range(len(of.shape)))
