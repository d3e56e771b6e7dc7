"""`etp_conv`: y = conv(x, kernel) + bias, with channels last."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import register_primitive, vjp_of, zeros_like_output
from .dense import check_shapes, weight_and_bias

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
    return lax.conv_general_dilated(
        x,
        kernel,
        strides or (1,) * len(axes),
        padding,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
    )


def _patches(x: Any, kernel: Any, **params: Any) -> jax.Array:
    """The window of x for each spatial position of y: `(batch, *space, *window, in)`."""
    *window, n_in, _ = kernel.shape
    size = n_in
    for n in window:
        size *= n
    # One output channel for each position in the kernel picks that position.
    picking = jnp.eye(size, dtype=x.dtype).reshape(*window, n_in, size)
    patches = _conv_general(x, picking, **params)
    return patches.reshape(*patches.shape[:-1], *window, n_in)


def _init_drtrl(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
    # All positions of y share the kernel, but each discounts its own trace: traces are kept per position, and
    # summed when the gradient is computed.
    y = y_var.aval
    kernel = weight_vars["weight"].aval.shape
    zeros = {"weight": jnp.zeros((*y.shape[:-1], *kernel, num_states), y.dtype)}
    return zeros | ({"bias": jnp.zeros((*y.shape, num_states), y.dtype)} if "bias" in weight_vars else {})


def _yw_to_w(g: Any, trace: Mapping[str, Any], *, has_bias: bool = False, **params: Any) -> dict[str, Any]:
    weight = trace["weight"]
    inner = weight.ndim - g.ndim
    by_place = g.reshape(*g.shape[:-1], *[1] * inner, g.shape[-1])
    return {"weight": weight * by_place} | ({"bias": trace["bias"] * g} if has_bias else {})


def _instant(
    x: Any, g: Any, weights: Mapping[str, Any], *, has_bias: bool = False, **params: Any
) -> dict[str, Any]:
    patches = _patches(x, weights["weight"], **params)
    inner = patches.ndim - g.ndim + 1
    by_place = g.reshape(*g.shape[:-1], *[1] * inner, g.shape[-1])
    return {"weight": patches[..., None] * by_place} | ({"bias": g} if has_bias else {})


def _solve(g: Any, trace: Mapping[str, Any], weights: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    applied = _yw_to_w(g, trace, **params)
    return {key: t.sum(range(t.ndim - weights[key].ndim)) for key, t in applied.items()}


etp_conv_p = register_primitive("etp_conv", _conv, batched=True, trainable_invars_fn=weight_and_bias)
"""x `(batch, *space, in)`, kernel `(*window, in, out)`, and bias `(out,)` with `has_bias=True`."""

etp_conv_p.register_etp_rules(
    yw_to_w=_yw_to_w,
    xy_to_dw=vjp_of(_conv, ("weight", "bias")),
    init_drtrl=_init_drtrl,
    init_pp=zeros_like_output,
    instant=_instant,
    solve=_solve,
)


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

    The traces of D-RTRL hold a kernel for every position of the result; those of pp_prop are as large as the
    result.

    **Arguments:**

    - `x`: `(batch, *space, in)`.
    - `kernel`: `(*window, in, out)`.
    - `bias`: `(out,)`.
    - `strides`, `dilation`: one integer for each spatial axis. Default: 1.
    - `padding`: `"SAME"`, `"VALID"`, or a pair of integers for each spatial axis.

    **Returns:** `(batch, *space, out)`.
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
    return etp_conv_p(x, kernel, bias, has_bias=True, **params)
