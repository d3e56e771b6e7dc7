"""AdaLoRA: a low-rank change parameterised like a singular value decomposition."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx

from ..arrays.lora.array import LoraArray, padded_to
from .lora import INFORMATIVE
from .method import MethodArray
from .record import BIAS, DROPOUT, Layer, Method, Option, Weight, count, flag, number, starts


class AdaLoRAArray(MethodArray):
    """AdaLoRA: adds `scaling * b diag(e) a`, i.e. a low-rank matrix parameterised like its SVD.

    This makes it possible to prune ranks from the layers that need them the least. Pruning itself isn't
    implemented: we only train the ranks that are left.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: has shape `(..., rank, inputs)`. Multiple input axes are flattened.
    - `b`: has shape `(..., outputs, rank)`. Multiple output axes are flattened.
    - `e`: the diagonal, with shape `(..., rank)`.
    - `scaling`: a factor for the change. Not differentiated. Default: 1.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        ada = ql.adapters.AdaLoRAArray(w, a, b, jnp.zeros(2))
        ql.quaxify(jnp.matmul)(ada, jnp.arange(3.0))
        ```

    Zhang et al., Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning (2023).
    """

    a: Any
    b: Any
    e: Any
    scaling: Any = eqx.field(default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"a": "rank columns", "b": "rows rank", "e": "rank"}
    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        return self.low_rank(self.scaled("e")[..., None] * self.a, self.b)


@starts
def adalora(x: Weight, *, rank: int = 12, alpha: float = 8) -> AdaLoRAArray:
    a, b = x.normal(rank, x.inputs, scale=0.02), x.normal(x.outputs, rank, scale=0.02)
    return x.on(AdaLoRAArray, a, b, x.zeros(rank), scaling=alpha / (rank + 1e-5))


def _read_adalora(layer: Layer) -> Any:
    pattern, r = layer.option("rank_pattern"), layer.option("init_r")
    kept = next((mask for name, mask in pattern.items() if name == f"{layer.name}.lora_E"), None)
    rank = r if kept is None else sum(kept)
    alpha = layer.option("lora_alpha")
    return layer.on(
        AdaLoRAArray, layer.read("a", rank, layer.inputs), layer.read("b", layer.outputs, rank),
        layer.read("e", rank, 1)[:, 0], scaling=(alpha if alpha > 0 else r) / (r + 1e-5),
    )  # fmt: skip


def _as_lora(x: AdaLoRAArray) -> LoraArray:
    # PEFT doesn't support a rank of zero.
    return padded_to(y := x.composed(), max(y.rank, 1))


_KEPT = Option(
    {}, "whether each rank is kept, by the name of a layer's lora_E",
    lambda x: isinstance(x, dict) and all(isinstance(own, list) and all(type(y) is bool for y in own)
                                          for own in x.values()),
)  # fmt: skip


ADALORA = Method(
    "ADALORA", AdaLoRAArray, adalora,
    parts={"a": ".lora_A", "b": ".lora_B", "e": ".lora_E"},
    options={
        "bias": BIAS,
        "init_r": count(12), "lora_alpha": number(8), "rank_pattern": _KEPT, "lora_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_adalora, rewritten=_as_lora, kinds=("linear", "matrix", "conv"),
    informative=(
        "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
        "init_lora_weights", "use_rslora", *INFORMATIVE,
    ),
)  # fmt: skip
