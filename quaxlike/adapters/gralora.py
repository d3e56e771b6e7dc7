"""GraLoRA: a separate low-rank change to each block of a weight."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..arrays.structured import BlockDiagonalMatrix
from .method import MethodArray
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, as_written, count, flag, number, starts


class GraLoRAArray(MethodArray):
    """Granular low-rank adaptation: adds a `k x k` grid of blocks, each with a separate low-rank matrix.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: has shape `(..., k, inputs / k, rank)`. For each of the `k` input groups, this concatenates the
        first factors of all blocks in that column.
    - `b`: has shape `(..., k, rank, outputs / k)`. For each of the `k` output groups, this concatenates the
        second factors of all blocks in that row.
    - `general_a`, `general_b`: an additional low-rank change to the whole weight, as `a` and `b` in
        [`quaxlike.LoraArray`][]. Default: None.
    - `scaling`: a factor for the change. Not differentiated. Default: 1.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 6)), jnp.ones((2, 3, 2)), jnp.zeros((2, 2, 2))
        gralora = ql.adapters.GraLoRAArray(w, a, b)
        ql.quaxify(jnp.matmul)(gralora, jnp.arange(6.0))
        ```

    Jung et al., GraLoRA: Granular Low-Rank Adaptation for Parameter-Efficient Fine-Tuning (2025).
    """

    a: Any
    b: Any
    general_a: Any = None
    general_b: Any = None
    scaling: Any = eqx.field(default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "k in_group rank", "b": "k rank out_group", "general_a": "h columns", "general_b": "rows h"
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        k, rank, size = self.b.shape[-3:]
        # The total rank is flattened from (n, j, q): the input group, the output group, and the rank within a
        # block.
        b = self.scaled("b")
        b = jnp.reshape(b, (*b.shape[:-3], k, k, rank // k, size))
        eye = jnp.eye(k, dtype=b.dtype)
        b = jnp.einsum("...jnqo,jl->...jonlq", b, eye)
        b = jnp.reshape(b, (*b.shape[:-5], k * size, k * rank))
        x = self.low_rank(BlockDiagonalMatrix(jnp.matrix_transpose(self.a)), b)
        if self.general_a is None:
            return x
        return self.low_rank(self.general_a, self.scaled("general_b")).with_base(x)


@starts
def gralora(x: Weight, *, rank: int = 32, alpha: float = 64, k: int = 2) -> GraLoRAArray:
    x.must_divide("GraLoRA", "a k", k, rank, x.outputs, x.inputs)
    a = x.kaiming(k, x.inputs // k, rank, fan_in=x.inputs // k)
    return x.on(GraLoRAArray, a, x.zeros(k, rank, x.outputs // k), scaling=alpha / rank)


def _read_gralora(layer: Layer) -> Any:
    r, k, h = (layer.option(name) for name in ("r", "gralora_k", "hybrid_r"))
    if r % k or layer.inputs % k or layer.outputs % k:
        raise layer.error("a", f"gralora_k must divide the rank, {layer.inputs} inputs and {layer.outputs} "
                          f"outputs; found rank {r} and gralora_k {k}")  # fmt: skip
    a, b = layer.read("a", k, layer.inputs // k, r), layer.read("b", k, r, layer.outputs // k)
    general = {"general_a": layer.read("general_a", h, layer.inputs),
               "general_b": layer.read("general_b", layer.outputs, h)} if h else {}  # fmt: skip
    return layer.on(GraLoRAArray, a, b, **general, scaling=layer.option("alpha") / (r + h))


def _write_gralora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    k, r, h = *x.b.shape[-3:-1], 0 if x.general_a is None else x.general_a.shape[-2]
    parts = {"a": x.a, "b": x.b, "general_a": x.general_a, "general_b": x.general_b}
    options = {"r": r, "hybrid_r": h, "gralora_k": k, "alpha": as_written(layer.path, x.scaling * (r + h))}
    return parts, options


GRALORA = Method(
    "GRALORA", GraLoRAArray, gralora,
    parts={
        "a": ".gralora_A", "b": ".gralora_B",
        "general_a": ".gralora_A_general.weight", "general_b": ".gralora_B_general.weight",
    },
    options={
        "bias": BIAS,
        "r": count(32), "hybrid_r": count(0, 0), "alpha": number(64), "gralora_k": count(2),
        "gralora_dropout": DROPOUT, "fan_in_fan_out": flag(),
    },
    read=_read_gralora, write=_write_gralora,
)  # fmt: skip
