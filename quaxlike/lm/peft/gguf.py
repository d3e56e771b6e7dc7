"""`save_gguf_adapter`, for saving a LoRA adapter to apply in llama.cpp to a GGUF file of the base model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._checked import checked
from ...arrays.adapted import AdaptedArray, innermost
from ...arrays.lora import LoraArray
from ...core.quaxify import quaxify
from ...core.values import is_value, materialise
from ...files.errors import CheckpointError
from ...surgery.trees import named_arrays, unstacked
from ..checkpoints.checkpoint import open_checkpoint
from ..gguf.config import keys_of
from ..gguf.metadata import as_python
from ..gguf.names import family_of
from ..gguf.writer import parts_of, write
from ..models.decoder_config import completed, text_tower


@checked
def save_gguf_adapter(path: str | os.PathLike[str], model: PyTree, source: str | os.PathLike[str]) -> None:
    """Writes the LoRA adapter of a decoder to a GGUF file. The base model isn't included.

    llama.cpp can then apply the adapter to a GGUF file of the base model, with either `llama-cli --lora` or
    `llama_cpp.Llama(lora_path=…)`.

    **Arguments:**

    - `path`: the file to write.
    - `model`: a decoder from [`quaxlike.lm.load`][] with LoRA, e.g. the output of
        [`quaxlike.lm.peft.load_adapter`][].
    - `source`: the decoder's checkpoint: either a directory or a GGUF file.

    **Raises:** `ValueError` if the adapter can't be represented in GGUF. This is the case for DoRA and any
    other methods, for adapted embeddings, and for weights trained in full. `CheckpointError` if llama.cpp
    doesn't support the architecture.

    !!! example

        ```python
        import quaxlike as ql
        from quaxlike.lm import peft

        def for_llama_cpp(base, adapter):
            model, _ = ql.lm.load(base)
            model = peft.load_adapter(adapter, model)
            peft.save_gguf_adapter("adapter.gguf", model, base)
        ```
    """
    path, source = Path(path), Path(source)
    whole = unstacked(model)
    arrays = named_arrays(whole)
    adapters = {name: x for name, x in arrays.items() if isinstance(x, AdaptedArray)}
    if not adapters:
        raise ValueError("The model has no adapters to save.")
    for name, x in adapters.items():
        if problem := _why_not_in_gguf(x):
            raise _not_held(name, problem)
    checkpoint = open_checkpoint(source)
    if checkpoint.format == "gguf":
        keys = as_python(checkpoint.metadata)
    else:
        keys = as_python(keys_of(completed(text_tower(checkpoint.config)), source))
    family = family_of(keys)
    own = family.gguf if family else None
    tensors = dict[str, np.ndarray]()
    alpha = float(next(iter(adapters.values())).rank)
    for name, x in adapters.items():
        for part in parts_of(path, name, x, keys):
            if part.tensor == name:
                raise CheckpointError(
                    f"{source}: llama.cpp has no tensor for {name} in models of its architecture "
                    f"{keys.get('general.architecture')!r}."
                )
            if own and part.tensor in own.without_adapters:
                raise ValueError(
                    f"{name}: llama.cpp does not apply adapters to {part.tensor}. Merge them into the model "
                    "with `quaxlike.merge` and save that, or `exclude` this layer when you adapt the model."
                )
            a, b, scaling = _factors(name, x, part.cut)
            a = a if part.columns is None else a[..., part.columns]
            b = b if part.rows is None else b[..., part.rows, :]
            for array, scale in (own.adapter_scales if own else {}).items():
                if name.endswith(f".{array}"):
                    factors = np.asarray(arrays[name.removesuffix(array) + scale])  # a vector, so not a Value
                    scaling = scaling * factors[:, None, None]
            tensors[f"{part.tensor}.lora_a"] = a
            tensors[f"{part.tensor}.lora_b"] = b * (scaling * x.rank / alpha).astype(np.float32)
    about = {"general.architecture": keys["general.architecture"], "general.type": "adapter"}
    write(path, tensors, about | {"adapter.type": "lora", "adapter.lora.alpha": np.float32(alpha)})


def _why_not_in_gguf(x: AdaptedArray) -> str:
    if type(x) is not LoraArray:
        return f"it has an adapter of type {type(x).__name__}"
    told = {
        "it is a DoRA": x.magnitude is not None,
        "it has an adapter over another one": isinstance(x.w, AdaptedArray),
        "its base is trained, too": x.gradients == "train",
        "its initialisation took a part of the weight into the adapter": x.taken is not None,
        "it has several adapters": x.ndim != innermost(x).ndim,
    }
    return next((problem for problem, holds in told.items() if holds), "")


def _not_held(name: str, problem: str) -> ValueError:
    return ValueError(f"{name}: {problem}. A GGUF adapter holds LoRA on matrices; merge other adapters.")


def _factors(name: str, x: Any, part: Callable[[Any], Any] | None) -> tuple[np.ndarray, ...]:
    """Returns `a`, `b` and the scaling of an adapter, or just of the part extracted by `part`."""
    cut = x
    if part is not None:
        cut = quaxify(part)(x.with_base(jnp.zeros(x.shape)))
    if not isinstance(cut, LoraArray):
        raise _not_held(name, "the parts that llama.cpp stores one by one are no LoRA of their own")
    if (cut.out_axes, cut.in_axes) != ((-2,), (-1,)):  # GPT-OSS's experts are transposed by `part`
        raise _not_held(name, "it is an embedding, or stored as (in, out)")
    lead = cut.shape[:-2]  # these are the experts, with separate adapters in llama.cpp

    def in_float32(leaf: Any) -> np.ndarray:
        dense = np.asarray(materialise(leaf) if is_value(leaf) else leaf).astype(np.float32)
        return np.broadcast_to(dense, (*lead, *dense.shape[-2:]))

    scaling = np.asarray(cut.scaling, np.float64)
    return in_float32(cut.a), in_float32(cut.b), scaling[..., None, None]
