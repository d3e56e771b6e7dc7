"""`etp_lora_mm`, `etp_lora_mv`: y = scale · x @ b @ a, a low-rank update of a weight."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import register_primitive, vjp_of, zeros_like_output
from .dense import check_shapes, onto_batched, scale_columns


def _low_rank(x: Any, b: Any, a: Any, *, scale: float = 1.0) -> jax.Array:
    return jnp.matmul(jnp.matmul(x, b), a) * jnp.asarray(scale, x.dtype)


def _init_drtrl(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
    # Traces decay per element of y, an axis that `b` does not have. So the trace is that of the product, from
    # which the cotangents of both factors follow.
    (n_in, _), (_, n_out) = weight_vars["b"].aval.shape, weight_vars["a"].aval.shape
    shape = (*x_var.aval.shape[:-1], n_in, n_out, num_states)
    return {"product": jnp.zeros(shape, y_var.aval.dtype)}


def _instant(x: Any, g: Any, weights: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    return {"product": x[..., :, None] * g[..., None, :]}


def _solve(
    g: Any, trace: Mapping[str, Any], weights: Mapping[str, Any], *, scale: float = 1.0
) -> dict[str, Any]:
    a, b = weights["a"], weights["b"]
    product = scale_columns(g, trace)["product"]
    product = product.sum(range(product.ndim - 2)) * jnp.asarray(scale, product.dtype)
    return {"b": product @ a.T, "a": b.T @ product}


etp_lora_mm_p = register_primitive(
    "etp_lora_mm",
    _low_rank,
    batched=True,
    trainable_invars_fn=lambda params: {"b": 1, "a": 2},
    batching=onto_batched(lambda: etp_lora_mm_p, 2),
)
"""y = scale · x @ b @ a: x `(batch..., in)`, b `(in, rank)`, a `(rank, out)`."""

etp_lora_mv_p = register_primitive(
    "etp_lora_mv",
    _low_rank,
    trainable_invars_fn=lambda params: {"b": 1, "a": 2},
    batching=onto_batched(lambda: etp_lora_mm_p, 2),
)
"""The same for x `(in,)`."""

for _p in (etp_lora_mm_p, etp_lora_mv_p):
    _p.register_etp_rules(
        yw_to_w=scale_columns,
        xy_to_dw=vjp_of(_low_rank, ("b", "a")),
        init_drtrl=_init_drtrl,
        init_pp=zeros_like_output,
        instant=_instant,
        solve=_solve,
    )


@checked
def lora_matmul(x: ArrayLike, b: ArrayLike, a: ArrayLike, *, scale: float = 1.0) -> jax.Array:
    """`scale * x @ b @ a`, with `b` and `a` trained online.

    **Arguments:**

    - `x`: `(..., in)`; axes before the last are batch axes.
    - `b`: `(in, rank)`.
    - `a`: `(rank, out)`.
    - `scale`: a static factor.

    **Returns:** `(..., out)`.
    """
    check_shapes(
        "lora_matmul",
        "`x` of shape (..., in), `b` of shape (in, rank) and `a` of shape (rank, out)",
        lambda x, b, a: len(b) == len(a) == 2 and x[-1:] == b[:1] and b[1] == a[0],
        x=x,
        b=b,
        a=a,
    )
    primitive = etp_lora_mv_p if jnp.ndim(x) == 1 else etp_lora_mm_p
    return primitive(x, b, a, scale=scale)
