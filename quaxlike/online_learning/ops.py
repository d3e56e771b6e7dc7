"""The built-in ETP primitives, along with functions wrapping them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from .._checked import checked
from ..arrays.lora import LoraArray
from ..core.operators import anywhere
from ..core.quaxify import quaxify
from ..core.rules import register
from ..core.values import is_value
from .primitive import ETPPrimitive, register_primitive, vjp_of, zeros_like_output, zeros_like_weights

_P = ParamSpec("_P")


def check_shapes(name: str, expected: str, fit: Callable[..., bool], **operands: Any) -> None:
    """Raises an error unless the operands have compatible shapes. An operand of None has shape `()`."""
    shapes = {key: () if x is None else np.shape(x) for key, x in operands.items()}
    if not fit(**shapes):
        given = [key for key, x in operands.items() if x is not None]
        found = ", ".join(f"`{key}` of shape {shapes[key]}" for key in given)
        raise ValueError(f"{name} takes {expected}; found {found}.")


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts a weight with elements shared by several outputs. Each output decays at its own rate, so it
    needs its own element in the traces.
    """
    return x if np.shape(x) == shape else jnp.broadcast_to(x, shape)


def _takes_values(fn: Callable[_P, jax.Array]) -> Callable[_P, jax.Array]:
    """Wraps a function to also accept Values outside `quaxify`."""
    quaxified = anywhere(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        with_values = any(map(is_value, args)) or any(map(is_value, kwargs.values()))
        return (quaxified if with_values else fn)(*args, **kwargs)

    return call


def _onto_batched(batched: Callable[[], ETPPrimitive]) -> Callable[..., Any]:
    """Creates a batching rule binding the primitive's batched version if only x is batched."""

    def rule(size: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        x, *weights = args
        x_dim, *weight_dims = dims
        if x_dim is None or any(d is not None for d in weight_dims):
            return NotImplemented
        return batched()(jnp.moveaxis(x, x_dim, 0), *weights, **params), 0

    return rule


def _product(
    name: str, fn: Callable[..., Any], trainables: Any = None, **rules: Callable[..., Any]
) -> tuple[ETPPrimitive, ETPPrimitive]:
    """Creates the primitives for a product, with x of shape `(batch..., in)` and of shape `(in,)`."""
    options: dict[str, Any] = {"trainable_invars_fn": trainables, "batching": _onto_batched(lambda: of_batch)}
    of_batch = register_primitive(f"etp_{name}mm", fn, batched=True, **options)
    of_one = register_primitive(f"etp_{name}mv", fn, **options)
    for primitive in (of_batch, of_one):
        primitive.register_etp_rules(init_pp=zeros_like_output, **rules)
    return of_batch, of_one


def _scale_columns(g: Any, trace: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """A `yw_to_w` rule for weights with the same last axis as y."""
    return {key: t * (g if key == "bias" else g[..., None, :]) for key, t in trace.items()}


# y = x @ w + b ------------------------------------------------------------------------------------


def _matmul(x: Any, w: Any, *bias: Any, has_bias: bool = False) -> jax.Array:
    y = jnp.matmul(x, w)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _weight_and_bias(params: Mapping[str, Any]) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if params.get("has_bias", False) else {"weight": 1}


# Here x is `(batch..., in)` or `(in,)`, w is `(in, out)`, and b is `(out,)`. Passing b requires
# `has_bias=True`.
etp_mm_p, etp_mv_p = _product(
    "", _matmul, _weight_and_bias,
    yw_to_w=_scale_columns,
    xy_to_dw=vjp_of(_matmul, ("weight", "bias")),
    init_drtrl=zeros_like_weights(lambda x: len(x.shape) - 1),
)  # fmt: skip


@_takes_values
@checked
def matmul(x: ArrayLike, w: Any, bias: ArrayLike | None = None) -> jax.Array:
    """Computes `x @ w + bias`, with `w` and `bias` trained online.

    **Arguments:**

    - `x`: array of shape `(..., in)`. All but the last axis are treated as batch axes.
    - `w`: array or Value of shape `(in, out)`.
    - `bias`: array of shape `(out,)`, or broadcasting to it. Defaults to no bias.

    **Returns:** an array of shape `(..., out)`.
    """
    check_shapes(
        "matmul",
        "`x` of shape (..., in), `w` of shape (in, out) and `bias` of shape (out,)",
        lambda x, w, bias: len(w) == 2 and x[-1:] == w[:1] and bias in (w[1:], (1,), ()),
        x=x,
        w=w,
        bias=bias,
    )
    primitive = etp_mv_p if jnp.ndim(x) == 1 else etp_mm_p
    if bias is None:
        return primitive(x, w)
    return primitive(x, w, _broadcast(bias, np.shape(w)[1:]), has_bias=True)


@register([etp_mm_p, etp_mv_p])
def _matmul_lora(primitive: Primitive, x: jax.Array, w: LoraArray, *bias: Any, has_bias: bool = False):
    """Trains a LoRA adapter online, whatever the type of its base weight."""
    plain = w.magnitude is None and (w.key is None or w.dropout == 0)
    if w.ndim != 2 or w.a.ndim != 2 or w.b.ndim != 2 or not plain:
        return NotImplemented

    def product(x: Any, base: Any, a: Any, b: Any) -> jax.Array:
        y = matmul(x, base) if w.gradients == "train" else jnp.matmul(x, base)
        # Depending on the layout, the rows of w correspond to either the rows of `b` or the columns of `a`.
        first, then = (b, a) if w.out_axes == (-2,) else (a.T, b.T)
        return y + lora_matmul(x * w.scaling_in(x.dtype), first, then).astype(y.dtype)

    y = quaxify(product)(x, w.base, w.a, w.b)
    return y + jnp.broadcast_to(elementwise(bias[0]), y.shape) if has_bias else y


# y = scale · x @ b @ a, a low-rank update of a weight ---------------------------------------------


def _low_rank(x: Any, b: Any, a: Any, *, scale: float = 1.0) -> jax.Array:
    y = jnp.matmul(jnp.matmul(x, b), a)
    return y * jnp.asarray(scale, y.dtype)


def _init_low_rank(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
    # Each element of y decays at its own rate, but `b` doesn't have the axis of y. So keep a trace for the
    # product `b @ a` instead, which gives both factors' cotangents.
    (n_in, _), (_, n_out) = weight_vars["b"].aval.shape, weight_vars["a"].aval.shape
    shape = (*x_var.aval.shape[:-1], n_in, n_out, num_states)
    return {"product": jnp.zeros(shape, y_var.aval.dtype)}


def _solve_low_rank(
    g: Any, trace: Mapping[str, Any], weights: Mapping[str, Any], *, scale: float = 1.0
) -> dict[str, Any]:
    a, b = weights["a"], weights["b"]
    product = _scale_columns(g, trace)["product"]
    product = product.sum(range(product.ndim - 2)) * jnp.asarray(scale, product.dtype)
    return {"b": product @ a.T, "a": b.T @ product}


# Here x is `(batch..., in)` or `(in,)`, b is `(in, rank)`, and a is `(rank, out)`.
etp_lora_mm_p, etp_lora_mv_p = _product(
    "lora_", _low_rank, lambda params: {"b": 1, "a": 2},
    yw_to_w=_scale_columns,
    xy_to_dw=vjp_of(_low_rank, ("b", "a")),
    init_drtrl=_init_low_rank,
    instant=lambda x, g, weights, **params: {"product": x[..., :, None] * g[..., None, :]},
    solve=_solve_low_rank,
)  # fmt: skip


@_takes_values
@checked
def lora_matmul(x: ArrayLike, b: ArrayLike, a: ArrayLike, *, scale: float = 1.0) -> jax.Array:
    """Computes `scale * x @ b @ a`, with `b` and `a` trained online.

    **Arguments:**

    - `x`: array of shape `(..., in)`. All but the last axis are treated as batch axes.
    - `b`: array of shape `(in, rank)`.
    - `a`: array of shape `(rank, out)`.
    - `scale`: a static scaling factor, i.e. a number rather than an array. Defaults to 1.

    **Returns:** an array of shape `(..., out)`.
    """
    check_shapes(
        "lora_matmul",
        "`x` of shape (..., in), `b` of shape (in, rank) and `a` of shape (rank, out)",
        lambda x, b, a: len(b) == len(a) == 2 and x[-1:] == b[:1] and b[1] == a[0],
        x=x,
        b=b,
        a=a,
    )
    if isinstance(scale, jax.Array | np.ndarray):
        raise TypeError(
            f"lora_matmul takes a static number as `scale`; found an array of type "
            f"{jax.typeof(scale).str_short()}. Multiply the result by it, `scale * lora_matmul(x, b, a)`."
        )
    primitive = etp_lora_mv_p if jnp.ndim(x) == 1 else etp_lora_mm_p
    return primitive(x, b, a, scale=scale)


# y = x @ w, for a sparse weight with a fixed sparsity pattern -------------------------------------

_Indices = Sequence[int] | np.ndarray | jax.Array


class SparsePattern:
    """A weight's sparsity pattern. Patterns are hashable and compared by value, so they can be static.

    **Arguments:**

    - `rows`, `columns`: each entry's indices, as integers with shape `(entries,)`.
    - `shape`: the weight's shape `(in, out)`.

    **Raises:** `ValueError` if any indices are out of bounds.
    """

    @checked
    def __init__(self, rows: _Indices, columns: _Indices, shape: tuple[int, int]) -> None:
        if isinstance(rows, str) or isinstance(columns, str):
            raise TypeError(f"rows and columns of a SparsePattern are integers; found {rows!r}, {columns!r}")
        self.rows, self.columns = (np.array(i, dtype=np.int32) for i in (rows, columns))
        self.shape = tuple(shape)
        if self.rows.ndim != 1 or self.rows.shape != self.columns.shape:
            raise ValueError(
                "rows and columns of a SparsePattern are vectors of equal length; found shapes "
                f"{self.rows.shape} and {self.columns.shape}"
            )
        for name, indices, size in (("rows", self.rows, shape[0]), ("columns", self.columns, shape[1])):
            if indices.size and not (indices.min() >= 0 and indices.max() < size):
                raise ValueError(
                    f"{name} of a SparsePattern of shape {self.shape} must be in [0, {size}); found "
                    f"[{indices.min()}, {indices.max()}]"
                )
        for indices in (self.rows, self.columns):
            indices.flags.writeable = False

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.rows.tobytes(), self.columns.tobytes(), self.shape

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsePattern) and self._key == other._key

    def __repr__(self) -> str:
        return f"SparsePattern({self.rows.size} of {self.shape[0]} × {self.shape[1]})"


def _sparse_matmul(x: Any, data: Any, *, pattern: SparsePattern) -> jax.Array:
    terms = x[..., pattern.rows] * data
    y = jnp.zeros((*x.shape[:-1], pattern.shape[1]), terms.dtype)
    return y.at[..., pattern.columns].add(terms)


def _scale_entries(g: Any, trace: Mapping[str, Any], *, pattern: SparsePattern) -> dict[str, Any]:
    return {"weight": trace["weight"] * g[..., pattern.columns]}


# Here x is `(batch..., in)` or `(in,)`, and the entries of w are `(entries,)`, with their indices in
# `pattern`.
etp_sp_mm_p, etp_sp_mv_p = _product(
    "sp_", _sparse_matmul,
    yw_to_w=_scale_entries,
    xy_to_dw=vjp_of(_sparse_matmul, ("weight",)),
    init_drtrl=zeros_like_weights(lambda x: len(x.shape) - 1),
)  # fmt: skip


@_takes_values
@checked
def sparse_matmul(x: ArrayLike, data: ArrayLike, pattern: SparsePattern) -> jax.Array:
    """Computes `x @ w` for a sparse matrix `w` with entries trained online.

    **Arguments:**

    - `x`: array of shape `(..., in)`. All but the last axis are treated as batch axes.
    - `data`: the entries' values, with shape `(entries,)` or `()`.
    - `pattern`: the entries' indices. If several entries have the same indices then they are summed.

    **Returns:** an array of shape `(..., out)`.
    """
    check_shapes(
        f"sparse_matmul with the pattern {pattern!r}",
        "`x` of shape (..., in) and `data` of shape (entries,)",
        lambda x, data: x[-1:] == pattern.shape[:1] and data in (pattern.rows.shape, ()),
        x=x,
        data=data,
    )
    primitive = etp_sp_mv_p if jnp.ndim(x) == 1 else etp_sp_mm_p
    return primitive(x, _broadcast(data, pattern.rows.shape), pattern=pattern)


# y = w, for weights used elementwise: gains, leaks and diagonal recurrence ------------------------

etp_elemwise_p = register_primitive(
    "etp_elemwise",
    lambda w: jnp.asarray(w),
    gradient_enabled=True,
    trainable_invars_fn=lambda params: {"weight": 0},
    x_invar_index=None,
)
etp_elemwise_p.register_etp_rules(
    yw_to_w=lambda g, trace, **params: {"weight": trace["weight"] * g},
    xy_to_dw=lambda x, g, weights, **params: {"weight": g},
    init_drtrl=lambda *args: {"weight": zeros_like_output(*args)},
    init_pp=zeros_like_output,
)


@_takes_values
@checked
def elementwise(w: ArrayLike) -> jax.Array:
    """Marks a weight acting elementwise on the state, to train it online.

    It's fine to apply a function (such as a sigmoid) to the parameter first: this is differentiated as usual.
    For example, `elementwise(jax.nn.sigmoid(log_decay)) * h`.

    **Arguments:**

    - `w`: an array. This must have the same shape as the state, or as its trailing axes.

    **Returns:** `w`.
    """
    return etp_elemwise_p(w)


# y = table[indices] -------------------------------------------------------------------------------


def _look_up(indices: Any, table: Any) -> jax.Array:
    # This returns the same rows as `table[indices]`. But that drops the gradient of an out-of-bounds index,
    # whereas here it belongs to the row returned.
    return table.at[indices].get(mode="clip")


def _look_up_to_dw(x: Any, g: Any, weights: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """An `xy_to_dw` rule. Here x is either the indices, or the trace of their one-hot encoding."""
    fn = (lambda w: jnp.matmul(x, w)) if jnp.issubdtype(x.dtype, jnp.inexact) else (lambda w: _look_up(x, w))
    return {"weight": jax.vjp(fn, weights["weight"])[1](g)[0]}


def _one_hot(x: Any, weights: Mapping[str, Any], **params: Any) -> jax.Array:
    # Unlike `jax.nn.one_hot`, this treats negative and out-of-bounds indices as the lookup does.
    table = weights["weight"]
    return _look_up(x, jnp.eye(table.shape[0], dtype=table.dtype))


# Here indices are `(batch...)`, and table is `(vocabulary, features)`.
etp_emb_p = register_primitive("etp_emb", _look_up, batched=True, batching=_onto_batched(lambda: etp_emb_p))
etp_emb_p.register_etp_rules(
    yw_to_w=_scale_columns,
    xy_to_dw=_look_up_to_dw,
    init_drtrl=zeros_like_weights(lambda x: len(x.shape)),
    init_pp=zeros_like_output,
    pp_input=_one_hot,
)


@_takes_values
@checked
def embedding(indices: ArrayLike, table: ArrayLike) -> jax.Array:
    """Computes `table[indices]`, with `table` trained online.

    With D-RTRL, the trace for each example is as large as the whole table. If this is too much then use
    pp_prop: its traces are small.

    **Arguments:**

    - `indices`: integers of any shape. Just as in JAX, negative indices count from the end, and out-of-bounds
        indices are those of the first or the last row.
    - `table`: array of shape `(vocabulary, features)`.

    **Returns:** an array of shape `(..., features)`.
    """
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
        raise TypeError(f"embedding takes integers as `indices`; found {jnp.result_type(indices)}.")
    check_shapes(
        "embedding", "a `table` of shape (vocabulary, features)", lambda table: len(table) == 2, table=table
    )
    return etp_emb_p(indices, table)


# y = conv(x, kernel) + bias, with channels last ---------------------------------------------------

_SPATIAL = "DHW"


def _conv(x: Any, kernel: Any, *bias: Any, has_bias: bool = False, **params: Any) -> jax.Array:
    y = _conv_general(x, kernel, **params)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _conv_general(
    x: Any,
    kernel: Any,
    *,
    strides: tuple[int, ...] | None = None,
    padding: str | tuple[tuple[int, int], ...] = "SAME",
    dilation: tuple[int, ...] | None = None,
) -> jax.Array:
    axes = _SPATIAL[len(_SPATIAL) - (kernel.ndim - 2) :]
    dtype = jnp.result_type(x, kernel)
    return lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        strides or (1,) * len(axes),
        padding,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
    )


def _patches(x: Any, kernel: Any, **params: Any) -> jax.Array:
    """Extracts the window of x at each spatial position in y, with shape `(batch, *space, *window, in)`."""
    *window, n_in, _ = kernel.shape
    size = n_in
    for n in window:
        size *= n
    # Use a convolution with one output channel per element of the window, selecting just that element.
    picking = jnp.eye(size, dtype=x.dtype).reshape(*window, n_in, size)
    patches = _conv_general(x, picking, **params)
    return patches.reshape(*patches.shape[:-1], *window, n_in)


def _init_conv(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
    # The kernel is shared by all spatial positions of y, but each position decays at its own rate. So keep a
    # trace for each position, and only sum over them in the gradient.
    y = y_var.aval
    kernel = weight_vars["weight"].aval.shape
    zeros = {"weight": jnp.zeros((*y.shape[:-1], *kernel, num_states), y.dtype)}
    return zeros | ({"bias": jnp.zeros((*y.shape, num_states), y.dtype)} if "bias" in weight_vars else {})


def _beside_window(g: Any, ndim: int) -> Any:
    """Inserts axes of size 1 before the last axis in `g`, for `ndim` axes in total."""
    return g.reshape(*g.shape[:-1], *[1] * (ndim - g.ndim), g.shape[-1])


def _scale_kernels(g: Any, trace: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    return {key: t * _beside_window(g, t.ndim) for key, t in trace.items()}


def _conv_instant(
    x: Any, g: Any, weights: Mapping[str, Any], *, has_bias: bool = False, **params: Any
) -> dict[str, Any]:
    patches = _patches(x, weights["weight"], **params)[..., None]
    patches = patches.astype(jnp.result_type(patches, g))
    return {"weight": patches * _beside_window(g, patches.ndim)} | ({"bias": g} if has_bias else {})


# Here x is `(batch, *space, in)`, kernel is `(*window, in, out)`, and bias is `(out,)`. Passing bias requires
# `has_bias=True`.
etp_conv_p = register_primitive("etp_conv", _conv, batched=True, trainable_invars_fn=_weight_and_bias)
etp_conv_p.register_etp_rules(
    yw_to_w=_scale_kernels,
    xy_to_dw=vjp_of(_conv, ("weight", "bias")),
    init_drtrl=_init_conv,
    init_pp=zeros_like_output,
    instant=_conv_instant,
)


@_takes_values
@checked
def conv(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: Sequence[int] | None = None,
) -> jax.Array:
    """A convolution over one, two or three spatial axes, with `kernel` and `bias` trained online.

    With D-RTRL, the trace for each spatial position in the output is as large as the kernel. In contrast,
    pp_prop's traces are only as large as the output.

    **Arguments:**

    - `x`: array of shape `(batch, *space, in)`.
    - `kernel`: array of shape `(*window, in, out)`.
    - `bias`: array of shape `(out,)`, or broadcasting to it. Defaults to no bias.
    - `strides`, `dilation`: one integer per spatial axis. Defaults to 1 for every axis.
    - `padding`: either `"SAME"`, `"VALID"`, or a pair of integers per spatial axis.

    **Returns:** an array of shape `(batch, *space, out)`.
    """
    check_shapes(
        "conv",
        "`x` of shape (batch, *space, in), `kernel` of shape (*window, in, out) and `bias` of shape (out,)",
        lambda x, kernel, bias: (
            3 <= len(x) == len(kernel) <= 5 and x[-1] == kernel[-2] and bias in (kernel[-1:], (1,), ())
        ),
        x=x,
        kernel=kernel,
        bias=bias,
    )
    axes = jnp.ndim(kernel) - 2
    by_axis: dict[str, Sequence[Any] | None] = {"strides": strides, "dilation": dilation}
    if isinstance(padding, str):
        if padding not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(
                f'conv takes "SAME", "VALID" or pairs of integers as `padding`; found {padding!r}.'
            )
    else:
        by_axis["padding"] = padding
    for name, given in by_axis.items():
        if given is not None and len(given) != axes:
            raise ValueError(f"conv takes {axes} `{name}`, one for each spatial axis; found {given!r}.")
    params: dict[str, Any] = {
        "strides": None if strides is None else tuple(strides),
        "padding": padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        "dilation": None if dilation is None else tuple(dilation),
    }
    if bias is None:
        return etp_conv_p(x, kernel, **params)
    return etp_conv_p(x, kernel, _broadcast(bias, np.shape(kernel)[-1:]), has_bias=True, **params)
