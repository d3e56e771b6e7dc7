"""`to_lora`: adapters of any type as low-rank ones, for programs that know LoRA alone."""

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
    """What a change of a weight loses as one of low rank."""

    lost: float
    """The Frobenius norm of what is lost, in parts of that of the change."""
    change: float
    """The Frobenius norm of the change, in parts of that of the weight."""


@checked
def to_lora(
    model: PyTree, rank: int, *, rank_pattern: Mapping[str, int] = {}, layout: Layouts = None
) -> tuple[PyTree, dict[str, LowRankError]]:
    """Replaces the adapters of a model by the low-rank ones that come closest to what they change, so that
    programs that know LoRA alone, such as vLLM and llama.cpp, run what was trained with any other.

    **Arguments:**

    - `model`: a model with adapters of any types, such as the result of [`quaxlike.adapt`][].
    - `rank`: of the new adapters.
    - `rank_pattern`: other ranks for some layers, as for [`quaxlike.loraify`][].
    - `layout`: which axes of weights are outputs and which inputs, as for [`quaxlike.layouts`][], where
        neither their layers nor their names say so. Default: none.

    **Returns:**

    The model with a [`quaxlike.LoraArray`][] in place of each adapter, on the same base; and the error of
    each, by name, as `(lost, change)`. `lost` is the Frobenius norm of what is lost, in parts of that of the
    change; `change` is the norm of the change, in parts of that of the weight.

    The approximation is the best one, from the largest singular values of the change. A LoRA of at most this
    rank keeps its factors, and loses nothing. A DoRA is no change of low rank, and is approximated like any
    other adapter. Arrays that are trained in full (`modules_to_save`, biases, rows of embeddings) are kept;
    biases that are adapted otherwise become those of the adapters (`lora_bias`). Dropout is left out.

    **Raises:**

    `ValueError` if the model has no adapters; for a rank of less than 1, or larger than a weight that has to
    be approximated; if it cannot be told which axes of a weight are outputs and which are inputs.

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
        if records[name].layout is None:  # no weight of a layer, but a bias or the scale of a norm
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
        records[name].bias or f"{layer_of(name)}.bias": new[name] for name in errors if name != layer_of(name)
    }
    arrays = {name: record.array for name, record in records.items()}
    if any(is_other_bias(arrays.get(name)) for name in biases):  # then each has one, as PEFT's files want it
        new |= {name: as_lora_bias(arrays.get(name), lora) for name, lora in biases.items()}
    return replace(model, new), errors
