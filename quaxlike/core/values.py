"""`Value` and `ArrayValue`: the base of every new kind of array."""

import abc
import contextlib
import dataclasses
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from types import NotImplementedType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._checked import PyTree, a_or_an
from . import compat
from .construction import QuickMeta

_M = TypeVar("_M", bound=eqx.Module)


# The hooks of a type, and what each is called for.
_HOOKS = {
    "aval": "its shape and dtype",
    "materialise": "its dense array",
    "default": "a result where no rule matches",
    "follows_rules": "whether rules apply to it",
    "promote": "a plain array as a value of its type",
    "widen": "the form that it shares with another Value",
    "cotangent": "the cotangent that a backward function receives",
    "leading_axis": "the axes along which its leaves are cut into rows",
    "shard_spec": "the partition specs of its leaves",
}


def _naming(hook: str, method: Any) -> Any:
    """Wraps a hook so that its errors carry a note with the names of the type and the hook."""
    if isinstance(method, classmethod | staticmethod):
        return type(method)(_naming(hook, method.__func__))
    if not callable(method):
        return method
    call: Callable[..., Any] = method

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            out = call(*args, **kwargs)
            return out if hook != "materialise" else as_dense(out, f"{type(args[0]).__qualname__}.{hook}")
        except Exception as error:
            of = args[0] if args and hook != "default" else None
            cls = of if isinstance(of, type) else type(of)
            if isinstance(cls, ValueMeta) and is_derivative_alone(jtu.tree_leaves(of)):
                raise derivative_alone(cls) from error
            name = call.__qualname__ if of is None else f"{cls.__qualname__}.{hook}"
            note = f"Raised by `{name}`, which quaxlike asked for {_HOOKS[hook]}."
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return named


def is_derivative_alone(leaves: Sequence[Any]) -> bool:
    """Whether these leaves, or their avals, are a derivative without what JAX does not differentiate."""
    return any(getattr(leaf, "dtype", None) == jax.dtypes.float0 for leaf in leaves)


def derivative_alone(cls: type) -> ValueError:
    """The error for a derivative as JAX returns it, whose pattern is missing."""
    return ValueError(
        f"The derivative of a function that returns {a_or_an(cls.__qualname__)} was used as an array. JAX "
        "gives leaves that are not inexact, such as indices or codes, no tangents, so it stands for none. "
        "Differentiate a function that returns an array, `quaxlike.materialise(...)`, or use the leaves of "
        "the derivative."
    )


def as_dense(out: Any, hook: str) -> Any:
    """What a hook made of a Value: an array, or another Value. Numbers and NumPy arrays become JAX arrays."""
    if isinstance(out, bool | int | float | complex | np.ndarray | np.generic):
        return jnp.asarray(out)
    if not hasattr(out, "shape") and not isinstance(type(out), ValueMeta):
        raise TypeError(f"{hook}() must return an array; found {out!r}.")
    return out


class ValueMeta(QuickMeta):
    """Names the hooks of a class in the errors that they raise."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> Any:
        named = {hook: _naming(hook, namespace[hook]) for hook in _HOOKS if hook in namespace}
        return super().__new__(mcs, name, bases, namespace | named, **kwargs)


class _Probing:
    """A context for asking the hooks of a type, outside of every trace. What has been registered to set
    itself aside, such as the policy on losses, does not see what the hooks do: the answers are remembered, so
    that it would see it the first time and not again."""

    def __init__(self) -> None:
        self.asides: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for aside in self.asides:
                stack.enter_context(aside())
            stack.enter_context(jax.core.eval_context())
            yield


probing = _Probing()


def takes_no_like(cls: Any) -> bool:
    """Whether `promote` of a class may be called without `like`: see `Value.promote`."""
    like = inspect.signature(cls.promote).parameters.get("like")
    return like is not None and like.default is not like.empty


# The types of which that holds. While there are none, no placeholders are looked for (core/placeholders.py).
placeholder_types: list[type] = []

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

    linear: ClassVar[bool] = False
    """Whether the value is linear in its array leaves, so that its tangents and cotangents are of its class.

    A value counts as linear if both it and the Values that it holds declare so; a type need not check
    what it holds. Integer, boolean and key leaves have no tangents: a derivative shares them. If a leaf is
    shared by several elements, or is only a part of one, no cotangent belongs to a single element, and the
    backward function of a `jax.custom_vjp` receives a dense cotangent.
    """

    own_dtypes: ClassVar[bool] = False
    """Whether rules for this type may return results of another dtype than their primitive does."""

    default_precedence: ClassVar[int] = 0
    """Where operands of several types override `default`, the one with the highest precedence is called."""

    # Equinox looks attributes up in Python, to make bound methods pytrees. On Values that lookup would be
    # most of the cost of a rule, so their methods are bound like those of any other Python object.
    __getattribute__ = object.__getattribute__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if takes_no_like(cls):
            placeholder_types.append(cls)
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

    if TYPE_CHECKING:  # at run time, a type may have fields of these names: see core/without_operators.py
        device: ClassVar[Any]  # as those of `jax.Array`, read from the leaves
        sharding: ClassVar[Any]
        devices: ClassVar[Any]

    @property
    def __jax_array__(self) -> Any:
        # A property, so that outside any `quaxify` it is None and the usual lookups
        # (`getattr(x, "__jax_array__", None)`) find nothing: `array @ value` then defers to `value`.
        level = level_of(self)
        caller = compat.calling_frame()
        if level is not None:
            # An operator of an array defers to ours, which follows rules wherever the value was made.
            reflected = caller.f_code.co_name.startswith("_operator_")
            return None if reflected and not level.holds(self) else lambda: level.adopt(self)
        if caller.f_code.co_name == "_arraylike":  # in jax.numpy, whose own message would not help
            raise TypeError(not_dispatched(self, named_in_frames(caller, "fun_name", str) or "jax.numpy"))
        return None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if (level := level_of(self)) is None:
            raise TypeError(not_dispatched(self, "NumPy"))
        return level.adopt(self).__array__(*args, **kwargs)


def level_of(value: Value | None = None) -> Any:
    """The trace of the innermost running `quaxify`, or of the innermost that dispatches on `value`; None if
    there is none."""
    ours = lambda trace: hasattr(trace, "dispatches_on") and (value is None or trace.dispatches_on(value))
    trace = last = compat.current_trace()
    while trace is not None:
        if ours(trace):
            return trace
        trace, last = getattr(trace, "parent_trace", None), trace
    # JAX traces the functions of custom derivatives under a trace without a parent; the levels that are
    # running get its program.
    cut = last is not None and not compat.is_eval_trace(last)
    return next(filter(ours, reversed(running.levels)), None) if cut else None


class _Running(threading.local):
    """The traces of the calls of `quaxify` that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.levels: list[Any] = []


running = _Running()


def not_dispatched(value: Value, what: str) -> str:
    """The error message for a Value that no `quaxify` dispatches on."""
    return (
        f"{a_or_an(type(value), capital=True)} was passed to {what} "
        + ("outside `quaxlike.quaxify`. " if level_of() is None else "but no `filter_spec` selects it. ")
        + "Wrap the function that uses it in `quaxify` (inside a rule: call `quaxify` on the parts), or use "
        "`quaxlike.materialise` to make it a dense array."
    )


def named_in_frames(frame: Any, variable: str, kind: type) -> str | None:
    """The function or primitive that a Value was passed to: what a variable of this type holds in the frames
    of JAX."""
    for _ in range(4):
        if frame is not None and isinstance(found := frame.f_locals.get(variable), kind):
            return f"`{found}`"
        frame = getattr(frame, "f_back", None)
    return None


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

    `None`, or a part without leaves, counts as missing if its field neither allows `None` nor defaults to
    it, and the Value cannot be materialised without it.
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
    except NameError:  # in a local class: any of its fields may then be missing
        hints = {}
    fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("static") and f.default is not None]
    return [f.name for f in fields if type(None) not in typing.get_args(hints.get(f.name))]


def _is_missing(part: Any) -> bool:
    if isinstance(part, Value):
        return has_missing_parts(part)
    if type(part) in (tuple, list):
        return any(map(_is_missing, part))
    return not jtu.tree_leaves(part)


def _materialises(value: Value) -> bool:
    leaves, treedef = jtu.tree_flatten(value)
    try:
        return _materialises_with(treedef, tuple(map(jax.typeof, leaves)))
    except TypeError:  # leaves that are not arrays, or unhashable statics
        return False


@functools.lru_cache(maxsize=4096)
def _materialises_with(treedef: Any, avals: tuple[Any, ...]) -> bool:
    value = as_shapes(jtu.tree_unflatten(treedef, avals))
    try:
        with probing():
            return bool(jtu.tree_leaves(jax.eval_shape(type(value).materialise, value)))
    except Exception:  # a type may fail in any way without its parts
        return False


def materialise(tree: PyTree) -> PyTree:
    """Replaces every Value in `tree` by the dense array that it stands for, nested ones included.

    Works inside and outside quaxified functions. The caller asks for it, so no policy applies.
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
        aval = _avals[key] = _make_aval(value, leaf_avals)
    return aval


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


# The errors below are not `TypeError`s: JAX replaces those with its own when it asks for an aval.


def not_an_array(value: Value, leaf: Any) -> ValueError:
    """The error for a field that is not an array."""
    paths = jtu.tree_leaves_with_path(value)
    (name, *_) = (jtu.keystr(path) for path, x in paths if x is leaf)
    return ValueError(
        f"{type(value).__name__}{name} holds {leaf!r} where an array is expected. Declare a field that is "
        "not an array with `eqx.field(static=True)`."
    )


def _make_aval(value: Value, leaf_avals: Sequence[Any]) -> Any:
    if is_derivative_alone(leaf_avals):
        raise derivative_alone(type(value))
    ask = type(value).aval
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves(value)):
        ask = _traced(ask)
    try:
        aval = ask(value)
    except TypeError as error:
        raise ValueError(f"{type(value).__name__} has no shape: its hooks raise {error!r}.") from error
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = _leaf_aval(aval)
    if not isinstance(aval, jax.core.AbstractValue):
        raise ValueError(
            f"{type(value).__name__}.aval() must return a jax.core.ShapedArray (or another JAX type); "
            f"found {aval!r}."
        )
    if jax.config.jax_enable_checks and type(value).aval is not ArrayValue.aval:
        _check_aval(value, aval)
    return compat.place_aval_like(aval, leaf_avals)


def _traced(hook: Callable[[Value], Any]) -> Callable[[Value], Any]:
    """`hook` for a Value whose leaves are shapes, with tracers in their place: it may compute with them."""

    def on_shapes(value: Value) -> Any:
        found: list[Any] = []
        with probing():
            jax.eval_shape(lambda value: found.append(hook(value)), value)
        return found[0]

    return on_shapes


def _check_aval(value: Value, aval: Any) -> None:
    """Raises an error if `aval` contradicts `materialise`, unless the latter refuses."""
    try:
        with probing(), jax.enable_checks(False):  # which would check what `materialise` asks, without end
            out = jax.eval_shape(lambda x: type(x).materialise(x), as_shapes(value))  # as in `aval`
    except Exception:  # a type may refuse in any way
        return
    if isinstance(out, jax.ShapeDtypeStruct) and (out.shape, out.dtype) != (aval.shape, aval.dtype):
        raise ValueError(
            f"{type(value).__name__}.aval() says {aval.str_short()}, but materialise() makes an array of "
            f"shape {out.shape} and dtype {out.dtype}. Correct either, or leave out `aval`, to infer it."
        )
