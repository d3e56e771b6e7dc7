"""`etp_mm`, `etp_mv`: y = x @ w + b, for batches and for single examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import ETPPrimitive, register_primitive, vjp_of, zeros_like_output, zeros_like_weights


def _matmul(x: Any, w: Any, *bias: Any, has_bias: bool = False) -> jax.Array:
    y = jnp.matmul(x, w)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def weight_and_bias(params: Mapping[str, Any]) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if params.get("has_bias", False) else {"weight": 1}


def scale_columns(g: Any, trace: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """A `yw_to_w` rule: weights act on the element of y at their last index, biases on their own."""
    return {key: t * (g if key == "bias" else g[..., None, :]) for key, t in trace.items()}


def onto_batched(batched: Callable[[], ETPPrimitive], num_weights: int) -> Callable[..., Any]:
    """A batching rule: mapped over x alone, the primitive for single examples becomes that for batches."""

    def rule(size: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        x, *weights = args
        x_dim, *weight_dims = dims
        if x_dim is None or any(d is not None for d in weight_dims):
            return NotImplemented
        return batched()(jnp.moveaxis(x, x_dim, 0), *weights, **params), 0

    return rule


etp_mm_p = register_primitive(
    "etp_mm",
    _matmul,
    batched=True,
    trainable_invars_fn=weight_and_bias,
    batching=onto_batched(lambda: etp_mm_p, 1),
)
"""y = x @ w: x `(batch..., in)`, w `(in, out)`, and b `(out,)` with `has_bias=True`."""

etp_mv_p = register_primitive(
    "etp_mv",
    _matmul,
    trainable_invars_fn=weight_and_bias,
    batching=onto_batched(lambda: etp_mm_p, 1),
)
"""The same for x `(in,)`."""

for _p in (etp_mm_p, etp_mv_p):
    _p.register_etp_rules(
        yw_to_w=scale_columns,
        xy_to_dw=vjp_of(_matmul, ("weight", "bias")),
        init_drtrl=zeros_like_weights(lambda x: len(x.shape) - 1),
        init_pp=zeros_like_output,
    )


def check_shapes(name: str, expected: str, fit: Callable[..., bool], **operands: Any) -> None:
    """Raises unless the shapes of the operands fit each other; the shape of None is `()`."""
    shapes = {key: () if x is None else np.shape(x) for key, x in operands.items()}
    if not fit(**shapes):
        given = [key for key, x in operands.items() if x is not None]
        found = ", ".join(f"`{key}` of shape {shapes[key]}" for key in given)
        raise ValueError(f"{name} takes {expected}; found {found}.")


@checked
def matmul(x: ArrayLike, w: Any, bias: ArrayLike | None = None) -> jax.Array:
    """`x @ w + bias`, with `w` and `bias` trained online.

    **Arguments:**

    - `x`: `(..., in)`; axes before the last are batch axes.
    - `w`: `(in, out)`, an array or a Value.
    - `bias`: `(out,)`.

    **Returns:** `(..., out)`.
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
    return primitive(x, w) if bias is None else primitive(x, w, bias, has_bias=True)
