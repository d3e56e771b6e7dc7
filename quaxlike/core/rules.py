"""Which rule a primitive follows when it meets Values: `register`, `RuleSet`, resolution by type."""

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import inspect
import itertools
import threading
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.extend.core as jexc
from jaxtyping import AbstractArray, ArrayLike

from . import compat
from .checks import Checked, RuleError
from .values import ArrayValue, Value

if TYPE_CHECKING:
    import plum

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0] + "."


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """One registered rule: for which operand types it stands, and where it was written."""

    primitive: jexc.Primitive
    function: Callable[..., Any]
    signature: "plum.Signature"
    takes_primitive: bool
    keywords: frozenset[str] | None  # the parameters it names, or None if it takes **params

    @property
    def written(self) -> Callable[..., Any]:
        """The function as its author wrote it, which may stand for several types."""
        return inspect.unwrap(getattr(self.function, "written_as", self.function))

    @property
    def source(self) -> str:
        """Where the rule was written, as `file:line`."""
        code = self.written.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self.keywords is not None:
            # JAX adds parameters in every release. One that the rule does not know and that is not
            # in use (None) is left out, so that the rule goes on working.
            params = {k: v for k, v in params.items() if k in self.keywords or v is not None}
            unknown = params.keys() - self.keywords
            if unknown:
                raise RuleError(
                    f"The rule {self} does not take the parameter(s) "
                    f"{', '.join(sorted(unknown))}. Add `**params` to it, and pass them on."
                )
        if self.takes_primitive:
            return self.function(primitive, *operands, **params)
        return self.function(*operands, **params)

    def __repr__(self) -> str:
        names = [*map(_type_name, self.signature.types)]
        if self.signature.has_varargs:
            names.append(f"*{_type_name(self.signature.varargs)}")
        return f"{self.primitive}({', '.join(names)}) at {self.source}"


class AmbiguousRuleError(RuleError, LookupError):
    """Several rules match the types of the operands, and none is more specific than the others."""

    __module__ = "quaxlike"


class RuleSet:
    """A private set of rules, layered over the global one.

    Give it to [`quaxlike.register`][] and to [`quaxlike.quaxify`][]. Its rules are asked first; a
    `quaxify` inside the quaxified function inherits it.

    !!! example

        ```python
        import quaxlike as ql

        mine = ql.RuleSet()

        @ql.register("sin", rules=mine)
        def _(x: ql.LoraArray, **params):
            ...

        ql.quaxify(lambda x: x, rules=mine)
        ```
    """

    def __init__(self) -> None:
        self._rules: dict[jexc.Primitive, tuple[Rule, ...]] = {}
        self._waiting: dict[jexc.Primitive, list[tuple[Callable[..., Any], int]]] = {}

    def __iter__(self) -> Iterator[Rule]:
        return itertools.chain.from_iterable(rules for _, rules in self.items())

    def items(self) -> list[tuple[jexc.Primitive, tuple[Rule, ...]]]:
        return [(primitive, self[primitive]) for primitive in list(self._rules)]

    def __getitem__(self, primitive: jexc.Primitive) -> tuple[Rule, ...]:
        with _lock:
            for function, precedence in self._waiting.pop(primitive, ()):
                self.add(Rule(primitive, function, *_inspect(function, precedence)))
            return self._rules.get(primitive, ())

    def add(self, rule: Rule) -> None:
        kept = [r for r in self[rule.primitive] if r.signature != rule.signature]
        for replaced in set(self[rule.primitive]) - set(kept):
            if replaced.function.__module__ != rule.function.__module__:
                warnings.warn(f"{rule} replaces {replaced}.", stacklevel=4)
        self._rules[rule.primitive] = (*kept, rule)

    def add_later(self, primitive: jexc.Primitive, function: Callable[..., Any], precedence: int) -> None:
        """Adds a rule whose annotations are looked at when `primitive` is first dispatched."""
        self._rules.setdefault(primitive, ())
        self._waiting.setdefault(primitive, []).append((function, precedence))


GLOBAL = RuleSet()


# -------------------------------------------------------------------------------------------------
# Registration
# -------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_epoch = 0

# The epoch, as a setting that JAX keeps in the keys of its own caches: a rule that is registered
# after `jax.jit(quaxify(f))` was traced makes it trace again. It is set only once something was
# quaxified, since it invalidates every jitted function of the process.
_jit_epoch = jax.make_user_context(0)
_in_use = False


def epoch() -> int:
    """The number of registrations so far; caches that depend on rules are keyed on it."""
    return _epoch


def mark_in_use() -> None:
    global _in_use
    _in_use = True


def register(
    primitive: jexc.Primitive | str | Sequence[jexc.Primitive | str],
    /,
    *,
    precedence: int = 0,
    rules: RuleSet | None = None,
) -> Callable[[_Fn], _Fn]:
    """Registers a rule: what a primitive does when it meets operands of the annotated types.

    The types of *all* positional parameters select the rule. Plain operands (arrays, NumPy arrays,
    Python scalars) count as `jax.Array`, so annotate them `jax.Array` or `ArrayLike`.

    **Arguments:**

    - `primitive`: a JAX primitive, its name (`"dot_general"`, `"jit"`, ...), or several of them.
    - `precedence`: decides between rules of which none is more specific. Default 0.
    - `rules`: the [`quaxlike.RuleSet`][] to register in. Default: the global one.

    **Returns:**

    A decorator that returns the rule unchanged. The rule takes the operands by position and the
    primitive's parameters by keyword, and returns an array or a Value (a sequence of them if the
    primitive has multiple results), or `NotImplemented`: then the next matching rule is asked. If its
    first parameter is annotated `jax.extend.core.Primitive` it is also given the primitive.

    **Raises:**

    `ValueError` for a name that no primitive has, with near misses.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        class Negated(ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return -self.array

        @ql.register("neg")
        def _(x: Negated, **params):
            return x.array

        ql.quaxify(jnp.negative)(Negated(jnp.arange(3)))
        ```
    """
    several = isinstance(primitive, Sequence) and not isinstance(primitive, str)
    primitives = [
        _as_primitive(p) for p in (cast(list[Any], primitive) if several else [cast(Any, primitive)])
    ]

    def decorator(function: _Fn) -> _Fn:
        global _epoch
        into = GLOBAL if rules is None else rules
        # Our own rules wait until they are asked for: importing the package inspects none of them.
        wait = (function.__module__ or "").startswith(_PACKAGE)
        inspected = None if wait else _inspect(function, precedence)
        with _lock:
            for p in primitives:
                if inspected is None:
                    into.add_later(p, function, precedence)
                else:
                    into.add(Rule(p, function, *inspected))
            _epoch += 1
            _resolver.cache_clear()
            if _in_use:
                _jit_epoch.set_global(_epoch)
        return function

    return decorator


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
            typed.__module__ = rule.__module__
            register(primitive, precedence=precedence, rules=rules)(typed)
            typed.written_as = rule  # pyright: ignore[reportFunctionMemberAccess] (for its source line)
        return rule

    return decorator


def _as_primitive(primitive: jexc.Primitive | str) -> jexc.Primitive:
    if not isinstance(primitive, str):
        return primitive
    name = primitive.removesuffix("_p")
    known = compat.named_primitives()
    if name not in known:  # defined since?
        compat.named_primitives.cache_clear()
        known = compat.named_primitives()
    try:
        return known[name]
    except KeyError:
        near = difflib.get_close_matches(primitive, known, n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"No JAX primitive is called {primitive!r}.{hint}") from None


def _inspect(
    function: Callable[..., Any], precedence: int
) -> "tuple[plum.Signature, bool, frozenset[str] | None]":
    import plum  # takes longer than all of this package

    types: list[Any] = []
    varargs: Any = plum.Signature().varargs
    keywords: set[str] | None = set()
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise TypeError(
            f"The annotations of the rule {function} cannot be evaluated: {error}. They select the "
            "rule, so their names must be importable at run time."
        ) from error
    takes_primitive = False
    for i, p in enumerate(inspect.signature(function).parameters.values()):
        hint = _plain_hint(hints.get(p.name, Any))
        if p.kind is p.VAR_KEYWORD:
            keywords = None
        elif p.kind is p.KEYWORD_ONLY:
            if keywords is not None:
                keywords.add(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            varargs = hint
        elif i == 0 and isinstance(hint, type) and issubclass(hint, jexc.Primitive):
            takes_primitive = True
        elif p.default is p.empty:
            types.append(hint)
        elif keywords is not None:  # has a default: a parameter of the primitive, not an operand
            keywords.add(p.name)
    signature = plum.Signature(*types, varargs=varargs, precedence=precedence)
    return signature, takes_primitive, None if keywords is None else frozenset(keywords)


def signature_of(types: Iterable[Any]) -> "plum.Signature":
    import plum

    return plum.Signature(*types)


def _plain_hint(hint: Any) -> Any:
    """Dispatch is by class: `Float[Array, "m n"]` selects what `Array` selects."""
    import plum

    while isinstance(hint, type) and issubclass(hint, AbstractArray):
        hint = hint.array_type
    return plum.resolve_type_hint(hint)


# -------------------------------------------------------------------------------------------------
# Resolution
# -------------------------------------------------------------------------------------------------


class Resolver:
    """The rules of a stack of rule sets, in the order in which they are asked, cached by types."""

    def __init__(self, layers: tuple[RuleSet, ...], made_at: int) -> None:
        self.layers = layers
        self.cache: dict[Any, list[Callable[..., Any]]] = {}
        self._made_at = made_at

    def candidates(self, key: tuple[Any, ...]) -> list[Callable[..., Any]]:
        """The rules for `key`, a primitive and then for each operand the class of a Value or None for
        anything else. Best first; they are asked in turn while they return `NotImplemented`."""
        primitive, *types = key
        operands = signature_of(jax.Array if t is None else t for t in types)
        found: list[Callable[..., Any]] = []
        for layer in self.layers:
            if not any(map(_looks_at_values, layer[primitive])):
                matching = [r for r in layer[primitive] if operands <= r.signature]
                found += in_order(primitive, operands, matching)
            else:
                found.append(ByValue(operands, layer[primitive]))
        may_decline = any(t is not None and t.follows_rules is not Value.follows_rules for t in types)
        found[:] = [Checked(rule, found, may_decline) for rule in found]
        with _lock:
            if self._made_at == _epoch:  # else `register` came between
                self.cache[key] = found
        return found


# The rule sets that are asked in this context; a `quaxify` adds its own for what it calls.
active_layers: contextvars.ContextVar[tuple[RuleSet, ...]] = contextvars.ContextVar(
    "quaxlike_rules", default=(GLOBAL,)
)


# The same, as a setting that JAX keeps in the keys of its caches: what was traced under other layers is
# traced again.
_jit_layers = jax.make_user_context((GLOBAL,))


@contextlib.contextmanager
def asking(layers: tuple[RuleSet, ...]) -> Iterator[None]:
    """Inside, these rule sets are asked."""
    token = active_layers.set(layers)
    try:
        with _jit_layers(layers):
            yield
    finally:
        active_layers.reset(token)


def resolver(layers: tuple[RuleSet, ...] = (GLOBAL,)) -> Resolver:
    """The resolver of these layers, as of the last registration."""
    return _resolver(layers, _epoch, jax.config.jax_enable_checks)


@functools.lru_cache(maxsize=256)
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
        # What declines for these types declines for less specific ones, too.
        matching = [r for r in matching if r.written is not best[0].written]
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class ByValue:
    """Stands for the rules of a primitive of which some are for types whose instances are told by their value
    (`__faithful__ = False`, as for plum): each time it asks those that match the operands of now."""

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
            out = Checked(rule, [], False)(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented


def _looks_at_values(rule: Rule) -> bool:
    """Whether the signature of a rule has a type whose instances are told by their value."""
    return not rule.signature.is_faithful and any(
        map(_told_by_value, (*rule.signature.types, _varargs(rule)))
    )


def _varargs(rule: Rule) -> Any:
    return rule.signature.varargs if rule.signature.has_varargs else object


def _told_by_value(hint: Any) -> bool:
    import plum

    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        return any(map(_told_by_value, members))
    return isinstance(hint, type) and issubclass(hint, Value) and not plum.is_faithful(hint)


def _is_of(x: Any, type_: Any, hint: Any) -> bool:
    """Whether an operand, which is dispatched on as a `type_`, is of an annotated type."""
    signature = signature_of([hint])
    by_value = isinstance(x, Value) and _told_by_value(hint)
    return signature.match((x,)) if by_value else signature_of([type_]) <= signature


def more_specific(a: Rule, b: Rule) -> bool:
    return a.signature <= b.signature and not b.signature <= a.signature


@dataclasses.dataclass(frozen=True, eq=False)
class Ambiguity:
    """Stands where the order of rules is undecided; asking it is the error."""

    primitive: jexc.Primitive
    operands: "plum.Signature"
    rules: list[Rule]

    def __call__(self, *_: Any) -> Any:
        listed = "\n".join(f"  {rule}" for rule in self.rules)
        types = ", ".join(map(_type_name, self.operands.types))
        raise AmbiguousRuleError(
            f"`{self.primitive}` of ({types}) is ambiguous: none of these rules is more specific "
            f"than the others.\n{listed}\nRegister a rule for exactly these types, give one of them "
            "a `precedence`, or fix the order with nested `quaxify(..., filter_spec=...)`."
        )


_ARRAY_LIKE = frozenset(typing.get_args(ArrayLike))


def _type_name(hint: Any) -> str:
    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        short = ["ArrayLike"] if {*members} >= _ARRAY_LIKE else []
        others = [m for m in members if not short or m not in _ARRAY_LIKE]
        return " | ".join([*map(_type_name, others), *short])
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
