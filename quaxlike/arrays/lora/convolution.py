"""Convolutions with an adapted kernel, and products of an adapted stack of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ...core.values import ArrayValue
from .. import precedence
from .array import RANK, LoraArray, labels, row_scale
from .dot import add, dropped, drops, multiply, tell_of_dropout, widened
from .einsum import Labels, arrange, cast, common_dtype


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
    """Computes a convolution with `a`, down to `rank` channels, and a pointwise one with `b`, back up. In a
    gradient it is the other way round: the inputs of the kernel are the outputs of the forward pass."""
    tell_of_dropout(lora)
    n, groups = lora.ndim, feature_group_count
    out, into, *window = dimension_numbers.rhs_spec
    w_labels, a_labels, b_labels = labels(lora)
    backward = b_labels == [into, RANK] and groups == 1 and not drops(lora)
    ends = {RANK, out if backward else into, *window}
    if batch_group_count > 1 or not (backward or b_labels == [out, RANK]) or set(a_labels) != ends:
        return NotImplemented

    scale, rows = (None, ()) if lora.magnitude is None else row_scale(lora)
    if scale is not None and scale.size != lora.shape[b_labels[0]]:
        return NotImplemented  # the scale also varies over the window

    def conv(x: Any, kernel: Any, **params: Any) -> Any:
        return primitive.bind(
            x,
            kernel,
            dimension_numbers=dimension_numbers,
            feature_group_count=groups,
            batch_group_count=1,
            **params,
        )

    pointwise = params | {
        "window_strides": (1,) * len(window), "padding": ((0, 0),) * len(window),
        "lhs_dilation": (1,) * len(window), "rhs_dilation": (1,) * len(window),
    }  # fmt: skip

    def adapter(a: Any, b: Any, x: Any) -> Any:
        dtype = common_dtype(a, b, x)
        # Both kernels have the axes of the base: the rank replaces `out` in one, and `in` in the other.
        if backward:
            down = arrange(cast(b, dtype), [out if i < 0 else i for i in b_labels], range(n))
            up = arrange(cast(a, dtype), [into if i < 0 else i for i in a_labels], range(n))
            thin = conv(cast(x, dtype), down, **pointwise | {"preferred_element_type": None})
            thin = thin if lora.scaling == 1 else thin * lora.scaling
            return conv(thin, up, **widened(params, dtype))
        down = arrange(cast(a, dtype), [out if i < 0 else i for i in a_labels], range(n))
        down = jnp.concatenate([down] * groups, axis=out)  # all groups of channels share `a`
        up = arrange(cast(b, dtype), [into if i < 0 else i for i in b_labels], range(n))
        thin = conv(cast(x, dtype), down, **params | {"preferred_element_type": None})
        thin = thin if lora.scaling == 1 else thin * lora.scaling
        return conv(thin, up, **widened(pointwise, dtype))

    def product(w: Any, a: Any, b: Any, x: Any) -> Any:
        if scale is None:
            return add(conv(x, w, **params), adapter(a, b, dropped(lora, x)))
        axis = (dimension_numbers.lhs_spec if backward else dimension_numbers.out_spec)[1]
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
    """Multiplies rows of `x` by the expert of their group, with two thin products for the adapter."""
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
        thin = dot(cast(dropped(lora, x), dtype), cast(first[0], dtype), first[1], summed, **plain)
        thin = thin if lora.scaling == 1 else thin * lora.scaling
        return add(y, dot(thin, cast(then[0], dtype), then[1], RANK, **widened(params, dtype)))

    return quaxify(product)(lora.base, lora.a, lora.b, x)
