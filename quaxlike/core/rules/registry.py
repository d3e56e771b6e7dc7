"""The registry of rules: `register` and `RuleSet`.

Registering a rule must take effect immediately, even in functions already jitted. So the number of
registrations (the "epoch") is part of our own cache keys as well as JAX's. Otherwise a cached rule could
still be used after being replaced.

Parsing annotations is slow, and importing plum is even slower. For our own rules, neither happens until their
primitive is first dispatched.
"""

import dataclasses
import functools
import inspect
import itertools
import threading
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jaxtyping import ArrayLike

from ..._checked import did_you_mean
from .. import compat, high_level
from ..array_kinds import shared_axes
from ..functions import names_in, type_hints, written_function
from ..hooks import RuleError
from ..values import ArrayValue
from .annotations import NO_ARRAYS, Annotation, annotation_of, is_only_for_instances

if TYPE_CHECKING:
    import plum

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0] + "."


class RuleWarning(UserWarning):
    """Issued for a rule or a type that works, but was written for another library and is harder to check.

    This is the case if a rule returns a different dtype than its primitive, but its type doesn't declare
    `own_dtypes`; or a different shape, but its type can't be materialised and doesn't declare `own_shapes`.
    (Under `jax_enable_checks` both raise a [`quaxlike.RuleError`][].) Also issued if a rule replaces one
    written elsewhere; if an ImplicitArray's handler can never match; and if a type that can't be materialised
    is differentiated by its leaves, or is used as a predicate. There's one warning for each rule and type.
    """

    __module__ = "quaxlike"


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # rules


def warn_once(rule: Any, warning: Warning) -> None:
    """Issues a warning at the line where the rule was written."""
    if rule not in _warned:
        _warned.add(rule)
        file, _, line = rule.source.rpartition(":")
        warnings.warn_explicit(warning, None, file, int(line))


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A registered rule: its operand types, and where it was written."""

    primitive: jexc.Primitive
    function: Callable[..., Any]
    signature: "plum.Signature"
    takes_primitive: bool
    keywords: frozenset[str] | None  # the names of its parameters, or None if it accepts **params
    operands: dict[str, Annotation] = dataclasses.field(default_factory=dict[str, Annotation])
    varargs: Annotation | None = None  # for any further operands
    defaults: frozenset[str] = frozenset()  # operands with a default, which may be omitted
    required: frozenset[str] = frozenset()  # parameters by keyword, without a default

    @property
    def written(self) -> Callable[..., Any]:
        """The function as written by its author. Several rules may share it."""
        return written_function(self._forwards_to)

    @functools.cached_property
    def _forwards_to(self) -> Callable[..., Any]:
        """The function called by `function`, if it just passes on its arguments."""
        return getattr(self.function, "written_as", self.function)

    @property
    def is_ours(self) -> bool:
        """Whether this rule comes from our package."""
        return (self.written.__module__ or "").startswith(_PACKAGE)

    @property
    def is_for_both_sides(self) -> bool:
        """Whether `register_on_either_side` created this rule for the case of both operands having its
        type."""
        return getattr(self.function, "is_for_both_sides", False)

    @functools.cached_property
    def _names_arrays(self) -> tuple[bool, ...]:
        """For each operand, and then for any further operands, whether it is annotated as `jax.Array`.

        Empty if none is.
        """
        more = False if self.varargs is None else self.varargs.names_array
        names = (*(annotation.names_array for annotation in self.operands.values()), more)
        return names if any(names) else ()

    @functools.cached_property
    def depends_on_shapes(self) -> bool:
        """Whether matching depends on dtypes or shapes, in addition to types."""
        return any(annotation.kinds for annotation in self.annotations(len(self.operands) + 1))

    def annotations(self, n: int) -> list[Annotation]:
        """Returns the annotations for `n` operands."""
        own = list(self.operands.values())
        return own if self.varargs is None else [*own, *[self.varargs] * (n - len(own))]

    def is_like(self, other: "Rule") -> bool:
        """Returns whether this applies to precisely the same operands as `other`."""
        if self.signature != other.signature:
            return False
        n = len(self.operands) + 1
        pairs = list(zip(self.annotations(n), other.annotations(n), strict=True))
        same_axes = self.shared_axes(n) == other.shared_axes(n)
        return same_axes and all(x.implies(y) and y.implies(x) for x, y in pairs)

    def shared_axes(self, n: int) -> frozenset[frozenset[tuple[int, int]]]:
        """Returns which axes of `n` operands must have the same size, by their names in the annotations."""
        kinds = [annotation.kinds for annotation in self.annotations(n)]
        return shared_axes([only[0][1] if len(only) == 1 else None for only in kinds])

    @property
    def source(self) -> str:
        """Where this rule was written, as `file:line`."""
        code = self.written.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if params and self.keywords is not None:
            # Every release of JAX adds some parameters. Leave out any the rule doesn't accept, if unused
            # (i.e. None), so that the rule continues to work.
            params = {k: v for k, v in params.items() if k in self.keywords or v is not None}
            unknown = params.keys() - self.keywords
            if unknown:
                raise RuleError(
                    f"The rule {self} does not take the parameter(s) "
                    f"{', '.join(sorted(unknown))}. Add `**params` to it, and pass them on."
                )
        if arrays := self._names_arrays:
            # JAX passes numbers and NumPy arrays to primitives without converting them.
            named = itertools.chain(arrays, itertools.repeat(arrays[-1]))
            operands = [
                jnp.asarray(x) if as_array and isinstance(x, NO_ARRAYS) else x
                for x, as_array in zip(operands, named, strict=False)
            ]
        if self.takes_primitive:
            return self._forwards_to(primitive, *operands, **params)
        return self._forwards_to(*operands, **params)

    def __repr__(self) -> str:
        names = [*map(str, self.operands.values())]
        if self.varargs is not None:
            names.append(f"*{self.varargs}")
        return f"{self.primitive}({', '.join(names)}) at {self.source}"


class RuleSet:
    """A private set of rules, layered over the global one.

    Pass this to [`quaxlike.register`][] and to [`quaxlike.quaxify`][]. Its rules are tried before any global
    ones, including inside any nested `quaxify`.

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

    @property
    def looked_at(self) -> list[Rule]:
        """The rules with annotations parsed so far.

        (Others are parsed when needed.)
        """
        return [rule for rules in list(self._rules.values()) for rule in rules]

    def __iter__(self) -> Iterator[Rule]:
        return itertools.chain.from_iterable(rules for _, rules in self.items())

    def items(self) -> list[tuple[jexc.Primitive, tuple[Rule, ...]]]:
        return [(primitive, self[primitive]) for primitive in list(self._rules)]

    def __getitem__(self, primitive: jexc.Primitive) -> tuple[Rule, ...]:
        with lock:
            # Remove these first, because `add` calls this method again.
            for function, precedence in self._waiting.pop(primitive, ()):
                for rule in rules_of(primitive, function, precedence):
                    self.add(rule)
            return self._rules.get(primitive, ())

    def add(self, rule: Rule) -> None:
        """Adds a rule, replacing any rule for the same operands.

        **Raises:** `RuleError` if both were written in the same place.
        """
        alike = [r for r in self[rule.primitive] if r.is_like(rule)]
        if rule.is_for_both_sides and not all(r.is_for_both_sides for r in alike):
            return  # a rule for precisely these types takes precedence
        for replaced in alike:
            if rule.is_for_both_sides or not replaced.is_for_both_sides:
                check_replacement(replaced, rule)
        self._rules[rule.primitive] = (*(r for r in self[rule.primitive] if r not in alike), rule)

    def add_later(self, primitive: jexc.Primitive, function: Callable[..., Any], precedence: int) -> None:
        """Adds a rule, but only parses its annotations once `primitive` is first dispatched."""
        self._rules.setdefault(primitive, ())
        self._waiting.setdefault(primitive, []).append((function, precedence))


GLOBAL = RuleSet()


# Registration -------------------------------------------------------------------------------------

lock = threading.RLock()
_epoch = 0

# The epoch, as part of JAX's cache keys: `jax.jit(quaxify(f))` is traced again if a rule is registered. This
# invalidates every jitted function in the process, so it's only set once something has been quaxified.
_jit_epoch = jax.make_user_context(0)
_in_use = False


def epoch() -> int:
    """Returns the number of registrations so far.

    Any cache depending on rules must have this in its key.
    """
    return _epoch


def mark_in_use() -> None:
    global _in_use
    _in_use = True


def register(
    primitive: jexc.Primitive | str | type[Any] | Sequence[jexc.Primitive | str | type[Any]],
    /,
    *,
    precedence: int = 0,
    rules: RuleSet | None = None,
) -> Callable[[_Fn], _Fn]:
    """Registers a rule, defining what a primitive does for operands of the annotated types.

    Rules are selected by the types of *all* positional parameters. Plain operands (arrays, NumPy arrays,
    Python scalars) are treated as `jax.Array`, so they can be annotated as either `jax.Array` or `ArrayLike`.
    To only accept certain dtypes and shapes, use jaxtyping, as in `Float[Array, "n m"]`. Axes with the same
    name must have the same size, also those of several operands.

    **Arguments:**

    - `primitive`: a JAX primitive, its name (`"dot_general"`, `"jit"`, ...), a subclass of hijax's `HiPrim`,
        or a sequence of these.
    - `precedence`: used to choose between rules if neither is more specific. Default: 0.
    - `rules`: the [`quaxlike.RuleSet`][] in which to register the rule. Default: the global one.

    **Returns:**

    A decorator returning the rule unchanged. The rule is called with the operands as positional arguments,
    and with the primitive's parameters as keyword arguments. It should return an array or a Value (or a
    sequence of these, if the primitive has multiple results), or else `NotImplemented`, to try the next
    matching rule. If the first parameter is annotated as `jax.extend.core.Primitive`, the primitive is passed
    as well. For a `HiPrim`, a rule is called with the leaves of its operands, and with the instance as
    `prim`; it should return a sequence of results.

    **Raises:**

    `ValueError` if there's no primitive with this name, with suggestions for similar names. `TypeError` if
    operands aren't annotated (unless another operand has a Value type), or if the rule can never match
    because it has a primitive's parameter as an operand, too many operands, or an operand with an
    impossible type. `RuleError` if there are two rules for the same operands in the same place.

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
    if not isinstance(precedence, int):
        raise TypeError(f"register takes an integer as `precedence`; found {precedence!r}.")
    primitives = as_primitives(primitive)
    if not primitives:
        raise ValueError("register takes at least one primitive; found an empty sequence.")

    if reason := next(filter(None, map(high_level.why_never_bound, primitives)), None):
        warnings.warn(reason, RuleWarning, stacklevel=2)

    def decorator(function: _Fn) -> _Fn:
        global _epoch
        into = GLOBAL if rules is None else rules
        # Delay our own rules until needed, so that importing the package doesn't inspect any of them.
        wait = (written_function(function).__module__ or "").startswith(_PACKAGE)
        with lock:
            for p in primitives:
                if wait:
                    into.add_later(p, function, precedence)
                    continue
                for rule in rules_of(p, function, precedence):
                    check_operands(rule, compat.parameters_of(p))
                    into.add(rule)
            # This comes last, because any cache seeing the new epoch must include the rule.
            _epoch += 1
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
    """Registers a single rule for operands `(types, other)`, `(other, types)` and `(types, types)`.

    **Arguments:**

    - `types`: a Value type, or a union of several.
    - `other`: the other operand's type. Default: anything.
    - `primitive`, `precedence`, `rules`: as in [`quaxlike.register`][].

    A rule registered for exactly `(types, types)` takes priority over this one.

    **Returns:**

    A decorator returning the rule unchanged. The rule is called with the primitive and its two operands as
    positional arguments, and with the primitive's parameters as keyword arguments.
    """

    def decorator(rule: _Fn) -> _Fn:
        for left, right in ((types, other), (other, types), (types, types)):

            def typed(primitive: jexc.Primitive, x: Any, y: Any, **params: Any) -> Any:
                return rule(primitive, x, y, **params)

            typed.__annotations__ |= {"x": left, "y": right}
            typed.__module__ = rule.__module__
            marks: Any = typed
            marks.written_as = rule  # called instead, and needed for its source line
            marks.is_for_both_sides = left is types and right is types
            register(primitive, precedence=precedence, rules=rules)(typed)
        return rule

    return decorator


def as_primitives(primitive: Any) -> list[jexc.Primitive]:
    """Converts `register`'s first argument: a primitive, its name, or a sequence of these."""
    several = isinstance(primitive, Sequence) and not isinstance(primitive, str)
    return [as_primitive(p) for p in (cast(list[Any], primitive) if several else [primitive])]


def as_primitive(primitive: Any) -> jexc.Primitive:
    if isinstance(primitive, jexc.Primitive):
        return primitive
    if high_level.is_high_level(primitive):
        return high_level.primitive_of(primitive)
    if not isinstance(primitive, str):
        from ..primitive_names import primitives_of  # these are only needed for messages

        known = primitives_of(primitive) or (["name"] if inspect.isroutine(primitive) else [])
        hint = " or ".join(f'`@quaxlike.register("{name}")`' for name in known)
        raise TypeError(
            f"register takes a JAX primitive, its name, or a sequence of these; found {primitive!r}."
            + (f" Write {hint} above a rule." if known else "")
        )
    name = primitive.removesuffix("_p")
    if name not in compat.named_primitives():  # it may have been defined in the meantime
        compat.named_primitives.cache_clear()
    known = compat.named_primitives()
    if name not in known:
        from ..primitive_names import function_called, primitives_of

        called = function_called(name)
        if called and (near := primitives_of(called[1])):
            hint = f" Did you mean {' or '.join(map(repr, near))}, by which `{called[0]}` is computed?"
        else:
            hint = did_you_mean(primitive, known)
        raise ValueError(f"No JAX primitive is called {primitive!r}.{hint}")
    found, *others = known[name]
    if others:
        raise ValueError(
            f"{1 + len(others)} primitives of different libraries are called {primitive!r}. Pass the one "
            "that you mean instead of its name: `register(primitive)`."
        )
    return found


def rules_of(primitive: jexc.Primitive, function: Callable[..., Any], precedence: int) -> list[Rule]:
    """Converts a function to rules for a primitive.

    Several, if operands have defaults.
    """
    hints = type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    first = hints.get(parameters[0].name) if parameters else None
    takes_primitive = isinstance(first, type) and issubclass(first, jexc.Primitive)
    by_position = [p for p in parameters[takes_primitive:] if p.kind <= p.VAR_POSITIONAL]
    annotations = {p.name: annotation_of(hints.get(p.name, Any), names_in(function)) for p in by_position}
    _check_annotations(function, [p.name for p in by_position if p.default is p.empty], hints, annotations)
    positional = [p for p in by_position if p.kind is not p.VAR_POSITIONAL]
    required = sum(p.default is p.empty for p in positional)
    several = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    varargs = annotations[several[0]] if several else None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    # A parameter with a default is normally the primitive's, unless it has to be an operand.
    params, arity = compat.parameters_of(primitive), compat.arity_of(primitive)
    defaults = [p.name for p in positional[required:]]
    may_be = list(itertools.takewhile(lambda name: name not in params, defaults))
    if arity is None:
        may_be = list(itertools.takewhile(lambda name: annotations[name].names_operand, may_be))
        counts = range(required, required + len(may_be) + 1)
    else:
        counts = [required + min(max(arity - required, 0), len(may_be))]

    def rule(count: int) -> Rule:
        operands = {p.name: annotations[p.name] for p in positional[:count]}
        types = [annotation.hint for annotation in operands.values()]
        more = varargs if count == counts[-1] else None
        return Rule(
            primitive,
            function,
            signature_of(types, precedence=precedence, **({} if more is None else {"varargs": more.hint})),
            takes_primitive,
            None if takes_all else frozenset(names).difference(operands),
            operands,
            more,
            frozenset(operands) & {*defaults},
            frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty),
        )

    return [rule(count) for count in counts]


def _check_annotations(
    function: Callable[..., Any], operands: Sequence[str], hints: Any, annotations: dict[str, Annotation]
) -> None:
    """Raises a `TypeError` if operands aren't annotated, unless another operand has a Value type."""
    bare = [name for name in operands if name not in hints]
    if bare and not any(annotations[name].names_value for name in operands):
        raise TypeError(
            f"The rule {_place(function)} has no annotation on `{bare[0]}`, so it would take the primitive "
            "over for every type. Annotations select the rule: a type of Values, `jax.Array`, or `Any`; "
            "for the primitive itself, in front, `jax.extend.core.Primitive`."
        )


def _place(function: Callable[..., Any]) -> str:
    function = written_function(function)
    code = function.__code__
    return f"`{function.__name__}` at {code.co_filename}:{code.co_firstlineno}"


def check_operands(rule: Rule, params: Collection[str]) -> None:
    """Raises a `TypeError` for a rule that can never match.

    Either an operand is actually a parameter of the primitive, there are too many or too few operands, or an
    annotation is impossible. Only issues a warning if the function has an attribute `may_never_match`, or is
    a stub without operands.
    """
    if (why := _never_matches(rule, params)) is None:
        return
    message = f"The rule {rule} can never match: {why}"
    # Packages written for quax contain stubs without operands, for primitives they don't support.
    is_stub = not rule.operands and rule.varargs is None
    if not is_stub and not getattr(rule.function, "may_never_match", False):
        raise TypeError(message)
    warn_once(rule, RuleWarning(message))


def can_match(primitive: jexc.Primitive, function: Callable[..., Any]) -> bool:
    """Returns whether a function could be a rule for a primitive, as far as known before it's called."""
    params = compat.parameters_of(primitive)
    return any(_never_matches(rule, params) is None for rule in rules_of(primitive, function, 0))


def _never_matches(rule: Rule, params: Collection[str]) -> str | None:
    for name in (rule.operands.keys() - rule.defaults).intersection(params):
        return (
            f"`{name}` is a parameter of `{rule.primitive}`, and comes by keyword. "
            f"Put a `*` before it: `def _(x: ..., *, {name}, **params)`."
        )
    arity, count = compat.arity_of(rule.primitive), len(rule.operands)
    if arity is not None and (count > arity or (count < arity and rule.varargs is None)):
        return (
            f"it takes {count} operand(s), and `{rule.primitive}` has {arity}. Parameters of the primitive "
            "come by keyword, and so stand after a `*`, or in `**params`."
        )
    for name, annotation in rule.operands.items():
        if annotation.is_impossible:
            why = (
                f"no operand `{name}` is of type {annotation}. Operands are arrays, which count as "
                "`jax.Array`, or Values."
            )
            if isinstance(annotation.written, type) and is_only_for_instances(annotation.written):
                why += (
                    f" {annotation} is only checked on instances, but classes select the rule: name the "
                    "types of Values, or a base class of theirs."
                )
            return why
    return None


def check_keywords(rule: Rule, params: Collection[str]) -> None:
    """Raises a `RuleError` if a rule requires a parameter that the primitive does not have."""
    for missing in rule.required.difference(params):
        raise RuleError(
            f"The rule {rule} requires `{missing}`, which is no parameter of `{rule.primitive}`."
            + (did_you_mean(missing, params) or f" Its parameters are: {', '.join(params) or 'none'}.")
        )


def check_replacement(old: Rule, new: Rule) -> None:
    """Raises a `RuleError` if a rule would replace another one written in the same place.

    A definition executed again (in a notebook cell, or when reloading a module) just replaces its previous
    rule. A rule written elsewhere is replaced with a warning.
    """
    was, now = old.written.__code__, new.written.__code__
    # The same function has been registered again, so no rule is lost.
    if was is now:
        return
    module = new.written.__module__
    running = _running(new.written.__globals__) if old.written.__module__ == module else []
    coexist = any(_contains(code, was) and _contains(code, now) for code in running)
    renamed = old.written.__qualname__ != new.written.__qualname__
    if old.written.__module__ == module and not coexist and not renamed:
        return
    runs_again = any(code.co_name == "<module>" for code in running)
    lenient = getattr(new.function, "may_never_match", False)
    if old.written.__module__ != module or (runs_again and not coexist) or lenient:
        warn_once(new, RuleWarning(f"{new} replaces {old}."))
    else:
        raise RuleError(
            f"{new} is for the same operands as {old}, and would replace it. Annotations tell rules apart by "
            "types of Values, and by dtypes and axes of arrays; or write one rule for both."
        )


def _running(namespace: dict[str, Any]) -> list[CodeType]:
    """Returns the code being executed in a module's namespace."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_globals is namespace:
            found.append(frame.f_code)
        frame = frame.f_back
    return found


def _contains(code: CodeType, other: CodeType) -> bool:
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return any(each is other or _contains(each, other) for each in inside)


def signature_of(types: Iterable[Any], **options: Any) -> "plum.Signature":
    import plum  # importing this takes longer than all of our own modules

    return plum.Signature(*types, **options)


@typing.no_type_check  # type checks would use more of the stack than accounted for
def require_stack_depth(calls: int = 200) -> None:
    """Raises a `RecursionError` if the stack doesn't have space left for this many nested calls.

    Use this before plum compares types. Beartype caches errors: after hitting the recursion limit once, it
    would keep raising the same `RecursionError` in later calls.
    """
    if calls:
        require_stack_depth(calls - 1)
