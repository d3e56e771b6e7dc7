"""`etp_emb`: a trained table of vectors."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import register_primitive, zeros_like_output, zeros_like_weights
from .dense import check_shapes, onto_batched, scale_columns


def _look_up(indices: Any, table: Any) -> jax.Array:
    return jnp.take(table, indices, axis=0)


def _xy_to_dw(x: Any, g: Any, weights: Mapping[str, Any], **params: Any) -> dict[str, Any]:
    """An `xy_to_dw` rule for indices, or for the trace of their one-hot encodings."""
    table = weights["weight"]
    fn = (lambda w: jnp.matmul(x, w)) if jnp.issubdtype(x.dtype, jnp.inexact) else (lambda w: _look_up(x, w))
    return {"weight": jax.vjp(fn, table)[1](g)[0]}


def _one_hot(x: Any, weights: Mapping[str, Any], **params: Any) -> jax.Array:
    table = weights["weight"]
    return jax.nn.one_hot(x, table.shape[0], dtype=table.dtype)


etp_emb_p = register_primitive("etp_emb", _look_up, batched=True, batching=onto_batched(lambda: etp_emb_p, 1))
"""y = table[indices]: indices `(batch...)`, table `(vocabulary, features)`."""

etp_emb_p.register_etp_rules(
    yw_to_w=scale_columns,
    xy_to_dw=_xy_to_dw,
    init_drtrl=zeros_like_weights(lambda x: len(x.shape)),
    init_pp=zeros_like_output,
    pp_input=_one_hot,
)


@checked
def embedding(indices: ArrayLike, table: ArrayLike) -> jax.Array:
    """`table[indices]`, with `table` trained online.

    The traces of D-RTRL are as large as the table, for each example; those of pp_prop are not.

    **Arguments:**

    - `indices`: integers, `(...)`.
    - `table`: `(vocabulary, features)`.

    **Returns:** `(..., features)`.
    """
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
        raise TypeError(f"embedding takes integers as `indices`; found {jnp.result_type(indices)}.")
    check_shapes(
        "embedding", "a `table` of shape (vocabulary, features)", lambda table: len(table) == 2, table=table
    )
    return etp_emb_p(indices, table)
