"""`Zero` and `Full`, with all elements equal, and `Identity`, the identity matrix.

Operations are simplified when tracing. This must only depend on static numbers. (A number stored as a leaf
may be traced, without a known value.)
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core.compat import vary_alike
from ...core.jaxprs.unify import widened
from ...core.operators import ArrayOperators
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue, Value, is_value
from ...primitives.classes import ELEMENTWISE_BINARY, ELEMENTWISE_UNARY, REARRANGEMENTS, ZERO_PRESERVING
from .. import precedence
from ..bounds import fill_value_of
from ..dot_axes import dot_axes

# Tried after the types adding metadata to an array, and before those determining how an array is stored.


class Zero(ArrayOperators, ArrayValue):
    """An array of zeros.

    This doesn't contain any arrays, so it isn't affected by transforms *outside* `quaxify`. For example,
    `jax.vmap` returns it unchanged.

    **Arguments:**

    - `shape`: the shape. Default: `()`.
    - `dtype`: the dtype. Default: float.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.zero import Zero

        x = jnp.ones((3, 4))
        ql.quaxify(lambda x, z: x + z @ x)(x, Zero((3, 3)))  # x itself
        ```
    """

    _shape: tuple[int, ...] = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)

    @checked
    def __init__(self, shape: int | Sequence[int] = (), dtype: Any = float) -> None:
        self._shape = _as_shape(shape)
        self._dtype = as_dtype(dtype)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self._shape, self._dtype)

    def materialise(self) -> jax.Array:
        return jnp.zeros(self._shape, self._dtype)

    def widen(self, like: Value) -> Any:
        """Converts to a `Full`, or lifts an array of zeros to another type."""
        if isinstance(like, Zero):
            return self
        return _unknown(self) if isinstance(like, Full) else widened(self.materialise(), like)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"Zero({self.aval().str_short()})")


class Full(ArrayOperators, ArrayValue):
    """An array with all elements equal.

    A Python or NumPy number is known when tracing, so operations with 0 and 1 are simplified. An array is a
    leaf: it can be traced and differentiated, and any leading axes stack several arrays, as created by
    `jax.vmap`.

    **Arguments:**

    - `value`: a number; or an array with shape `()`, or `(*batch,)` for a stack.
    - `shape`: the shape, without batch axes. Default: `()`.
    - `dtype`: the dtype. Default: the dtype of `value`.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.zero import Full

        ql.quaxify(jnp.sin)(Full(2.0, (3, 4)))  # one sine
        ```
    """

    value: jax.Array | None
    number: bool | int | float | complex | None = eqx.field(static=True)
    _shape: tuple[int, ...] = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)

    @checked
    def __init__(self, value: ArrayLike, shape: int | Sequence[int] = (), dtype: Any = None) -> None:
        self._shape = _as_shape(shape)
        self._dtype = as_dtype(value if dtype is None else dtype)
        if isinstance(value, jax.Array) or np.ndim(value):
            self.value, self.number = jnp.asarray(value, self._dtype), None
        else:
            self.value, self.number = None, np.asarray(value, self._dtype).item()

    def __check_init__(self) -> None:
        # Always use the same object for a NaN. Otherwise static fields wouldn't compare equal.
        if self.number != self.number:
            object.__setattr__(self, "number", _NANS.setdefault(repr(self.number), self.number))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__check_init__()

    def aval(self) -> jax.core.ShapedArray:
        batch = () if self.value is None else self.value.shape
        return jax.core.ShapedArray((*batch, *self._shape), self._dtype)

    def materialise(self) -> jax.Array:
        value = _scalar(self)
        shape = (*value.shape, *self._shape)
        return jax.lax.broadcast_in_dim(value, shape, tuple(range(value.ndim)))

    @property
    def linear(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.number is None

    def widen(self, like: Value) -> Any:
        """Converts the number to an array, unless it's the same for `like`; or lifts to another type."""
        if not isinstance(like, Zero | Full):
            return widened(self.materialise(), like)
        same = isinstance(like, Full) and (like.number is self.number or like.number == self.number)
        return self if same or self.number is None else _unknown(self)

    def leading_axis(self) -> Any:
        return (0,) if self.value is not None and self.value.ndim else NotImplemented

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        value = self.number if self.value is None else wl.pformat(self.value, **kwargs)
        return wl.TextDoc(f"Full({value}, {self.aval().str_short()})")


_NANS: dict[str, Any] = {}


def _as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def as_dtype(x: Any) -> np.dtype:
    return np.dtype(jnp.result_type(x))


Constant = Zero | Full
_Any = ArrayLike | ArrayValue

# Simplification -----------------------------------------------------------------------------------


def _lift(x: Any) -> Any:
    """Converts a plain operand with shape () to a constant. Returns anything else unchanged."""
    return x if isinstance(x, ArrayValue) or np.shape(x) else Full(x)


def known(x: Any) -> Any:
    """Returns the number filling `x`, or None if it isn't known when tracing."""
    return 0 if isinstance(x, Zero) else x.number if isinstance(x, Full) else None


def _scalar(x: Constant) -> Any:
    """Returns the elements' value, with shape (), or with the batch axes if this is a stack."""
    if isinstance(x, Full) and x.value is not None:
        return x.value
    return np.asarray(known(x), x.dtype)


def _unknown(x: Constant) -> Full:
    """Moves a constant's number into an array, so that it isn't known when tracing."""
    return Full(jnp.asarray(known(x), x.dtype), x.shape)


def _constant(number: Any, shape: Sequence[int], dtype: Any) -> Constant:
    return Zero(shape, dtype) if number == 0 else Full(number, shape, dtype)


def _same(x: Constant, shape: Sequence[int]) -> Any:
    """Changes a constant's shape."""
    if known(x) is not None:
        return _constant(known(x), shape, x.dtype)
    value = _scalar(x)
    # With batch axes, it's ambiguous which axes of the new shape these correspond to.
    return Full(value, shape) if value.ndim == 0 else NotImplemented


def apply(fn: Callable[..., Any], *constants: Constant, shape: Sequence[int]) -> Any:
    """Applies `fn` to the value: the result is the same for all elements.

    If the elements are known, this computes the result immediately, so that it's known as well.
    """
    scalars = [_scalar(x) for x in constants]
    if all(known(x) is not None for x in constants):
        with jax.core.eval_context():  # needed inside an eager shard_map
            number = np.asarray(fn(*map(jnp.asarray, scalars)))
        # NaNs must be computed as part of the program. Otherwise `checkify` couldn't check the operation.
        if number == number:
            return _constant(number.item(), shape, number.dtype)
    batches = {np.shape(v) for v in scalars} - {()}
    if len(batches) > 1 or any(tuple(shape[: len(batch)]) != batch for batch in batches):
        return NotImplemented
    scalars = vary_alike([*map(jnp.asarray, scalars)])
    if 0 in shape:  # without elements, gradients must not become NaN or infinite
        out = jax.eval_shape(fn, *scalars)
        value = vary_alike([jnp.zeros(out.shape, out.dtype), *scalars])[0]
    else:
        value = fn(*scalars)
    return Full(value, shape[value.ndim :])


def result(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the shape and dtype of a primitive's result."""
    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in operands]
    return jax.eval_shape(functools.partial(primitive.bind, **params), *shapes)


@register(ELEMENTWISE_UNARY)
def _elementwise_unary(primitive: Primitive, x: Constant, **params: Any) -> Any:
    return apply(functools.partial(primitive.bind, **params), x, shape=x.shape)


@register_on_either_side(ELEMENTWISE_BINARY, Constant, precedence=precedence.CONSTANT)
def _elementwise_binary(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    out = result(primitive, (x, y), params)
    x, y = _lift(x), _lift(y)
    match primitive.name, known(x), known(y):
        # Only correct if the other operand isn't infinite or NaN. This is ignored, as for JAX's symbolic
        # zeros.
        case ("mul", 0, _) | ("mul", _, 0) | ("div", 0, _):
            return Zero(out.shape, out.dtype)
    if isinstance(x, Constant) and isinstance(y, Constant):
        return apply(functools.partial(primitive.bind, **params), x, y, shape=out.shape)
    match primitive.name, known(x), known(y):
        case "pow", _, 0:
            return Full(1, out.shape, out.dtype)
        case ("add", 0, _) | ("mul", 1, _):
            return broadcast_like(y, out)
        case ("add" | "sub", _, 0) | ("mul" | "div" | "pow", _, 1):
            return broadcast_like(x, out)
        case "sub", 0, _:
            return quaxify(jnp.negative)(broadcast_like(y, out))
        case _:
            return _with_scalars(primitive, x, y, params, out)


def broadcast_like(x: Any, out: Any) -> Any:
    """Broadcasts and converts `x` to the shape and dtype of `out`."""
    if np.shape(x) != out.shape:
        x = quaxify(jnp.broadcast_to)(x, out.shape)
    return x if jnp.result_type(x) == out.dtype else quaxify(jax.lax.convert_element_type)(x, out.dtype)


def _with_scalars(primitive: Primitive, x: Any, y: Any, params: dict[str, Any], out: Any) -> Any:
    """Applies the primitive to a constant with shape (), if the other operand has the full shape."""
    small = [_scalar(v) if isinstance(v, Constant) else v for v in (x, y)]
    fits = {np.shape(v) for v in small} == {(), out.shape}
    if not fits:
        return NotImplemented
    small = small if any(map(is_value, small)) else vary_alike(small)
    return quaxify(primitive.bind)(*small, **params)


@register(REARRANGEMENTS)
def _rearrangement(primitive: Primitive, x: Constant, **params: Any) -> Any:
    out = result(primitive, [x], params)
    if not primitive.multiple_results:
        return _same(x, out.shape)
    parts = [_same(x, o.shape) for o in out]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


@register("dynamic_slice")
def _dynamic_slice(primitive: Primitive, x: Constant, *indices: Any, **params: Any) -> Any:
    return _same(x, params["slice_sizes"])


@register("gather")
def _gather(primitive: Primitive, x: Constant, indices: ArrayLike, **params: Any) -> Any:
    fill = fill_value_of(params["mode"], params["fill_value"], x.dtype)
    # Out-of-bounds slices may be filled. The result is then only constant if this uses the same value.
    if fill is not None and (known(x) is None or fill != known(x)):
        return NotImplemented
    return _same(x, result(primitive, (x, indices), params).shape)


@register("pad", precedence=precedence.CONSTANT)
def _pad(primitive: Primitive, x: Constant, value: _Any, **params: Any) -> Any:
    number = known(value) if isinstance(value, Constant) else _concrete(value)
    if number is None or number != known(x):
        return NotImplemented
    return _same(x, result(primitive, (x, value), params).shape)


def _concrete(x: Any) -> Any:
    return None if isinstance(x, jax.core.Tracer | ArrayValue) else np.asarray(x).item()


@register(["concatenate", "stack"])
def _joined(primitive: Primitive, *xs: Constant, **params: Any) -> Any:
    if known(xs[0]) is None or any(known(x) != known(xs[0]) for x in xs):
        return NotImplemented
    return _same(xs[0], result(primitive, xs, params).shape)


@register("select_n")
def _select_n(which: ArrayLike, *cases: Constant) -> Any:
    if known(cases[0]) is None or any(known(x) != known(cases[0]) for x in cases):
        return NotImplemented
    return cases[0]


@register("select_n", precedence=precedence.CONSTANT)
def _select_n_by_constant(primitive: Primitive, which: Constant, *cases: _Any, **params: Any) -> Any:
    if known(which) is not None:
        return cases[int(known(which))]
    constants = [x for x in cases if isinstance(x, Constant)]
    if len(constants) == len(cases):

        def select(*scalars: Any) -> Any:
            return primitive.bind(*jnp.broadcast_arrays(*scalars), **params)

        return apply(select, which, *constants, shape=which.shape)
    scalar = _scalar(which)
    return NotImplemented if scalar.ndim else quaxify(primitive.bind)(scalar, *cases, **params)


_REDUCED: dict[str, Callable[[Any, int], Any]] = {
    "reduce_sum": lambda v, n: v * np.asarray(n).astype(v.dtype),
    "reduce_prod": lambda v, n: v**n,
    "reduce_max": lambda v, n: v,
    "reduce_min": lambda v, n: v,
    "reduce_and": lambda v, n: v,
    "reduce_or": lambda v, n: v,
}


@register(tuple(_REDUCED))
def _reduction(primitive: Primitive, x: Constant, *, axes: Sequence[Any], **params: Any) -> Any:
    # Each array of a stack has its own value, so we can't reduce over the batch axes.
    if any(i < np.ndim(_scalar(x)) for i in axes):
        return NotImplemented
    n = math.prod(x.shape[i] for i in axes)
    if not isinstance(n, int):  # a symbolic dimension of `jax.export`
        return NotImplemented
    shape = [d for i, d in enumerate(x.shape) if i not in axes]
    if n == 0:
        # The result is the reduction's identity, obtained by reducing an empty array.
        of_nothing = functools.partial(primitive.bind, axes=(0,), **params)
        return apply(lambda v: of_nothing(v[None][:0]), Full(0, (), x.dtype), shape=shape)
    return apply(lambda v: _REDUCED[primitive.name](v, n), x, shape=shape)


@register("sort")
def _sort(*xs: Constant, dimension: Any, **params: Any) -> Any:
    return NotImplemented if any(dimension < np.ndim(_scalar(x)) for x in xs) else list(xs)


@register(["cumsum", "cumprod", "cummax", "cummin", "argmax", "argmin"])
def _along_axis_of_zero(primitive: Primitive, x: Zero, **params: Any) -> Zero:
    out = result(primitive, [x], params)
    return Zero(out.shape, out.dtype)


@register_on_either_side(["dot_general", "conv_general_dilated"], Zero, precedence=precedence.CONSTANT)
def _product_with_zero(primitive: Primitive, x: Any, y: Any, **params: Any) -> Zero:
    out = result(primitive, (x, y), params)
    return Zero(out.shape, out.dtype)


@register_on_either_side("dot_general", Full, other=ArrayLike, precedence=precedence.CONSTANT)
def _product_with_full(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Multiplies by a `Full`.

    All of its rows are equal, so the other operand is summed just once, rather than once per row.
    """
    if any(isinstance(v, Full) and np.ndim(_scalar(v)) for v in (x, y)):
        return NotImplemented
    out = result(primitive, (x, y), params)
    on_left = isinstance(x, Full)
    full, other = (x, y) if on_left else (y, x)
    axes, of_other = dot_axes(full, other, params["dimension_numbers"], on_left=on_left)
    n = math.prod(np.shape(full)[i] for i in axes.contracting)
    if n == 0:
        return Zero(out.shape, out.dtype)
    if isinstance(x, Full) and isinstance(y, Full):
        if not isinstance(n, int):  # a symbolic size
            return NotImplemented

        def product(a: Any, b: Any) -> Any:
            a, b = jnp.astype(a, out.dtype), jnp.astype(b, out.dtype)
            return a * b * np.asarray(n).astype(out.dtype)

        return apply(product, x, y, shape=out.shape)
    kept = (*of_other.batch, *of_other.free)
    moved = jnp.transpose(other, (*kept, *of_other.contracting)).astype(out.dtype)
    sums = jnp.sum(moved, range(len(kept), moved.ndim))
    sums = jnp.astype(sums, out.dtype) * jnp.astype(_scalar(full), out.dtype)
    return jax.lax.broadcast_in_dim(sums, out.shape, [of_other.in_result[axis] for axis in kept])


# The identity -------------------------------------------------------------------------------------

# Tried after `Zero`, because the product of the identity with a `Zero` should be a `Zero` as well.


class Identity(ArrayOperators, ArrayValue):
    """The identity matrix.

    **Arguments:**

    - `n`: the size; the shape is `(n, n)`.
    - `dtype`: the dtype. Default: float.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.zero import Identity

        x = jnp.ones((3, 4))
        ql.quaxify(jnp.matmul)(Identity(3), x)  # x itself
        ```
    """

    n: int = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)

    @checked
    def __init__(self, n: int, dtype: Any = float) -> None:
        self.n = n
        self._dtype = as_dtype(dtype)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray((self.n, self.n), self._dtype)

    def materialise(self) -> jax.Array:
        return jnp.eye(self.n, dtype=self._dtype)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"Identity({self.aval().str_short()})")


@register_on_either_side("dot_general", Identity, precedence=precedence.IDENTITY)
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    on_left = isinstance(x, Identity)
    own, other = (x, y) if on_left else (y, x)
    _, (axes, batch, _, _) = dot_axes(own, other, params["dimension_numbers"], on_left=on_left)
    if not axes or batch:
        return NotImplemented
    if type(x) is type(y) and len(axes) == 2:
        out = jnp.asarray(x.n)
    elif len(axes) == 2:
        out = quaxify(functools.partial(jnp.trace, axis1=axes[0], axis2=axes[1]))(other)
    else:  # the contracted axis is replaced by the other axis, which comes first or last
        out = quaxify(jnp.moveaxis)(other, axes[0], 0 if on_left else -1)
    return broadcast_like(out, result(primitive, (x, y), params))


@register("transpose")
def _transpose(x: Identity, **params: Any) -> Identity:
    return x


@register(ZERO_PRESERVING)
def _elementwise_on_identity(primitive: Primitive, x: Identity, **params: Any) -> Any:
    """Applies a function mapping 0 to 0. If it also maps 1 to 1, the result is still the identity."""
    one = apply(functools.partial(primitive.bind, **params), Full(1, (), x.dtype), shape=())
    return Identity(x.n, one.dtype) if known(one) == 1 else NotImplemented


@register("reduce_sum")
def _reduce_sum(x: Identity, *, axes: Sequence[Any], **params: Any) -> Full | Identity:
    if not axes:
        return x
    # `astype` wraps an `n` that doesn't fit, as a sum of ones would.
    return Full(np.asarray(x.n).astype(x.dtype), (), x.dtype) if len(axes) == 2 else Full(1, (x.n,), x.dtype)


# The identity is its own LU factor. The rules for these two primitives also simplify `jnp.linalg.solve` and
# `jnp.linalg.inv`, which use them under the hood.


@register("lu")
def _lu(x: Identity, **params: Any) -> list[Any]:
    order = jnp.arange(x.n, dtype=jnp.int32)
    return [x, order, order]


@register("triangular_solve", precedence=precedence.IDENTITY)
def _triangular_solve(x: Identity, y: ArrayLike | ArrayValue, **params: Any) -> Any:
    return y
