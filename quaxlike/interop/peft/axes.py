"""Arrays in PyTorch's layout, in which PEFT's files store layers of every framework.

There, the weight of a linear layer is `(out, in)`, that of a convolution `(out, in, *window)`, and both are
called `weight`; a bias has one axis. An array that is called `weight` already keeps its layout.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...arrays.lora import LoraArray
from ...surgery.trees import layer_of
from ...surgery.weight_axes import Layout, is_norm

_FIELDS = {"kernel": "weight", "embedding": "weight", "embeddings": "weight", "w": "weight", "b": "bias"}
_OF_NORMS = {"scale": "weight", "offset": "bias"}


def file_name(name: str) -> str:
    """The name of an array in PyTorch: `dense.weight` for `dense.kernel`."""
    above, _, field = name.rpartition(".")
    fields = _FIELDS | (_OF_NORMS if is_norm(above) else {})
    return f"{above}.{fields[field]}" if above and field in fields else name


class Stored(NamedTuple):
    """How an array is stored: in which order of axes, and in which shape."""

    order: Sequence[int]
    shape: tuple[int, ...]

    def put(self, array: Any) -> Any:
        return jnp.transpose(array, self.order).reshape(self.shape)

    def take(self, stored: Any, shape: Sequence[int]) -> Any:
        back = [self.order.index(i) for i in range(len(shape))]
        return stored.reshape([shape[i] for i in self.order]).transpose(back)


def stored_as(name: str, shape: Sequence[int], layouts: Mapping[str, Layout | None]) -> Stored:
    """How the array of this name is stored. `layouts` are the model's.

    Raises `ValueError` for an array without a counterpart in PyTorch's layers."""
    shape, field = tuple(shape), name.rpartition(".")[2]
    n, whole = len(shape), list(range(len(shape)))
    if field in ("bias", "b"):
        beside = (
            x
            for other, x in layouts.items()
            if other != name and layer_of(other) == name.removesuffix(f".{field}")
        )
        weight = next((x for x in beside if x is not None and x.is_known), None)
        stacked = weight is not None and weight.kind in ("linear", "matrix") and n > len(weight.out_axes)
        return Stored(whole, shape if stacked else (math.prod(shape),))
    layout = layouts.get(name)
    if n < 2 or field not in ("kernel", "w") or (layout is not None and layout.kind == "embedding"):
        return Stored(whole, shape)
    if (
        layout is None
        or layout.kind not in ("linear", "matrix", "conv")
        or len((*layout.out_axes, *layout.in_axes)) < n
    ):
        raise ValueError(
            f"PEFT's files have no place for {name}, of shape {shape}: it is {why_unsupported(layout)}."
        )
    order = [n + axis for axis in (*layout.out_axes, *layout.in_axes)]
    sizes = [shape[i] for i in order]
    n_out = len(layout.out_axes)
    rest = sizes[n_out:] if layout.kind == "conv" else [math.prod(sizes[n_out:])]
    return Stored(order, (math.prod(sizes[:n_out]), *rest))


def why_unsupported(layout: Layout | None) -> str:
    """Describes a weight that PEFT has no adapter for."""
    if layout is None or not layout.is_known:
        return "a weight that does not say which of its axes are outputs; pass `layout`"
    if layout.kind == "other conv":
        return (
            "a grouped or transposed convolution; PEFT's adapters of those are not low-rank changes of the "
            "weight"
        )
    return "a stack of layers; save them one by one"


def part_shapes(lora: LoraArray, kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes in which the parts of an adapter are stored: a linear layer has one axis each of outputs and
    inputs, a convolution a window of ones after its outputs."""
    rank, out, into = lora.rank, math.prod(lora.b.shape[:-1]), lora.a.shape[1:]
    if kind != "conv":
        return {"a": (rank, math.prod(into)), "b": (out, rank), "magnitude": (out,)}
    ones = (1,) * (len(into) - 1)
    return {"a": (rank, *into), "b": (out, rank, *ones), "magnitude": (1, out, *ones)}
