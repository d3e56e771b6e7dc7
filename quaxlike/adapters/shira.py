"""SHiRA: adds a sparse matrix."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.sparse import SparseArray
from .combinators import SumArray
from .method import MethodArray
from .record import Layer, Method, Weight, Written, count, flag, starts


class SHiRAArray(MethodArray):
    """Sparse high-rank adaptation: trains a small subset of the weight's elements.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `delta`: the change, as a [`quaxlike.SparseArray`][] of shape `(..., outputs, inputs)`.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        delta = ql.SparseArray.from_coo(jnp.ones(2), [[0, 1], [3, 2]], (4, 6))
        shira = ql.adapters.SHiRAArray(jnp.ones((4, 6)), delta)
        ql.quaxify(jnp.matmul)(shira, jnp.arange(6.0))
        ```

    Bhardwaj et al., Sparse High Rank Adapters (2024).
    """

    delta: Any

    part_axes: ClassVar[Mapping[str, str]] = {"delta": "rows columns"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        return self.on(SumArray, self.delta)


@starts
def shira(x: Weight, *, rank: int = 32) -> SHiRAArray:
    """Selects random elements, as many as a LoRA with this rank has parameters."""
    n, size = rank * (x.outputs + x.inputs), x.outputs * x.inputs
    if x.batch or not 0 < n <= size:
        raise ValueError(
            f"SHiRA of rank {rank} trains {n} elements of one matrix; found a weight of shape {x.w.shape}."
        )
    at = jnp.sort(jax.random.permutation(next(x.keys), size)[:n])
    places = jnp.stack([at // x.inputs, at % x.inputs], axis=-1)
    return x.on(SHiRAArray, SparseArray.from_coo(x.zeros(n), places, (x.outputs, x.inputs)))


def _read_shira(layer: Layer) -> Any:
    n = layer.option("r") * (layer.outputs + layer.inputs)
    values, places = layer.read("values", n), np.asarray(layer.read("places", 2, n, integers=True), np.int64)
    shape = (layer.outputs, layer.inputs)
    if n and (
        (places < 0).any() or (places.max(1) >= shape).any() or len({*zip(*places.tolist(), strict=True)}) < n
    ):
        raise layer.error("places", f"expected different places in {shape}")
    return layer.on(SHiRAArray, SparseArray.from_coo(values, places.T, shape))


def _write_shira(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    delta = layer.array.delta
    each = delta.nse / (layer.array.num_outputs + layer.array.num_inputs)
    if not bool(np.all(delta.is_stored)) or each != int(each) or each < 1:
        raise ValueError(
            f"PEFT's SHiRA trains a multiple of outputs and inputs of elements, here of "
            f"{layer.array.num_outputs + layer.array.num_inputs}; {layer.name} has {delta.nse}."
        )
    places = jnp.stack([index.astype(jnp.int32) for index in delta.indices])
    return {"values": delta.data, "places": places}, {"r": int(each)}


SHIRA = Method(
    "SHIRA", SHiRAArray, shira,
    parts={"values": ".shira_weight", "places": ".shira_indices"},
    options={"r": count(32), "fan_in_fan_out": flag()},
    read=_read_shira, write=_write_shira, conv1d=False,
    informative=("mask_type", "random_seed", "init_weights"),
)  # fmt: skip
