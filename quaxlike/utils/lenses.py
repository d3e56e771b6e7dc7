"""Lenses, i.e. a getter together with a copying setter for some part of an object.

A lens never mutates an object. Instead, `set` rebuilds each object along the path, so any checks in
`__post_init__` also apply to the copy.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast, get_origin, overload

import jax
from jax.tree_util import DictKey, GetAttrKey

_S = TypeVar("_S")
_T = TypeVar("_T")
_U = TypeVar("_U")

# Each step along the path of a lens is either an attribute or an item. These are the classes of JAX's key
# paths, so `jax.tree_util.keystr` can print them.
_Step = GetAttrKey | DictKey


@dataclasses.dataclass(frozen=True, repr=False)
class Lens(Generic[_S, _T]):
    """A lens on a part of type `T` inside objects of type `S`.

    For example, if `Point` has a [`LensField`][quaxlike.utils.LensField] called `x`, then `Point.x` is a
    lens. A lens's attributes and items are also lenses, making it easy to reach deeper parts:
    `Model.layers[0].bias`.

    **Methods:** `get`, `set`, `update` and `focus`.
    """

    _root: type[_S] | None
    _path: tuple[_Step, ...] = ()

    def get(self, obj: _S, /) -> _T:
        """Returns this part of `obj`."""
        value: Any = obj
        for step in self._path:
            value = _child(value, step)
        return value

    def set(self, obj: _S, value: _T, /) -> _S:
        """Returns a copy of `obj` with this part set to `value`. The original is left unchanged.

        Any dataclasses along the path are rebuilt using `dataclasses.replace`, which calls their
        `__post_init__`. Fields with `init=False` keep their values unless it sets them. A handwritten
        `__init__` expects unknown arguments, so such objects are copied shallowly instead. An `InitVar`
        without a default raises a `TypeError`.
        """
        return cast(_S, _replaced(obj, self._path, value))

    def update(self, obj: _S, f: Callable[[_T], _T], /) -> _S:
        """Returns a copy of `obj` with `f` applied to this part."""
        return self.set(obj, f(self.get(obj)))

    def focus(self, where: Lens[_T, _U] | Callable[[_T], _U], /) -> Lens[_S, _U]:
        """Composes this lens with another lens, or with a function looking up attributes and items.

        `Model.mlp.focus(lambda mlp: mlp.layers[0])` is the same lens as `Model.mlp.layers[0]`, but type
        checkers can infer its type.
        """
        inner = where if isinstance(where, Lens) else where(cast(_T, Lens(None)))
        if not isinstance(inner, Lens):
            raise TypeError(
                "`focus` expects a lens, or a function that only follows attributes and items of "
                f"its argument, found {type(inner).__name__}. Compute with `get` and `update`."
            )
        return Lens(self._root, self._path + cast("Lens[_T, _U]", inner)._path)

    def __getattr__(self, name: str) -> Lens[_S, Any]:
        # Python and notebooks look up names like `__array__` and `_repr_html_` to find out what an object
        # supports. Lenses for these would look like support for everything.
        if name.startswith("_"):
            raise AttributeError(name)
        return Lens(self._root, (*self._path, GetAttrKey(name)))

    def __getitem__(self, key: Any) -> Lens[_S, Any]:
        return Lens(self._root, (*self._path, DictKey(key)))

    # Otherwise Python would iterate by calling `__getitem__` with 0, 1, 2, ... until an `IndexError`, i.e.
    # forever.
    __iter__ = None

    def __repr__(self) -> str:
        root = "" if self._root is None else self._root.__name__
        return f"Lens({root}{jax.tree_util.keystr(self._path)})"


def _child(obj: Any, step: _Step) -> Any:
    return getattr(obj, step.name) if isinstance(step, GetAttrKey) else obj[step.key]


def _replaced(obj: Any, path: tuple[_Step, ...], value: Any) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, GetAttrKey):
        # Don't look up the last step: its field may not be set yet.
        return _with_attribute(obj, step.name, _replaced(_child(obj, step), rest, value) if rest else value)
    return _with_item(obj, step.key, _replaced(_child(obj, step), rest, value))


def _with_attribute(obj: Any, name: str, value: Any) -> Any:
    if hasattr(obj, "_replace"):  # a named tuple
        return obj._replace(**{name: value})
    field = getattr(obj, "__dataclass_fields__", {}).get(name)
    if field is None:
        raise TypeError(
            f"A lens can set the fields of dataclasses and named tuples, and {name!r} of "
            f"{type(obj).__name__} is not one. Set what contains it."
        )
    if field.init and obj.__dataclass_params__.init:
        return _rebuilt(obj, name, value)
    new = copy.copy(obj)
    object.__setattr__(new, name, value)
    return new


def _rebuilt(obj: Any, name: str, value: Any) -> Any:
    cls = type(obj)
    for other in cls.__dataclass_fields__.values():
        is_init_var = other._field_type is dataclasses._FIELD_INITVAR  # pyright: ignore
        if is_init_var and other.default is dataclasses.MISSING:
            raise TypeError(
                f"A lens cannot set {name!r} of {cls.__name__}, whose `__init__` also takes {other.name!r}, "
                "an InitVar: instances don't keep it. Use "
                f"`dataclasses.replace(obj, {name}=…, {other.name}=…)`."
            )
    new = dataclasses.replace(obj, **{name: value})
    # This drops fields with `init=False`. Keep their values, unless `__post_init__` has computed new ones.
    computes = hasattr(cls, "__post_init__")
    for other in dataclasses.fields(obj):
        if not other.init and _is_set(obj, other.name) and not (computes and _is_set(new, other.name)):
            object.__setattr__(new, other.name, getattr(obj, other.name))
    return new


def _is_set(obj: Any, name: str) -> bool:
    """Returns whether an instance has its own value for a field, not just its class's default."""
    if hasattr(obj, "__dict__") and name not in vars(obj):
        return False
    return hasattr(obj, name)


def _with_item(obj: Any, key: Any, value: Any) -> Any:
    if isinstance(obj, list | dict):
        new = copy.copy(obj)
        new[key] = value
        return new
    if isinstance(obj, tuple):
        items = list(obj)
        items[key] = value
        return cast(Any, type(obj))._make(items) if hasattr(obj, "_make") else type(obj)(items)
    raise TypeError(
        f"A lens can set items of lists, tuples and dicts, found item {key!r} of a "
        f"{type(obj).__name__}. For arrays: `lens.update(obj, lambda x: x.at[...].set(...))`."
    )


class LensField(Generic[_T]):
    """Annotates a dataclass field to be a lens on the class. On instances it is still a `T`.

    This works for classes decorated with [`dataclass`][quaxlike.utils.dataclass]. For any other dataclasses
    (such as `eqx.Module`s), inherit from [`HasLensFields`][quaxlike.utils.HasLensFields] as well. At run time
    `LensField[T]` is just `Annotated[T, LensField]`, so run-time type checkers see a `T`.

    Lenses come from functional programming; see J. N. Foster et al., "Combinators for bidirectional tree
    transformations", 2007.

    !!! example

        ```python
        from quaxlike.utils import HasLensFields, LensField, dataclass

        @dataclass
        class Point(HasLensFields):
            x: LensField[float]
            y: LensField[float]

        p = Point(1.0, 2.0)
        Point.x.get(p)  # 1.0
        Point.x.set(p, 3.0)  # Point(x=3.0, y=2.0); p is unchanged
        Point.x.update(p, lambda x: 10 * x)  # Point(x=10.0, y=2.0)
        ```
    """

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type[_S], /) -> Lens[_S, _T]: ...
        @overload
        def __get__(self, instance: object, owner: type[Any] | None = None, /) -> _T: ...
        def __get__(self, instance: Any, owner: Any = None, /) -> Any: ...
        def __set__(self, instance: Any, value: _T, /) -> None: ...
    else:

        def __class_getitem__(cls, item: Any) -> Any:
            return Annotated[item, cls]


class HasLensFields:
    """Base class turning each [`LensField`][quaxlike.utils.LensField] of a dataclass into a lens.

    It has neither metaclass nor fields, so it combines with `eqx.Module` or any other base class.

    !!! example

        ```python
        import equinox as eqx
        import jax.numpy as jnp
        from quaxlike.utils import HasLensFields, LensField

        class Layer(HasLensFields, eqx.Module):
            weight: LensField[jax.Array]

        Layer.weight.update(Layer(jnp.ones(3)), jnp.zeros_like)
        ```
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        make_lens_fields(cls)


class LensSpec(dataclasses.Field):  # pyright: ignore[reportMissingTypeArgument]
    """A dataclass field kept on its class as a descriptor returning a lens.

    This relies on `dataclasses` looking up the class attribute twice. The first time, the field has no name
    yet and returns itself. `dataclasses` then sets its name and looks it up again. (Finding a field now, it
    would replace the class attribute by the default.) So the second lookup returns the default, leaving the
    descriptor in place.
    """

    __slots__ = ()

    @classmethod
    def of(cls, field: dataclasses.Field[Any]) -> LensSpec:
        """Copies a field into a `LensSpec`."""
        spec = cls.__new__(cls)
        for slot in dataclasses.Field.__slots__:
            setattr(spec, slot, getattr(field, slot))
        return spec

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        # Python looks in the instance dictionary first, so here the field hasn't been set.
        if instance is not None:
            if self.default is not dataclasses.MISSING:  # as an ordinary field has it on its class
                return self.default
            raise AttributeError(f"The field {self.name!r} of this {owner.__name__} is not set.")
        # Despite what the type stubs claim, the name is initially `None`.
        if cast("str | None", self.name) is None:
            return self
        # This branch also looks up the default if a subclass annotates the same name again.
        if not _is_processed(owner) and self.name in inspect.get_annotations(owner):
            if self.default is dataclasses.MISSING:
                raise AttributeError(self.name)
            return self.default
        return Lens(owner, (GetAttrKey(self.name),))


class SlotLens:
    """A descriptor wrapping a slot: a lens on the class, the slot's value on instances."""

    def __init__(self, name: str, slot: Any) -> None:
        self._name = name
        self._slot = slot

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return Lens(owner, (GetAttrKey(self._name),))
        return self._slot.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self._slot.__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self._slot.__delete__(instance)


def make_lens_fields(cls: type[Any]) -> None:
    """Turns every field annotated as `LensField` into a lens. Call this before `dataclasses.dataclass`."""
    if _is_processed(cls):
        return  # with `slots=True` the class is created twice, and this is the second time
    for name, annotation in inspect.get_annotations(cls).items():
        if _is_lens_annotation(annotation, cls):
            field = getattr(cls, name, dataclasses.MISSING)
            if not isinstance(field, dataclasses.Field):
                field = cast("dataclasses.Field[Any]", dataclasses.field(default=field))
            if not isinstance(field, LensSpec):
                setattr(cls, name, LensSpec.of(field))


def make_slot_lenses(cls: type[Any]) -> None:
    """Restores a class's lenses after `dataclass(slots=True)` has replaced them with slot descriptors."""
    for field in dataclasses.fields(cls):
        slot = vars(cls).get(field.name)
        if isinstance(field, LensSpec) and inspect.ismemberdescriptor(slot):
            setattr(cls, field.name, SlotLens(field.name, slot))


def _is_processed(cls: type[Any]) -> bool:
    return "__dataclass_fields__" in vars(cls)


def _is_lens_annotation(annotation: Any, cls: type[Any]) -> bool:
    if isinstance(annotation, str):
        head, *attributes = annotation.split("[")[0].strip().split(".")
        namespace: Mapping[str, Any] = vars(sys.modules.get(cls.__module__, object))
        if head not in namespace:  # the name is local to some function, so we can't evaluate it
            return [head, *attributes][-1] == LensField.__name__
        annotation = namespace[head]
        for attribute in attributes:
            annotation = getattr(annotation, attribute, None)
    metadata = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
    return annotation is LensField or LensField in metadata
