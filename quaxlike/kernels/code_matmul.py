"""Products of codes with codes: activations are rounded to 8 bits, and XLA multiplies the codes.

Accumulating int8 products in int32 is only exact up to a certain length. This must be checked: an overflow
would silently give the wrong result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32

#: The codes' dtype, the largest code, and the accumulator dtype for each kind of activations.
ACTIVATIONS: dict[str, tuple[Any, float, Any]] = {
    "int8": (jnp.int8, 127.0, jnp.int32),
    "fp8": (jnp.float8_e4m3fn, 448.0, jnp.float32),
}


def rounded_rows(
    x: Float[Array, "*batch k"], activations: str, limit: float | None = None
) -> tuple[Array, Float32[Array, "*batch 1"]]:
    """Rounds rows to codes, with one scale per row.

    The largest code represents the largest magnitude in the row. If `limit` is given, it represents this
    limit for every row instead, and any larger values are clipped.
    """
    dtype, largest, _ = ACTIVATIONS[activations]
    x = x.astype(jnp.float32)
    if limit is None:
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) / largest
    else:
        scale = jnp.full((*x.shape[:-1], 1), limit / largest, jnp.float32)
    codes = x / jnp.where(scale == 0, 1.0, scale)  # A row of zeros has a scale of zero.
    codes = jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes
    return jnp.clip(codes, -largest, largest).astype(dtype), scale


def code_matmul(
    x: Float[Array, "*batch k"],
    codes: Array,
    scale: Float[Array, "n groups"],
    *,
    activations: str,
    derivative: Callable[..., Array],
    limit: float | None = None,
    rounds_gradients: bool = False,
) -> Float32[Array, "*batch n"]:
    """Computes `x @ W.T` for a weight with 8-bit codes, rounding each row of `x` to 8 bits.

    **Arguments:**

    - `x`: has shape `(*batch, K)`.
    - `codes`: has shape `(N, K)`. Either int8, or float8 bytes.
    - `scale`: has shape `(N, groups)`, with one scale for every code group in a row. All groups must have the
        same length.
    - `activations`: how to round `x`, and how to interpret the codes: a key of `ACTIVATIONS`.
    - `derivative`: computes the product from `(x, codes, scale)` without rounding `x`. This is differentiated
        rather than the actual function, i.e. with straight-through estimation for the rounding.
    - `limit`: the magnitude of `x` represented by the largest code. Defaults to the largest magnitude in each
        row.
    - `rounds_gradients`: whether to also compute the gradient with respect to `x` as a product of codes,
        rounding each row of `y`'s cotangent. This only supports reverse-mode autodifferentiation.

    **Raises:** `ValueError` if a group has too many integers to be accumulated in int32.
    """
    dtype, largest, sums = ACTIVATIONS[activations]
    n, k = codes.shape
    groups = scale.shape[1]
    summed = {"inputs": k // groups} | ({"outputs": n} if rounds_gradients else {})
    for what, count in summed.items():
        if sums == jnp.int32 and count * largest**2 > np.iinfo(np.int32).max:
            most = np.iinfo(np.int32).max // int(largest) ** 2
            raise ValueError(
                f"A product in 8 bits adds up to {most:,} numbers in int32; found a weight of {count:,} "
                f"{what}. Quantise it without `activations`."
            )

    def product(x: Array, codes: Array, scale: Array) -> Array:
        parts = lax.bitcast_convert_type(codes, dtype)
        each, of_row = rounded_rows(x, activations, limit)
        if groups == 1:
            dims = (((x.ndim - 1,), (1,)), ((), ()))
            y = lax.dot_general(each, parts, dims, preferred_element_type=sums).astype(jnp.float32)
            return y * of_row * scale.astype(jnp.float32).reshape(*[1] * (x.ndim - 1), n)
        each = jnp.moveaxis(each.reshape(*each.shape[:-1], groups, -1), -2, 0)
        weight = jnp.moveaxis(parts.reshape(n, groups, -1), 1, 0)
        dims = (((each.ndim - 1,), (2,)), ((0,), (0,)))
        y = lax.dot_general(each, weight, dims, preferred_element_type=sums).astype(jnp.float32)
        factor = scale.astype(jnp.float32).T.reshape(groups, *[1] * (x.ndim - 1), n)
        return jnp.sum(y * factor, axis=0) * of_row

    def derived(primals: Any, tangents: Any) -> Any:
        x, codes, scale = primals
        known = {
            i: dot for i, dot in enumerate(tangents) if i != 1 and not isinstance(dot, SymbolicZero)
        }  # Typically this excludes the scale, which is a constant.

        def unrounded(*varying: Array) -> Array:
            # Only differentiate with respect to perturbed operands.
            own = dict(enumerate(primals)) | dict(zip(known, varying, strict=True))
            return derivative(own[0], codes, own[2]).astype(jnp.float32)

        _, dot = jax.jvp(unrounded, [primals[i] for i in known], list(known.values()))
        return product(x, codes, scale), dot

    def forwards(x: Any, codes: Any, scale: Any) -> tuple[Array, Any]:
        # Only the scale's cotangent needs the activations. Otherwise don't save them for the backward pass.
        kept = x.value if scale.perturbed else None
        y = product(x.value, codes.value, scale.value)
        return y, (kept, codes.value, scale.value)

    def backwards(kept: Any, cotangent: Any) -> Any:
        x_known, codes, scale = kept
        if isinstance(cotangent, SymbolicZero):
            return None, None, None

        def by_scale(scale: Any) -> Any:
            return derivative(x_known, codes, scale).astype(jnp.float32)

        of_scale = None if x_known is None else jax.vjp(by_scale, scale)[1](cotangent)[0]
        factor = scale.astype(jnp.float32).T.reshape(groups, *[1] * (x.ndim - 1), n)
        # For this product, the scales vary along the contracted axis. So they apply before rounding, rather
        # than to the result.
        each, of_row = rounded_rows(cotangent[None] * factor, activations)
        weight = jnp.moveaxis(lax.bitcast_convert_type(codes, dtype).reshape(n, groups, -1), 1, 0)
        dims = (((each.ndim - 1,), (1,)), ((0,), (0,)))
        of_x = lax.dot_general(each, weight, dims, preferred_element_type=sums).astype(jnp.float32) * of_row
        return jnp.moveaxis(of_x, 0, -2).reshape(x.shape).astype(x.dtype), None, of_scale

    if rounds_gradients:
        # Only use `custom_vjp` if needed: it doesn't support forward mode.
        by_codes = jax.custom_vjp(product)
        by_codes.defvjp(forwards, backwards, symbolic_zeros=True)
        return by_codes(x, codes, scale)
    exact = jax.custom_jvp(product)
    exact.defjvp(derived, symbolic_zeros=True)
    return exact(x, codes, scale)
