"""Products with a `LoraArray`: `dot_general`, convolutions with an adapted kernel, stacks of experts.

The result must have the dtype of a product with the base, whatever the adapter's dtype. Otherwise a float32
adapter would silently promote a bfloat16 model. So the adapter's contribution is computed in the wider dtype,
and only cast once, at the very end.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.jaxprs.evaluate import cached_trace
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue, is_value
from ...kernels.multilinear import is_spread, spread_like
from .. import precedence
from ..adapted import labels_of
from ..adapted_product import AdaptedProduct
from ..dot_axes import Labels, arrange, cast, common_dtype
from .array import RANK, LoraArray, drops, labels, row_scale, scaled, warn_of_dropout

# Tried before the rules for types with special storage (which then apply to each part), and after the rules
# for arrays with known contents (zeros).


@register_on_either_side("dot_general", LoraArray, precedence=precedence.LORA)
def _product(primitive: Primitive, x: Any, y: Any, **params: Any):
    # Do this outside the cached trace, which wouldn't warn a second time.
    for operand in (x, y):
        if isinstance(operand, LoraArray) and operand.dropout > 0:
            warn_of_dropout(operand)
    return _traced_product(primitive, x, y, **params)


@cached_trace
def _traced_product(primitive: Primitive, x: Any, y: Any, **params: Any):
    on_left = isinstance(x, LoraArray)
    lora, x = (x, y) if on_left else (y, x)
    it = AdaptedProduct(lora, x, on_left, **params)
    if lora.magnitude is None:
        product = functools.partial(_lora_product, it)
    else:
        product = functools.partial(_dora_product, it, *row_scale(lora))
    return quaxify(product)(lora.base, lora.a, lora.b, x)


def _lora_product(it: AdaptedProduct, w: Any, a: Any, b: Any, x: Any, x_labels: Labels | None = None) -> Any:
    x_labels = it.x_labels if x_labels is None else x_labels
    y = _with_base(it, w, x, x_labels)
    return add(y, _with_factors(it, a, b, dropped(it.w, x), x_labels))


def _with_base(it: AdaptedProduct, w: Any, x: Any, x_labels: Labels) -> Any:
    """As `it.with_base`, but allows both operands to be sharded over the same explicit mesh axes."""
    if it.params.get("out_sharding") is None and not is_value(w) and is_spread((w, x)):
        return arrange(*it.times(w, it.own["w"], x, x_labels, it.out, **it.params), it.out)
    return it.with_base(w, x, x_labels)


def _with_factors(it: AdaptedProduct, a: Any, b: Any, x: Any, x_labels: Labels) -> Any:
    lora, params = it.w, it.params
    first, then = (a, it.own["a"]), (b, it.own["b"])
    if _shrinks_by_b(lora, it.contracting):
        first, then = then, first
    dtype = common_dtype(a, b, x)
    first = cast(first[0], dtype), first[1]
    keep = {*it.out, *then[1]}
    summed = {*it.own["alpha"]} - keep
    if summed:  # an axis of adapters is summed over, so scale each adapter beforehand
        first = scaled(lora, *first)
    thin, thin_labels = it.times(*first, cast(x, dtype), x_labels, keep, precision=params["precision"])
    if not summed:
        thin, thin_labels = scaled(lora, thin, thin_labels)
    y = it.times(cast(then[0], dtype), then[1], thin, thin_labels, it.out, **widened(params, dtype))
    return arrange(*y, it.out)


def _dora_product(it: AdaptedProduct, scale: Any, rows: Labels, w: Any, a: Any, b: Any, x: Any) -> Any:
    lora, x_labels = it.w, it.x_labels
    if not {*rows} <= {*it.out}:  # rows are summed over, so scale x instead
        # Integers would be rounded when multiplied by the scale.
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = cast(x, common_dtype(lora, x))
        more = [*(i for i in rows if i not in x_labels), *x_labels]
        x = multiply(arrange(x, x_labels, more), arrange(scale, rows, more))
        return _lora_product(it, w, a, b, x, more)
    by_row = arrange(scale, rows, it.out)
    if not drops(lora):
        return multiply(_lora_product(it, w, a, b, x), by_row)
    # As in PEFT, dropout only affects what is added to the original layer's output. This includes the effect
    # of rescaling the base.
    y, x = _with_base(it, w, x, x_labels), dropped(lora, x)
    change = multiply(_with_base(it, w, x, x_labels), by_row - 1)
    return add(y, add(change, multiply(_with_factors(it, a, b, x, x_labels), by_row)))


def _shrinks_by_b(lora: LoraArray, summed: Sequence[int]) -> bool:
    """Returns whether only axes of `b` are summed over. If so, we multiply by `b` before `a`."""
    n = lora.ndim
    return not any(i - n in lora.in_axes for i in summed) and any(i - n in lora.out_axes for i in summed)


def widened(params: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Returns the `params` for a product computed in this dtype, which may be wider than the base's."""
    preferred = params["preferred_element_type"]
    if preferred is not None:
        preferred = common_dtype(jax.ShapeDtypeStruct((), preferred), jax.ShapeDtypeStruct((), dtype))
    return params | {"preferred_element_type": preferred, "out_sharding": None}


# Arithmetic that keeps the base's dtype, whatever the adapter's -----------------------------------


def add(y: Any, z: Any) -> Any:
    """Returns `y + z`, sharded like `y` along any explicit mesh axes."""
    dtype = common_dtype(y, z)
    z = z if is_value(y) or is_value(z) or y.shape != z.shape else spread_like(z, y)
    return cast(cast(y, dtype) + cast(z, dtype), y.dtype)


def multiply(y: Any, z: Any) -> Any:
    dtype = common_dtype(y, z)
    return cast(cast(y, dtype) * cast(z, dtype), y.dtype)


def dropped(lora: LoraArray, x: Any) -> Any:
    """Applies dropout to the adapter's input `x`."""
    if not drops(lora):
        return x
    keep = 1 - lora.dropout
    key: Any = lora.key
    mask = jax.random.bernoulli(jnp.ravel(key)[0], keep, x.shape)
    return x * (cast(mask, x.dtype) / keep)


@register("conv_general_dilated", precedence=precedence.LORA)
def _conv(
    primitive: Primitive,
    x: ArrayLike | ArrayValue,
    lora: LoraArray,
    *,
    dimension_numbers: jax.lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    **params: Any,
):
    """Convolves with `a`, which reduces to `rank` channels, and then pointwise with `b`.

    For the gradient this order is reversed: the kernel's inputs are the outputs of the forward pass.
    """
    warn_of_dropout(lora)
    n, groups, dims = lora.ndim, feature_group_count, dimension_numbers
    out, into, *window = dims.rhs_spec
    w_labels, a_labels, b_labels = labels(lora)
    # Kernels with factors (rank, in, *window) and (out, rank) are supported, and so are their gradients, with
    # `in` and `out` exchanged.
    backward = b_labels == [into, RANK] and groups == 1 and not drops(lora)
    ends = {RANK, out if backward else into, *window}
    if batch_group_count > 1 or not (backward or b_labels == [out, RANK]) or set(a_labels) != ends:
        return NotImplemented

    scale, rows = (None, ()) if lora.magnitude is None else row_scale(lora)
    if scale is not None and scale.size != lora.shape[b_labels[0]]:
        return NotImplemented  # the scale would also vary across the window

    conv = functools.partial(
        primitive.bind, dimension_numbers=dims, feature_group_count=groups, batch_group_count=1
    )

    def adapter(a: Any, b: Any, x: Any) -> Any:
        return _conv_with_factors(conv, lora, a, b, x, dims.rhs_spec, groups, backward, params)

    def product(w: Any, a: Any, b: Any, x: Any) -> Any:
        if scale is None:
            return add(conv(x, w, **params), adapter(a, b, dropped(lora, x)))
        axis = (dims.lhs_spec if backward else dims.out_spec)[1]
        channels = arrange(scale, rows, rows).reshape([-1 if i == axis else 1 for i in range(n)])
        if backward:
            x = multiply(x, channels)
            return add(conv(x, w, **params), adapter(a, b, x))
        y, seen = conv(x, w, **params), dropped(lora, x)
        if not drops(lora):
            return multiply(add(y, adapter(a, b, x)), channels)
        change = multiply(conv(seen, w, **params), channels - 1)
        return add(y, add(change, multiply(adapter(a, b, seen), channels)))

    base = lora.base
    if len(w_labels) < n:
        base = quaxify(lambda w: jnp.broadcast_to(w, lora.shape))(base)
    return quaxify(product)(base, lora.a, lora.b, x)


def _conv_with_factors(
    conv: Callable[..., Any],
    lora: LoraArray,
    a: Any,
    b: Any,
    x: Any,
    kernel_axes: Sequence[int],
    groups: int,
    backward: bool,
    params: dict[str, Any],
) -> Any:
    """Convolves with `a` and then with `b`, or vice versa if `backward`."""
    out, into, *window = kernel_axes
    _, a_labels, b_labels = labels(lora)
    n, dtype = lora.ndim, common_dtype(a, b, x)
    # The convolution with `b` has a window of size one, and no strides or padding.
    pointwise = params | {
        "window_strides": (1,) * len(window), "padding": ((0, 0),) * len(window),
        "lhs_dilation": (1,) * len(window), "rhs_dilation": (1,) * len(window),
    }  # fmt: skip
    # Both kernels have the base's axes, except that the rank replaces `out` in one, and `in` in the other.
    if backward:
        down = arrange(cast(b, dtype), [out if i < 0 else i for i in b_labels], range(n))
        up = arrange(cast(a, dtype), [into if i < 0 else i for i in a_labels], range(n))
        first, then = pointwise, params
    else:
        down = arrange(cast(a, dtype), [out if i < 0 else i for i in a_labels], range(n))
        down = jnp.concatenate([down] * groups, axis=out)  # `a` is shared by all groups of channels
        up = arrange(cast(b, dtype), [into if i < 0 else i for i in b_labels], range(n))
        first, then = params, pointwise
    thin = conv(cast(x, dtype), down, **first | {"preferred_element_type": None})
    thin, _ = scaled(lora, thin, [*range(n)])
    return conv(thin, up, **widened(then, dtype))


@register("ragged_dot_general", precedence=precedence.LORA)
def _ragged_dot(
    primitive: Primitive,
    x: ArrayLike | ArrayValue,
    lora: LoraArray,
    group_sizes: ArrayLike,
    *,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    **params: Any,
):
    """Multiplies each row of `x` by the expert for its group, with two thin products for the adapter."""
    dims = ragged_dot_dimension_numbers
    ((_, lora_summed), batch), rows = dims.dot_dimension_numbers, dims.lhs_ragged_dimensions
    parts = labels(lora)
    experts = dims.rhs_group_dimensions
    whole = lora.ndim == 3 and all(set(experts) <= set(own) for own in parts)
    if not whole or batch != ((), ()) or len(lora_summed) != 1 or rows != (0,) or lora.magnitude is not None:
        return NotImplemented
    (expert,), (summed,) = experts, lora_summed
    _, a_labels, b_labels = parts

    def dot(x: Any, part: Any, own: Labels, summed: int, **params: Any) -> Any:
        numbers = jax.lax.RaggedDotDimensionNumbers(
            (((1,), (own.index(summed),)), ((), ())), rows, (own.index(expert),)
        )
        return primitive.bind(x, part, group_sizes, ragged_dot_dimension_numbers=numbers, **params)

    def product(w: Any, a: Any, b: Any, x: Any) -> Any:
        y = primitive.bind(x, w, group_sizes, ragged_dot_dimension_numbers=dims, **params)
        first, then = ((a, a_labels), (b, b_labels)) if summed in a_labels else ((b, b_labels), (a, a_labels))
        dtype = common_dtype(a, b, x)
        plain = params | {"preferred_element_type": None}
        # Apply one scaling per expert to the expert's factor, but a single scaling to the thin result.
        part, by_expert = cast(first[0], dtype), bool(labels_of(lora)["alpha"])
        part = scaled(lora, part, first[1])[0] if by_expert else part
        thin = dot(cast(dropped(lora, x), dtype), part, first[1], summed, **plain)
        thin = thin if by_expert else scaled(lora, thin, [0, 1])[0]
        return add(y, dot(thin, cast(then[0], dtype), then[1], RANK, **widened(params, dtype)))

    return quaxify(product)(lora.base, lora.a, lora.b, x)
