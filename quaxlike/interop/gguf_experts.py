"""The experts of a layer, which llama.cpp and transformers stack in different ways.

llama.cpp has one stack of the gates' matrices and one of the values', both `(experts, out, in)`. transformers
has a single stack for the two: gates before values, or, in GPT-OSS, in turn and as `(experts, in, out)`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.quaxify import quaxify
from .errors import complain

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


def together(path: Path, name: str, parts: Sequence[Any], in_turn: bool) -> Any:
    """The array of transformers that these tensors of a file make up.

    **Arguments:**

    - `path`: the name of the file in errors.
    - `name`: of the array.
    - `parts`: one tensor, or gates and values: each `(experts, out, in)`, or `(experts, out)` for biases.
    - `in_turn`: whether gates and values are in turn, and matrices `(experts, in, out)`, in transformers.

    **Raises:** `CheckpointError` for gates and values of different shapes.
    """
    turn = in_turn and name.endswith(_MATRICES)
    if len(parts) == 1:
        return quaxify(_turned)(parts[0]) if turn else parts[0]
    shapes, axes = [part.shape for part in parts], 3 if name.endswith(_MATRICES) else 2
    if len(shapes[0]) != axes or shapes[0] != shapes[1]:
        raise complain(path, name, f"must be made of two stacks of the same shape; found {shapes}")
    dtype, count = np.promote_types(*(part.dtype for part in parts)), shapes[0][1]
    order = np.arange(2 * count).reshape(2, count).T.reshape(-1)

    def whole(parts: Sequence[Any]) -> Any:
        x = jnp.concatenate([part.astype(dtype) for part in parts], axis=1)
        x = x[:, order] if in_turn else x
        return _turned(x) if turn else x

    return quaxify(whole)(list(parts))


def cuts_of(name: str, n_axes: int, in_turn: bool) -> tuple[Callable[[Any], Any], ...]:
    """The inverse of `together`: functions that cut llama.cpp's tensors out of an array of so many axes; none
    if the array is stored as it is."""
    matrix, joined = name.endswith(_MATRICES), halves_of(name) is not None
    turn = _turned if in_turn and matrix else lambda x: x
    if n_axes != (3 if matrix else 2) or not (joined or turn is _turned):
        return ()
    if not joined:
        return (turn,)
    if in_turn:
        return tuple(lambda x, i=i: turn(x)[:, i::2] for i in range(2))
    return lambda x: x[:, : x.shape[1] // 2], lambda x: x[:, x.shape[1] // 2 :]


def _turned(x: Any) -> Any:
    """Exchanges the inputs and outputs of matrices."""
    return jnp.swapaxes(x, 1, 2)
