"""Dataclasses that are pytrees."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, cast, dataclass_transform, overload

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey

from .equality import equal, hash_of, is_static, made
from .lenses import LensField, LensSpec, make_lens_fields, make_slot_lenses

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type[Any])
_MISSING = dataclasses.MISSING
_Missing = dataclasses._MISSING_TYPE  # pyright: ignore[reportPrivateUsage]


def field(
    *,
    default: _T | _Missing = _MISSING,
    default_factory: Callable[[], _T] | _Missing = _MISSING,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    metadata: Mapping[Any, Any] | None = None,
    kw_only: bool | _Missing = _MISSING,
    static: bool = False,
) -> _T:
    """A field of a [`dataclass`][quaxlike.utils.dataclass], which may be static.

    **Arguments:**

    - `static`: whether the field is part of the pytree's structure, as hashable metadata, instead
        of a child. Default `False`.
    - the others: as for `dataclasses.field`.

    **Returns:**

    The field, which type checkers treat as a value of the field's type.

    !!! example

        ```python
        from quaxlike.utils import dataclass, field

        @dataclass
        class Layer:
            weight: jax.Array
            name: str = field(default="layer", static=True)
        ```
    """
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"field takes a mapping as `metadata`; found {metadata!r}.")
    made = dataclasses.field(
        default=cast(Any, default),
        default_factory=cast(Any, default_factory),
        init=init,
        repr=repr,
        hash=hash,
        compare=compare,
        metadata={**(metadata or {}), "static": static},
        kw_only=cast(Any, kw_only),
    )
    return cast(_T, made)


def lens_field(
    *,
    default: _T | _Missing = _MISSING,
    default_factory: Callable[[], _T] | _Missing = _MISSING,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    metadata: Mapping[Any, Any] | None = None,
    kw_only: bool | _Missing = _MISSING,
    static: bool = False,
) -> LensField[_T]:
    """Like [`field`][quaxlike.utils.field], for a [`LensField`][quaxlike.utils.LensField].

    **Arguments:**

    - as for [`field`][quaxlike.utils.field].

    **Returns:**

    The field, which type checkers treat as a `LensField[T]`.

    !!! example

        ```python
        from quaxlike.utils import LensField, dataclass, lens_field

        @dataclass
        class Point:
            x: LensField[float] = lens_field(default=0.0)
            name: LensField[str] = lens_field(default="p", static=True)
        ```
    """
    made = field(
        default=default,
        default_factory=default_factory,
        init=init,
        repr=repr,
        hash=hash,
        compare=compare,
        metadata=metadata,
        kw_only=kw_only,
        static=static,
    )
    return cast(LensField[_T], LensSpec.of(cast(Any, made)))


class _Options(TypedDict, total=False):
    init: bool
    repr: bool
    eq: bool
    order: bool
    unsafe_hash: bool
    frozen: bool
    match_args: bool
    kw_only: bool
    slots: bool
    weakref_slot: bool


@overload
def dataclass(cls: _C, /, **options: Unpack[_Options]) -> _C: ...
@overload
def dataclass(cls: None = None, /, **options: Unpack[_Options]) -> Callable[[_C], _C]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field, lens_field, dataclasses.field))
def dataclass(
    cls: Any = None,
    /,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    frozen: bool = True,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> Any:
    """Makes a class a standard dataclass that is a pytree, frozen by default.

    - Fields are children; those made with `field(static=True)` are part of the structure, and their
        values must be hashable. Fields with `init=False` are kept too.
    - JAX rebuilds instances from their fields: neither `__init__` nor `__post_init__` runs again.
    - `==` compares arrays by shape, dtype and all their values, as `eqx.tree_equal` does, and gives
        one boolean (a traced one for traced arrays); `hash` agrees with it.
    - Subclasses must be decorated too. Decorating a class twice changes nothing.

    **Arguments:**

    - `cls`: the class.
    - `frozen`: whether instances are immutable. Default `True`.
    - the others: as for `dataclasses.dataclass`, with its defaults.

    **Returns:**

    The class, or a decorator if `cls` is absent.

    **Raises:**

    - `TypeError`: at construction, if the value of a static field is not hashable.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.utils import dataclass, field

        @dataclass
        class Point:
            x: jax.Array
            y: jax.Array
            name: str = field(default="p", static=True)

        jax.tree.map(jnp.negative, Point(jnp.ones(3), jnp.zeros(3)))
        ```
    """

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            raise TypeError(f"dataclass decorates a class; found {cls!r}.")
        if cls in made:
            return cls
        if issubclass(cls, eqx.Module):
            raise TypeError(
                f"{cls.__name__} is an eqx.Module, which is a pytree dataclass already. Remove the decorator."
            )
        before = dict(vars(cls))
        make_lens_fields(cls)
        cls = dataclasses.dataclass(
            cls,
            # A hand-written `__init__` stays in any case; `init=False` lets lenses know about it.
            init=init and "__init__" not in before,
            repr=repr,
            eq=eq,
            order=order,
            unsafe_hash=unsafe_hash,
            frozen=frozen,
            match_args=match_args,
            kw_only=kw_only,
            slots=slots,
            weakref_slot=weakref_slot,
        )
        make_slot_lenses(cls)
        if eq and "__eq__" not in before:
            cls.__eq__ = equal
        if vars(cls).get("__hash__") not in (None, before.get("__hash__")):
            cls.__hash__ = hash_of
        if "__init__" in vars(cls):
            cls.__init__ = _checking_static_fields(cls.__init__)
        _register(cls)
        made.add(cls)
        return cls

    return decorate if cls is None else decorate(cls)


def _checking_static_fields(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked_init(self: Any, /, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for f in dataclasses.fields(self):
            if not is_static(f) or not hasattr(self, f.name):
                continue
            value = getattr(self, f.name)
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"The static field {f.name!r} of {type(self).__name__} must be hashable, for "
                    f"JAX to compare structures by it; found {type(value).__name__} ({error}). Use "
                    "a hashable value such as a tuple, or make the field a child: `static=False`."
                ) from error

    return checked_init


# The names of the children, and the names and values of the static fields.
_Structure = tuple[tuple[str, ...], tuple[str, ...], tuple[Hashable, ...]]


def _register(cls: type[Any]) -> None:
    fields = dataclasses.fields(cls)
    children = tuple(f.name for f in fields if not is_static(f))
    static = tuple(f.name for f in fields if is_static(f))
    get_children, get_static = _getter(children), _getter(static)

    def flatten(obj: Any) -> tuple[Iterable[Any], _Structure]:
        try:
            return get_children(obj), (children, static, get_static(obj))
        except AttributeError:
            # With `__post_init__` skipped or not yet run, fields may be unset.
            some_children = tuple(name for name in children if hasattr(obj, name))
            some_static = tuple(name for name in static if hasattr(obj, name))
            structure = (some_children, some_static, _getter(some_static)(obj))
            return _getter(some_children)(obj), structure

    def flatten_with_keys(obj: Any) -> tuple[Iterable[tuple[Any, Any]], _Structure]:
        values, structure = flatten(obj)
        return zip(map(GetAttrKey, structure[0]), values, strict=True), structure

    def unflatten(structure: _Structure, values: Iterable[Any]) -> Any:
        names, static_names, static_values = structure
        obj = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(obj, name, value)
        for name, value in zip(static_names, static_values, strict=True):
            object.__setattr__(obj, name, value)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) < 2:  # then attrgetter gives no tuple, or cannot be made
        return lambda obj: tuple(getattr(obj, name) for name in names)
    return operator.attrgetter(*names)
