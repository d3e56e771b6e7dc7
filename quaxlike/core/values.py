"""`Value` and `ArrayValue`: the base of every new kind of array."""

import abc
import dataclasses
import functools
import sys
import typing
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu
from jaxtyping import ArrayLike, PyTree

from . import compat
from .construction import ValueMeta

_V = TypeVar("_V", bound="Value")


class Value(eqx.Module, metaclass=ValueMeta):
    """Anything that may stand where a JAX array stood, inside a function wrapped in `quaxify`.

    Subclass [`quaxlike.ArrayValue`][] for arrays; subclass this only for things that are not arrays.
    A `Value` is an Equinox module: array fields are its leaves, and whatever decides shape, dtype or
    dispatch is a static field: anything that can be compared, never an array. The annotation of a field that
    may be None says so.

    Everything below `materialise` is optional; each hook says in its docstring what its absence means.
    """

    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = None
    """The policy where no rule matches and no `quaxlike.on_materialise` is in force; None means "allow"."""

    linear: ClassVar[bool] = False
    """Whether the value is linear in its array leaves: its tangents and cotangents are of its class then.

    A value is taken to be linear if it says so and the Values that it holds do, so a type need not look at
    what it holds. Integer, boolean and key leaves have no tangents: a derivative shares them. Where a leaf
    stands for several elements, or for a part of one, its cotangent is none of them: what the backward
    function of a `jax.custom_vjp` sees is dense then.
    """

    own_dtypes: ClassVar[bool] = False
    """Whether rules that take this type may give results of another dtype than their primitive does."""

    default_precedence: ClassVar[int] = 0
    """Among operands of several types that override `default`, that of the highest is called."""

    # Equinox looks attributes up in Python, so as to make pytrees of bound methods. On Values that lookup is
    # most of the cost of a rule; their methods are bound as those of any other Python object.
    __getattribute__ = object.__getattribute__

    @abc.abstractmethod
    def aval(self) -> jax.core.AbstractValue:
        """The JAX type that this value has towards the code that uses it."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """The dense array that this value stands for. May raise, to refuse."""

    @staticmethod
    def default(
        primitive: jexc.Primitive,
        values: Sequence["ArrayLike | Value"],
        params: dict[str, Any],
    ) -> "ArrayLike | Value | Sequence[ArrayLike | Value]":
        """Called when no rule matches; overridden by types that treat all primitives alike.

        Without an override among the operands every Value is materialised, under the policy; with
        exactly one, or one of the highest `default_precedence`, it is called; with several different
        ones a `TypeError` names the types.

        **Arguments:**

        - `primitive`: the JAX primitive that was bound.
        - `values`: its operands, Values unwrapped.
        - `params`: its parameters.

        **Returns:**

        What a rule returns: one result, or a sequence if `primitive.multiple_results`.
        """
        raise NotImplementedError  # never called: dispatch compares by identity

    @classmethod
    def promote(cls, array: Any, like: Any) -> "Value | NotImplementedType":
        """A plain `array` as this type, to match `like`: where one branch of a `cond`, or a loop carry,
        is a Value and the other side is not. Reads statics and shapes of `like` only.

        The result equals `array` and differentiates as it does. Its static fields may be others than those of
        `like` if `like` can be brought to them: see `widen`.

        Where `like` may be None (its default then), and rules of this type raise
        [`quaxlike.OperandMismatch`][] in a loop, it is asked without `like` about the zeros that the loop
        starts from: for a value whose one leaf is `array` and that goes with anything. An iteration tells
        what the zeros become.

        Without it the Value side is materialised under the policy.
        """
        return NotImplemented

    def widen(self, like: "Value") -> "Value | jax.Array | NotImplementedType":
        """This value in a form that `like` has or can be brought to in turn: where two branches of a `cond`,
        or a loop carry before and after an iteration, are Values that differ in class, static fields or
        shapes of leaves. Reads statics and shapes of `like` only.

        Both sides are asked, the second one about the first in its new form; the two forms must then agree.
        The result equals this value and differentiates as it does; a dense array makes both sides dense.

        Without it fields that are Values are widened, and the rest must agree.
        """
        return NotImplemented

    @classmethod
    def cotangent(cls, ct: Any) -> Any:
        """A cotangent as the backward function of a `jax.custom_vjp` sees it: a value of this type (which is
        `linear`), or an array that stands beside such ones. For types whose static fields a cotangent does
        not share, such as units.
        """
        return ct

    def follows_rules(self) -> bool:
        """Whether the rules registered for the type are for this value.

        Without it they are. A value that does not follow them meets its `default`, or is materialised.
        """
        return True

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        """For each array leaf, which of its axes is the logical leading axis; None if the leaf is shared
        by all rows. Lets `lax.scan` and `lax.map` run over rows. Without it, leaves of the array's shape
        whose rows materialise as its rows are cut by their first axis; others are materialised.
        """
        return NotImplemented

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        """For each array leaf, the partition spec that follows from `spec`, the one of the logical array.

        Without it leaves of the logical shape take `spec` itself, if their parts are those of the array, and
        an empty `spec` replicates all leaves; anything else is an error that names this hook.
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
        """Shape and dtype of the array that this value stands for; without it, `materialise` tells."""
        with jax.core.eval_context():
            # By a function of its own: JAX remembers results for statics that are equal, as 1 and 1.0 are.
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(self))
        return jax.core.ShapedArray(out.shape, out.dtype, weak_type=getattr(out, "weak_type", False))

    @abc.abstractmethod
    def materialise(self) -> jax.Array:
        """The dense array that this value stands for. May raise, to refuse."""

    @property
    def shape(self) -> tuple[int, ...]:
        return aval_of(self).shape

    @property
    def dtype(self) -> Any:
        return aval_of(self).dtype

    @property
    def ndim(self) -> int:
        return len(aval_of(self).shape)

    @property
    def size(self) -> int:
        return aval_of(self).size

    @property
    def __jax_array__(self) -> Any:
        # A property, so that it is None where no quaxify is under way and the usual lookups
        # (`getattr(x, "__jax_array__", None)`) find nothing: `array @ value` then defers to `value`.
        level = level_of(self)
        if level is not None:
            return lambda: level.adopt(self)
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if caller.f_code.co_name == "_arraylike":  # of jax.numpy, which would refuse it in words of its own
            raise TypeError(not_dispatched(self, _asking_function(caller)))
        return None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if (level := level_of(self)) is None:
            raise TypeError(not_dispatched(self, "NumPy"))
        return level.adopt(self).__array__(*args, **kwargs)


def level_of(value: Value | None = None) -> Any:
    """The trace of the innermost `quaxify` under way that dispatches on `value`; of any, without a value.
    None if there is none."""
    trace = compat.current_trace()
    while trace is not None:
        takes = getattr(trace, "takes", None)
        if takes is not None and (value is None or takes(value)):
            return trace
        trace = getattr(trace, "parent_trace", None)
    return None


def not_dispatched(value: Value, what: str) -> str:
    """The message for a Value that is used where no `quaxify` takes it."""
    return (
        f"A {type(value).__name__} was given to {what} "
        + ("outside `quaxlike.quaxify`. " if level_of() is None else "that no `filter_spec` selects it for. ")
        + "Wrap the function that uses it in `quaxify` (inside a rule: call `quaxify` on the parts), or use "
        "`quaxlike.materialise` to make it a dense array."
    )


def _asking_function(frame: Any) -> str:
    """The function of `jax.numpy` that asks, from the frames above its question."""
    for _ in range(4):
        name = frame.f_locals.get("fun_name")
        if name is not None:
            return f"`{name}`"
        frame = frame.f_back
    return "jax.numpy"


def replace_fields(value: _V, **fields: Any) -> _V:
    """`value` with some of its fields replaced, past its construction and what that checks: for rules,
    which have made the parts to fit."""
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

    One of which parts are missing, as in the halves that `eqx.partition` makes, stands for no array: it is
    not a Value here, but a pytree like any other.
    """
    return KINDS[type(x)] == "value" and not is_hollow(x)


def is_hollow(value: Value) -> bool:
    """Whether parts of a Value are missing, as in the halves that `eqx.partition` makes of it.

    `None`, or a part without leaves, is missing where neither the annotation nor the default of its field
    is `None`, and the Value cannot be materialised without it.
    """
    cls: Any = type(value)
    for name in _required_fields(cls):
        part = getattr(value, name, 0)
        if KINDS[type(part)] != "array" and _is_missing(part):
            return not _materialises(value)
    return False


@functools.cache
def _required_fields(cls: type) -> list[str]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # of a local class: any of them may be missing
        hints = {}
    fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("static") and f.default is not None]
    return [f.name for f in fields if type(None) not in typing.get_args(hints.get(f.name))]


def _is_missing(part: Any) -> bool:
    if isinstance(part, Value):
        return is_hollow(part)
    if type(part) in (tuple, list):
        return any(map(_is_missing, part))
    return not jtu.tree_leaves(part)


def _materialises(value: Value) -> bool:
    leaves, treedef = jtu.tree_flatten(value)
    try:
        key = (treedef, *map(jax.typeof, leaves))
        found = _materialising.get(key)
    except TypeError:  # leaves that are no arrays, or unhashable statics
        return False
    if found is None:
        try:
            with jax.core.eval_context():
                out = jax.eval_shape(type(value).materialise, as_shapes(value))
            found = bool(jtu.tree_leaves(out))
        except Exception:  # whatever a type does without its parts
            found = False
        _remember(_materialising, key, found)
    return found


_materialising: dict[Any, bool] = {}


def materialise(tree: PyTree) -> PyTree:
    """Every Value in `tree` as the dense array it stands for, nested ones included.

    Works inside and outside quaxified functions. It is what the caller asked for, so no policy applies.
    """

    def dense(leaf: Any) -> Any:
        while isinstance(leaf := getattr(leaf, "quax_value", leaf), Value):  # of a tracer
            leaf = type(leaf).materialise(leaf)
        return leaf

    return jtu.tree_map(dense, tree, is_leaf=is_value)


def as_shapes(value: Value) -> Value:
    """`value` with every array leaf replaced by its shape and dtype."""

    def shape(leaf: Any) -> Any:
        aval = jax.typeof(leaf) if _is_array(leaf) else leaf
        if not isinstance(aval, jax.core.ShapedArray):
            return leaf
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    return jtu.tree_map(shape, value)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) or isinstance(leaf, Value)


def aval_of(value: Value) -> Any:
    """`value.aval()`, memoised on the avals of the leaves and on the statics, and placed on their mesh."""
    key: list[Any] = [compat.x64_enabled()]
    leaf_avals: list[Any] = []
    if not _describe(value, key, leaf_avals):
        return _aval_of_tree(value)
    hashable = (*key, *leaf_avals)
    try:
        aval = _avals.get(hashable)
    except TypeError:  # a static field that cannot be hashed; those of a treedef are only compared
        return _aval_of_tree(value)
    return _remember(_avals, hashable, _make_aval(value, leaf_avals)) if aval is None else aval


def _describe(value: Value, key: list[Any], leaf_avals: list[Any]) -> bool:
    """Adds classes and statics to `key`; False where a part is neither an array nor a Value."""
    cls = type(value)
    fields = _fields.get(cls)
    if fields is None:
        fields = _fields[cls] = [(f.name, bool(f.metadata.get("static"))) for f in dataclasses.fields(cls)]
    key.append(cls)
    for name, static in fields:
        part = getattr(value, name)
        if static:
            key += (type(part), part)  # 1, 1.0 and True are equal
        elif (kind := KINDS[type(part)]) == "array":
            leaf_avals.append(part.aval)
        elif kind != "value" or not _describe(part, key, leaf_avals):
            return False
    return True


def _aval_of_tree(value: Value) -> Any:
    leaves, treedef = jtu.tree_flatten(value)
    try:
        leaf_avals = [_leaf_aval(leaf) for leaf in leaves]
    except TypeError:
        for leaf in leaves:
            if not hasattr(leaf, "shape") and not _is_array(leaf):
                raise not_an_array(value, leaf) from None
        return _make_aval(value, ())
    key = (compat.x64_enabled(), treedef, *leaf_avals)
    aval = _avals.get(key)
    if aval is None:
        stand_ins = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        make = _make_aval_of_shapes if stand_ins else _make_aval
        aval = _remember(_avals, key, make(value, leaf_avals))
    return aval


def _leaf_aval(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(leaf.weak_type))
    return jax.typeof(leaf)


def _remember(memo: dict[Any, Any], key: Any, found: Any) -> Any:
    if len(memo) > 4096:
        memo.clear()
    memo[key] = found
    return found


_fields: dict[type, list[tuple[str, bool]]] = {}
_avals: dict[Any, Any] = {}


def check_whole(value: Value) -> None:
    """Raises an error for a Value of which parts are missing."""
    if is_hollow(value):
        raise ValueError(
            f"Parts of a {type(value).__name__} are missing, as in the halves that `eqx.partition` makes, so "
            f"that it stands for no array. Join the halves with `eqx.combine` first; found {value}."
        )


# In what follows errors are no `TypeError`s: where JAX asks for an aval it puts its own in place of those.


def not_an_array(value: Value, leaf: Any) -> ValueError:
    """The error for a field that is not an array."""
    paths = jtu.tree_leaves_with_path(value)
    (name, *_) = (jtu.keystr(path) for path, x in paths if x is leaf)
    return ValueError(
        f"{type(value).__name__}{name} holds {leaf!r} where an array is expected. Declare a field that is "
        "not an array with `eqx.field(static=True)`."
    )


def _make_aval_of_shapes(value: Value, leaf_avals: Sequence[Any]) -> Any:
    """The same for leaves that are shapes: `aval` may compute with them, so they are traced."""
    aval = None

    def look(value: Value) -> None:
        nonlocal aval
        aval = _make_aval(value, leaf_avals)

    with jax.core.eval_context():
        jax.eval_shape(look, value)
    return aval


def _make_aval(value: Value, leaf_avals: Sequence[Any]) -> Any:
    try:
        aval = type(value).aval(value)
    except TypeError as error:
        raise ValueError(f"{type(value).__name__} has no shape: its hooks raise {error!r}.") from error
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))
    if not isinstance(aval, jax.core.AbstractValue):
        raise ValueError(
            f"{type(value).__name__}.aval() must return a jax.core.ShapedArray (or another JAX type); "
            f"found {aval!r}."
        )
    if jax.config.jax_enable_checks and type(value).aval is not ArrayValue.aval:
        _check_aval(value, aval)
    return compat.place_aval_like(aval, leaf_avals)


def _check_aval(value: Value, aval: Any) -> None:
    """Raises an error if `aval` contradicts `materialise`, where that does not refuse."""
    try:
        with jax.core.eval_context():
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(value))  # as in `aval`
    except Exception:  # whatever a type does that refuses
        return
    if isinstance(out, jax.ShapeDtypeStruct) and (out.shape, out.dtype) != (aval.shape, aval.dtype):
        raise ValueError(
            f"{type(value).__name__}.aval() says {aval.str_short()}, but materialise() makes an array of "
            f"shape {out.shape} and dtype {out.dtype}. Correct either, or leave out `aval`, to infer it."
        )
