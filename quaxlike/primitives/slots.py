"""Named places on a primitive for rules that JAX has no table for."""

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class MissingRuleError(NotImplementedError):
    """A primitive has no rule in the slot that was called."""


class Slot:
    """A named place for one rule of a primitive; calling it calls the rule.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.primitives import define_primitive

        half_p = define_primitive("half", lambda x: x / 2)

        @half_p.slot("cost").register
        def _(x):
            return x.size

        half_p.slot("cost")(jnp.ones(3))  # 3
        ```
    """

    def __init__(self, primitive_name: str, name: str) -> None:
        self.primitive_name = primitive_name
        self.name = name
        self._rule: Callable[..., Any] | None = None

    def register(self, rule: _F) -> _F:
        """Puts `rule` into the slot, in place of an existing one, and returns it."""
        if not callable(rule):
            raise TypeError(
                f"slot {self.name!r} of primitive {self.primitive_name!r} takes a function; found {rule!r}"
            )
        self._rule = rule
        return rule

    @property
    def registered(self) -> bool:
        """Whether the slot holds a rule."""
        return self._rule is not None

    @property
    def rule(self) -> Callable[..., Any]:
        """The rule in the slot. Raises `MissingRuleError` if there is none."""
        if self._rule is None:
            raise MissingRuleError(
                f"primitive {self.primitive_name!r} has no rule in slot {self.name!r}; register "
                f"one with `primitive.slot({self.name!r}).register(rule)`"
            )
        return self._rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(*args, **kwargs)

    def __repr__(self) -> str:
        state = "registered" if self.registered else "empty"
        return f"<slot {self.name!r} of {self.primitive_name!r}, {state}>"
