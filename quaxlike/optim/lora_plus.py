"""LoRA+: a larger learning rate for adapter parameters initialised to zero."""

from typing import Any

import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray
from ..core.values import replace_fields


@checked
def lora_plus(ratio: float | int = 16.0) -> optax.GradientTransformation:
    """Uses a different learning rate for each LoRA's `b` matrix, by scaling its updates.

    The `b` matrix is initialised to zero, and its optimal learning rate is larger than for the `a` matrix:
    with the same learning rate for both, `b` learns too slowly in wide layers. This should typically be the
    last transformation in a chain. A custom adapter lists the relevant parameters in its `faster` attribute.

    **Arguments:**

    - `ratio`: the learning rate for `b`, relative to all other parameters. Defaults to 16.

    **Returns:**

    A gradient transformation. Its `init` raises a `ValueError` if this affects none of the trained
    parameters.

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
        adapted = [x for x in jtu.tree_leaves(params, is_leaf=_is_adapted) if _is_adapted(x)]
        if not any(_faster(x) for x in adapted):
            raise ValueError(
                "lora_plus is for LoRAs, and the parameters have none whose `b` is trained. Pass those that "
                "`eqx.partition(model, quaxlike.trainable(model))` makes."
            )
        return optax.EmptyState()

    def scaled(x: Any) -> Any:
        if not _is_adapted(x):
            return x
        return replace_fields(x, w=every(x.w), **{name: ratio * part for name, part in _faster(x).items()})

    def every(updates: PyTree) -> PyTree:
        return jtu.tree_map(scaled, updates, is_leaf=_is_adapted)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (every(updates), state))


def _is_adapted(x: Any) -> bool:
    """Returns whether `x` is an adapter, possibly just the trainable half of a partitioned one."""
    return isinstance(x, AdaptedArray)


def _faster(x: AdaptedArray) -> dict[str, Any]:
    parts = {name: getattr(x, name) for name in x.faster}
    return {name: part for name, part in parts.items() if part is not None}
