"""`Value` and `ArrayValue`: the base of every new kind of array.

The aval of a Value must be the shape and dtype of `materialise()`, no matter which transforms are running.
Every transform needs it, so it's memoised on the class, the statics and the avals of the leaves. If any were
missing from the key, a Value could end up with another one's shape.

Nothing in this file computes with a Value. `is_value` is the hottest function in the package: it runs for
every operand of every primitive.
"""

import abc
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu
import numpy as np

from .._checked import PyTree
from . import compat
from .construction import HOOKS, check_field_names
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
from .levels import level_of, might_be_value, name_the_mixin, not_dispatched
from .shapes import OfType, as_shapes, as_strong, is_weak, leaf_aval, sharded_like_dense
from .source_lines import calling_frame
from .statics import fields_of, statics_of, types_of

_M = TypeVar("_M", bound=eqx.Module)

# Called with every new subclass of `Value`.
on_new_type: list[Callable[[Any], None]] = []


class Value(eqx.Module, metaclass=ValueMeta):
    """Anything standing in for a JAX array inside a function wrapped in `quaxify`.

    Only subclass this directly for something other than an array. For arrays, use [`quaxlike.ArrayValue`][].

    A `Value` is an Equinox module, with its array fields as leaves. Anything determining its shape, dtype or
    dispatch should be a static field; these can hold any object supporting `==`, but never an array. A field
    that can be None must be annotated as optional.

    All methods after `materialise` are optional. Their docstrings say what happens if you leave them out.
    """

    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = None
    """What to do if no rule matches and `quaxlike.on_materialise` isn't being used. None means "allow"."""

    to_materialise: ClassVar[str] = ""
    """For a type whose `on_materialise` is "error": what materialising would destroy, and how to get a dense
    array on purpose. Error messages end with this text.
    """

    to_unify: ClassVar[str] = ""
    """What to do if two such values (from two branches, or before and after an iteration) have no common
    form. Error messages end with this text.
    """

    linear: ClassVar[bool] = False
    """Whether this value is linear in its array leaves, so that its tangents and cotangents have its class.

    A value is treated as linear if it and all Values inside it declare this, so a type doesn't have to check
    its parts. Integer, boolean and key leaves don't have tangents, and are shared by derivatives. If a leaf
    is shared by several elements, or is only part of one, then a cotangent doesn't belong to a single
    element, and the backward function of a `jax.custom_vjp` receives a dense cotangent.
    """

    stores_elements: ClassVar[bool] = False
    """For a linear type with integer, boolean or key leaves: whether each number in its other leaves is one
    element of the array, whatever the former contain. (For example, these are the positions of the elements
    that are stored.) If this is False then we check it, and the cotangent is dense if we can't, because we
    are tracing.
    """

    own_dtypes: ClassVar[bool] = False
    """Whether rules for this type are allowed to return a dtype other than the primitive's."""

    own_shapes: ClassVar[bool | None] = None
    """Whether rules for this type are allowed to return a shape other than the primitive's, such as one
    boolean per vector if the elements are vectors. None means that they are, with a warning, if the value
    can't be materialised.
    """

    default_precedence: ClassVar[int] = 0
    """If operands of several types override `default`, then the one with the highest precedence is used."""

    # Equinox overrides attribute lookup, to make bound methods pytrees. This would dominate the cost of
    # calling a rule, so Values use the usual lookup instead.
    __getattribute__ = object.__getattribute__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_field_names(cls)
        for hook in on_new_type:
            hook(cls)

    # `==` compares elementwise (or raises an error), so hash by identity.
    __hash__ = object.__hash__

    if TYPE_CHECKING:

        def __eq__(self, other: object, /) -> Any: ...
        def __ne__(self, other: object, /) -> Any: ...

    @abc.abstractmethod
    def aval(self) -> jax.core.AbstractValue:
        """Returns the JAX type of this value, as seen by any code using it."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """Computes the dense array. You can raise an error here if it should never be materialised."""

    @staticmethod
    def default(
        primitive: jexc.Primitive,
        values: Sequence["jax.typing.ArrayLike | Value"],
        params: dict[str, Any],
    ) -> "jax.typing.ArrayLike | Value | Sequence[jax.typing.ArrayLike | Value]":
        """Called if no rule matches. Override this to handle all primitives in the same way.

        If no operand overrides this, every Value is materialised, under the policy. If several types do, the
        one with the highest `default_precedence` is used, and a tie raises a `TypeError`.

        **Arguments:**

        - `primitive`: the JAX primitive being bound.
        - `values`: its operands, with any Values already unwrapped.
        - `params`: its parameters.

        **Returns:**

        The same as a rule: one result, or a sequence if `primitive.multiple_results`.
        """
        raise NotImplementedError  # never called: dispatch compares by identity

    @classmethod
    def promote(cls, array: Any, like: Any) -> "Value | NotImplementedType":
        """Converts a plain `array` to this type, to match `like`.

        Called if one branch of a `cond` returns a Value but another one an array, or if a loop carry changes
        from one to the other. Only use the statics and shapes of `like`, not its data.

        The result must be equal to `array`, and have the same derivative. Its static fields can differ from
        `like`'s if `like` can be widened to them (see `widen`). If `like` contains another Value (as a named
        array can), `array` may be a Value of this class.

        Loops are often initialised with zeros, before their kind of Value is known. If you give `like` the
        default None, and a rule for this type raises [`quaxlike.OperandMismatch`][] inside a loop, this is
        called on the zeros without `like`. Then return a placeholder compatible with any value, with `array`
        as its only leaf. The first iteration determines the actual type.

        By default, the Value is materialised instead, under the policy.
        """
        return NotImplemented

    def widen(self, like: "Value") -> "Value | jax.Array | NotImplementedType":
        """Converts this value to `like`'s form, or to one `like` can be widened to in turn.

        Called if two branches of a `cond`, or a loop carry before and after an iteration, are Values with
        different classes, static fields or leaf shapes. Only use the statics and shapes of `like`.

        First one is widened to the other, then the other to the result, after which the two must agree. The
        value returned must be equal to this one, and have the same derivative. If it's a dense array, both
        are materialised.

        By default, fields that are Values are widened, and everything else has to agree.
        """
        return NotImplemented

    @classmethod
    def cotangent(cls, ct: Any) -> Any:
        """Converts a cotangent for the backward function of a `jax.custom_vjp`.

        `ct` is a value of this type (which must be `linear`), or a plain array if only other results have
        this type. Override this if cotangents and primals have different static fields, e.g. units.
        """
        return ct

    def cotangent_factor(self, dtype: Any) -> Any:
        """Returns a scalar of this type and `dtype`, converting a cotangent to one for the leaves.

        Used for values created inside a function being differentiated. For example, a quantity returns one in
        the same unit. None by default, which leaves cotangents unchanged.
        """
        return None

    def follows_rules(self) -> bool:
        """Returns whether the rules registered for this type apply to this value.

        True by default. If False, `default` is used, or the value is materialised.
        """
        return True

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        """Returns each array leaf's axis for the leading axis of the array; None if it's shared by all rows.

        Used to iterate over rows in `lax.scan` and `lax.map`. By default, leaves with the shape of the array
        are sliced along their first axis, if the slices materialise to the array's rows. Otherwise this value
        is materialised.
        """
        return NotImplemented

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        """Returns the partition spec of each array leaf, given the `spec` of the logical array.

        By default, `spec` itself is used for leaves with the logical shape (if slicing them slices the
        array), and all leaves are replicated if `spec` is empty. Anything else is an error.
        """
        return NotImplemented


class ArrayValue(Value):
    """A new kind of array.

    To create one, define its fields and `materialise`, and then add rules using [`quaxlike.register`][].

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
        """Returns the dense array's shape and dtype. By default, inferred from `materialise`."""
        with probing():
            # A new function each time, to avoid a cache hit: JAX compares statics by `==`, and `1 == 1.0`.
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(self))
        return leaf_aval(out)

    @abc.abstractmethod
    def materialise(self) -> jax.Array:
        """Computes the dense array. You can raise an error here if it should never be materialised."""

    # These use `aval`: a type's shape isn't necessarily the shape of its leaves.

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
        # A property, so that `getattr(x, "__jax_array__", None)` is None outside `quaxify`: then
        # `array @ value` defers to `value`.
        level = level_of(self)
        caller = calling_frame()
        if level is not None:
            # Operators on arrays defer to ours, which can use the registered rules wherever the value was
            # created.
            reflected = compat.is_operator_of_array(caller)
            return None if reflected and not level.holds(self) else lambda: level.adopt(self)
        if compat.is_check_of_argument(caller):  # its own message would not help
            name = compat.asking_function(caller)
            raise NoArrayError(not_dispatched(self, f"`{name}`" if name else "jax.numpy"))
        return None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if (level := level_of(self)) is None:
            raise NoArrayError(not_dispatched(self, "NumPy") + name_the_mixin(self))
        return level.adopt(self).__array__(*args, **kwargs)


HOOKS.update({**vars(Value), **vars(ArrayValue)})


class NoArrayError(TypeError, RuntimeError):
    """A Value was passed to a function for arrays, outside `quaxify`.

    Also a `RuntimeError`, because JAX replaces any `TypeError` raised while binding a primitive.
    """


def _aval_for_user(value: Value) -> Any:
    try:
        return aval_of(value)
    except Endless as error:
        raise endless_error(error) from None


def replace_fields(value: _M, /, **fields: Any) -> _M:
    """Replaces some fields of `value` without running its constructor or its checks.

    Use this inside rules, where the new fields are valid by construction.
    """
    new = object.__new__(type(value))
    for f in dataclasses.fields(value):
        object.__setattr__(new, f.name, fields[f.name] if f.name in fields else getattr(value, f.name))
    return new


class _Kinds(dict[type, str]):
    """Looks up the kind of a class's instances, once for each class."""

    def __missing__(self, cls: type) -> str:
        array = issubclass(cls, jax.Array | jax.core.Tracer)
        kind = self[cls] = "value" if issubclass(cls, Value) else "array" if array else "other"
        return kind


KINDS = _Kinds()


def kind_of(x: Any) -> str:
    """Returns "value", "array" or "other"."""
    return KINDS[type(x)]


def is_value(x: Any) -> bool:
    """Returns whether `x` is a [`quaxlike.Value`][]; for `is_leaf=` and `filter_spec=`.

    Use this in `jax.tree.map` over a model, so that each Value is a leaf and not a subtree.

    A Value with missing parts (e.g. one half of the result of `eqx.partition`) does not represent an array:
    this returns False for it, and it is treated as an ordinary pytree.
    """
    return KINDS[type(x)] == "value" and not has_missing_parts(x)


def has_missing_parts(value: Value) -> bool:
    """Returns whether a Value has missing parts, as after `eqx.partition`.

    A part is missing if it is None (or contains None), its field's annotation and default don't allow for
    this, and the Value can't be materialised without it. The same applies to optax's masks in place of
    arrays. Any other part without leaves is just metadata, such as `()` or a module with only static fields.
    """
    cls: Any = type(value)
    for name in _required_fields(cls):
        part = getattr(value, name, 0)
        if KINDS[type(part)] != "array" and _is_missing(part):
            return refuses(value)
    return False


def missing_field(value: Value) -> str:
    """Returns the first field whose part is missing."""
    cls: Any = type(value)
    return next(name for name in _required_fields(cls) if _is_missing(getattr(value, name, 0)))


@functools.cache
def _required_fields(cls: Any) -> list[str]:
    """Returns the names of the fields that can't be None in a module or named tuple."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):  # e.g. a local class, whose annotations we can only read
        hints = {
            name: hint for base in cls.__mro__ for name, hint in vars(base).get("__annotations__", {}).items()
        }
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        names = [f.name for f in fields if not f.metadata.get("static") and f.default is not None]
    else:
        names = [name for name in cls._fields if cls._field_defaults.get(name, 0) is not None]
    return [name for name in names if not _allows_none(hints.get(name))]


def _allows_none(hint: Any) -> bool:
    """Returns whether an annotation allows None, for the field or for a part."""
    if isinstance(hint, str):
        return re.search(r"\b(None|Optional)\b", hint) is not None
    hint = getattr(hint, "__value__", hint)  # a `type` statement
    return hint is type(None) or any(map(_allows_none, typing.get_args(hint)))


def _is_missing(part: Any) -> bool:
    cls = type(part)
    check = _checks.get(cls)
    if check is None:
        check = _checks[cls] = _check_of(part)
    return check(part)


_checks: dict[type, Callable[[Any], bool]] = {}  # for each type of part: is this part missing?


def _check_of(part: Any) -> Callable[[Any], bool]:
    cls = type(part)
    names = getattr(cls, "_fields", None) if isinstance(part, tuple) else None  # a named tuple
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
    """Returns whether a node of any other type only contains None. (Next to actual leaves, there may be a
    good reason for the None.)
    """
    leaves = jtu.tree_leaves(node, is_leaf=lambda x: x is None)
    return bool(leaves) and all(x is None for x in leaves)


def refuses(value: Value) -> bool:
    """Returns whether a Value can't be materialised, be it by refusing or for any other reason."""
    leaves, treedef = jtu.tree_flatten(value)
    try:
        avals = tuple(map(jax.typeof, leaves))
    except TypeError:  # leaves other than arrays
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
    except Exception:  # a type can refuse by raising anything, and may also fail because parts are missing
        return True


def materialise(tree: PyTree) -> PyTree:
    """Replaces every Value in `tree` by its dense array, including nested Values.

    Works both inside and outside quaxified functions. Calling this is explicit, so the policy doesn't apply.
    """

    def dense(leaf: Any) -> Any:
        while isinstance(leaf := getattr(leaf, "quax_value", leaf), Value):  # a tracer's value
            leaf = type(leaf).materialise(leaf)
        if isinstance(leaf, jax.core.Tracer) and might_be_value(leaf):
            leaf = materialise_p.bind(leaf)
        return leaf

    return jtu.tree_map(dense, tree, is_leaf=is_value)


# The equation for the above inside a transform. Its rules are in core/higher_order/value.py.
materialise_p = jexc.Primitive("quaxlike_materialise")


def materialised(value: Any) -> Any:
    """Materialises a Value repeatedly until it is an array, at this level only.

    Anything else is returned unchanged, including a tracer from another level.
    """
    out = value
    while is_value(out):
        out = type(out).materialise(out)
    return as_strong(out, [aval_of(value)]) if out is not value and is_weak(out) else out


def aval_of(value: Value) -> Any:
    """Returns `value.aval()` on its leaves' mesh, memoised by leaf avals and statics."""
    statics: list[Any] = [compat.x64_enabled()]
    leaf_avals: list[Any] = []
    try:
        _describe(value, statics, leaf_avals)
    except TypeError:  # a leaf other than an array
        for leaf in jtu.tree_leaves(value):
            if isinstance(leaf, np.dtype) or (not hasattr(leaf, "shape") and not eqx.is_array_like(leaf)):
                raise not_an_array(value, leaf) from None
        return _make_aval(value, ())
    key: Any = (*statics, *leaf_avals)
    try:
        aval = _avals.get(key)
    except TypeError:  # an unhashable static field; treedefs compare statics without hashing them
        key = (compat.x64_enabled(), repr(statics), jtu.tree_structure(value), *leaf_avals)
        aval = _avals.get(key)
    if aval is None:
        if len(_avals) > 4096:
            _avals.clear()
        aval = _avals[key] = _infer_aval(value, key, leaf_avals)
        if type(value) not in _checked or jax.config.jax_enable_checks:
            _check_aval(value, aval, key)
    return aval


_checked: set[type] = set()  # classes whose `aval` was compared with `materialise`


def _infer_aval(value: Value, key: Any, leaf_avals: Sequence[Any]) -> Any:
    """Computes an aval, or raises an error if this needs the same aval again.

    Waiting for the recursion limit won't do: code in between may catch errors and try again, doubling the
    time at each recursion level. For the same reason, once such a call is found, its class is marked as
    endless until the outermost call returns.
    """
    cls, now = type(value), running_hooks
    if key in now.inferring or cls in now.endless:
        now.endless.add(cls)
        raise Endless(computes_with_itself(hook_of_shape(cls)))
    now.inferring[key] = cls
    try:
        return _make_aval(value, leaf_avals)
    except RecursionError as error:
        # The check above doesn't find calls for different shapes or statics.
        if list(now.inferring.values()).count(cls) < OFTEN:
            raise
        now.endless.add(cls)
        raise Endless(computes_with_itself(hook_of_shape(cls))) from error
    finally:
        del now.inferring[key]
        if not now.inferring:
            now.endless.clear()


def _describe(value: Value, statics: list[Any], leaf_avals: list[Any]) -> None:
    """Appends everything an aval depends on: the class, the statics and the avals of the leaves."""
    cls: Any = type(value)
    names, read_statics = fields_of(cls)
    statics.append(cls)
    if read_statics is not None:
        own = read_statics(value)
        statics += (own, types_of(own))  # 1, 1.0 and True compare equal
    for name in names:
        part = getattr(value, name)
        if (kind := KINDS[type(part)]) == "array":
            leaf_avals.append(part.aval)
            continue
        statics.append(name)
        if kind == "value":
            _describe(part, statics, leaf_avals)
        elif part is not None:  # a number, a shape, or a pytree
            leaves, treedef = jtu.tree_flatten(part)
            statics += (treedef, types_of(statics_of(part)))
            leaf_avals += map(leaf_aval, leaves)


_avals: dict[Any, Any] = {}


def _make_aval(value: Value, leaf_avals: Sequence[Any]) -> Any:
    if any(getattr(aval, "dtype", None) == jax.dtypes.float0 for aval in leaf_avals):
        raise derivative_alone(type(value))
    ask = type(value).aval
    if any(isinstance(leaf, jax.ShapeDtypeStruct | OfType) for leaf in jtu.tree_leaves(value)):
        ask = traced(ask)
    try:
        aval = ask(value)
    except TypeError as error:  # JAX would replace a TypeError by its own
        found = " ".join(f"{error!r}".split())
        message = f"{type(value).__name__} has no shape: its hooks raise {found}. {remedy(value, error)}"
        raise ValueError(message.rstrip()) from error
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = leaf_aval(aval)
    if not isinstance(aval, jax.core.AbstractValue):
        raise ValueError(
            f"{type(value).__name__}.aval() must return a jax.core.ShapedArray (or another JAX type); "
            f"found {aval!r}."
        )
    return compat.place_aval_like(sharded_like_dense(value, aval, leaf_avals), leaf_avals)


def _check_aval(value: Value, aval: Any, key: Any) -> None:
    """Raises if `aval` contradicts `materialise`. (If the latter refuses, there's nothing to check.)

    Normally only checks each class's first value. Under `jax_enable_checks`, checks every one.
    """
    cls = type(value)
    _checked.add(cls)
    if cls.aval is ArrayValue.aval or not isinstance(aval, jax.core.ShapedArray):
        return
    try:
        with probing(), jax.enable_checks(False):  # otherwise JAX's own checks would recurse infinitely
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(value))  # as in `aval`
    except Exception:  # a type may refuse with any error
        return
    if isinstance(out, jax.ShapeDtypeStruct) and (out.shape, out.dtype) != (aval.shape, aval.dtype):
        _checked.discard(cls)
        _avals.pop(key, None)
        raise ValueError(
            f"{cls.__name__}.aval() says {aval.str_short()}, but materialise() makes an array of "
            f"shape {out.shape} and dtype {out.dtype}. Correct either, or leave out `aval`, to infer it."
        )
