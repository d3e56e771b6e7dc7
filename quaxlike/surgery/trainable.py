"""The trained part of an adapted model."""

import warnings
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.lora import LoraArray, LoraBias, TrainableArray, TrainableRows
from ..core.values import is_value


@checked
def trainable(model: PyTree) -> PyTree:
    """Which leaves of a model its adapters train.

    **Arguments:**

    - `model`: what [`quaxlike.loraify`][] made. A warning says so if nothing of it is trained.

    **Returns:**

    The model with True in place of each leaf that is trained (adapters, `modules_to_save`, trained biases,
    bases with `train_base`) and False in place of all others: a filter spec for `eqx.partition`. Where the
    optimiser gets the whole model, of floating arrays, the function itself gives the labels of
    `optax.partition({True: optimiser, False: optax.set_to_zero()}, ql.trainable)`. Do not give the result to
    `optax.masked` alone: it adds the raw gradients of all other leaves to them.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=4, key=jax.random.key(1))
        params, rest = eqx.partition(model, ql.trainable(model))

        @eqx.filter_grad
        def grad(params, x):
            return jnp.sum(ql.quaxify(eqx.combine(params, rest))(x))

        grad(params, jnp.ones(2))  # of the adapters alone
        ```
    """
    spec = jtu.tree_map(trained_leaves, model, is_leaf=is_value)
    if not any(jtu.tree_leaves(spec)):
        warnings.warn(
            "The model has no adapters, so nothing of it is trained. Put some on it with `quaxlike.loraify`.",
            stacklevel=3,  # beyond `checked`
        )
    return spec


def trained_leaves(leaf: Any) -> Any:
    """Which leaves of one array of a model are trained."""
    spec = jtu.tree_map(lambda _: False, leaf)
    if isinstance(leaf, LoraArray):
        fields = ["a", "b", *(["magnitude"] if leaf.magnitude is not None else [])]
        fields += ["w"] if leaf.train_base else []
    elif isinstance(leaf, TrainableArray):
        fields = ["array"]
    elif isinstance(leaf, TrainableRows):
        fields = ["rows"]
    elif isinstance(leaf, LoraBias):
        fields = ["b", *(["w"] if isinstance(leaf.w, TrainableArray) else [])]
    else:
        return spec
    floats = jtu.tree_map(eqx.is_inexact_array, leaf)
    return eqx.tree_at(lambda x: [getattr(x, f) for f in fields], spec, [getattr(floats, f) for f in fields])
