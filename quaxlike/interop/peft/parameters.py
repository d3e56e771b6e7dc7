"""PEFT's `target_parameters`: adapters of parameters that are no layer's weight, such as stacks of experts.

The factors of a stack `(experts, …)` are stored in one matrix each: `A` as `(experts * rank, in)`, with the
experts outside, `B` as `(out, rank * experts)`, with the experts inside. Several parameters of a module are
wrapped one around the other, the first innermost: each but the last is under `base_layer` of the next one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ...arrays.lora import LoraArray
from ...surgery.notation import Layout
from ...surgery.trees import layer_of

_WRAPPED = ".base_layer"


def is_stack(name: str, shape: Sequence[int], layout: Layout | None) -> bool:
    """Whether an array is a stack of matrices that is a parameter of its module, and no layer's weight."""
    if layout is None or not layout.is_known or layer_of(name) != name or "." not in name:
        return False
    return len(shape) == 3 and len(layout.batch_shape(tuple(shape))) == 1


def is_targeted(name: str, target_parameters: Iterable[str]) -> bool:
    """Whether the adapter is for the array of this name."""
    return any(name == target or name.endswith(f".{target}") for target in target_parameters)


def wrapped_names(names: Iterable[str]) -> dict[str, str]:
    """The names of the modules in the file under which the adapters of these parameters are stored."""
    of_module: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_module[name.rpartition(".")[0]].append(name)
    return {
        name: module + _WRAPPED * (len(own) - 1 - i)
        for module, own in of_module.items()
        for i, name in enumerate(own)
    }


def stored_shapes(lora: LoraArray) -> dict[str, tuple[int, ...]]:
    """The shapes of the factors in the file."""
    (n, rank, into), out = lora.a.shape, lora.b.shape[1]
    return {"a": (n * rank, into), "b": (out, rank * n)}


def unpacked(lora: LoraArray, a: Any, b: Any) -> LoraArray:
    """The adapter with the factors that the file has."""
    (n, rank, into), out = lora.a.shape, lora.b.shape[1]
    return lora.replace(a=a.reshape(n, rank, into), b=jnp.transpose(b.reshape(out, rank, n), (2, 0, 1)))


def packed(lora: LoraArray) -> dict[str, Any]:
    """The factors as the file has them."""
    shapes = stored_shapes(lora)
    return {"a": lora.a.reshape(shapes["a"]), "b": jnp.transpose(lora.b, (1, 2, 0)).reshape(shapes["b"])}


def renamed_stacks(
    adapters: Mapping[str, Any], stacks: Iterable[str], target_parameters: Iterable[str]
) -> dict[str, Any]:
    """The adapters of a file, those of stacks under the names of the parameters."""
    wrapped = wrapped_names(name for name in stacks if is_targeted(name, target_parameters))
    back = {module: name for name, module in wrapped.items()}
    return {back.get(layer, layer): keys for layer, keys in adapters.items()}
