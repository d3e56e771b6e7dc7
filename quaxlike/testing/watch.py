"""Finds the first incorrect rule or default, by comparing each step of a program with its primitive."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu

from ..core.inspect.recorder import Recorder
from ..core.quaxify import quaxify
from ..core.recording import recording
from ..core.rules import Checked, Rule
from ..core.values import Value, is_value
from .compare import disagreement, is_inexact, size_of, weighted_sum
from .refusing import reveal


class _Watcher(Recorder):
    """Compares each step's output and gradient with the primitive's on materialised arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.culprit, self.message = "", ""
        self._at_work = False
        self._default_of: type | None = None

    def by_default_of(self, cls: type) -> None:
        super().by_default_of(cls)
        self._default_of = cls

    def follow(
        self, handler: Callable[..., Any], primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        self._default_of = None
        try:
            out = super().follow(handler, primitive, operands, params)
        except Exception as error:
            self._blame(handler, f"`{primitive}` raises {type(error).__name__}: {error}")
            raise
        if out is NotImplemented or self.culprit or self._at_work or not _is_concrete((operands, out)):
            return out
        rule = _rule(handler)
        if rule is None and self._default_of is None:
            return out
        self._at_work = True
        try:
            if difference := _step(handler, primitive, operands, params, out):
                self._blame(handler, f"`{primitive}` gives {difference}")
        finally:
            self._at_work = False
        return out

    def _blame(self, handler: Callable[..., Any], message: str) -> None:
        rule = _rule(handler)
        if self.culprit or (rule is None and self._default_of is None):
            return
        self.culprit = f"rule {rule}" if rule else f"{getattr(self._default_of, '__name__', '')}.default"
        self.message = message


def _rule(handler: Any) -> Rule | None:
    rule = handler.rule if isinstance(handler, Checked) else handler
    return rule if isinstance(rule, Rule) else None


def _is_concrete(tree: Any) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(tree))


def _step(
    handler: Callable[..., Any], primitive: Any, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> str:
    """Returns how a step differs from applying its primitive to materialised arrays."""
    leaves, treedef = jtu.tree_flatten(list(operands))

    def build(varied: Sequence[Any]) -> list[Any]:
        new = iter(varied)
        return treedef.unflatten([next(new) if is_inexact(x) else x for x in leaves])

    def of_arrays(varied: Sequence[Any]) -> Any:
        dense = [reveal(x) for x in build(varied)]
        return primitive.bind(*dense, **primitive.get_bind_params(params))

    def of_values(varied: Sequence[Any]) -> Any:
        return _as(primitive, reveal(handler(primitive, build(varied), params)))

    varied = [x for x in leaves if is_inexact(x)]
    try:
        expected = of_arrays(varied)
    except Exception:  # the primitive doesn't support these types, even though the rule does
        return ""
    scale = size_of([reveal(x) for x in operands])
    dtypes = not any(is_value(x) and x.own_dtypes for x in operands)
    if difference := disagreement(_as(primitive, reveal(out)), expected, dtypes=dtypes, scale=scale):
        return str(difference)
    try:
        gradient = jax.grad(lambda varied: weighted_sum(of_arrays(varied)))(varied)
    except Exception:  # this step isn't differentiable
        return ""
    found = jax.grad(lambda varied: weighted_sum(of_values(varied)))(varied)
    difference = disagreement(found, gradient, scale=max(1.0, scale))
    return f"a different gradient: {difference}" if difference else ""


def _as(primitive: Any, out: Any) -> Any:
    return list(out) if primitive.multiple_results else out


def watch(run: Callable[[Any], Any], value: Value) -> tuple[str, str]:
    """Runs a program step by step, to find the first incorrect step.

    **Returns:** the first rule or default differing from its primitive, and how it differs. Both are empty if
    there is none.
    """
    watcher = _Watcher()
    try:
        with recording(watcher), jax.disable_jit():
            quaxify(run)(value)
    except Exception as error:
        if not watcher.culprit:
            watcher.culprit, watcher.message = hook_in(error, type(value)), str(error)
    return watcher.culprit, watcher.message


def hook_in(error: Exception, cls: type) -> str:
    """Returns the type's innermost method in an error's traceback."""
    methods = {
        getattr(getattr(part, "__func__", part), "__code__", None): name
        for base in cls.__mro__
        if base is not Value
        for name, part in vars(base).items()
    }
    methods.pop(None, None)
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((f"{cls.__name__}.{methods[code]}" for code in reversed(frames) if code in methods), "")
