"""`to_lora`: approximates other adapters by LoRA, for programs that support nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._checked import checked
from .._patterns import value_for
from ..arrays.adapted import AdaptedArray
from ..arrays.lora.low_rank import as_lora, as_lora_bias, is_other_bias
from .loraify import checked_patterns
from .records import Layouts, records_of, require_layout
from .trees import layer_of, map_arrays, replace


class LowRankError(NamedTuple):
    """The error of a low-rank approximation to a weight's change."""

    lost: float
    """The Frobenius norm of the error, relative to the norm of the change."""
    change: float
    """The Frobenius norm of the change, relative to the norm of the weight."""


@checked
def to_lora(
    model: PyTree, rank: int, *, rank_pattern: Mapping[str, int] = {}, layout: Layouts = None
) -> tuple[PyTree, dict[str, LowRankError]]:
    """Replaces each adapter in a model by its closest low-rank approximation.

    This is useful for serving the model with a program that only supports LoRA, such as vLLM or llama.cpp.

    **Arguments:**

    - `model`: a model with adapters, such as the result of [`quaxlike.adapt`][].
    - `rank`: the rank of the new adapters.
    - `rank_pattern`: overrides the rank for particular layers, as in [`quaxlike.loraify`][].
    - `layout`: layouts that can't be inferred from the layer or the name, as in [`quaxlike.layouts`][].
        Default: none.

    **Returns:**

    The model with a [`quaxlike.LoraArray`][] in place of each adapter, and a dict from names to errors
    `(lost, change)`. Here `lost` is the error's Frobenius norm over the change's, and `change` the change's
    over the weight's.

    Each approximation keeps the change's largest singular values, so it is optimal for its rank. A LoRA of at
    most this rank is left unchanged. (A DoRA's change isn't low-rank, so it is approximated like any other.)
    Directly trained arrays (`modules_to_save`, biases, rows of embeddings) are left unchanged, whereas
    adapted biases become LoRA biases (`lora_bias`). Dropout is removed.

    **Raises:**

    `ValueError` if the model has no adapters, if the rank is less than 1 or exceeds a weight's size, or if
    the layout is unknown.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        class Shifted(ql.AdaptedArray):
            shift: jax.Array

            def materialise(self):
                return ql.materialise(self.base) + self.shift

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.adapt(mlp, lambda w, **_: Shifted(w, jnp.ones(w.shape)))
        lora, errors = ql.to_lora(model, rank=1)
        errors["layers.0.weight"].lost  # 0: all columns of the shift are the same
        ```

    Eckart and Young, The approximation of one matrix by another of lower rank (1936).
    """
    records = records_of(model, layout)
    adapted = {name: x.array for name, x in records.items() if isinstance(x.array, AdaptedArray)}
    if not adapted:
        raise ValueError("The model has no adapters; to_lora takes the result of `adapt` or the like.")
    checked_patterns("rank_pattern", rank_pattern, adapted)
    ranks = {name: value_for(rank_pattern, layer_of(name), rank) for name in adapted}
    if (least := min(ranks.values())) < 1:
        raise ValueError(f"to_lora takes a rank of at least 1; found {least}.")

    def converted(name: str, x: AdaptedArray) -> tuple[Any, LowRankError | None]:
        if records[name].layout is None:  # Not a weight, but e.g. a bias or a norm's scale.
            return x, None

        def axes() -> tuple[Sequence[int], Sequence[int]]:
            layout = require_layout(name, records[name])
            return layout.out_axes, layout.in_axes

        lora, error = as_lora(name, x, ranks[name], axes)
        return lora, error and LowRankError(*error)

    found = map_arrays(converted, adapted)
    errors = {name: error for name, (_, error) in found.items() if error is not None}
    if not errors:
        raise ValueError(
            f"The model has no adapters of weights, only arrays trained in full: {', '.join(adapted)}."
        )
    new = {name: lora for name, (lora, _) in found.items()}
    biases = {
        records[name].bias or f"{layer_of(name)}.bias": new[name]
        for name in errors
        if records[name].bias is not None or name != layer_of(name)
    }
    arrays = {name: record.array for name, record in records.items()}
    # In PEFT's checkpoint format, either all adapters have a bias or none do.
    if any(is_other_bias(arrays.get(name)) for name in biases):
        new |= {name: as_lora_bias(arrays.get(name), lora) for name, lora in biases.items()}
    return replace(model, new), errors
