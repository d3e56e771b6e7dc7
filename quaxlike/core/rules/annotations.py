"""Annotations of a rule's operands, which determine the types for dispatch and the arrays accepted.

All plain operands dispatch as `jax.Array`, so `hint` never contains a number or a NumPy type. Otherwise a
rule for `float` would match eagerly, but not under `jit`.
"""

import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jaxtyping import AbstractArray, ArrayLike

from ..array_kinds import ANY_ARRAY, ArrayKind
from ..functions import expanded_alias, type_name
from ..values import Value

_NUMBERS = (bool, int, float, complex)
NO_ARRAYS = (*_NUMBERS, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Annotation:
    """What an operand's annotation means for dispatch."""

    hint: Any
    """The class of the operand, or a union of classes."""
    classes: tuple[Any, ...]
    """The classes in the annotation."""
    written: Any
    kinds: tuple[tuple[Any, ArrayKind | None], ...] = ()
    """Each class along with its dtypes and shapes, if these are restricted as in jaxtyping's `Float[Array,
    "n"]`."""

    @property
    def is_impossible(self) -> bool:
        """Whether no operand can ever match this."""
        return self.hint is Nothing

    @property
    def names_array(self) -> bool:
        """Whether this includes `jax.Array`, but neither numbers nor NumPy arrays."""
        return jax.Array in self.classes and not any(map(_is_number_or_numpy, self.classes))

    @property
    def names_operand(self) -> bool:
        """Whether this includes arrays or a Value type.

        (An annotation for a parameter of the primitive doesn't.)
        """
        return self.names_value or not {jax.Array, np.ndarray}.isdisjoint(self.classes)

    @property
    def names_value(self) -> bool:
        """Whether this includes a Value type."""
        return any(issubclass(cls, Value) for cls in self.classes if cls is not Any)

    def takes(self, cls: type, aval: Callable[[], Any]) -> bool:
        """Returns whether this accepts the dtype and shape of an operand dispatching as `cls`."""
        return not self.kinds or any(
            _is_subclass(cls, each) and (kind is None or kind.takes(aval())) for each, kind in self.kinds
        )

    def implies(self, other: "Annotation") -> bool:
        """Returns whether `other` accepts every dtype and shape accepted here."""
        if not other.kinds:
            return True
        own = self.kinds or [(cls, None) for cls in typing.get_args(self.hint) or (self.hint,)]

        def is_accepted(cls: Any, kind: Any) -> bool:
            for each, wanted in other.kinds:
                if _is_subclass(cls, each) and (
                    wanted is None or (kind is not None and kind.implies(wanted))
                ):
                    return True
            return False

        return all(is_accepted(cls, kind) for cls, kind in own)

    def excludes(self, other: "Annotation", cls: type) -> bool:
        """Returns whether no dtype and shape for an operand of this class is accepted by both."""
        own, others = (
            [kind for each, kind in x.kinds or [(Any, None)] if _is_subclass(cls, each)]
            for x in (self, other)
        )
        return all(x and y and x.excludes(y) for x, y in itertools.product(own, others))

    def __str__(self) -> str:
        return type_name(self.written if self.kinds or self.is_impossible else self.hint)


class Nothing:
    """The class for an annotation without any possible operands, such as `list`."""


def annotation_of(hint: Any, names: Callable[[str], Any] = str) -> Annotation:
    """Parses an annotation. Numbers and NumPy arrays represent any plain operand, and aliases are expanded.

    **Arguments:**

    - `names`: a function for evaluating any names in quotes.
    """
    members = list(dict.fromkeys(_members(hint, names)))
    classes = tuple(cls for cls, _ in members)
    if any(member in ((Any, None), (object, None)) for member in members):
        return Annotation(Any, classes, hint)
    if not members:
        return Annotation(Nothing, (), hint)
    plain = [cls for cls in classes if cls is not Any and _is_number_or_numpy(cls)]
    if all(kind is None for _, kind in members):
        # When a primitive is bound, numbers and NumPy arrays may already have been converted to arrays.
        return Annotation(_union([*classes, jax.Array] if plain else classes), classes, hint)
    # Next to other kinds of arrays, a number is treated as an array without axes.
    kinds = [(cls, kind) for cls, kind in members if cls not in plain]
    kinds += [(jax.Array, None if issubclass(cls, np.ndarray) else ArrayKind()) for cls in plain]
    return Annotation(_union([cls for cls, _ in kinds]), classes, hint, tuple(kinds))


def _union(classes: Iterable[Any]) -> Any:
    return functools.reduce(operator.or_, dict.fromkeys(classes))


def _members(hint: Any, names: Callable[[str], Any]) -> Iterator[tuple[Any, ArrayKind | None]]:
    """Expands an annotation into its classes, each with its dtypes and shape."""
    import plum  # importing this takes longer than all of our own modules

    if isinstance(hint, typing.ForwardRef | str):
        hint = names(hint if isinstance(hint, str) else hint.__forward_arg__)
    origin = typing.get_origin(hint)
    if hint is None or hint is type(None):
        pass
    elif hint is Any:
        yield Any, None
    elif origin in (typing.Union, UnionType):
        for member in typing.get_args(hint):
            yield from _members(member, names)
    elif isinstance(hint, TypeVar):
        several = hint.__constraints__ or (Any if hint.__bound__ is None else hint.__bound__,)
        for member in several:
            yield from _members(member, names)
    elif hasattr(hint, "__supertype__"):  # a NewType
        yield from _members(hint.__supertype__, names)
    elif origin is typing.Annotated or (hasattr(origin, "__value__") and not isinstance(origin, type)):
        args = typing.get_args(hint)
        yield from _members(args[0] if origin is typing.Annotated else expanded_alias(origin, args), names)
    elif hasattr(hint, "__value__") and not isinstance(hint, type):  # a `type` alias
        yield from _members(hint.__value__, names)
    elif isinstance(hint, type) and issubclass(hint, AbstractArray):
        kind = ArrayKind.of(hint)
        kind = None if kind == ANY_ARRAY else kind
        for cls, _ in _members(hint.array_type, names):
            yield (jax.Array if cls is not Any and _is_number_or_numpy(cls) else cls), kind
    else:
        cls = plum.resolve_type_hint(hint if origin is None else origin)
        if isinstance(cls, type) and _may_have_operands(cls):
            # A subclass of `jax.Array` counts as `jax.Array`.
            yield (jax.Array if issubclass(cls, (jax.Array, jax.core.Tracer)) else cls), None


def _may_have_operands(cls: type) -> bool:
    """Returns whether arrays or Values can be of this class. (A list or mapping never is.)"""
    if cls in (*_NUMBERS, object):
        return True
    if cls.__module__ == "collections.abc":  # those with a hook, such as Iterable, look at methods
        return "__subclasshook__" in vars(cls)
    return cls.__module__ != "builtins" and not is_only_for_instances(cls)


def is_only_for_instances(cls: Any) -> bool:
    """Returns whether `issubclass` refuses a class, such as a protocol naming attributes."""
    try:
        issubclass(Value, cls)
    except TypeError:
        return True
    return False


@functools.cache
def _is_number_or_numpy(cls: type) -> bool:
    """Returns whether a class represents plain operands, but isn't `jax.Array` itself."""
    if cls in (object, jax.Array):
        return False
    return issubclass(cls, (*NO_ARRAYS, *typing.get_args(ArrayLike))) or any(
        issubclass(number, cls) for number in _NUMBERS
    )


def _is_subclass(cls: Any, other: Any) -> bool:
    return other is Any or (cls is not Any and issubclass(cls, other))
