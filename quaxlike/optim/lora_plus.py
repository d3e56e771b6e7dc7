"""`lora_plus`: another learning rate for the second matrix of LoRAs."""

from typing import Any

import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.lora import LoraArray
from ..core.values import replace_fields


@checked
def lora_plus(ratio: float | int = 16.0) -> optax.GradientTransformation:
    """Multiplies the updates of the matrices `b` of LoRAs, which is a learning rate of their own.

    With one learning rate for both matrices, `b` learns too slowly in wide layers: it begins at zero, and its
    best rate is larger than that of `a`. Put the transformation at the end of a chain.

    **Arguments:**

    - `ratio`: the learning rate of `b`, divided by that of everything else. Default: 16.

    **Returns:**

    The transformation. Its `init` raises a `ValueError` if there is no [`quaxlike.LoraArray`][] in the
    parameters whose `b` is trained.

    !!! example

        ```python
        import optax
        from quaxlike.optim import lora_plus

        optimiser = optax.chain(optax.adamw(2e-4), lora_plus(16))
        ```

    Source: Hayou et al., LoRA+, <https://arxiv.org/abs/2402.12354>.
    """
    if not ratio > 0:
        raise ValueError(f"lora_plus takes a positive number as `ratio`; found {ratio}.")

    def init(params: PyTree) -> optax.EmptyState:
        if not any(_is_lora(x) and x.b is not None for x in jtu.tree_leaves(params, is_leaf=_is_lora)):
            raise ValueError(
                "lora_plus is for LoRAs, and the parameters have none whose `b` is trained. Pass those that "
                "`eqx.partition(model, quaxlike.trainable(model))` makes."
            )
        return optax.EmptyState()

    def scaled(x: Any) -> Any:
        if not _is_lora(x):
            return x
        return replace_fields(x, w=every(x.w), b=None if x.b is None else ratio * x.b)

    def every(updates: PyTree) -> PyTree:
        return jtu.tree_map(scaled, updates, is_leaf=_is_lora)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (every(updates), state))


def _is_lora(x: Any) -> bool:
    """Whether `x` is a LoRA, or the trained half of one."""
    return isinstance(x, LoraArray)
