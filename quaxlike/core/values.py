"""`Value` and `ArrayValue`: the base of every new kind of array."""

import abc
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu

from .._checked import PyTree
from . import compat
from .derivatives import derivative_alone
from .hooks import (
    OFTEN,
    Endless,
    ValueMeta,
    computes_with_itself,
    endless_error,
    hook_of_shape,
    not_an_array,
    probing,
    remedy,
    running_hooks,
    traced,
)
from .levels import level_of, not_dispatched
from .source_lines import calling_frame

_M = TypeVar("_M", bound=eqx.Module)


# Called on every new type of Values.
on_new_type: list[Callable[[Any], None]] = []


class Value(eqx.Module, metaclass=ValueMeta):
    """Anything that can stand in for a JAX array inside a function wrapped in `quaxify`.

    Subclass [`quaxlike.ArrayValue`][] for arrays; subclass this only for things that are not arrays.
    A `Value` is an Equinox module. Its array fields are its leaves; whatever decides shape, dtype or
    dispatch is a static field, which holds anything that can be compared, but never an array. Annotate a
    field that may be None as such.

    Everything below `materialise` is optional; the docstring of each hook says what happens without it.
    """

    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = None
    """The policy where no rule matches and no `quaxlike.on_materialise` is in force; None means "allow"."""

    to_materialise: ClassVar[str] = ""
    """For a type whose `on_materialise` is "error": what would be lost, and how to get a dense array on
    purpose. Messages say it in place of how to allow it."""

    to_unify: ClassVar[str] = ""
    """What to do where two such values, in branches or before and after an iteration, have no form in common.
    Messages say it in place of how a type unifies them."""

    linear: ClassVar[bool] = False
    """Whether the value is linear in its array leaves, so that its tangents and cotangents are of its class.

    A value counts as linear if both it and the Values that it holds declare so; a type need not check
    what it holds. Integer, boolean and key leaves have no tangents: a derivative shares them. If a leaf is
    shared by several elements, or is only a part of one, no cotangent belongs to a single element, and the
    backward function of a `jax.custom_vjp` receives a dense cotangent.
    """

    own_dtypes: ClassVar[bool] = False
    """Whether rules for this type may return results of another dtype than their primitive does."""

    own_shapes: ClassVar[bool | None] = None
    """Whether rules for this type may return results of another shape than their primitive does, such as one
    boolean for each vector where the elements are vectors. None means that they may, with a warning, for a
    value that refuses to materialise."""

    default_precedence: ClassVar[int] = 0
    """Where operands of several types override `default`, the one with the highest precedence is called."""

    # Equinox looks attributes up in Python, to make bound methods pytrees. On Values that lookup would be
    # most of the cost of a rule, so their methods are bound like those of any other Python object.
    __getattribute__ = object.__getattribute__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in on_new_type:
            hook(cls)

    # `==` compares elements or is an error, so two Values are the same key only if they are one.
    __hash__ = object.__hash__

    if TYPE_CHECKING:

        def __eq__(self, other: object, /) -> Any: ...
        def __ne__(self, other: object, /) -> Any: ...

    @abc.abstractmethod
    def aval(self) -> jax.core.AbstractValue:
        """The JAX type of this value, as seen by the code that uses it."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """The dense array that this value stands for. May raise, to refuse."""

    @staticmethod
    def default(
        primitive: jexc.Primitive,
        values: Sequence["jax.typing.ArrayLike | Value"],
        params: dict[str, Any],
    ) -> "jax.typing.ArrayLike | Value | Sequence[jax.typing.ArrayLike | Value]":
        """Called when no rule matches; override it in types that treat all primitives alike.

        If no operand overrides it, every Value is materialised, under the policy. If exactly one type
        does, or one has the highest `default_precedence`, its override is called; if several do, a
        `TypeError` names the types.

        **Arguments:**

        - `primitive`: the JAX primitive that was bound.
        - `values`: its operands; Values are passed unwrapped.
        - `params`: its parameters.

        **Returns:**

        As a rule does: one result, or a sequence if `primitive.multiple_results`.
        """
        raise NotImplementedError  # never called: dispatch compares by identity

    @classmethod
    def promote(cls, array: Any, like: Any) -> "Value | NotImplementedType":
        """Turns a plain `array` into this type, to match `like`: where one branch of a `cond`, or a loop
        carry, is a Value and the other side is not. Reads only the statics and shapes of `like`.

        The result equals `array` and has the same derivative. Its static fields may differ from those of
        `like` if `like` can be widened to them: see `widen`. If `like` holds a Value (as an array with names
        may), `array` may be a Value of the same class.

        If `like` may be None (which is then its default), and rules of this type raise
        [`quaxlike.OperandMismatch`][] in a loop, it is called without `like` on the zeros that the loop
        starts from. It must return a placeholder that is compatible with any value, and whose one leaf is
        `array`; the first iteration then determines the real type.

        Without it, the Value side is materialised under the policy.
        """
        return NotImplemented

    def widen(self, like: "Value") -> "Value | jax.Array | NotImplementedType":
        """Converts this value to a form that `like` has, or can be widened to in turn: where two branches of
        a `cond`, or a loop carry before and after an iteration, are Values that differ in class, static
        fields or shapes of leaves. Reads only the statics and shapes of `like`.

        It is called on both sides, on the second with the new form of the first; the two forms must then
        agree. The result equals this value and has the same derivative; a dense array makes both sides dense.

        Without it, fields that are Values are widened, and everything else must agree.
        """
        return NotImplemented

    @classmethod
    def cotangent(cls, ct: Any) -> Any:
        """Converts a cotangent to what the backward function of a `jax.custom_vjp` receives. `ct` is a value
        of this type (which is `linear`), or a plain array where only other results have this type. Override
        it in types whose static fields a cotangent does not share, such as units.
        """
        return ct

    def cotangent_factor(self, dtype: Any) -> Any:
        """What the cotangent of a value that is made inside of a derivative is multiplied with to give that
        of its leaves, such as one in the same unit: a scalar of this type and dtype. Without it, nothing.
        """
        return None

    def follows_rules(self) -> bool:
        """Whether the rules registered for the type apply to this value.

        Without it, they do. Otherwise `default` is called, or the value is materialised.
        """
        return True

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        """For each array leaf, which of its axes is the logical leading axis; None if all rows share the
        leaf. It lets `lax.scan` and `lax.map` run over rows. Without it, leaves that have the shape of the
        array are cut along their first axis, if their rows materialise as its rows; else it is materialised.
        """
        return NotImplemented

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        """For each array leaf, the partition spec that follows from `spec`, that of the logical array.

        Without it, leaves of the logical shape take `spec` itself, if their parts are those of the array, and
        an empty `spec` replicates all leaves. Anything else raises an error that names this hook.
        """
        return NotImplemented


class ArrayValue(Value):
    """A new kind of array.

    Write the fields and `materialise`, then rules with [`quaxlike.register`][].

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        class Scaled(ql.ArrayValue):
            array: jax.Array
            scale: jax.Array  # a scalar

            def materialise(self):
                return self.array * self.scale

        @ql.register("mul")
        def _(x: Scaled, y: jax.Array):
            return Scaled(x.array, x.scale * y) if y.ndim == 0 else NotImplemented

        ql.quaxify(lambda x: x * 2.0)(Scaled(jnp.ones(3), jnp.array(4.0)))  # a Scaled
        ```
    """

    def aval(self) -> jax.core.ShapedArray:
        """The shape and dtype of the dense array; inferred from `materialise` unless overridden."""
        with probing():
            # A new function each time: JAX caches by statics that compare equal, as 1 and 1.0 do.
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(self))
        return jax.core.ShapedArray(out.shape, out.dtype, weak_type=getattr(out, "weak_type", False))

    @abc.abstractmethod
    def materialise(self) -> jax.Array:
        """The dense array that this value stands for. May raise, to refuse."""

    # Each asks `aval`, for a type may say that its own shape is another, such as that of its components.

    @property
    def shape(self) -> tuple[int, ...]:
        return _aval_for_user(self).shape

    @property
    def dtype(self) -> Any:
        return _aval_for_user(self).dtype

    @property
    def ndim(self) -> int:
        return len(_aval_for_user(self).shape)

    @property
    def size(self) -> int:
        return _aval_for_user(self).size

    if TYPE_CHECKING:  # at run time, a type may have fields of these names: see core/without_operators.py
        device: ClassVar[Any]  # as those of `jax.Array`, read from the leaves
        sharding: ClassVar[Any]
        devices: ClassVar[Any]

    @property
    def __jax_array__(self) -> Any:
        # A property, so that outside any `quaxify` it is None and the usual lookups
        # (`getattr(x, "__jax_array__", None)`) find nothing: `array @ value` then defers to `value`.
        level = level_of(self)
        caller = calling_frame()
        if level is not None:
            # An operator of an array defers to ours, which follows rules wherever the value was made.
            reflected = compat.is_operator_of_array(caller)
            return None if reflected and not level.holds(self) else lambda: level.adopt(self)
        if compat.is_check_of_argument(caller):  # its own message would not help
            name = compat.asking_function(caller)
            raise NoArrayError(not_dispatched(self, f"`{name}`" if name else "jax.numpy"))
        return None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if (level := level_of(self)) is None:
            raise NoArrayError(not_dispatched(self, "NumPy"))
        return level.adopt(self).__array__(*args, **kwargs)


class NoArrayError(TypeError, RuntimeError):
    """A Value was passed to a function that asks for an array, outside of `quaxify`. It is a `RuntimeError`
    as well, as where a primitive is bound: there JAX would replace a `TypeError` by its own."""


def _aval_for_user(value: Value) -> Any:
    try:
        return aval_of(value)
    except Endless as error:
        raise endless_error(error) from None


def replace_fields(value: _M, /, **fields: Any) -> _M:
    """`value` with some fields replaced, without running its constructor and checks: for rules, whose parts
    fit by construction."""
    new = object.__new__(type(value))
    for f in dataclasses.fields(value):
        object.__setattr__(new, f.name, fields[f.name] if f.name in fields else getattr(value, f.name))
    return new


class _Kinds(dict[type, str]):
    """The kind of the instances of a class, looked up once."""

    def __missing__(self, cls: type) -> str:
        array = issubclass(cls, jax.Array | jax.core.Tracer)
        kind = self[cls] = "value" if issubclass(cls, Value) else "array" if array else "other"
        return kind


KINDS = _Kinds()


def kind_of(x: Any) -> str:
    """Whether `x` is a "value", an "array" or some "other" object."""
    return KINDS[type(x)]


def is_value(x: Any) -> bool:
    """Whether `x` is a [`quaxlike.Value`][]; for `is_leaf=` and `filter_spec=`.

    A Value with missing parts, such as a half made by `eqx.partition`, stands for no array: it does not count
    as a Value here, but as a pytree like any other.
    """
    return KINDS[type(x)] == "value" and not has_missing_parts(x)


def has_missing_parts(value: Value) -> bool:
    """Whether parts of a Value are missing, as in the halves that `eqx.partition` makes of it.

    A part that is None, or that holds None, counts as missing if its field neither allows None nor defaults
    to it, and the Value cannot be materialised without it. So does what optax puts in the place of masked
    arrays. Other parts without leaves, such as `()` or a module of static fields, are metadata.
    """
    cls: Any = type(value)
    for name in _required_fields(cls):
        part = getattr(value, name, 0)
        if KINDS[type(part)] != "array" and _is_missing(part):
            return refuses(value)
    return False


def missing_field(value: Value) -> str:
    """The first field of a Value whose part is missing."""
    cls: Any = type(value)
    return next(name for name in _required_fields(cls) if _is_missing(getattr(value, name, 0)))


@functools.cache
def _required_fields(cls: Any) -> list[str]:
    """The fields of a module, or of a named tuple, that may not be None."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):  # in a local class, or no types: any of its fields may then be missing
        hints = {}
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        names = [f.name for f in fields if not f.metadata.get("static") and f.default is not None]
    else:
        names = [name for name in cls._fields if cls._field_defaults.get(name, 0) is not None]
    return [name for name in names if not _allows_none(hints.get(name))]


def _allows_none(hint: Any) -> bool:
    """Whether an annotation allows None, for the field or for a part of it."""
    hint = getattr(hint, "__value__", hint)  # of a `type` statement
    return hint is type(None) or any(map(_allows_none, typing.get_args(hint)))


def _is_missing(part: Any) -> bool:
    cls = type(part)
    check = _checks.get(cls)
    if check is None:
        check = _checks[cls] = _check_of(part)
    return check(part)


_checks: dict[type, Callable[[Any], bool]] = {}  # of the parts of a type, whether they are missing


def _check_of(part: Any) -> Callable[[Any], bool]:
    cls = type(part)
    names = getattr(cls, "_fields", None) if isinstance(part, tuple) else None  # of a named tuple
    if part is None or names == ():  # or `optax.MaskedNode`
        return lambda part: True
    if isinstance(part, Value):
        return has_missing_parts
    if isinstance(part, eqx.Module) or names:
        required = _required_fields(cls)
        return lambda part: any(_is_missing(getattr(part, name, 0)) for name in required)
    if isinstance(part, tuple | list):
        return lambda part: any(map(_is_missing, part))
    if isinstance(part, dict):
        return lambda part: any(map(_is_missing, part.values()))
    if jtu.treedef_is_leaf(jtu.tree_structure(part)):
        return lambda part: False
    return _holds_nothing_but_none


def _holds_nothing_but_none(node: Any) -> bool:
    """Whether another node of trees is one of a half. It may hold None beside leaves for its own reasons."""
    leaves = jtu.tree_leaves(node, is_leaf=lambda x: x is None)
    return bool(leaves) and all(x is None for x in leaves)


def refuses(value: Value) -> bool:
    """Whether a Value refuses to materialise, or cannot."""
    leaves, treedef = jtu.tree_flatten(value)
    try:
        avals = tuple(map(jax.typeof, leaves))
    except TypeError:  # leaves that are not arrays
        return True
    try:
        return _refuses(treedef, avals)
    except TypeError:  # unhashable statics
        return _refuses.__wrapped__(treedef, avals)


@functools.lru_cache(maxsize=4096)
def _refuses(treedef: Any, avals: tuple[Any, ...]) -> bool:
    value = as_shapes(jtu.tree_unflatten(treedef, avals))
    try:
        with probing():
            return not jtu.tree_leaves(jax.eval_shape(lambda x: type(x).materialise(x), value))
    except Exception:  # a type may refuse in any way, or fail in any without its parts
        return True


def materialise(tree: PyTree) -> PyTree:
    """Replaces every Value in `tree` by the dense array that it stands for, nested ones included.

    Works inside and outside quaxified functions. The caller asks for it, so no policy applies.
    """

    def dense(leaf: Any) -> Any:
        while isinstance(leaf := getattr(leaf, "quax_value", leaf), Value):  # of a tracer
            leaf = type(leaf).materialise(leaf)
        return leaf

    return jtu.tree_map(dense, tree, is_leaf=is_value)


def materialised(value: Any) -> Any:
    """A Value, or what its hook makes of it, until that is an array, if only to this level: the tracer of
    another level stays what it is there. Returns anything else unchanged."""
    while is_value(value):
        value = type(value).materialise(value)
    return value


def as_shapes(value: Value) -> Value:
    """`value` with every leaf replaced by its shape and dtype; by its type, if that is not one of arrays."""

    def shape(leaf: Any) -> Any:
        aval = jax.typeof(leaf) if _is_array(leaf) else leaf
        if isinstance(aval, jax.core.ShapedArray):
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        return OfType(aval) if isinstance(aval, jax.core.AbstractValue) else leaf

    return jtu.tree_map(shape, value)


class OfType:
    """A leaf of which only the type is known, as `jax.ShapeDtypeStruct` is one for arrays: for the types of
    hijax that Values hold."""

    __slots__ = ("aval",)

    def __init__(self, aval: jax.core.AbstractValue) -> None:
        self.aval = aval


compat.register_stand_in(OfType, operator.attrgetter("aval"))


def _is_array(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) or isinstance(leaf, Value)


def aval_of(value: Value) -> Any:
    """`value.aval()` on the mesh of its leaves, memoised by their avals and the statics."""
    statics: list[Any] = [compat.x64_enabled()]
    leaf_avals: list[Any] = []
    try:
        _describe(value, statics, leaf_avals)
    except TypeError:  # a leaf that is no array
        for leaf in jtu.tree_leaves(value):
            if not hasattr(leaf, "shape") and not _is_array(leaf):
                raise not_an_array(value, leaf) from None
        return _make_aval(value, ())
    key: Any = (*statics, *leaf_avals)
    try:
        aval = _avals.get(key)
    except TypeError:  # an unhashable static field; a treedef compares its statics, and does not hash them
        key = (compat.x64_enabled(), jtu.tree_structure(value), *leaf_avals)
        aval = _avals.get(key)
    if aval is None:
        if len(_avals) > 4096:
            _avals.clear()
        aval = _avals[key] = _infer_aval(value, key, leaf_avals)
        if type(value) not in _checked or jax.config.jax_enable_checks:
            _check_aval(value, aval, key)
    return aval


_checked: set[type] = set()  # the classes whose `aval` was compared with `materialise`


def _infer_aval(value: Value, key: Any, leaf_avals: Sequence[Any]) -> Any:
    """Works out an aval, unless that needs the same aval.

    At the limit of recursion it would be too late: whoever catches an error on the way, and asks again, would
    double the time at each turn. For the same reason it is an error for the class at once, up to the first
    call.
    """
    cls, now = type(value), running_hooks
    if key in now.inferring or cls in now.endless:
        now.endless.add(cls)
        raise Endless(computes_with_itself(hook_of_shape(cls)))
    now.inferring[key] = cls
    try:
        return _make_aval(value, leaf_avals)
    except RecursionError as error:
        # Each time it asked for the aval of another shape, or of other statics.
        if list(now.inferring.values()).count(cls) < OFTEN:
            raise
        now.endless.add(cls)
        raise Endless(computes_with_itself(hook_of_shape(cls))) from error
    finally:
        del now.inferring[key]
        if not now.inferring:
            now.endless.clear()


def _describe(value: Value, statics: list[Any], leaf_avals: list[Any]) -> None:
    """Adds what decides about the aval of a Value: its class and statics, and the avals of its leaves."""
    cls = type(value)
    fields = _fields.get(cls)
    if fields is None:
        fields = _fields[cls] = [(f.name, bool(f.metadata.get("static"))) for f in dataclasses.fields(cls)]
    statics.append(cls)
    for name, static in fields:
        part = getattr(value, name)
        if static:
            statics += (type(part), part)  # 1, 1.0 and True are equal
        elif (kind := KINDS[type(part)]) == "array":
            leaf_avals.append(part.aval)
        elif kind == "value":
            statics.append(name)
            _describe(part, statics, leaf_avals)
        else:  # None, a number, a shape, or a pytree
            leaves, treedef = jtu.tree_flatten(part)
            statics += (name, treedef)
            leaf_avals += map(_leaf_aval, leaves)


def _leaf_aval(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(leaf.weak_type))
    return jax.typeof(leaf)


_fields: dict[type, list[tuple[str, bool]]] = {}
_avals: dict[Any, Any] = {}


def _make_aval(value: Value, leaf_avals: Sequence[Any]) -> Any:
    if any(getattr(aval, "dtype", None) == jax.dtypes.float0 for aval in leaf_avals):
        raise derivative_alone(type(value))
    ask = type(value).aval
    if any(isinstance(leaf, jax.ShapeDtypeStruct | OfType) for leaf in jtu.tree_leaves(value)):
        ask = traced(ask)
    try:
        aval = ask(value)
    except TypeError as error:  # which JAX would replace by its own, when it asks for an aval
        found = " ".join(f"{error!r}".split())
        message = f"{type(value).__name__} has no shape: its hooks raise {found}. {remedy(value, error)}"
        raise ValueError(message.rstrip()) from error
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = _leaf_aval(aval)
    if not isinstance(aval, jax.core.AbstractValue):
        raise ValueError(
            f"{type(value).__name__}.aval() must return a jax.core.ShapedArray (or another JAX type); "
            f"found {aval!r}."
        )
    return compat.place_aval_like(aval, leaf_avals)


def _check_aval(value: Value, aval: Any, key: Any) -> None:
    """Raises an error if `aval` contradicts `materialise`, unless the latter refuses. It is checked for the
    first value of a class, or for all under `jax_enable_checks`."""
    cls = type(value)
    _checked.add(cls)
    if cls.aval is ArrayValue.aval or not isinstance(aval, jax.core.ShapedArray):
        return
    try:
        with probing(), jax.enable_checks(False):  # which would check what `materialise` asks, without end
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(value))  # as in `aval`
    except Exception:  # a type may refuse in any way
        return
    if isinstance(out, jax.ShapeDtypeStruct) and (out.shape, out.dtype) != (aval.shape, aval.dtype):
        _checked.discard(cls)
        _avals.pop(key, None)
        raise ValueError(
            f"{cls.__name__}.aval() says {aval.str_short()}, but materialise() makes an array of "
            f"shape {out.shape} and dtype {out.dtype}. Correct either, or leave out `aval`, to infer it."
        )
