"""Conversion of tensors between llama.cpp's and transformers' conventions.

llama.cpp has separate stacks for the gate and up projections, of shape `(experts, out, in)`, whereas
transformers concatenates them into a single stack. (For GPT-OSS it interleaves them, in a stack of shape
`(experts, in, out)`.) Some of llama.cpp's files also permute the rows of q and k.
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

# Maps llama.cpp's names to transformers'. Keys with a suffix map to names that have none in transformers.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is None:
        return name
    parts, layer = _parts(family), f"{family.name('model.layers')}.{found[1]}"
    if whole := parts.get(f"{found[2]}.{kind}"):
        return f"{layer}.{whole}"
    return f"{layer}.{parts[found[2]]}.{kind}" if found[2] in parts else name


def llama_cpp_name(name: str, family: Family | None) -> str:
    """The inverse of `transformers_name`."""
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
    """Maps transformers' names to llama.cpp's names. If llama.cpp splits a stack, its first name is used."""
    family = family_of(metadata)
    halves = {name: gate_and_up(name) if family else None for name in names}
    return {name: pair[0] if pair else llama_cpp_name(name, family) for name, pair in halves.items()}


def row_order(
    path: Path, name: str, shape: tuple[int, ...], metadata: Mapping[str, Any]
) -> np.ndarray | None:
    """Returns the permutation that the file applies to the rows of q and k, or None if there isn't one."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    family = family_of(metadata)
    if found is None or family is None or not (family.gguf and family.gguf.permuted):
        return None
    prefix = f"{metadata.get('general.architecture')}.attention."
    heads = metadata.get(f"{prefix}head_count")
    if found[1] == "k":
        heads = metadata.get(f"{prefix}head_count_kv", heads)
    if len(shape) != (2 if found[2] == "weight" else 1):
        raise file_error(
            path, name, f"must be a matrix, or the vector of its biases; found the shape {shape}"
        )
    n = shape[0]
    if type(heads) is not int or heads < 1 or n % heads or n // heads % 2:
        raise file_error(path, name, f"{heads!r} heads do not divide its {n} rows into pairs")
    return np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(-1)


# Experts ------------------------------------------------------------------------------------------

#: Maps transformers' names within a block to the pair of llama.cpp tensors that they are split into.
_JOINED = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
}
_MATRICES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def gate_and_up(name: str) -> tuple[str, str] | None:
    """Returns the two llama.cpp tensors that store a stack of experts, or None for any other array."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found is None or found[2] not in _JOINED:
        return None
    gate, up = _JOINED[found[2]]
    return f"blk.{found[1]}.{gate}", f"blk.{found[1]}.{up}"


def expert_stacks(names: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Maps each stack of experts to the llama.cpp tensors that store it."""
    out: dict[str, tuple[str, ...]] = {}
    for name in names:
        for whole, (gate, up) in _JOINED.items():
            found = re.fullmatch(rf"blk\.(\d+)\.{re.escape(gate)}", name)
            if found and (other := f"blk.{found[1]}.{up}") in names:
                out[f"model.layers.{found[1]}.{whole}"] = (name, other)
    return out


def stack_experts(path: Path, name: str, parts: Sequence[Any], interleaved: bool) -> Any:
    """Converts one or more of llama.cpp's expert tensors to a single array in transformers' layout.

    `parts` is either one tensor or the gate and up projections. Matrices are `(experts, out, in)`, and biases
    are `(experts, out)`. If `interleaved`, then transformers' layout alternates between the two projections,
    with matrices being `(experts, in, out)`.

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
    """The inverse of `stack_experts`: returns a function to extract each of llama.cpp's tensors.

    `n_axes` is the number of axes of the array. The result is empty if the array is stored unchanged.
    """
    matrices = name.endswith(_MATRICES)
    swap = _swapped if interleaved and matrices else _same
    if n_axes != (3 if matrices else 2):
        return ()
    if gate_and_up(name) is None:
        return () if swap is _same else (swap,)
    if interleaved:
        return lambda x: swap(x)[:, ::2], lambda x: swap(x)[:, 1::2]
    return lambda x: x[:, : x.shape[1] // 2], lambda x: x[:, x.shape[1] // 2 :]


def _same(x: Any) -> Any:
    return x


def _swapped(x: Any) -> Any:
    """Transposes the input and output axes of (a stack of) matrices."""
    return jnp.swapaxes(x, 1, 2)
