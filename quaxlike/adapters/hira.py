"""HiRA: a low-rank factor of each element of a weight."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..arrays.zero import Full
from .combinators import HadamardArray
from .method import MethodArray
from .record import DROPOUT, Layer, Method, Weight, Written, count, flag, starts


class HiRAArray(MethodArray):
    """HiRA: multiplies the weight by one plus a low-rank matrix, element by element: `w * (1 + b a)`.

    The product is formed in each matrix product; of embeddings, only the rows that are looked up are.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, *inputs)`.
    - `b`: shape `(..., *outputs, rank)`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

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
    return x.on(HiRAArray, x.kaiming(rank, *x.into, fan_in=x.inputs), x.zeros(*x.out, rank))


def _read_hira(layer: Layer) -> Any:
    embedding = layer.layout.kind == "embedding"
    shape = layer.shape_of("embedding_b" if embedding else "b")
    r = shape[1] if len(shape) > 1 else 0  # PEFT 0.21 does not heed `rank_pattern`
    if layer.window:
        a, b = (
            layer.read("a", r, *layer.in_shape),
            layer.read("b", layer.outputs, r, *[1] * len(layer.window)),
        )
    else:
        names = ("embedding_a", "embedding_b") if embedding else ("a", "b")
        a, b = layer.read(names[0], r, layer.inputs), layer.read(names[1], layer.outputs, r)
    return layer.on(HiRAArray, a.reshape(r, *layer.in_shape), b.reshape(*layer.out_shape, r))


def _write_hira(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, kind = layer.array, layer.layout.kind
    r = x.b.shape[-1]
    a, b = x.a if kind == "conv" else x.a.reshape(r, -1), x.b.reshape(-1, r)
    b = b.reshape(*b.shape, *[1] * (x.a.ndim - 2)) if kind == "conv" else b
    start = "embedding_" if kind == "embedding" else ""
    return {f"{start}a": a, f"{start}b": b}, {"r": r}


HIRA = Method(
    "HIRA", HiRAArray, hira,
    parts={
        "a": ".hira_A", "b": ".hira_B",
        "embedding_a": ".hira_embedding_A", "embedding_b": ".hira_embedding_B",
    },
    options={"r": count(32), "hira_dropout": DROPOUT, "fan_in_fan_out": flag()},
    read=_read_hira, write=_write_hira, kinds=("linear", "matrix", "conv", "embedding"),
    informative=("rank_pattern",),
)  # fmt: skip
