"""DeLoRA: a low-rank change of bounded strength."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..core.values import materialise
from .method import MethodArray
from .record import BIAS, DROPOUT, RANK, Layer, Method, Weight, Written, starts


class DeLoRAArray(MethodArray):
    """DeLoRA: adds a low-rank matrix with normalised factors.

    As a result, a single trained scalar bounds the change's size.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: has shape `(..., rank, inputs)`. Multiple input axes are flattened.
    - `b`: has shape `(..., outputs, rank)`. Multiple output axes are flattened.
    - `strength`: the bound, with shape `(...)`.
    - `column_norms`: the weight's column norms at initialisation, with shape `(..., inputs)`. Not trained.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        norms = jnp.linalg.norm(w, axis=0)
        de = ql.adapters.DeLoRAArray(w, a, b, jnp.asarray(15.0), norms)
        ql.quaxify(jnp.matmul)(de, jnp.arange(3.0))
        ```

    Bini et al., Decoupling Angles and Strength in Low-rank Adaptation (2025).
    """

    a: Any
    b: Any
    strength: Any
    column_norms: Any

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank columns", "b": "rows rank", "strength": "", "column_norms": "columns"
    }  # fmt: skip

    def trained(self) -> Sequence[str]:
        return ("a", "b", "strength", *(["w"] if self.gradients == "train" else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        def norm(x: Any, axis: Any) -> Any:
            return jnp.maximum(_norm(x, axis), jnp.asarray(1e-4, x.dtype))

        scale = self.strength[..., None] / (self.a.shape[-2] * norm(self.a, -1) * norm(self.b, -2))
        return self.low_rank(scale[..., None] * self.a * self.column_norms[..., None, :], self.b)


def _norm(x: Any, axis: int) -> Any:
    """Computes the norm, but with a gradient of zero at zero (rather than NaN).

    This matters because `b` is initialised with zeros.
    """
    squares = jnp.sum(x * x, axis)
    some = squares > 0
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, jnp.ones_like(squares))), squares)


@starts
def delora(x: Weight, *, rank: int = 8, strength: float = 15.0) -> DeLoRAArray:
    w = jnp.asarray(materialise(x.w)).astype(x.dtype)
    norms = jnp.sqrt(jnp.sum(w * w, axis=tuple(x.layout.out_axes)))
    a, b = x.kaiming(rank, x.inputs, fan_in=x.inputs), x.zeros(x.outputs, rank)
    return x.on(DeLoRAArray, a, b, strength * x.ones(), norms.reshape(*x.batch, x.inputs))


def _read_delora(layer: Layer) -> Any:
    r = layer.option("r")
    return layer.on(
        DeLoRAArray, layer.read("a", r, layer.inputs), layer.read("b", layer.outputs, r),
        layer.read("strength", 1)[0], layer.read("column_norms", layer.inputs),
    )  # fmt: skip


def _write_delora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    parts = {"a": x.a, "b": x.b, "strength": x.strength.reshape(1), "column_norms": x.column_norms}
    return parts, {"r": x.a.shape[-2]}


DELORA = Method(
    "DELORA", DeLoRAArray, delora,
    parts={
        "a": ".delora_A", "b": ".delora_B", "strength": ".delora_lambda", "column_norms": ".delora_w_norm",
    },
    options={"bias": BIAS, **RANK, "module_dropout": DROPOUT},
    read=_read_delora, write=_write_delora, conv1d=False, patterns={"r": "rank_pattern"},
    informative=("delora_lambda", "lambda_pattern", "init_weights"),
)  # fmt: skip
