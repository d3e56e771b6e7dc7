"""Dataclasses as pytrees."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast, dataclass_transform, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey

from .lenses import LensField, LensSpec, make_lens_fields, make_slot_lenses

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type[Any])
_MISSING = dataclasses.MISSING
_Missing = dataclasses._MISSING_TYPE  # pyright: ignore[reportPrivateUsage]

# Every class made by `dataclass`. (The JAX pytree registry keeps these alive anyway.)
_made: set[type[Any]] = set()


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
    """Declares a field of a [`dataclass`][quaxlike.utils.dataclass]: `dataclasses.field` with an additional
    `static` argument.

    **Arguments:**

    - `static`: whether the field is metadata in the pytree structure rather than a child. JAX compares
        structures using `==`. Default `False`.
    - the others: as for `dataclasses.field`.

    **Returns:**

    The field. (Type checkers see a value of the field's type.)

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
    options: dict[str, Any] = {"default": default, "default_factory": default_factory, "kw_only": kw_only}
    made: Any = dataclasses.field(
        **options,
        init=init,
        repr=repr,
        hash=hash,
        compare=compare,
        metadata={**(metadata or {}), "static": static},
    )
    return made


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
    """Declares a [`LensField`][quaxlike.utils.LensField] of a dataclass.

    **Arguments:**

    - as for [`field`][quaxlike.utils.field].

    **Returns:**

    The field. (Type checkers see a `LensField[T]`.)

    !!! example

        ```python
        from quaxlike.utils import LensField, dataclass, lens_field

        @dataclass
        class Point:
            x: LensField[float] = lens_field(default=0.0)
            name: LensField[str] = lens_field(default="p", static=True)
        ```
    """
    made: Any = field(
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
    return cast(LensField[_T], LensSpec.of(made))


@overload
def dataclass(
    cls: _C,
    /,
    *,
    init: bool = ...,
    repr: bool = ...,
    eq: bool = ...,
    order: bool = ...,
    unsafe_hash: bool = ...,
    frozen: bool = ...,
    match_args: bool = ...,
    kw_only: bool = ...,
    slots: bool = ...,
    weakref_slot: bool = ...,
) -> _C: ...
@overload
def dataclass(
    cls: None = None,
    /,
    *,
    init: bool = ...,
    repr: bool = ...,
    eq: bool = ...,
    order: bool = ...,
    unsafe_hash: bool = ...,
    frozen: bool = ...,
    match_args: bool = ...,
    kw_only: bool = ...,
    slots: bool = ...,
    weakref_slot: bool = ...,
) -> Callable[[_C], _C]: ...
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
    """Turns a class into a standard dataclass and a pytree. By default the dataclass is frozen.

    - Fields are children of the pytree, except for static ones (`static=True`), which are part of its
        structure. JAX compares structures, so static fields must not contain arrays and must not be mutated.
        Fields with `init=False` are preserved as well.
    - When JAX rebuilds an instance, it sets the fields directly and does *not* call `__init__` or
        `__post_init__` again.
    - `==` compares arrays by shape, dtype and values, like `eqx.tree_equal`. It returns a single boolean,
        traced if the arrays are traced. `hash` is consistent with this.
    - Subclasses must be decorated as well. Decorating a class twice has no effect.

    **Arguments:**

    - `cls`: the class.
    - `frozen`: whether instances are immutable. Default `True`.
    - the others: as for `dataclasses.dataclass`, with its defaults.

    **Returns:**

    The class, or a decorator if `cls` is omitted.

    **Raises:**

    - `TypeError`: at construction, if a static field contains an array.

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

    given: dict[str, Any] = {
        "repr": repr,
        "eq": eq,
        "order": order,
        "unsafe_hash": unsafe_hash,
        "frozen": frozen,
        "match_args": match_args,
        "kw_only": kw_only,
        "slots": slots,
        "weakref_slot": weakref_slot,
    }

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            raise TypeError(f"dataclass decorates a class; found {cls!r}.")
        if cls in _made:
            return cls
        if issubclass(cls, eqx.Module):
            raise TypeError(
                f"{cls.__name__} is an eqx.Module, which is a pytree dataclass already. Remove the decorator."
            )
        before = dict(vars(cls))
        make_lens_fields(cls)
        # `dataclasses` never overwrites a handwritten `__init__`, regardless of this flag. Pass `init=False`
        # anyway: it tells lenses to copy an instance rather than calling its `__init__`.
        cls = dataclasses.dataclass(cls, init=init and "__init__" not in before, **given)
        make_slot_lenses(cls)
        if eq and "__eq__" not in before:
            cls.__eq__ = _equal
        if vars(cls).get("__hash__") not in (None, before.get("__hash__")):
            cls.__hash__ = _hash_of
        if "__init__" in vars(cls):
            cls.__init__ = _checking_static_fields(cls.__init__)
        _register(cls)
        _made.add(cls)
        return cls

    return decorate if cls is None else decorate(cls)


def _checking_static_fields(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked_init(self: Any, /, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for f in dataclasses.fields(self):
            if not _is_static(f) or not hasattr(self, f.name):
                continue
            value = getattr(self, f.name)
            if not _is_hashable(value) and any(map(_is_array, jax.tree.leaves(value))):
                raise TypeError(
                    f"The static field {f.name!r} of {type(self).__name__} must not hold an array, for JAX "
                    f"to compare structures by it; found {_told(value)}. Make the field a child: leave out "
                    "`static=True`. Or hold the numbers as a tuple."
                )

    return checked_init


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _told(value: Any) -> str:
    return "an array" if _is_array(value) else f"{type(value).__name__} with an array in it"


# The names of the children, followed by the names and values of the static fields.
_Structure = tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...]]


def _register(cls: type[Any]) -> None:
    fields = dataclasses.fields(cls)
    children = tuple(f.name for f in fields if not _is_static(f))
    static = tuple(f.name for f in fields if _is_static(f))
    get_children, get_static = _getter(children), _getter(static)

    def flatten(obj: Any) -> tuple[Iterable[Any], _Structure]:
        try:
            return get_children(obj), (children, static, get_static(obj))
        except AttributeError:
            # Some fields may not be set, e.g. if `__post_init__` was skipped or hasn't run yet.
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
    if len(names) < 2:  # `attrgetter` fails for no names, and for a single name it doesn't return a tuple
        return lambda obj: tuple(getattr(obj, name) for name in names)
    return operator.attrgetter(*names)


# Equality and hashing, which compare arrays by value ----------------------------------------------


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return field.metadata.get("static", False)


def _equal(self: Any, other: Any) -> Any:
    """Implements `__eq__`. The result is traced if any of the arrays is."""
    if type(other) is not type(self):
        return NotImplemented
    names = [f.name for f in dataclasses.fields(self) if f.compare and not _is_static(f)]
    static = [f.name for f in dataclasses.fields(self) if f.compare and _is_static(f)]
    if any(getattr(self, name) != getattr(other, name) for name in static):
        return False
    leaves, structure = _flatten_to_dataclasses([getattr(self, name) for name in names])
    others, other_structure = _flatten_to_dataclasses([getattr(other, name) for name in names])
    if structure != other_structure:
        return False
    all_same: Any = True
    for leaf, other_leaf in zip(leaves, others, strict=True):
        same = _leaf_equal(leaf, other_leaf)
        if same is False:
            return False
        all_same = all_same & same
    return all_same


def _hash_of(self: Any) -> int:
    """Implements `__hash__`: equal instances have equal hashes."""
    fields = [f for f in dataclasses.fields(self) if (f.compare if f.hash is None else f.hash)]
    static = tuple(getattr(self, f.name) for f in fields if _is_static(f))
    leaves, _ = _flatten_to_dataclasses([getattr(self, f.name) for f in fields if not _is_static(f)])
    return hash((static, *map(_leaf_hash, leaves)))


def _flatten_to_dataclasses(tree: Any) -> Any:
    # Compare nested dataclasses as a whole: their own `__eq__` may ignore some of the fields.
    return jax.tree.flatten(tree, is_leaf=lambda node: type(node) in _made)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _on_host(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            x = jax.random.key_data(x)
    return np.asarray(x)


def _leaf_equal(x: Any, y: Any) -> Any:
    if not _is_array(x) and not _is_array(y):
        same = x == y
        return same if isinstance(same, Tracer) else bool(same)
    if not (_is_array(x) and _is_array(y)) or x.shape != y.shape or x.dtype != y.dtype:
        return False
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return jnp.all(jnp.asarray(x) == jnp.asarray(y))
    return bool(np.array_equal(_on_host(x), _on_host(y)))


def _leaf_hash(x: Any) -> int:
    if not _is_array(x):
        return hash(x)
    if isinstance(x, Tracer):
        raise TypeError(
            f"Cannot hash a dataclass that holds a traced array ({x.aval}), whose values are not "
            "known yet. Hash it outside of jit, grad and vmap."
        )
    # Adding zero normalises -0.0 to 0.0: these are equal, so they need equal hashes, but their bytes differ.
    values = _on_host(x) + np.zeros((), _on_host(x).dtype)
    return hash((x.shape, str(x.dtype), values.tobytes()))
