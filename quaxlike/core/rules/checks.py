"""Checks of what rules return: number of results, shapes, dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc

from .. import compat
from ..values import KINDS, aval_of, is_value


class RuleError(TypeError):
    """A rule cannot be followed: what it takes or returns is not what its primitive needs."""

    __module__ = "quaxlike"


class Checked:
    """A rule whose results are checked, for operands of certain types.

    The check costs about as much as tracing the primitive. A rule that has given a right result is trusted
    with the same parameters again, and while a function is traced with operands of the same shapes and
    dtypes; under `jax_enable_checks` never.

    Operands that do not follow the rules of their type (`may_decline`) are looked for each time.
    """

    def __init__(self, rule: Callable[..., Any], among: list[Callable[..., Any]], may_decline: bool) -> None:
        self.rule = rule
        self._among = among  # where the rule itself may stand once it has been checked
        self._may_decline = may_decline
        self._right: set[Any] = set()
        self._is_trusted = False  # with any parameters

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self._may_decline and not all(x.follows_rules() for x in operands if is_value(x)):
            return NotImplemented
        key: Any = tuple(params.values())
        if not compat.is_eval_trace(compat.current_trace()):
            key = (key, *[_aval(x) for x in operands])
        try:
            trusted = key in self._right or self._is_trusted
        except TypeError:  # parameters that cannot be looked up
            trusted, key = False, None
        out = self.rule(primitive, operands, params)
        if out is not NotImplemented and (not trusted or jax.config.jax_enable_checks):
            check_results(self.rule, primitive, operands, params, out)
            if key is None or any(isinstance(p, jexc.Jaxpr | jexc.ClosedJaxpr) for p in params.values()):
                self._is_trusted = True  # for what cannot be looked up, or would be kept alive
                if not (self._may_decline or jax.config.jax_enable_checks):
                    self._among[:] = [self.rule if r is self else r for r in self._among]
            else:
                if len(self._right) >= _LIMIT:
                    self._right.clear()
                self._right.add(key)
        return out


_LIMIT = 256  # parameters that a rule is trusted with


def _aval(x: Any) -> Any:
    return aval_of(x) if KINDS[type(x)] == "value" else jax.typeof(x)


def check_results(
    rule: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> None:
    """Raises a `RuleError` if `out` cannot be what `primitive` gives."""
    expected = _expected(primitive, operands, params)
    results = out if primitive.multiple_results else [out]
    if not isinstance(results, list | tuple) or (expected is not None and len(results) != len(expected)):
        number = "" if expected is None else f" of {len(expected)} result(s)"
        found = f"one of {len(out)}" if isinstance(out, list | tuple) else _found(out)
        raise RuleError(f"The rule {rule} must return a sequence{number}; found {found}.")
    for i, x in enumerate(results):
        which = f" as result {i}" if primitive.multiple_results else ""
        if not is_value(x) and not eqx.is_array_like(x):
            raise RuleError(f"The rule {rule} must return an array or a Value{which}; found {_found(x)}.")
        found = aval_of(x) if is_value(x) else jax.typeof(x)
        want = None if expected is None else expected[i]
        if not isinstance(want, jax.core.ShapedArray) or not isinstance(found, jax.core.ShapedArray):
            continue
        own_dtypes = any(is_value(x) and x.own_dtypes for x in operands)
        if found.shape != want.shape or (found.dtype != want.dtype and not own_dtypes):
            hint = ""
            if found.shape == want.shape:
                names = sorted({type(x).__name__ for x in operands if is_value(x)})
                hint = (
                    f" If it is meant to have another dtype, set `own_dtypes = True` on {' or '.join(names)}."
                )
            raise RuleError(
                f"The rule {rule} must return {want.str_short()}{which}, as `{primitive}` does for operands "
                f"of these types; found {_found(x)}.{hint}"
            )


def _expected(
    primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """The avals that the primitive gives for arrays of these shapes; None where it cannot say."""
    try:
        out, _ = primitive.abstract_eval(*map(_aval, operands), **params)
    except Exception:  # types that the primitive itself does not take, which its rule may well do
        return None
    return out if primitive.multiple_results else [out]


def _found(x: Any) -> str:
    if is_value(x):
        return f"{type(x).__name__} of {aval_of(x).str_short()}"
    return jax.typeof(x).str_short() if eqx.is_array_like(x) else repr(x)
