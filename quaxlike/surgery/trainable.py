"""A model's trainable part, i.e. its adapters and the scales of its quantised weights."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, innermost, on_innermost
from ..arrays.quantized import AbstractQuantizedArray
from ..core.values import is_value, replace_fields
from .select import Where, select
from .trees import listing, map_arrays, named_arrays, replace


@checked
def trainable(model: PyTree, *, freeze: Sequence[str] = ()) -> PyTree:
    """Returns a filter spec marking the leaves to train in an adapted model.

    Typically you would pass this to `eqx.partition` before differentiating, so that gradients and optimiser
    states only exist for the adapters, rather than for the whole model.

    **Arguments:**

    - `model`: the result of [`quaxlike.loraify`][] or [`quaxlike.train_scales`][]. A warning is issued if
        there is nothing to train.
    - `freeze`: names of adapter fields to leave untrained. For example, `freeze=["a"]` only trains the second
        matrix in each LoRA (LoRA-FA), storing `x @ a.T` for the backward pass rather than the layer's inputs
        `x`. Default: none.

    **Returns:**

    The model with each leaf replaced by `True` or `False`, for use with `eqx.partition`. `True` marks
    adapters, `modules_to_save`, trained biases and bases, and the scales of quantised weights with
    `gradients="train"`.

    To apply an optimiser to a whole model of floating-point arrays, you can also pass this function itself as
    labels, i.e. `optax.partition({True: optimiser, False: optax.set_to_zero()}, ql.trainable)`. Don't use
    `optax.masked` on its own: it returns the raw gradients for all other leaves as their updates.

    **Raises:** `ValueError` if `freeze` includes a field that no adapter trains.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=4, key=jax.random.key(1))
        params, rest = eqx.partition(model, ql.trainable(model))

        @eqx.filter_grad
        def grad(params, x):
            return jnp.sum(ql.quaxify(eqx.combine(params, rest))(x))

        grad(params, jnp.ones(2))  # only of the adapters
        ```

    For `freeze`: Zhang et al., LoRA-FA, <https://arxiv.org/abs/2308.03303>.
    """
    if isinstance(freeze, str):
        raise TypeError(
            f"trainable takes a sequence of names as `freeze`, such as [{freeze!r}]; found a string."
        )
    parts = {name for x in jtu.tree_leaves(model, is_leaf=is_value) for name in _parts_of(x)}
    if unknown := sorted({*freeze} - parts):
        raise ValueError(
            f"No adapter trains a part {unknown[0]!r}; they train {', '.join(sorted(parts)) or 'nothing'}."
        )
    spec = jtu.tree_map(lambda x: trained_leaves(x, freeze), model, is_leaf=is_value)
    if not any(jtu.tree_leaves(spec)):
        warnings.warn(
            "The model has no adapters, so nothing in it is trained. Add some with `quaxlike.loraify`, "
            "or train the scales of quantised weights with `quaxlike.train_scales`.",
            stacklevel=3,  # beyond `checked`
        )
    return spec


@checked
def train_scales(model: PyTree, where: Where | None = None) -> PyTree:
    """Makes the scales of quantised weights differentiable, whilst their codes stay fixed.

    Afterwards, train the leaves selected by [`quaxlike.trainable`][]. The model stays quantised, so its size
    doesn't change.

    **Arguments:**

    - `model`: any pytree with quantised weights.
    - `where`: which weights to train the scales of, as in [`quaxlike.select`][]. For a weight with an
        adapter, this refers to its base. Default: all quantised weights.

    **Returns:**

    The model, with `gradients="train"` set on these weights.

    **Raises:**

    `ValueError` if no weights are quantised, or if any of their scales are not floating-point.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.train_scales(ql.quantize(mlp, "nf4"))
        params, rest = eqx.partition(model, ql.trainable(model))
        ```

    Source: Kim et al., PEQA, <https://arxiv.org/abs/2305.14152>.
    """
    arrays = named_arrays(model) if where is None else select(model, where)
    quantised = {name: x for name, x in arrays.items() if isinstance(innermost(x), AbstractQuantizedArray)}
    if not quantised:
        raise ValueError(f"There are no quantised weights, only {listing(arrays)}.")

    def trained(name: str, x: Any) -> Any:
        w: Any = innermost(x)
        if not any(map(eqx.is_inexact_array, jtu.tree_leaves(w.scale))):
            raise ValueError(
                f"{name} is of type {type(w).__name__}, whose scales are 8-bit codes, not floating-point "
                "numbers. Leave it out with `where`."
            )
        return on_innermost(lambda w: dataclasses.replace(w, gradients="train"), x)

    return replace(model, map_arrays(trained, quantised))


def _parts_of(x: Any) -> list[str]:
    """Lists an adapter's trained fields, and those of any adapters it wraps."""
    return [*x.trained(), *_parts_of(x.w)] if isinstance(x, AdaptedArray) else []


def trained_leaves(leaf: Any, freeze: Sequence[str] = ()) -> Any:
    """Marks an array's trained leaves, except for the fields in `freeze`."""
    spec = jtu.tree_map(lambda _: False, leaf)
    if isinstance(leaf, AdaptedArray):
        spec = spec.with_base(trained_leaves(leaf.w, freeze))
        fields = [name for name in leaf.trained() if name not in freeze]
    elif isinstance(leaf, AbstractQuantizedArray) and leaf.gradients == "train":
        fields = ["scale"]
    else:
        return spec
    return replace_fields(spec, **{name: _trained_floats(getattr(leaf, name), freeze) for name in fields})


def _trained_floats(part: Any, freeze: Sequence[str]) -> Any:
    """Marks the floating-point arrays in a trained part.

    Adapters and quantised arrays in it decide themselves what is trained. Otherwise this would mark leaves
    without gradients, and weight decay would shrink them.
    """

    def decides(x: Any) -> bool:
        return isinstance(x, AdaptedArray | AbstractQuantizedArray)

    def marked(x: Any) -> Any:
        return trained_leaves(x, freeze) if decides(x) else eqx.is_inexact_array(x)

    return jtu.tree_map(marked, part, is_leaf=decides)
