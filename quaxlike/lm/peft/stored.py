"""The names and layouts of arrays in PEFT files, for layers from any framework.

In PyTorch, a linear layer's weight is `(out, in)`, and a convolution kernel is `(out, in, *window)`. Both are
called `weight`, so we assume any array with this name to have this layout already. Biases are
one-dimensional.

`target_parameters` adapts parameters other than the weights of layers, such as stacks of experts or matrices
in recurrent cells. If several of a module's parameters are adapted, then PEFT nests their wrappers. The first
is innermost, so all but the last are under the `base_layer` of the next. Router weights are parameters of a
separate module, so they are named like this too. (In transformers 4, each expert's matrices were layers with
their own adapters.)
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...adapters.lora import GROUPED
from ...arrays.layout import Layout
from ...surgery.trees import layer_of
from ...surgery.weight_axes import is_norm

_WRAPPED = ".base_layer"
# The first parameter in each module. (A dict of arrays may be in another order.)
_FIRST = ("gate_up_proj", "weight_ih")

_FIELDS = {"kernel": "weight", "embedding": "weight", "embeddings": "weight", "w": "weight", "b": "bias"}
_OF_NORMS = {"scale": "weight", "offset": "bias"}


def file_name(name: str) -> str:
    """Returns the array's name in PyTorch, e.g. `dense.weight` for `dense.kernel`."""
    above, _, field = name.rpartition(".")
    fields = _FIELDS | (_OF_NORMS if is_norm(above) else {})
    return f"{above}.{fields[field]}" if above and field in fields else name


class Stored(NamedTuple):
    """How an array is stored in the file, i.e. its shape and the order of its axes."""

    order: Sequence[int]
    shape: tuple[int, ...]

    def put(self, array: Any) -> Any:
        return jnp.transpose(array, self.order).reshape(self.shape)

    def take(self, stored: Any, shape: Sequence[int]) -> Any:
        back = [self.order.index(i) for i in range(len(shape))]
        return stored.reshape([shape[i] for i in self.order]).transpose(back)


def stored_as(name: str, shape: Sequence[int], layouts: Mapping[str, Layout | None]) -> Stored:
    """Determines how an array is stored, based on the layouts in the model.

    Raises `ValueError` for arrays without an equivalent in PyTorch.
    """
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
    """Explains why PEFT doesn't support adapters for this weight."""
    if layout is None or not layout.is_known:
        return "a weight that does not say which of its axes are outputs; pass `layout`"
    if layout.kind in ("grouped conv", "other conv"):
        return GROUPED
    return "a stack of layers; save them one by one"


def is_parameter(name: str, shape: Sequence[int], layout: Layout | None) -> bool:
    """Returns whether a matrix (or a stack of matrices) is a bare parameter, rather than a layer's weight."""
    if layout is None or not layout.is_known or layer_of(name) != name or "." not in name:
        return False
    lead = len(layout.batch_shape(tuple(shape)))
    return layout.kind in ("linear", "matrix") and (len(shape), lead) in ((2, 0), (3, 1))


def biases_of(mode: str | None, names: Iterable[str], layers: Collection[str]) -> list[str]:
    """Returns the biases selected by the option `bias`: all, none, or the ones in the adapted `layers`
    (`"lora_only"` for LoRA).
    """
    if mode in (None, "none"):
        return []
    return [x for x in names if is_bias(x) and (mode == "all" or x.rpartition(".")[0] in layers)]


def is_bias(name: str) -> bool:
    """Returns whether a tensor is named like a bias in PyTorch, such as `bias_ih` in a recurrent cell."""
    return re.fullmatch(r"bias(_\w+)?", name.rpartition(".")[2]) is not None


def is_targeted(name: str, target_parameters: Iterable[str]) -> bool:
    """Returns whether an array is one of the adapter's target parameters."""
    return any(name == target or name.endswith(f".{target}") for target in target_parameters)


def wrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Maps each adapted parameter's name to the name of its wrapper in PEFT."""
    of_module: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_module[name.rpartition(".")[0]].append(name)
    return {
        name: module + _WRAPPED * (len(own) - 1 - i)
        for module, own in of_module.items()
        for i, name in enumerate(sorted(own, key=lambda name: name.rpartition(".")[2] not in _FIRST))
    }


def renamed_parameters(
    adapters: Mapping[str, Any], parameters: Iterable[str], target_parameters: Iterable[str]
) -> dict[str, Any]:
    """Renames the adapters in a file, using the names of their parameters."""
    wrapped = wrapped_names(name for name in parameters if is_targeted(name, target_parameters))
    back = {module: name for name, module in wrapped.items()}
    return {back.get(layer, layer): keys for layer, keys in adapters.items()}


def separate_experts(
    adapters: Iterable[str], stacks: Mapping[str, str], tensors_of: Callable[[str], list[str]]
) -> dict[str, list[str]]:
    """Returns the layers in each stack of experts, if the experts have separate adapters.

    `stacks` maps names in the file to names in the model, and `tensors_of` maps these to tensors in the
    published checkpoint.
    """
    layers = {new: [layer_of(tensor) for tensor in tensors_of(name)] for new, name in stacks.items()}
    apart = {new: own for new, own in layers.items() if len(own) > 1}
    return apart if {layer for own in apart.values() for layer in own} & set(adapters) else {}
