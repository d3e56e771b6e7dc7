"""Products with a `LoraArray`: `dot_general` with any dimension numbers, the array on either side."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ...core import compat
from ...core.jaxprs.cached import cached_trace
from ...core.quaxify import quaxify
from ...core.rules import register_on_either_side
from ...core.values import is_value
from ...primitives.partitioning import is_spread, spread_like
from .. import precedence
from ..dot_axes import dot_axes, in_order
from .array import LoraArray, labels, row_scale
from .einsum import Labels, arrange, cast, common_dtype, contract

# Tried before the rules of arrays with a special storage, which then receive the parts; and after those of
# arrays with known contents (zeros).


class DropoutWarning(UserWarning):
    """Adapters with dropout are trained without a key to draw from, so that nothing is dropped."""


@register_on_either_side("dot_general", LoraArray, precedence=precedence.LORA)
def _product(primitive: Primitive, x: Any, y: Any, **params: Any):
    for operand in (x, y):
        if isinstance(operand, LoraArray) and operand.dropout > 0:
            tell_of_dropout(operand)
    return _traced_product(primitive, x, y, **params)


@cached_trace
def _traced_product(primitive: Primitive, x: Any, y: Any, **params: Any):
    if isinstance(x, LoraArray):
        return _dot_general(x, y, True, **params)
    return _dot_general(y, x, False, **params)


def _dot_general(lora: LoraArray, x: Any, on_left: bool, *, dimension_numbers: Any, **params: Any):
    n = lora.ndim
    of_lora, of_x = dot_axes(lora, x, dimension_numbers, on_left=on_left)
    # Every axis of x has the label of the axis of the array that it is paired with, or a new one.
    x_labels = list(range(n, n + x.ndim))
    for own, others in zip(of_lora[:2], of_x[:2], strict=True):
        for label, axis in zip(own, others, strict=True):
            x_labels[axis] = label
    x_free = [i for i in x_labels if i >= n]
    out = [*of_lora.batch, *in_order(on_left, of_lora.free, x_free)]

    w_labels, a_labels, b_labels = labels(lora)

    def times(part: Any, part_labels: Labels, x: Any, x_labels: Labels, keep: Any, **params: Any):
        if on_left:
            return contract(part, part_labels, x, x_labels, keep, **params)
        return contract(x, x_labels, part, part_labels, keep, **params)

    def base_product(w: Any, x: Any, x_labels: Labels) -> Any:
        spread = params.get("out_sharding") is None and not is_value(w) and is_spread((w, x))
        if len(w_labels) < n or len(x_labels) > x_ndim or spread:
            return arrange(*times(w, w_labels, x, x_labels, out, **params), out)
        operands = (w, x) if on_left else (x, w)
        return jax.lax.dot_general(*operands, dimension_numbers, **params)

    def adapter_product(a: Any, b: Any, x: Any, x_labels: Labels) -> Any:
        first, then = (a, a_labels), (b, b_labels)
        if _shrinks_by_b(lora, of_lora.contracting):
            first, then = then, first
        dtype = common_dtype(a, b, x)
        thin, thin_labels = times(
            cast(first[0], dtype), first[1], cast(x, dtype), x_labels, {*out, *then[1]},
            precision=params["precision"],
        )  # fmt: skip
        thin = thin if lora.scaling == 1 else thin * lora.scaling
        y = times(cast(then[0], dtype), then[1], thin, thin_labels, out, **widened(params, dtype))
        return arrange(*y, out)

    def product(w: Any, a: Any, b: Any, x: Any, x_labels: Labels = x_labels) -> Any:
        y = base_product(w, x, x_labels)
        return add(y, adapter_product(a, b, dropped(lora, x), x_labels))

    def dora_product(w: Any, a: Any, b: Any, x: Any) -> Any:
        if not set(rows) <= set(out):  # rows are summed over, so x is scaled instead
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                x = cast(x, common_dtype(lora, x))
            more = [*(i for i in rows if i not in x_labels), *x_labels]
            return product(w, a, b, multiply(arrange(x, x_labels, more), arrange(scale, rows, more)), more)
        by_row = arrange(scale, rows, out)
        if not drops(lora):
            return multiply(product(w, a, b, x), by_row)
        y, x = base_product(w, x, x_labels), dropped(lora, x)
        change = multiply(base_product(w, x, x_labels), by_row - 1)
        return add(y, add(change, multiply(adapter_product(a, b, x, x_labels), by_row)))

    x_ndim = x.ndim
    if lora.magnitude is None:
        return quaxify(product)(lora.base, lora.a, lora.b, x)
    scale, rows = row_scale(lora)
    return quaxify(dora_product)(lora.base, lora.a, lora.b, x)


def _shrinks_by_b(lora: LoraArray, summed: Sequence[int]) -> bool:
    """Whether only axes of `b` are summed over, so that `b` makes x thin; otherwise `a` does."""
    n = lora.ndim
    return not any(i - n in lora.in_axes for i in summed) and any(i - n in lora.out_axes for i in summed)


def widened(params: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The `params` for a product of arrays of this dtype, which may be wider than that of the base."""
    preferred = params["preferred_element_type"]
    if preferred is not None:
        preferred = common_dtype(jax.ShapeDtypeStruct((), preferred), jax.ShapeDtypeStruct((), dtype))
    return params | {"preferred_element_type": preferred, "out_sharding": None}


# -------------------------------------------------------------------------------------------------
# Arithmetic that keeps the dtype of the base, whatever the dtype of the adapter
# -------------------------------------------------------------------------------------------------


def add(y: Any, z: Any) -> Any:
    """`y + z`, sharded over the explicit axes of a mesh like `y`."""
    dtype = common_dtype(y, z)
    z = z if is_value(y) or is_value(z) or y.shape != z.shape else spread_like(z, y)
    return cast(cast(y, dtype) + cast(z, dtype), y.dtype)


def multiply(y: Any, z: Any) -> Any:
    dtype = common_dtype(y, z)
    return cast(cast(y, dtype) * cast(z, dtype), y.dtype)


def drops(lora: LoraArray) -> bool:
    """Whether dropout is on."""
    return lora.key is not None and lora.dropout > 0


def tell_of_dropout(lora: LoraArray) -> None:
    """Warns if an adapter with dropout, but without a key, is being differentiated: it is trained."""
    if lora.dropout > 0 and lora.key is None and any(map(compat.is_differentiated, (lora.a, lora.b))):
        warnings.warn(
            f"An adapter with dropout={lora.dropout} is trained without a key, so nothing is dropped. Call "
            "`quaxlike.with_dropout_key(model, key)` at each step, with a new key; or adapt the model with "
            "`dropout=0`.",
            DropoutWarning,
            stacklevel=2,
        )


def dropped(lora: LoraArray, x: Any) -> Any:
    """`x` after dropout, as the adapter receives it."""
    if not drops(lora):
        return x
    keep = 1 - lora.dropout
    key: Any = lora.key
    mask = jax.random.bernoulli(jnp.ravel(key)[0], keep, x.shape)
    return x * (cast(mask, x.dtype) / keep)
