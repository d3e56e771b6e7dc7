"""PEFT's `target_parameters`: adapters of parameters that are no weights of layers, such as stacks of experts
and matrices of recurrent cells.

The factors of a stack `(experts, …)` are stored in one matrix each: `A` as `(experts * rank, in)`, with
experts as the slower index, `B` as `(out, rank * experts)`, with experts as the faster one. If several
parameters of a module have adapters, their wrappers are nested, the first innermost: each but the last is
under `base_layer` of the next. The weights of routers, which are parameters of separate modules, are named
the same way. In transformers 4, the matrices of experts were layers, each with its own adapter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...arrays.lora import LoraArray
from ...surgery.trees import layer_of
from ...surgery.weight_axes import Layout

_WRAPPED = ".base_layer"
# The parameters that come first in their modules, whatever the order of a model's dict.
_FIRST = ("gate_up_proj", "weight_ih")


def is_parameter(name: str, shape: Sequence[int], layout: Layout | None) -> bool:
    """Whether an array is a matrix, or a stack of matrices, that is a parameter of its module and not the
    weight of a layer."""
    if layout is None or not layout.is_known or layer_of(name) != name or "." not in name:
        return False
    lead = len(layout.batch_shape(tuple(shape)))
    return layout.kind in ("linear", "matrix") and (len(shape), lead) in ((2, 0), (3, 1))


def is_targeted(name: str, target_parameters: Iterable[str]) -> bool:
    """Whether the adapter is for the array of this name."""
    return any(name == target or name.endswith(f".{target}") for target in target_parameters)


def wrapped_names(names: Iterable[str]) -> dict[str, str]:
    """The modules under whose names the file stores the adapters of these parameters."""
    of_module: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_module[name.rpartition(".")[0]].append(name)
    return {
        name: module + _WRAPPED * (len(own) - 1 - i)
        for module, own in of_module.items()
        for i, name in enumerate(sorted(own, key=lambda name: name.rpartition(".")[2] not in _FIRST))
    }


def stored_shapes(lora: LoraArray) -> dict[str, tuple[int, ...]]:
    """The shapes of the factors in the file."""
    (*n, rank, into), out = lora.a.shape, lora.b.shape[-2]
    return {"a": (math.prod(n) * rank, into), "b": (out, rank * math.prod(n))}


def unpacked(lora: LoraArray, a: Any, b: Any) -> LoraArray:
    """The adapter with factors from a file."""
    apart = b.reshape(*lora.b.shape[-2:], -1)
    return lora.replace(a=a.reshape(lora.a.shape), b=jnp.transpose(apart, (2, 0, 1)).reshape(lora.b.shape))


def packed(lora: LoraArray) -> dict[str, Any]:
    """The factors in the layout of a file."""
    shapes, b = stored_shapes(lora), lora.b.reshape(-1, *lora.b.shape[-2:])
    return {"a": lora.a.reshape(shapes["a"]), "b": jnp.transpose(b, (1, 2, 0)).reshape(shapes["b"])}


def renamed_parameters(
    adapters: Mapping[str, Any], parameters: Iterable[str], target_parameters: Iterable[str]
) -> dict[str, Any]:
    """The adapters of a file, with those of parameters under the names of these."""
    wrapped = wrapped_names(name for name in parameters if is_targeted(name, target_parameters))
    back = {module: name for name, module in wrapped.items()}
    return {back.get(layer, layer): keys for layer, keys in adapters.items()}


def separate_experts(
    adapters: Iterable[str], stacks: Mapping[str, str], tensors_of: Callable[[str], list[str]]
) -> dict[str, list[str]]:
    """The stacks whose experts have separate adapters in the file, with the layers of their matrices.
    `stacks` maps their names in the file to those in the model, and `tensors_of` these to the tensors of
    published files."""
    layers = {new: [layer_of(tensor) for tensor in tensors_of(name)] for new, name in stacks.items()}
    apart = {new: own for new, own in layers.items() if len(own) > 1}
    return apart if {layer for own in apart.values() for layer in own} & set(adapters) else {}


def stacked(lora: LoraArray, parts: Sequence[tuple[Any, Any] | None]) -> LoraArray:
    """The adapter of a stack from the adapters of its matrices, in order; None for a matrix without one.

    An expert may have several matrices, one above the other in the stack. Each keeps its factors: the stack's
    `a` holds all of theirs, and its `b` is zero between different matrices.
    """
    (n, rank, _), out = lora.a.shape, lora.b.shape[1]
    each = len(parts) // n
    dtype = next(part[0].dtype for part in parts if part is not None)
    a, b = np.zeros(lora.a.shape, dtype), np.zeros(lora.b.shape, dtype)
    for number, part in enumerate(parts):
        if part is not None:
            i, j = divmod(number, each)
            own = slice(j * rank // each, (j + 1) * rank // each)
            a[i, own] = part[0]
            b[i, j * out // each : (j + 1) * out // each, own] = part[1]
    return lora.replace(a=jnp.asarray(a), b=jnp.asarray(b))
