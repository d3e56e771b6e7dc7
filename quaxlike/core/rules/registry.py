"""The registry of rules: `register`, `RuleSet`."""

import contextlib
import dataclasses
import difflib
import inspect
import itertools
import threading
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, ArrayLike

from .. import compat, high_level
from ..hooks import RuleError
from ..values import ArrayValue, Value

if TYPE_CHECKING:
    import plum

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_NUMBERS = (bool, int, float, complex)
_NO_ARRAYS = (*_NUMBERS, np.ndarray, np.generic)
_PACKAGE = __name__.partition(".")[0] + "."


class RuleWarning(UserWarning):
    """A rule or a type that was written for another library works, but less is certain about it than here.

    A rule returns another dtype than its primitive does, and its type does not declare `own_dtypes` (under
    `jax_enable_checks`, this is a [`quaxlike.RuleError`][]). A handler of an ImplicitArray can never match. A
    type that refuses to materialise is differentiated by its leaves, or its only leaf decides about control
    flow. Each rule and each type is warned about once.
    """

    __module__ = "quaxlike"


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # rules


def warn_once(rule: Any, warning: Warning) -> None:
    """Warns at the place where the rule was written."""
    if rule not in _warned:
        _warned.add(rule)
        file, _, line = rule.source.rpartition(":")
        warnings.warn_explicit(warning, None, file, int(line))


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """One registered rule: the operand types that it applies to, and where it was written."""

    primitive: jexc.Primitive
    function: Callable[..., Any]
    signature: "plum.Signature"
    takes_primitive: bool
    keywords: frozenset[str] | None  # the parameters it names, or None if it takes **params
    operands: frozenset[str] = frozenset()  # the names of its operands
    arrays: tuple[bool, ...] = ()  # whether it names each of them, and any more, as `jax.Array`

    @property
    def written(self) -> Callable[..., Any]:
        """The function as its author wrote it; several rules may share it."""
        return inspect.unwrap(getattr(self.function, "written_as", self.function))

    @property
    def source(self) -> str:
        """Where the rule was written, as `file:line`."""
        code = self.written.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self.keywords is not None:
            # JAX adds parameters in every release. One that the rule does not name and that is unused
            # (None) is left out, so that the rule keeps working.
            params = {k: v for k, v in params.items() if k in self.keywords or v is not None}
            unknown = params.keys() - self.keywords
            if unknown:
                raise RuleError(
                    f"The rule {self} does not take the parameter(s) "
                    f"{', '.join(sorted(unknown))}. Add `**params` to it, and pass them on."
                )
        if any(self.arrays):
            # JAX hands numbers and NumPy arrays to primitives as they are.
            named = itertools.chain(self.arrays, itertools.repeat(self.arrays[-1]))
            operands = [
                jnp.asarray(x) if as_array and isinstance(x, _NO_ARRAYS) else x
                for x, as_array in zip(operands, named, strict=False)
            ]
        if self.takes_primitive:
            return self.function(primitive, *operands, **params)
        return self.function(*operands, **params)

    def __repr__(self) -> str:
        names = [*map(type_name, self.signature.types)]
        if self.signature.has_varargs:
            names.append(f"*{type_name(self.signature.varargs)}")
        return f"{self.primitive}({', '.join(names)}) at {self.source}"


class RuleSet:
    """A private set of rules, layered over the global one.

    Pass it to [`quaxlike.register`][] and to [`quaxlike.quaxify`][]. Its rules are tried first; a
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

    @property
    def looked_at(self) -> list[Rule]:
        """The rules whose annotations have been read: those not waiting for their primitive."""
        return [rule for rules in list(self._rules.values()) for rule in rules]

    def __iter__(self) -> Iterator[Rule]:
        return itertools.chain.from_iterable(rules for _, rules in self.items())

    def items(self) -> list[tuple[jexc.Primitive, tuple[Rule, ...]]]:
        return [(primitive, self[primitive]) for primitive in list(self._rules)]

    def __getitem__(self, primitive: jexc.Primitive) -> tuple[Rule, ...]:
        with lock:
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
        """Adds a rule whose annotations are read when `primitive` is first dispatched."""
        self._rules.setdefault(primitive, ())
        self._waiting.setdefault(primitive, []).append((function, precedence))


GLOBAL = RuleSet()


# Registration -------------------------------------------------------------------------------------

lock = threading.RLock()
_epoch = 0

# The epoch, as a setting that is part of the keys of JAX's caches: registering a rule after
# `jax.jit(quaxify(f))` was traced makes JAX trace it again. It is set only once something has been
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
    primitive: jexc.Primitive | str | type[Any] | Sequence[jexc.Primitive | str | type[Any]],
    /,
    *,
    precedence: int = 0,
    rules: RuleSet | None = None,
) -> Callable[[_Fn], _Fn]:
    """Registers a rule for what a primitive does with operands of the annotated types.

    The types of *all* positional parameters select the rule. Plain operands (arrays, NumPy arrays,
    Python scalars) count as `jax.Array`, so annotate them as `jax.Array` or `ArrayLike`.

    **Arguments:**

    - `primitive`: a JAX primitive, its name (`"dot_general"`, `"jit"`, ...), a class of hijax's `HiPrim`, or
        several of them.
    - `precedence`: decides between rules if neither is more specific. Default 0.
    - `rules`: the [`quaxlike.RuleSet`][] to register in. Default: the global one.

    **Returns:**

    A decorator that returns the rule unchanged. The rule takes the operands by position and the
    primitive's parameters by keyword, and returns an array or a Value (a sequence of them if the
    primitive has multiple results), or `NotImplemented` to pass on to the next matching rule. If its
    first parameter is annotated `jax.extend.core.Primitive`, it also receives the primitive. The rule of a
    `HiPrim` takes the leaves of its operands, and the instance as `prim`; it returns a sequence of results.

    **Raises:**

    `ValueError` for a name that no primitive has, with near misses. `TypeError` for operands without
    annotations, unless another one is of a Value type, and for a parameter of the primitive as an operand.

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
    several = isinstance(primitive, Sequence) and not isinstance(primitive, str)
    primitives = [
        _as_primitive(p) for p in (cast(list[Any], primitive) if several else [cast(Any, primitive)])
    ]

    def decorator(function: _Fn) -> _Fn:
        global _epoch
        into = GLOBAL if rules is None else rules
        # Our own rules wait until they are needed, so that importing the package inspects none of them.
        wait = (function.__module__ or "").startswith(_PACKAGE)
        inspected = None if wait else _inspect(function, precedence)
        with lock:
            for p in primitives:
                if inspected is None:
                    into.add_later(p, function, precedence)
                else:
                    rule = Rule(p, function, *inspected)
                    check_operands(rule, compat.parameters_of(p))
                    into.add(rule)
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
    """Registers one rule for operands `(types, other)`, `(other, types)` and `(types, types)`.

    **Arguments:**

    - `types`: a Value type, or a union of several.
    - `other`: the type of the operand on the other side. Default: anything.
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


def _as_primitive(primitive: Any) -> jexc.Primitive:
    if isinstance(primitive, jexc.Primitive):
        return primitive
    if high_level.is_high_level(primitive):
        return high_level.primitive_of(primitive)
    if not isinstance(primitive, str):
        hint = ' Write `@quaxlike.register("name")` above a rule.' if inspect.isroutine(primitive) else ""
        raise TypeError(
            f"register takes a JAX primitive, its name, or a sequence of these; found {primitive!r}.{hint}"
        )
    name = primitive.removesuffix("_p")
    if name not in compat.named_primitives():  # it may have been defined since
        compat.named_primitives.cache_clear()
    known = compat.named_primitives()
    if name not in known:
        near = difflib.get_close_matches(primitive, known, n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"No JAX primitive is called {primitive!r}.{hint}")
    found, *others = known[name]
    if others:
        raise ValueError(
            f"{1 + len(others)} primitives of different libraries are called {primitive!r}. Pass the one "
            "that you mean instead of its name: `register(primitive)`."
        )
    return found


def _inspect(
    function: Callable[..., Any], precedence: int
) -> "tuple[plum.Signature, bool, frozenset[str] | None, frozenset[str], tuple[bool, ...]]":
    import plum  # takes longer than all of this package

    types: list[Any] = []
    varargs: Any = plum.Signature().varargs
    keywords: set[str] | None = set()
    hints = type_hints(function)
    parameters = inspect.signature(function).parameters
    _check_annotations(function, parameters.values(), hints)
    takes_primitive = False
    operands: set[str] = set()
    for i, p in enumerate(parameters.values()):
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
            operands.add(p.name)
        elif keywords is not None:  # has a default: a parameter of the primitive, not an operand
            keywords.add(p.name)
    signature = plum.Signature(*types, varargs=varargs, precedence=precedence)
    named = None if keywords is None else frozenset(keywords)
    return signature, takes_primitive, named, frozenset(operands), tuple(map(_is_array, (*types, varargs)))


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a rule, evaluated. They may name what it closes over: a class defined beside it."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    around: dict[str, Any] = {}
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            around[name] = cell.cell_contents
    try:
        return typing.get_type_hints(function, localns=around)
    except NameError as error:
        raise TypeError(
            f"The annotations of the rule {function} cannot be evaluated: {error}. They select the "
            "rule, so their names must be importable at run time."
        ) from error


def _check_annotations(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter], hints: dict[str, Any]
) -> None:
    """Raises a `TypeError` for operands without annotations, unless another one is of a Value type."""
    operands = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL or _is_required(p)]
    bare = [name for name in operands if name not in hints]
    members = [
        t for name in operands if name in hints for t in (typing.get_args(hints[name]) or (hints[name],))
    ]
    if bare and not any(isinstance(t, type | TypeVar) and _may_be_value(t) for t in members):
        raise TypeError(
            f"The rule {_place(function)} has no annotation on `{bare[0]}`, so it would take the primitive "
            "over for every type. Annotations select the rule: a type of Values, `jax.Array`, or `Any`; "
            "for the primitive itself, in front, `jax.extend.core.Primitive`."
        )


def _is_required(p: inspect.Parameter) -> bool:
    return p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty


def _may_be_value(hint: Any) -> bool:
    return isinstance(hint, TypeVar) or issubclass(typing.get_origin(hint) or hint, Value)


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return f"`{function.__name__}` at {code.co_filename}:{code.co_firstlineno}"


def check_operands(rule: Rule, params: Collection[str]) -> None:
    """Raises a `TypeError` if a rule takes a parameter of its primitive by position, and so never matches;
    only warns if its function has an attribute `may_never_match`."""
    for name in rule.operands.intersection(params):
        message = (
            f"The rule {rule} can never match: `{name}` is a parameter of `{rule.primitive}`, and "
            f"comes by keyword. Put a `*` before it: `def _(x: ..., *, {name}, **params)`."
        )
        if not getattr(rule.function, "may_never_match", False):
            raise TypeError(message)
        warn_once(rule, RuleWarning(message))


def signature_of(types: Iterable[Any]) -> "plum.Signature":
    import plum

    return plum.Signature(*types)


@typing.no_type_check  # type checks would use more of the stack than is counted here
def require_stack_depth(calls: int = 200) -> None:
    """Raises a `RecursionError` if fewer nested calls are left. To be called before plum compares types:
    beartype memoises its errors, and would raise a `RecursionError` again in later calls."""
    if calls:
        require_stack_depth(calls - 1)


def _plain_hint(hint: Any) -> Any:
    """Reduces a hint to its class, by which rules are dispatched: `Float[Array, "m n"]` counts as `Array`,
    and `float` as `float | Array`."""
    import plum

    while isinstance(hint, type) and issubclass(hint, AbstractArray):
        hint = hint.array_type
    hint = plum.resolve_type_hint(hint)
    members = {*(typing.get_args(hint) or (hint,))}
    # Python numbers are plain operands, and may be arrays by the time that a primitive gets them.
    return hint if members.isdisjoint(_NUMBERS) or jax.Array in members else hint | jax.Array


def _is_array(hint: Any) -> bool:
    """Whether a hint names `jax.Array`, and neither numbers nor NumPy arrays."""
    members = {*(typing.get_args(hint) or (hint,))}
    return jax.Array in members and members.isdisjoint(_NO_ARRAYS)


_ARRAY_LIKE = frozenset(typing.get_args(ArrayLike))


def type_name(hint: Any) -> str:
    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        short = ["ArrayLike"] if {*members} >= _ARRAY_LIKE else []
        others = [m for m in members if not short or m not in _ARRAY_LIKE]
        return " | ".join([*map(type_name, others), *short])
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
