"""Resolution: the choice of a rule for a primitive, by the types of its operands."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jexc

from ..values import Value
from .checks import Checked, RuleError
from .registry import GLOBAL, Rule, RuleSet, check_operands, epoch, lock, need_stack, signature_of, type_name

if TYPE_CHECKING:
    import plum


class AmbiguousRuleError(RuleError, LookupError):
    """Several rules match the types of the operands, and none is more specific than the others."""

    __module__ = "quaxlike"


class Resolver:
    """The rules of a stack of rule sets, in the order in which they are tried, cached by types."""

    def __init__(self, layers: tuple[RuleSet, ...], made_at: int) -> None:
        self.layers = layers
        self.cache: dict[Any, list[Callable[..., Any]]] = {}
        self._made_at = made_at

    def candidates(self, key: tuple[Any, ...], params: Collection[str] = ()) -> list[Callable[..., Any]]:
        """The rules for `key`: a primitive, followed by one entry for each operand, the class of a Value or
        None for anything else. Best first; each is tried if the one before returned `NotImplemented`.

        **Raises:** `TypeError` for a rule that takes one of the primitive's `params` by position.
        """
        need_stack()
        primitive, *types = key
        for rule in itertools.chain.from_iterable(layer[primitive] for layer in self.layers):
            check_operands(rule, params)
        operands = signature_of(jax.Array if t is None else t for t in types)
        found: list[Callable[..., Any]] = []
        for layer in self.layers:
            if not any(map(_looks_at_values, layer[primitive])):
                matching = [r for r in layer[primitive] if operands <= r.signature]
                found += in_order(primitive, operands, matching)
            else:
                found.append(ByValue(operands, layer[primitive]))
        may_decline = any(t is not None and t.follows_rules is not Value.follows_rules for t in types)
        found[:] = [Checked(rule, may_decline) for rule in found]
        with lock:
            if self._made_at == epoch():  # else a rule was registered in the meantime
                self.cache[key] = found
        return found


# The rule sets in force in this context; a `quaxify` adds its own while it calls its function.
active_layers: contextvars.ContextVar[tuple[RuleSet, ...]] = contextvars.ContextVar(
    "quaxlike_rules", default=(GLOBAL,)
)


# The same, as a setting that is part of the keys of JAX's caches: a function that was traced under other
# layers is traced again.
_jit_layers = jax.make_user_context((GLOBAL,))


@contextlib.contextmanager
def asking(layers: tuple[RuleSet, ...]) -> Iterator[None]:
    """Puts these rule sets in force inside the block."""
    token = active_layers.set(layers)
    try:
        with _jit_layers(layers):
            yield
    finally:
        active_layers.reset(token)


def resolver(layers: tuple[RuleSet, ...] = (GLOBAL,)) -> Resolver:
    """The resolver for these layers, as of the last registration."""
    return _resolver(layers, epoch(), jax.config.jax_enable_checks)


@functools.lru_cache(maxsize=64)  # those of earlier epochs drop out
def _resolver(layers: tuple[RuleSet, ...], at: int, checks: bool) -> Resolver:
    return Resolver(layers, at)


def in_order(
    primitive: jexc.Primitive, operands: "plum.Signature", matching: list[Rule]
) -> list[Callable[..., Any]]:
    order: list[Callable[..., Any]] = []
    while matching:
        best = [r for r in matching if not any(more_specific(q, r) for q in matching)]
        highest = max(r.signature.precedence for r in best)
        best = [r for r in best if r.signature.precedence == highest]
        if len(best) > 1:
            return [*order, Ambiguity(primitive, operands, best)]
        order += best
        # A function that declines these types also declines them under a less specific signature.
        matching = [r for r in matching if r.written is not best[0].written]
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class ByValue:
    """Stands for the rules of a primitive if some are for types that are recognised by the value, not the
    class, of an operand (plum's `__faithful__ = False`). Each call tries those that match its operands."""

    operands: "plum.Signature"
    rules: Sequence[Rule]

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        types = self.operands.types

        def matches(rule: Rule) -> bool:
            if not _looks_at_values(rule):
                return self.operands <= rule.signature
            if not rule.signature.has_varargs and len(rule.signature.types) != len(types):
                return False
            hints = rule.signature.expand_varargs(len(types))
            return all(_is_of(x, t, hint) for x, t, hint in zip(operands, types, hints, strict=True))

        matching = [r for r in self.rules if matches(r)]
        for rule in in_order(primitive, self.operands, matching):
            out = Checked(rule, may_decline=False)(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented


def _looks_at_values(rule: Rule) -> bool:
    """Whether the signature of a rule has a type whose instances are recognised by their value."""
    signature = rule.signature
    hints = (*signature.types, signature.varargs) if signature.has_varargs else signature.types
    return not signature.is_faithful and any(map(_told_by_value, hints))


def _told_by_value(hint: Any) -> bool:
    import plum

    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        return any(map(_told_by_value, members))
    return isinstance(hint, type) and issubclass(hint, Value) and not plum.is_faithful(hint)


def _is_of(x: Any, type_: Any, hint: Any) -> bool:
    """Whether an operand that counts as a `type_` in dispatch is of the annotated type."""
    signature = signature_of([hint])
    by_value = isinstance(x, Value) and _told_by_value(hint)
    return signature.match((x,)) if by_value else signature_of([type_]) <= signature


def more_specific(a: Rule, b: Rule) -> bool:
    return a.signature <= b.signature and not b.signature <= a.signature


@dataclasses.dataclass(frozen=True, eq=False)
class Ambiguity:
    """Stands in for rules whose order is undecided; raises the error when it is called."""

    primitive: jexc.Primitive
    operands: "plum.Signature"
    rules: list[Rule]

    def __call__(self, *_: Any) -> Any:
        listed = "\n".join(f"  {rule}" for rule in self.rules)
        types = ", ".join(map(type_name, self.operands.types))
        raise AmbiguousRuleError(
            f"`{self.primitive}` of ({types}) is ambiguous: none of these rules is more specific "
            f"than the others.\n{listed}\nRegister a rule for exactly these types, give one of them "
            "a `precedence`, or fix the order with nested `quaxify(..., filter_spec=...)`."
        )
