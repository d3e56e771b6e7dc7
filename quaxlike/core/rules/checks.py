"""Checks of what rules return: number of results, shapes, dtypes."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc

from .. import compat
from ..values import KINDS, aval_of, is_value


class RuleError(TypeError):
    """A rule cannot be used: what it takes or returns does not fit its primitive."""

    __module__ = "quaxlike"


class RuleWarning(UserWarning):
    """A rule or a type that was written for another library works, but less is certain about it than here.

    A rule returns another dtype than its primitive does, and its type does not declare `own_dtypes` (under
    `jax_enable_checks`, this is a [`quaxlike.RuleError`][]). A handler of an ImplicitArray can never match. A
    type that refuses to materialise is differentiated by its leaves, or its only leaf decides about control
    flow. Each rule and each type is warned about once.
    """

    __module__ = "quaxlike"


class Checked:
    """A rule for operands of certain types, together with the checks of its results.

    A check costs about as much as tracing the primitive. A rule that has returned a correct result is trusted
    with the same parameters from then on: for concrete arrays, within one trace, and in other traces for
    operands of the same shapes and dtypes. Under `jax_enable_checks` it is never trusted.

    If `may_decline`, each call checks whether the operands follow the rules of their type.
    """

    def __init__(self, rule: Callable[..., Any], may_decline: bool) -> None:
        self.rule = rule
        self._may_decline = may_decline
        self._right: set[Any] = set()  # trusted parameters; with avals, while tracing
        self._is_trusted = False  # with any parameters
        # A trace, and the parameters that are trusted there.
        self._here: tuple[Callable[[], Any], set[Any]] = (lambda: None), set()

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self._may_decline and not all(x.follows_rules() for x in operands if is_value(x)):
            return NotImplemented
        out = self.rule(primitive, operands, params)
        key: Any = tuple(params.values())
        here, right_here = self._here
        try:
            if here() is compat.current_trace() and key in right_here:
                return out
            hash(key)
        except TypeError:  # unhashable parameters
            key = None
        if out is not NotImplemented:
            self._check(primitive, operands, params, out, key)
        return out

    def _check(
        self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any, key: Any
    ) -> None:
        if jax.config.jax_enable_checks:
            check_results(self.rule, primitive, operands, params, out)
            return
        if self._is_trusted:
            return
        if key is None or any(isinstance(p, jexc.Jaxpr | jexc.ClosedJaxpr) for p in key):
            check_results(self.rule, primitive, operands, params, out)
            self._is_trusted = True  # these are unhashable, or a set would keep them alive
            return
        trace: Any = compat.current_trace()
        known = key if compat.is_eval_trace(trace) else (key, *map(_aval, operands))
        if known not in self._right:
            check_results(self.rule, primitive, operands, params, out)
            if len(self._right) >= _LIMIT:
                self._right.clear()
            self._right.add(known)
        here, right_here = self._here
        if here() is not trace or len(right_here) >= _LIMIT:
            right_here = set()
            self._here = weakref.ref(trace), right_here  # one assignment: other threads have other traces
        right_here.add(key)


_LIMIT = 256  # entries of a set of trusted parameters


def _aval(x: Any) -> Any:
    return aval_of(x) if KINDS[type(x)] == "value" else jax.typeof(x)


def check_results(
    rule: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> None:
    """Raises a `RuleError` if `out` cannot be the result of `primitive`; only warns if its dtype differs."""
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
            message = (
                f"The rule {rule} must return {want.str_short()}{which}, as `{primitive}` does for operands "
                f"of these types; found {_found(x)}."
            )
            if found.shape != want.shape:
                raise RuleError(message)
            names = sorted({type(x).__name__ for x in operands if is_value(x)})
            message += (
                f" If it is meant to have another dtype, set `own_dtypes = True` on {' or '.join(names)}."
            )
            if jax.config.jax_enable_checks:
                raise RuleError(message)
            warn_once(rule, RuleWarning(message))


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # rules


def warn_once(rule: Any, warning: Warning) -> None:
    """Warns at the place where the rule was written."""
    if rule not in _warned:
        _warned.add(rule)
        file, _, line = rule.source.rpartition(":")
        warnings.warn_explicit(warning, None, file, int(line))


def _expected(
    primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """The avals that the primitive returns for arrays of these shapes; None if they are unknown."""
    try:
        out, _ = primitive.abstract_eval(*map(_aval, operands), **params)
    except Exception:  # the primitive itself may not take types that its rule does
        return None
    return out if primitive.multiple_results else [out]


def _found(x: Any) -> str:
    if is_value(x):
        return f"{type(x).__name__} of {aval_of(x).str_short()}"
    return jax.typeof(x).str_short() if eqx.is_array_like(x) else repr(x)
