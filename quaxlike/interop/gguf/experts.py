"""The experts of a layer, which llama.cpp and transformers stack in different ways.

llama.cpp has one stack of the gates' matrices and one of the values', both `(experts, out, in)`. transformers
has a single stack for the two: gates before values, or, in GPT-OSS, alternating, as `(experts, in, out)`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.quaxify import quaxify
from ..files.errors import complain

#: transformers' names within a block, and the two tensors of llama.cpp.
_JOINED = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
}
_MATRICES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def halves_of(name: str) -> tuple[str, str] | None:
    """The two llama.cpp tensors that a stack of experts consists of; None for any other array."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found is None or found[2] not in _JOINED:
        return None
    gate, up = _JOINED[found[2]]
    return f"blk.{found[1]}.{gate}", f"blk.{found[1]}.{up}"


def joined(names: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The stacks of experts that two llama.cpp tensors make up: from the stack's name to theirs."""
    out: dict[str, tuple[str, ...]] = {}
    for name in names:
        for whole, (gate, up) in _JOINED.items():
            found = re.fullmatch(rf"blk\.(\d+)\.{re.escape(gate)}", name)
            if found and (other := f"blk.{found[1]}.{up}") in names:
                out[f"model.layers.{found[1]}.{whole}"] = (name, other)
    return out


def together(path: Path, name: str, parts: Sequence[Any], interleaved: bool) -> Any:
    """The array of transformers that these tensors of a file make up.

    **Arguments:**

    - `path`: the name of the file in errors.
    - `name`: of the array.
    - `parts`: one tensor, or gates and values: each `(experts, out, in)`, or `(experts, out)` for biases.
    - `interleaved`: whether gates and values alternate in transformers, where matrices are `(experts, in,
        out)` then.

    **Raises:** `CheckpointError` for gates and values of different shapes, and for what is no stack.
    """
    matrices = name.endswith(_MATRICES)
    swap = _swapped if interleaved and matrices else _same
    shapes = [part.shape for part in parts]
    if len(parts) == 1 and swap is _same:
        return parts[0]
    if len(parts) == 1:
        if len(shapes[0]) != 3:
            raise complain(path, name, f"must be a stack of matrices; found the shape {shapes[0]}")
        return quaxify(swap)(parts[0])
    if len(shapes[0]) != (3 if matrices else 2) or shapes[0] != shapes[1]:
        raise complain(path, name, f"must be made of two stacks of the same shape; found {shapes}")
    dtype, count = np.promote_types(*(part.dtype for part in parts)), shapes[0][1]
    order = np.arange(2 * count).reshape(2, count).T.reshape(-1)

    def whole(parts: Sequence[Any]) -> Any:
        x = jnp.concatenate([part.astype(dtype) for part in parts], axis=1)
        return swap(x[:, order] if interleaved else x)

    return quaxify(whole)(list(parts))


def cuts_of(name: str, n_axes: int, interleaved: bool) -> tuple[Callable[[Any], Any], ...]:
    """The inverse of `together`: functions that cut llama.cpp's tensors out of an array of so many axes; none
    if the array is stored as it is."""
    matrices = name.endswith(_MATRICES)
    swap = _swapped if interleaved and matrices else _same
    if n_axes != (3 if matrices else 2):
        return ()
    if halves_of(name) is None:
        return () if swap is _same else (swap,)
    if interleaved:
        return lambda x: swap(x)[:, ::2], lambda x: swap(x)[:, 1::2]
    return lambda x: x[:, : x.shape[1] // 2], lambda x: x[:, x.shape[1] // 2 :]


def _same(x: Any) -> Any:
    return x


def _swapped(x: Any) -> Any:
    """Exchanges the inputs and outputs of matrices."""
    return jnp.swapaxes(x, 1, 2)
