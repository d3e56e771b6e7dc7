"""HiRA: multiplies a weight elementwise by one plus a low-rank matrix."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..arrays.zero import Full
from .combinators import HadamardArray
from .lora import read_factors, written_factors
from .method import MethodArray
from .record import DROPOUT, Layer, Method, Weight, Written, count, flag, starts


class HiRAArray(MethodArray):
    """HiRA: multiplies the weight elementwise by one plus a low-rank matrix, i.e. `w * (1 + b a)`.

    Matrix products with this array materialise it, but embedding lookups only compute the rows they need.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: the first factor, of shape `(..., rank, *inputs)`.
    - `b`: the second factor, of shape `(..., *outputs, rank)`.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        a, b = jnp.ones((2, 6)), jnp.zeros((4, 2))
        hira = ql.adapters.HiRAArray(jnp.ones((4, 6)), a, b)
        ql.quaxify(jnp.matmul)(hira, jnp.arange(6.0))
        ```

    Huang et al., HiRA: Parameter-Efficient Hadamard High-Rank Adaptation for Large Language Models (2025).
    """

    a: Any
    b: Any

    part_axes: ClassVar[Mapping[str, str]] = {"a": "rank in", "b": "out rank"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> HadamardArray:
        n_out, n_in = len(self.out_axes), len(self.in_axes)
        ones = Full(jnp.ones((), self.a.dtype), (*self.b.shape[-1 - n_out : -1], *self.a.shape[-n_in:]))
        axes = {"out_axes": range(-n_out - n_in, -n_in), "in_axes": range(-n_in, 0)}
        return self.on(HadamardArray, LoraArray(ones, self.a, self.b, **axes))


@starts
def hira(x: Weight, *, rank: int = 32) -> HiRAArray:
    return x.on(HiRAArray, x.kaiming(rank, *x.in_shape, fan_in=x.inputs), x.zeros(*x.out_shape, rank))


def _read_hira(layer: Layer) -> Any:
    shape = layer.shape_of("embedding_b" if layer.kind == "embedding" else "b")
    r = shape[1] if len(shape) > 1 else 0  # Don't use `rank_pattern`, which PEFT 0.21 ignores.
    return layer.on(HiRAArray, *read_factors(layer, r))


def _write_hira(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    return written_factors(layer, x.a, x.b), {"r": x.b.shape[-1]}


HIRA = Method(
    "HIRA", HiRAArray, hira,
    parts={
        "a": ".hira_A", "b": ".hira_B",
        "embedding_a": ".hira_embedding_A", "embedding_b": ".hira_embedding_B",
    },
    options={"r": count(32), "hira_dropout": DROPOUT, "fan_in_fan_out": flag()},
    read=_read_hira, write=_write_hira, kinds=("linear", "matrix", "conv", "embedding"),
    informative=("rank_pattern", "init_weights"),
)  # fmt: skip
