"""`ImplicitArray`, with a shape and dtype specified, computed, or inferred from `materialize()`.

Users write `materialize` and handlers for a single array, so these must never be called with a stack of
arrays (as created by `jax.vmap` or a scan), which has an extra batch axis. A specified shape always refers to
a single item. This makes it possible to detect stacks and map over them.
"""

import abc
import contextlib
import contextvars
import functools
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu
import numpy as np

from .._checked import checked
from ..core.hooks import as_dense, probing
from ..core.jaxprs.slots import leading_axes
from ..core.operators import ArrayOperators
from ..core.policy import dense, dense_operands, map_values
from ..core.quaxify import quaxify
from ..core.recording import note
from ..core.rules import active_layers, resolver
from ..core.statics import type_of
from ..core.values import ArrayValue, is_value, materialise, replace_fields
from .declared import Declared, bind_fields, canonical_dtype, take_fields
from .eformer import AvalHook, Flattening, PostInit
from .trees import fields


class OriginArray(abc.ABC):  # noqa: B024 (it only registers types)
    """The common base class of `jax.Array` and every `ImplicitArray`, for `isinstance` checks."""


OriginArray.register(jax.Array)
OrginArray = OriginArray  # this is how eformer spells it


class UninitializedAval(Exception):
    """Raised if an ImplicitArray's shape or dtype is neither specified nor inferable."""


def aux_field(**kwargs: Any) -> Any:
    """Declares a static field. Its value must be hashable.

    **Arguments:** as for `equinox.field`.
    """
    # This is the default of `dataclasses.field`, but Equinox doesn't accept it.
    if kwargs.get("metadata", ...) is None:
        kwargs.pop("metadata")
    return eqx.field(static=True, **kwargs)


class _ImplicitMeta(type(ArrayValue)):
    """A metaclass adding `shape=` and `dtype=` to constructors. Both are checked against `materialize`."""

    default_shape: Any
    default_dtype: Any
    _order: tuple[str, ...]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> Any:
        namespace["_order"] = take_fields(bases, namespace)
        if "__post_init__" in namespace and not any(issubclass(base, PostInit) for base in bases):
            bases = (*bases, PostInit)
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        if "aval" in vars(cls):  # a method or a property
            hook = vars(cls)["aval"]
            cls.aval = AvalHook(getattr(hook, "fget", hook))
        return cls

    def __call__(cls, *args: Any, shape: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        rest, shape, dtype = bind_fields(cls._order, args, shape, dtype)
        x = super().__call__(*rest, **kwargs)
        # Otherwise this is a call to `dataclasses.replace`, which preserves the shape and dtype.
        if "_declared" not in kwargs:
            shape = cls.default_shape if shape is None and _is_inherited(cls, "compute_shape") else shape
            dtype = cls.default_dtype if dtype is None and _is_inherited(cls, "compute_dtype") else dtype
        if shape is not None:
            object.__setattr__(x, "_declared", Declared.of(shape, x._declared.dtype, _field_shapes(x)))
        if dtype is not None:
            object.__setattr__(x, "_declared", x._declared.with_dtype(dtype))
        _compare_with_materialize(x)
        return x


def _is_inherited(cls: type, name: str) -> bool:
    return getattr(cls, name) is getattr(ImplicitArray, name)


class ImplicitArray(Flattening, ArrayOperators, ArrayValue, metaclass=_ImplicitMeta):
    """Base class for new kinds of arrays, in the ImplicitArray style.

    Subclasses should define fields and `materialize()`. They are Equinox modules, so they don't need an
    `@dataclass` decorator. The shape and dtype are determined by the first of these to apply:

    - the constructor's arguments `shape=` and `dtype=`, or fields with these names;
    - `compute_shape()` and `compute_dtype()`. By default these return the class attributes `default_shape`
        and `default_dtype`;
    - `materialize()`, which is traced but not run.

    A warning is raised if `materialize()` returns a different shape or dtype.

    If the leaves are stacked, e.g. under `jax.vmap` or in a scan, then a specified shape refers to a single
    item. In this case a stack is materialised item by item, and handlers are only called for single items. If
    no shape was specified then this can't be detected, and `materialize()` is called with the stacked fields.

    These can be passed as class keyword arguments, and are inherited by subclasses:

    - `commute_ops`: whether to try the handlers of a commutative primitive (`add`, `mul`, `max`, ...) with
        swapped operands as well. Default: True.
    - `warn_on_materialize`: whether to warn (once per call site) about primitives without a handler. Default:
        True. To silence these warnings for all types, set the environment variable `WARN_ON_MATTER=0`.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.implicit import ImplicitArray, aux_field, implicit, register


        class Codes(ImplicitArray):
            codes: jax.Array
            scale: float = aux_field()

            def materialize(self):
                return self.codes * self.scale


        @register("dot_general")
        def _(x: jax.Array, w: Codes, **params):
            return (
                jax.lax.dot_general_p.bind(x, w.codes.astype(x.dtype), **params)
                * w.scale
            )


        w = Codes(jnp.ones((4, 2), jnp.int8), scale=0.5)
        y = implicit(jnp.matmul)(jnp.ones((3, 4)), w)
        ```
    """

    default_shape: ClassVar[Sequence[int] | None] = None
    default_dtype: ClassVar[Any] = None
    commute_ops: ClassVar[bool] = True
    warn_on_materialize: ClassVar[bool] = True

    _declared: Declared = eqx.field(static=True, default=Declared(), kw_only=True, repr=False)

    def __init_subclass__(
        cls, commute_ops: bool | None = None, warn_on_materialize: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if "materialize" in vars(cls):
            cls.materialize = _of_each_item(vars(cls)["materialize"])  # pyright: ignore
        if commute_ops is not None:
            cls.commute_ops = commute_ops
        if warn_on_materialize is not None:
            cls.warn_on_materialize = warn_on_materialize

    @abc.abstractmethod
    def materialize(self) -> Any:
        """Returns the array represented by this. It may be another ImplicitArray."""

    def compute_shape(self) -> Sequence[int] | None:
        """Computes the shape from the fields. Return None to infer it from `materialize` instead."""
        return self.default_shape

    def compute_dtype(self) -> Any:
        """Computes the dtype from the fields. Return None to infer it from `materialize` instead."""
        return self.default_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        if self._declared.shape is not None:
            return self._declared.shape_of(_field_shapes(self))
        shape = self.compute_shape()
        return tuple(shape) if shape is not None else _aval_of_materialize(self, "shape").shape

    @property
    def dtype(self) -> Any:
        dtype = self.compute_dtype() if self._declared.dtype is None else self._declared.dtype
        return _aval_of_materialize(self, "dtype").dtype if dtype is None else canonical_dtype(dtype)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.shape, self.dtype)

    def astype(self, dtype: Any) -> "ImplicitArray":
        """Changes the dtype. The result of `materialize()` is then cast to this dtype.

        If an earlier dtype has fewer numbers then it is cast to that one first. Handlers don't know about
        this, so the array is materialised instead.
        """
        return replace_fields(self, _declared=self._declared.cast(dtype))

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # Some handlers written for eformer do this.
            if name == "dtype" and "_is_lent" in vars(self):
                object.__setattr__(self, "_declared", self._declared.with_dtype(value))
            else:
                super().__setattr__(name, value)

    def follows_rules(self) -> bool:
        """Returns whether handlers can be used for this. (They are written for a single array rather than a
        stack, and don't know about earlier casts.)
        """
        return not is_stack(self) and not self._declared.casts

    def leading_axis(self) -> Any:
        if not is_stack(self):
            return NotImplemented  # `materialize` may mix the rows of an array, so it can't be sliced
        stacking = _stacking(self)
        return leading_axes(
            (part, n == max(stacking)) for part, n in zip(fields(self)[0], stacking, strict=True)
        )

    def materialise(self) -> jax.Array:
        x, dtypes = self, [*self._declared.casts, self.dtype]
        if self._declared.casts:
            x = replace_fields(self, _declared=self._declared.with_dtype(dtypes[0]))
        out = materialize_nested(x, full=True)
        for dtype in dtypes:
            out = out if out.dtype == dtype else out.astype(dtype)
        return out

    @property
    def on_materialise(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        wanted = os.environ.get("WARN_ON_MATTER", "true").lower() in ("true", "yes", "1", "on")
        return "warn" if self.warn_on_materialize and wanted else "allow"

    @staticmethod
    def default(primitive: jexc.Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        if any(isinstance(x, ImplicitArray) and is_stack(x) for x in values):
            return bind(primitive, [_dense_if_stack(x, primitive, values) for x in values], params)
        for handler in _handlers_of_swapped(primitive, values):
            out = handler(primitive, values[::-1], params)
            if out is not NotImplemented:
                note("with operands swapped")
                return out
        implicit = [x for x in values if isinstance(x, ImplicitArray)]
        # Look this up on instances: it may be a static method or an ordinary one as well.
        own = {type(x): x.default_handler for x in reversed(implicit) if _has_default_handler(type(x))}
        if len(own) > 1:
            names = ", ".join(kind.__name__ for kind in reversed(own))
            raise TypeError(
                f"No handler for `{primitive}` matches, and its operands {names} each have a "
                "`default_handler`. Register a handler for this combination of types."
            )
        token = _unhandled.set(values)
        try:
            handler = next(iter(own.values()), ImplicitArray.default_handler)
            return handler(primitive, *values, params=params)
        finally:
            _unhandled.reset(token)

    @classmethod
    def default_handler(
        cls, primitive: jexc.Primitive, *args: Any, params: dict[str, Any] | None = None
    ) -> Any:
        """Called if no handler matches. By default, this materialises all operands.

        Operands of other types are only materialised if they don't have a rule for arrays either. Calling
        this explicitly from a handler materialises the operands without a warning.
        """
        unhandled = _unhandled.get()
        is_asked_for = len(args) != len(unhandled) or any(map(operator.is_not, args, unhandled))
        if is_asked_for:
            return bind(primitive, map_values(materialise, args), params or {})
        places = [i for i, x in enumerate(args) if isinstance(x, ImplicitArray)]
        arrays = dense_operands(primitive, args, places)
        apply = quaxify(bind) if any(map(is_value, arrays)) else bind
        return apply(primitive, arrays, params or {})


OriginArray.register(ImplicitArray)


def _has_default_handler(cls: type) -> bool:
    inherited = inspect.getattr_static(ImplicitArray, "default_handler")
    return inspect.getattr_static(cls, "default_handler") is not inherited


# Whilst a default handler is running, the operands for which no handler was found.
_unhandled: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("_unhandled", default=())


@contextlib.contextmanager
def lent(operands: Sequence[Any]) -> Iterator[list[Any]]:
    """Copies any ImplicitArrays amongst a handler's operands. Handlers written for eformer set the dtypes of
    their operands, and copying makes this safe.
    """
    copies = {id(x): replace_fields(x) for x in operands if issubclass(type(x), ImplicitArray)}
    for x in copies.values():
        object.__setattr__(x, "_is_lent", True)
    try:
        yield [copies.get(id(x), x) for x in operands]
    finally:
        for x in copies.values():
            object.__delattr__(x, "_is_lent")


def bind(primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    return primitive.bind(*operands, **primitive.get_bind_params(params))


# Stacks, i.e. arrays with more leading axes in their fields than declared


def _stacking(x: ImplicitArray) -> list[int]:
    declared = x._declared  # pyright: ignore[reportPrivateUsage]
    return [] if declared.shape is None else declared.stacking(_field_shapes(x))


def is_stack(x: ImplicitArray) -> bool:
    """Returns whether `x` is a stack of several arrays, along the leading axes of its fields."""
    return any(_stacking(x))


def _dense_if_stack(x: Any, primitive: jexc.Primitive, values: Sequence[Any]) -> Any:
    if not (isinstance(x, ImplicitArray) and is_stack(x)):
        return x
    hint = (
        f"This {type(x).__name__} is a stack, and handlers are for one array. To keep the type, map over "
        "it: with jax.lax.scan or jax.lax.map, or with jax.vmap around `implicit`."
    )
    return dense(x, primitive.name, values, hint=hint)


def _of_each_item(materialize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Maps `materialize`, written for just a single array, over the leading axes of a stack."""

    @functools.wraps(materialize)
    def of_each(self: Any) -> Any:
        parts, structure = fields(self)
        stacking = _stacking(self)
        if not any(stacking):
            return as_dense(materialize(self), f"{type(self).__name__}.materialize")
        if any(map(is_value, parts)):
            return quaxify(lambda parts: of_each(structure.unflatten(parts)))(parts)
        axes = [0 if n == max(stacking) else None for n in stacking]
        return jax.vmap(lambda *parts: of_each(structure.unflatten(parts)), axes)(*parts)

    return of_each


@checked
def materialize_nested(x: Any, full: bool = False) -> Any:
    """Materialises an ImplicitArray. If its fields are ImplicitArrays too, then their handlers are used.

    **Arguments:**

    - `full`: whether to repeat this until the result is no longer an ImplicitArray. By default this is only
        done once.
    """
    while is_value(x):
        x = _materialize_once(x)
        if not full:
            break
    return x


def _materialize_once(x: Any) -> Any:
    method = type(x).materialize if isinstance(x, ImplicitArray) else type(x).materialise
    parts, structure = fields(x)
    if not any(map(is_value, parts)):
        return method(x)
    return quaxify(lambda parts: method(structure.unflatten(parts)))(parts)


# Handlers matching once the operands are swapped

_COMMUTATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"))


def _handlers_of_swapped(primitive: jexc.Primitive, values: Sequence[Any]) -> Sequence[Callable[..., Any]]:
    may_swap = all(x.commute_ops for x in values if isinstance(x, ImplicitArray))
    if primitive.name not in _COMMUTATIVE or not may_swap:
        return ()
    return resolver(active_layers.get()).candidates(
        (primitive, *(type(x) if is_value(x) else None for x in values[::-1]))
    )


# The shape and dtype of `materialize`, found without running it


def _field_shapes(x: Any) -> list[tuple[int, ...]]:
    return [tuple(getattr(part, "shape", ())) for part in fields(x)[0]]


# The arrays for which `materialize` is being traced to find its shape. It may in turn ask for the shape,
# which would lead to infinite recursion.
_traced: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar("_traced", default=frozenset())


def _aval_of_materialize(x: ImplicitArray, what: str) -> Any:
    leaves, treedef = jtu.tree_flatten(x)
    avals = tuple(map(_leaf_type, leaves))
    if (treedef, avals) in _traced.get():
        raise UninitializedAval(
            f"{type(x).__name__}.materialize() reads `self.{what}`, which nothing else determines. Pass "
            f"`{what}=` when the array is built, or define `compute_{what}()` or `default_{what}`."
        )
    return _trace_materialize(treedef, _static_types(treedef), avals, jax.config.jax_enable_x64)


def _leaf_type(leaf: Any) -> jax.ShapeDtypeStruct:
    # A number has a weak type, so a product with it has the dtype of the other factor.
    if isinstance(leaf, jax.ShapeDtypeStruct):
        dtype, weak_type = leaf.dtype, bool(leaf.weak_type)
    else:
        dtype, weak_type = jax.dtypes.result_type(leaf, return_weak_type_flag=True)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=weak_type)


def _static_types(treedef: Any) -> Any:
    """Returns the types of the static fields. Tree structures are equal even if these differ (2 and 2.0)."""
    data = treedef.node_data()
    if data is None:  # a leaf
        return None
    return type_of(data[1]), tuple(map(_static_types, treedef.children()))


@functools.lru_cache(maxsize=4096)
def _trace_materialize(treedef: Any, static_types: Any, avals: tuple[Any, ...], x64: bool) -> Any:
    token = _traced.set(_traced.get() | {(treedef, avals)})
    try:
        with probing():
            return jax.eval_shape(
                lambda leaves: materialize_nested(treedef.unflatten(leaves), full=True), list(avals)
            )
    finally:
        _traced.reset(token)


def _compare_with_materialize(x: ImplicitArray) -> None:
    """Warns if the specified or computed shape or dtype differs from that of `materialize`."""
    if not all(eqx.is_array_like(leaf) or hasattr(leaf, "dtype") for leaf in jtu.tree_leaves(x)):
        return  # some leaf is just a placeholder, e.g. in the middle of a tree transformation
    said = {"shape": x.shape, "dtype": x.dtype}  # this raises an error if they can't be determined
    try:
        made = _aval_of_materialize(x, "shape")
    except Exception:  # either it always raises an error, or it can't be traced here
        return
    for what, value in said.items():
        if value != getattr(made, what):
            warnings.warn(
                f"{type(x).__name__} has {what} {value}, but its materialize() returns {what} "
                f"{getattr(made, what)}.",
                stacklevel=3,
            )
