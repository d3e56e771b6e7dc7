"""`etp_elemwise`: weights that act element by element, such as gains, leaks and diagonal recurrence."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import register_primitive, zeros_like_output


def _init_drtrl(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
    return {"weight": zeros_like_output(x_var, y_var, weight_vars, num_states)}


etp_elemwise_p = register_primitive(
    "etp_elemwise",
    lambda w: jnp.asarray(w),
    gradient_enabled=True,
    trainable_invars_fn=lambda params: {"weight": 0},
    x_invar_index=None,
)
"""y = w, which the step then uses elementwise."""

etp_elemwise_p.register_etp_rules(
    yw_to_w=lambda g, trace, **params: {"weight": trace["weight"] * g},
    xy_to_dw=lambda x, g, weights, **params: {"weight": g},
    init_drtrl=_init_drtrl,
    init_pp=zeros_like_output,
)


@checked
def elementwise(w: ArrayLike) -> jax.Array:
    """Marks `w` as trained online, for weights that act on the state elementwise.

    Functions that are applied to the parameter before (a sigmoid, say) are differentiated as usual:
    `elementwise(jax.nn.sigmoid(log_decay)) * h`.

    **Arguments:**

    - `w`: of the shape of the state, or of its last axes.

    **Returns:** `w`.
    """
    return etp_elemwise_p(w)
