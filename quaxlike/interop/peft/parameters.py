"""PEFT's `target_parameters`: adapters of parameters that are no layer's weight, such as stacks of experts.

The factors of a stack `(experts, …)` are stored in one matrix each: `A` as `(experts * rank, in)`, with the
experts outside, `B` as `(out, rank * experts)`, with the experts inside. Several parameters of a module are
wrapped one around the other, the first innermost: each but the last is under `base_layer` of the next one.
The weights of routers, which are parameters of modules of their own, are named likewise. For transformers 4
the matrices of experts were layers, and had adapters one by one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...arrays.lora import LoraArray
from ...surgery.notation import Layout
from ...surgery.trees import layer_of

_WRAPPED = ".base_layer"


def is_stack(name: str, shape: Sequence[int], layout: Layout | None) -> bool:
    """Whether an array is a stack of matrices that is a parameter of its module, and no layer's weight."""
    if layout is None or not layout.is_known or layer_of(name) != name or "." not in name:
        return False
    return len(shape) == 3 and len(layout.batch_shape(tuple(shape))) == 1


def is_router(layer: str, stacks: Iterable[str]) -> bool:
    """Whether a layer chooses from experts: it stands beside their stacks."""
    module, _, own = layer.rpartition(".")
    return own in ("gate", "router") and any(name.startswith(f"{module}.experts.") for name in stacks)


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


def of_experts_apart(
    adapters: Iterable[str], stacks: Mapping[str, str], tensors_of: Callable[[str], list[str]]
) -> dict[str, list[str]]:
    """If experts have adapters one by one, the stacks, and the layers of their matrices in the file.

    **Arguments:**

    - `adapters`: the layers of the file.
    - `stacks`: of the model, their names in the file to those in the model.
    - `tensors_of`: from the name of an array of the model to the tensors of files that make it up.
    """
    layers = {new: [layer_of(tensor) for tensor in tensors_of(name)] for new, name in stacks.items()}
    apart = {new: own for new, own in layers.items() if len(own) > 1}
    return apart if {layer for own in apart.values() for layer in own} & set(adapters) else {}


def stacked(lora: LoraArray, parts: Sequence[tuple[Any, Any] | None]) -> LoraArray:
    """The adapter of a stack, made of those of its matrices in turn; None for a matrix without.

    An expert may have several matrices, one above the other in the stack. Each keeps its factors: `a` of the
    stack has those of all of them, and `b` is zero where they do not belong together.
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
