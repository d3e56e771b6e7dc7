"""Converts tensors between llama.cpp's and transformers' conventions.

llama.cpp has separate stacks for the gate and up projections, of shape `(experts, out, in)`, whereas
transformers concatenates them into a single stack. (For GPT-OSS it interleaves them, in a stack of shape
`(experts, in, out)`.) Some llama.cpp files also permute the rows of q and k.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.quaxify import quaxify
from ...files.errors import file_error
from ..families import FAMILIES, Family

# Maps llama.cpp's names to transformers' names. If a key has a suffix, such as ".weight", then the array in
# transformers is a bare parameter without one.
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def family_of(metadata: Mapping[str, Any]) -> Family | None:
    """Looks up a file's model family. Returns None if its architecture is unknown."""
    name = metadata.get("general.architecture")
    known = [(x.gguf, x) for x in FAMILIES.values() if x.gguf and x.gguf.name == name]
    marked = [x for gguf, x in known if gguf.marker and metadata.get(f"{name}.{gguf.marker}")]
    return next(iter([*marked, *(x for gguf, x in known if not gguf.marker)]), None)


def _parts(family: Family) -> dict[str, str]:
    """Maps llama.cpp's names within a block to transformers' names."""
    norms = zip(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), family.norms, strict=True)
    fused = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"} if family.fused else {}
    own = family.gguf.parts if family.gguf else {}
    parts = {**_IN_BLOCK, "ffn_gate_inp": f"mlp.{family.router}", **fused}
    parts |= {theirs: ours for theirs, ours in norms if ours}
    return {theirs: family.name(ours) for theirs, ours in parts.items()} | dict(own)


def transformers_name(name: str, family: Family | None) -> str:
    """Converts a llama.cpp tensor name to transformers' name, or returns it unchanged if there is none."""
    if family is None:
        return name
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{family.name(_TOP[stem])}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        return name
    parts, layer = _parts(family), f"{family.name('model.layers')}.{found[1]}"
    if whole := parts.get(found[2]):
        return f"{layer}.{whole}"
    part, _, kind = found[2].rpartition(".")
    return f"{layer}.{parts[part]}.{kind}" if part in parts else name


def llama_cpp_name(name: str, family: Family | None) -> str:
    """The inverse of `transformers_name`: converts transformers' name to llama.cpp's."""
    stem, _, kind = name.rpartition(".")
    named = family.name if family else str
    top = {named(hf): gguf for gguf, hf in _TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    found = re.fullmatch(rf"{re.escape(named('model.layers'))}\.(\d+)\.(.+)", name)
    if family is None or found is None:
        return name
    inner = {hf: gguf for gguf, hf in _parts(family).items()}
    layer, (stem, _, kind) = found[1], found[2].rpartition(".")
    if found[2] in inner:
        return f"blk.{layer}.{inner[found[2]]}"
    return f"blk.{layer}.{inner[stem]}.{kind}" if stem in inner else name


def llama_cpp_names(names: Iterable[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """Maps transformers' names to llama.cpp's names. If llama.cpp splits an array, its first name is used."""
    family = family_of(metadata)
    return {name: tensors_of(name, family)[0] for name in names}


def tensors_of(name: str, family: Family | None) -> tuple[str, ...]:
    """Returns the names of the llama.cpp tensors for an array. There can be several."""
    found = _in_layer(name, family)
    if family is None or found is None or found[1] not in (parts := _joined(family)):
        return (llama_cpp_name(name, family),)
    return tuple(f"blk.{found[0]}.{part}" for part in parts[found[1]])


def joined_by(name: str, family: Family | None) -> str:
    """Returns how an array's rows are distributed over several tensors, as a name in `ORDERS`.

    This is empty for a single tensor, and also for experts: their rows aren't reordered.
    """
    found, own = _in_layer(name, family), family.gguf if family else None
    joined = own.joined.get(found[1]) if own and found else None
    return joined.rows if joined else ""


def joined_tensors(names: Mapping[str, Any], family: Family | None) -> dict[str, tuple[str, ...]]:
    """Maps each array stored as several tensors to these tensors."""
    out: dict[str, tuple[str, ...]] = {}
    for array, parts in (_joined(family) if family else {}).items():
        for name in names:
            layer = name.removesuffix(parts[0])
            tensors = tuple(layer + part for part in parts)
            if re.fullmatch(r"blk\.\d+\.", layer) and all(tensor in names for tensor in tensors):
                out[f"{_layers(family)}.{layer[4:]}{array}"] = tensors
    return out


def _joined(family: Family) -> dict[str, tuple[str, ...]]:
    own = family.gguf.joined if family.gguf else {}
    return {**_EXPERTS, **{name: joined.tensors for name, joined in own.items()}}


def _layers(family: Family | None) -> str:
    return family.name("model.layers") if family else "model.layers"


def _in_layer(name: str, family: Family | None) -> tuple[str, str] | None:
    """Splits a name into the layer number and the name within this layer."""
    found = re.fullmatch(rf"{re.escape(_layers(family))}\.(\d+)\.(.+)", name)
    return None if found is None else (found[1], found[2])


# Experts ------------------------------------------------------------------------------------------

#: Maps transformers' names within a block to pairs of llama.cpp tensors.
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
}
_MATRICES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def stack_experts(path: Path, name: str, parts: Sequence[Any], interleaved: bool) -> Any:
    """Converts one or more llama.cpp expert tensors to a single array in transformers' layout.

    `parts` is either one tensor or the gate and up projections. Matrices are `(experts, out, in)`, and biases
    are `(experts, out)`. If `interleaved`, then transformers' layout alternates between the two projections,
    and matrices are `(experts, in, out)`.

    **Raises:** `CheckpointError` if the two projections have different shapes, or if a tensor is not a stack.
    """
    matrices = name.endswith(_MATRICES)
    swap = _swapped if interleaved and matrices else _same
    shapes = [part.shape for part in parts]
    if len(parts) == 1 and swap is _same:
        return parts[0]
    if len(parts) == 1:
        if len(shapes[0]) != 3:
            raise file_error(path, name, f"must be a stack of matrices; found the shape {shapes[0]}")
        return quaxify(swap)(parts[0])
    if len(shapes[0]) != (3 if matrices else 2) or shapes[0] != shapes[1]:
        raise file_error(path, name, f"must be made of two stacks of the same shape; found {shapes}")
    dtype, count = np.promote_types(*(part.dtype for part in parts)), shapes[0][1]
    order = np.arange(2 * count).reshape(2, count).T.reshape(-1)

    def whole(parts: Sequence[Any]) -> Any:
        x = jnp.concatenate([part.astype(dtype) for part in parts], axis=1)
        return swap(x[:, order] if interleaved else x)

    return quaxify(whole)(list(parts))


def expert_slices(name: str, n_axes: int, interleaved: bool) -> tuple[Callable[[Any], Any], ...]:
    """The inverse of `stack_experts`: returns a function to extract each llama.cpp tensor.

    `n_axes` is the array's number of axes. The result is empty if the array is stored unchanged.
    """
    matrices = name.endswith(_MATRICES)
    swap = _swapped if interleaved and matrices else _same
    if n_axes != (3 if matrices else 2):
        return ()
    if not name.endswith(tuple(_EXPERTS)):
        return () if swap is _same else (swap,)
    if interleaved:
        return lambda x: swap(x)[:, ::2], lambda x: swap(x)[:, 1::2]
    return lambda x: x[:, : x.shape[1] // 2], lambda x: x[:, x.shape[1] // 2 :]


def _same(x: Any) -> Any:
    return x


def _swapped(x: Any) -> Any:
    """Transposes the input and output axes of (a stack of) matrices."""
    return jnp.swapaxes(x, 1, 2)
