"""Values as hijax types, so that `jax.jit`, `jax.grad`, `jax.vmap` and loops treat them as a single operand.

[`as_hitype`][quaxlike.hijax.as_hitype] converts a Value type to a JAX `HiType`. Pass its instances to a plain
`jax.jit`, without `quaxify` anywhere: operators on them dispatch to the Value's rules.

This is experimental, as is hijax itself (<https://docs.jax.dev/en/latest/hijax_types.html>), and requires JAX
0.11.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from .core.jaxprs.linearity import has_tangent
from .core.jaxprs.slots import LeafLayout
from .core.quaxify import quaxify as _quaxify
from .core.values import Value, is_value

try:
    from jax.experimental.hijax import (
        HiPrim,
        HiType,
        MappingSpec,
        ShapedArray,
        Zero,
        aval_property,
        instantiate_zeros,
        linearize_from_jvp,
        register_hitype,
        vjp_from_jvp,
    )
except ImportError as error:
    raise ImportError(
        f"quaxlike.hijax needs the hijax of JAX 0.11; found JAX {jax.__version__}. Upgrade JAX."
    ) from error

__all__ = ["HiTangent", "HiValue", "LeafAxes", "as_hitype", "quaxify"]


@dataclasses.dataclass(frozen=True)
class LeafAxes(MappingSpec):
    """An entry of `in_axes` or `out_axes` for `jax.vmap`, giving an axis for each leaf of a value.

    Use None for leaves not mapped over. JAX can only infer the axis size from arrays, so also pass
    `axis_size` to `jax.vmap`.

    **Arguments:**

    - `axes`: one axis per leaf. Default: the leading axis of every leaf.
    """

    axes: tuple[int | None, ...] | None = None

    def of(self, n: int) -> tuple[int | None, ...]:
        return (0,) * n if self.axes is None else self.axes


@dataclasses.dataclass(frozen=True)
class ValueType(HiType):
    """The type shared by all Values with a given pytree structure, or by their tangents."""

    treedef: Any
    avals: tuple[Any, ...]  # one for each leaf
    is_tangent: bool = False

    def __repr__(self) -> str:
        name = self.value_class.__name__
        return f"{'tangent of ' if self.is_tangent else ''}{name} {self.dtype.name}{list(self.shape)}"

    def str_short(self, *_: Any, **__: Any) -> str:
        return repr(self)

    @functools.cached_property
    def layout(self) -> LeafLayout:
        return LeafLayout(self.treedef, self.avals)

    @property
    def value_class(self) -> Any:
        return self.layout.cls

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.aval.shape

    @property
    def dtype(self) -> Any:
        return self.layout.aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # Leaves

    def leaves(self) -> list[tuple[Any, bool]]:
        """Returns the type of each leaf and whether it's present. (Tangents lack e.g. integer leaves.)"""
        return [(a, not self.is_tangent or has_tangent(a)) for a in self.avals]

    def lo_ty(self) -> list[Any]:
        return [ShapedArray(a.shape, a.dtype) for a, own in self.leaves() if own]

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        return jtu.tree_leaves(hi_val.value)

    def raise_val(self, *lo_vals: Any) -> Any:
        if not self.is_tangent:
            return _instance(as_hitype(self.value_class), jtu.tree_unflatten(self.treedef, lo_vals))
        leaf = iter(lo_vals)
        leaves = [next(leaf) if own else None for _, own in self.leaves()]
        return HiTangent(jtu.tree_unflatten(self.treedef, leaves), self)

    # Derivatives

    def to_tangent_aval(self) -> Any:
        # A Value can be its own tangent if it forms a vector space and all its leaves are differentiable. Any
        # others need a separate type.
        is_space = self.value_class.linear and all(map(has_tangent, self.avals))
        return self if is_space else dataclasses.replace(self, is_tangent=True)

    def vspace_zero(self) -> Any:
        return Wrap(self)(*(jnp.zeros(a.shape, a.dtype) for a in self.lo_ty()))

    def vspace_add(self, x: Any, y: Any) -> Any:
        return Wrap(self)(*map(jnp.add, Unwrap(self)(x), Unwrap(self)(y)))

    # Batching and loops

    def dec_rank(self, size: int | None, spec: Any) -> "ValueType":
        return self._with_shapes(spec, lambda shape, axis: shape[:axis] + shape[axis + 1 :])

    def inc_rank(self, size: int | None, spec: Any) -> "ValueType":
        return self._with_shapes(spec, lambda shape, axis: (*shape[:axis], size, *shape[axis:]))

    def _with_shapes(self, spec: Any, change: Callable[[Any, int], Any]) -> "ValueType":
        if spec is None:
            return self
        axes = iter(self.spec(spec).of(len(self.lo_ty())))
        by_leaf = [(a, next(axes) if own else None) for a, own in self.leaves()]
        avals = [a if axis is None else ShapedArray(change(a.shape, axis), a.dtype) for a, axis in by_leaf]
        return dataclasses.replace(self, avals=tuple(avals))

    def spec(self, spec: Any) -> LeafAxes:
        if not isinstance(spec, LeafAxes):
            raise ValueError(
                f"{self} is mapped along {spec!r}, but it is no array: pass `quaxlike.hijax.LeafAxes()` in "
                "`in_axes` and `out_axes`, and `axis_size`."
            )
        return spec

    def leading_axis_spec(self) -> LeafAxes:
        return LeafAxes()


class HiTangent:
    """The tangent or cotangent of a [`HiValue`][quaxlike.hijax.HiValue].

    Here `value` has the same structure as the original Value, with None for any non-differentiable leaf (e.g.
    integer codes). This is the convention of `equinox.filter_grad`.
    """

    def __init__(self, value: Any, of: ValueType) -> None:
        self.value, self._type = value, of

    def __repr__(self) -> str:
        return f"HiTangent({self.value})"


class HiValue:
    """Base class for the hijax types created by [`as_hitype`][quaxlike.hijax.as_hitype].

    The attribute `value` is the underlying Value. (Inside a transform its leaves are tracers.) Operators,
    `shape`, `dtype` and `ndim` are as for the Value. Values returned by operators are wrapped as hijax types
    again.
    """

    value: Any
    value_class: type[Value]
    # NumPy would otherwise convert this row by row: it has a length and items.
    __array_priority__ = 100

    def __new__(cls, value: Value) -> Any:
        if not isinstance(value, cls.value_class):
            raise TypeError(f"{cls.__name__} takes a {cls.value_class.__name__}; found {value!r}.")
        leaves, treedef = jtu.tree_flatten(value)
        if not any(isinstance(x, Tracer) for x in leaves):
            return _instance(cls, value)
        # Inside a transform this must be a tracer rather than an actual instance.
        return Wrap(ValueType(treedef, tuple(jax.typeof(x) for x in leaves)))(*leaves)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value})"

    # The default would call `__new__` without a value. (This is also used to copy.)
    def __reduce__(self) -> Any:
        return _wrapped, (self.value,)

    def __len__(self) -> int:
        return _len(self)

    def __iter__(self) -> Iterator[Any]:
        return _iter(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return self.value.ndim


# Otherwise Python would look for rows until an `IndexError`, which JAX doesn't raise. Also used for tracers.


def _len(x: Any) -> int:
    if not x.shape:
        raise TypeError("len() of an array without axes")
    return x.shape[0]


def _iter(x: Any) -> Iterator[Any]:
    if not x.shape:
        raise TypeError("iteration over an array without axes")
    return (x[i] for i in range(x.shape[0]))


def _instance(cls: type[HiValue], value: Any) -> HiValue:
    self = object.__new__(cls)
    self.value = value
    return self


def _type_of(x: HiValue) -> ValueType:
    leaves, treedef = jtu.tree_flatten(x.value)
    return ValueType(treedef, tuple(map(jax.typeof, leaves)))


@functools.cache
def as_hitype(cls: Any) -> type[HiValue]:
    """Creates a hijax type from a Value type, either built-in or your own.

    **Arguments:**

    - `cls`: a concrete subclass of [`quaxlike.Value`][]. Its static fields must be hashable.

    **Returns:**

    A subclass of [`HiValue`][quaxlike.hijax.HiValue]. To create an instance, call it on a Value. The result
    is cached: calling this function again returns the same class.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        HiNF4 = ql.hijax.as_hitype(ql.NF4Array)
        w = HiNF4(ql.NF4Array.quantize(jnp.ones((8, 64))))

        @jax.jit
        def layer(w, x):  # one operand, w
            return w @ x

        layer(w, jnp.ones(64))
        ```
    """
    if not (isinstance(cls, type) and issubclass(cls, Value)):
        raise TypeError(f"as_hitype takes a subclass of quaxlike.Value; found {cls!r}.")
    made = type(f"Hi{cls.__name__}", (HiValue,), {"value_class": cls, "__module__": cls.__module__})
    register_hitype(made, _type_of)
    return made


register_hitype(HiTangent, lambda x: x._type)


def _is_hi(x: Any) -> bool:
    return isinstance(x, HiValue) or (isinstance(x, Tracer) and isinstance(x.aval, ValueType))


def quaxify(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As [`quaxlike.quaxify`][], but for hijax types.

    That is, `fn` is called with the underlying Values, and any Values it returns are wrapped as hijax types
    again.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jtu.tree_map(lambda x: x.value if _is_hi(x) else x, (args, kwargs), is_leaf=_is_hi)
        out = _quaxify(fn)(*args, **kwargs)
        return jtu.tree_map(lambda x: _wrapped(x) if is_value(x) else x, out, is_leaf=is_value)

    return wrapper


def _wrapped(value: Any) -> Any:
    return as_hitype(type(value))(value)


_OPERATORS = {
    name: getattr(operator, name)
    for name in "add sub mul truediv floordiv mod pow matmul lshift rshift lt le gt ge eq ne".split()  # noqa: SIM905
}
_OPERATORS |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "divmod": divmod}
_OF_ONE = {name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert", "getitem")}
_OF_ONE["round"] = round


def _install_operators() -> None:
    for name, plain in _OPERATORS.items():
        forward = quaxify(plain)
        reverse = quaxify(lambda x, y, plain=plain: plain(y, x))
        setattr(HiValue, f"__{name}__", forward)
        # JAX finds a tracer's operators as attributes of its type, with a leading underscore.
        setattr(ValueType, f"_{name}", staticmethod(forward))
        if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(HiValue, f"__r{name}__", reverse)
            setattr(ValueType, f"_r{name}", staticmethod(reverse))
    for name, plain in _OF_ONE.items():
        forward = quaxify(plain)
        setattr(HiValue, f"__{name}__", forward)
        setattr(ValueType, f"_{name}", staticmethod(forward))
    for name, method in {"len": _len, "iter": _iter}.items():
        setattr(ValueType, f"_{name}", staticmethod(method))


_install_operators()


def _value(x: Any) -> Any:
    kind: ValueType = x.aval
    return jtu.tree_unflatten(kind.treedef, Unwrap(kind)(x))


ValueType.value = aval_property(_value)  # pyright: ignore[reportAttributeAccessIssue]


# Conversion from and to leaves ---------------------------------------------------------------------


class _Leafwise(HiPrim):
    """Base class for the linear primitives converting between a hijax value and its leaves."""

    def __init__(self, kind: ValueType) -> None:
        self.kind = kind
        self.params = {"kind": kind}
        super().__init__()

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_jvp


class Unwrap(_Leafwise):
    """Unpacks a hijax value into its leaves; the inverse of `Wrap`."""

    def __init__(self, kind: ValueType) -> None:
        self.in_avals, self.out_aval = (kind,), kind.lo_ty()
        super().__init__(kind)

    def expand(self, x: Any) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.kind.lower_val(x)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        (t,), out = tangents, self(*primals)
        moving = self.kind.to_tangent_aval()
        known = iter(() if isinstance(t, Zero) else Unwrap(moving)(t))

        def zero(a: Any) -> Any:
            return Zero(a.to_tangent_aval())

        return out, [
            next(known) if has_tangent(a) and not isinstance(t, Zero) else zero(a) for a in self.out_aval
        ]

    def transpose(self, out_ct: Any, operand: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        operand.accum(Wrap(self.kind)(*map(instantiate_zeros, out_ct)))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        (x,), (spec,) = args, dims
        kind: ValueType = jax.typeof(x)
        return Unwrap(kind)(x), list(kind.spec(spec).of(len(self.out_aval)))


class Wrap(_Leafwise):
    """Packs leaves into a hijax value; the inverse of `Unwrap`."""

    def __init__(self, kind: ValueType) -> None:
        self.in_avals, self.out_aval = tuple(kind.lo_ty()), kind
        super().__init__(kind)

    def expand(self, *leaves: Any) -> Any:
        return self.kind.raise_val(*leaves)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        moving = self.kind.to_tangent_aval()
        if all(isinstance(t, Zero) for t in tangents):
            return self(*primals), Zero(moving)
        own = [instantiate_zeros(t) for t, a in zip(tangents, self.in_avals, strict=True) if has_tangent(a)]
        return self(*primals), Wrap(moving)(*own)

    def transpose(self, out_ct: Any, *operands: Any) -> None:
        for operand, ct in zip(operands, Unwrap(self.kind)(instantiate_zeros(out_ct)), strict=True):
            operand.accum(ct)

    def batch(self, axis_data: Any, args: Sequence[Any], dims: Sequence[Any]) -> Any:
        batched = map(jax.typeof, args)
        avals = [next(batched) if moves else a for a, moves in self.kind.leaves()]
        return Wrap(dataclasses.replace(self.kind, avals=tuple(avals)))(*args), LeafAxes(tuple(dims))
