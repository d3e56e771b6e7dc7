"""Rules of primitives with two operands, for a type on either side."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.extend.core as jexc
from jaxtyping import ArrayLike

from .rules import RuleSet, register
from .values import ArrayValue

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def register_on_either_side(
    primitive: jexc.Primitive | str | Sequence[jexc.Primitive | str],
    types: Any,
    /,
    *,
    other: Any = ArrayLike | ArrayValue,
    precedence: int = 0,
    rules: RuleSet | None = None,
) -> Callable[[_Fn], _Fn]:
    """Registers one rule for operands `(types, other)`, `(other, types)` and `(types, types)`.

    **Arguments:**

    - `types`: a type of Values, or a union of several.
    - `other`: what may stand on the other side. Default: anything.
    - `primitive`, `precedence`, `rules`: as in [`quaxlike.register`][].

    **Returns:**

    A decorator that returns the rule unchanged. The rule takes the primitive, then the two operands by
    position, and the primitive's parameters by keyword.
    """

    def decorator(rule: _Fn) -> _Fn:
        for left, right in ((types, other), (other, types), (types, types)):

            def typed(primitive: jexc.Primitive, x: Any, y: Any, **params: Any) -> Any:
                return rule(primitive, x, y, **params)

            typed.__annotations__ |= {"x": left, "y": right}
            register(primitive, precedence=precedence, rules=rules)(typed)
            typed.written_as = rule  # pyright: ignore[reportFunctionMemberAccess] (for its source line)
        return rule

    return decorator
