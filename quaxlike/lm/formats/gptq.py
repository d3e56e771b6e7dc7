"""GPTQ, i.e. 2-, 3-, 4- or 8-bit codes packed down each column, with packed zero points.

Source: the layouts of AutoGPTQ and GPTQModel, <https://github.com/ModelCloud/GPTQModel>.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._patterns import PatternError, startmatch
from ...files.errors import quoted
from ...files.tensors import Tensors
from ...kernels.bits import unpack
from ..folders.entries import warn_of_unknown
from .format import (
    INT32,
    OF_ALL,
    Format,
    StoredLayer,
    StoredWeight,
    group_size,
    integer,
    integers,
    layers,
    num_words,
    settings,
    settings_in,
    stream,
    weight,
)

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def weights(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        kind = "marlin" if config.get("is_marlin_format") else kind
        raise tensors.error("checkpoint_format", f"gptq and gptq_v2 can be read; found {quoted(kind)}")
    out: dict[str, StoredWeight] = {}
    for layer in layers(tensors, *_PARTS):
        own = _own_config(config, layer)
        out |= weight(layer, _PARTS, lambda layer=layer, own=own: _read(layer, own, kind == "gptq"))
    return out


def _own_config(config: Mapping[str, Any], layer: StoredLayer) -> Mapping[str, Any]:
    """Returns the settings for a single layer. (Regular expressions in `dynamic` can override them.)"""
    dynamic = settings(config, "dynamic", layer.tensors.path)
    for pattern in dynamic:
        own = settings(dynamic, pattern, layer.tensors.path)
        exclude, pattern = pattern.startswith("-:"), re.sub(r"^[-+]:", "", pattern)
        try:
            found = startmatch(pattern, layer.name)
        except PatternError as error:
            raise layer.error(None, f"`dynamic` has the pattern {quoted(pattern)}: {error}") from None
        if found and exclude:
            raise layer.error(
                "qweight", f"is there, though `dynamic` leaves it out by {quoted(f'-:{pattern}')}"
            )
        if found:
            known = (*OF_ALL, *FORMAT.used, *FORMAT.without_effect)
            warn_of_unknown(f"The quantisation config of {layer.tensors.path}, `dynamic`,", own, known)
            return {**config, **own}
    return config


def _read(layer: StoredLayer, config: Mapping[str, Any], plus_one: bool) -> Any:
    path = layer.tensors.path
    bits = integer(config, "bits", path, among=(2, 3, 4, 8))
    group = group_size(config, path)
    rows, n = layer.shape("qweight", 2)
    k = layer.shape("g_idx", 1)[0] if "g_idx" in layer else rows * 32 // bits
    block = k if group is None else group
    groups = 1 if block is None else math.ceil(k / block)
    if bits == 3 and (k % 32 or n % 32):
        raise layer.error(None, f"3 bits take multiples of 32 inputs and outputs; found {k} and {n}")
    packed = layer.get("qweight", [INT32], (num_words(k, bits), n))
    zeros = layer.get("qzeros", [INT32], (groups, num_words(n, bits)))
    scale = layer.scales("scales", (groups, n))
    codes = unpack(stream(packed.T), bits, k)
    zero = _zeros(zeros, bits, n, plus_one)
    usual = np.arange(k) // block
    if "g_idx" not in layer and ((config.get("desc_act") and groups > 1) or k % 32 or k % block):
        raise layer.error("g_idx", f"is missing: the order, or the number, of its {k} columns is unknown")
    index = layer.get("g_idx", [INT32], (k,)) if "g_idx" in layer else usual
    if index.min() < 0 or index.max() >= groups:
        raise layer.error(
            "g_idx", f"expected groups up to {groups - 1}; found {index.min()} to {index.max()}"
        )
    order = None
    if not np.array_equal(index, usual):
        if not config.get("desc_act"):
            raise layer.error("g_idx", "the columns are not in order, but the config does not say desc_act")
        order = np.argsort(index, kind="stable")
        codes, index = codes[:, order], index[order]
    scale, zero = np.ascontiguousarray(scale.T), np.ascontiguousarray(zero.T)
    # The index doesn't match the group size, so store one scale per column.
    if not np.array_equal(index, usual):
        scale, zero, block = scale[:, index], zero[:, index], 1
    return integers(codes, scale, zero, bits=bits, block=block, order=order)


def _zeros(packed: np.ndarray, bits: int, n: int, plus_one: bool) -> np.ndarray:
    """Reads the zero points. In version 1 of the format, they are stored with one subtracted.

    The libraries writing these files subtract one from every code by arithmetic on whole words, so borrows
    propagate from one code to the next. To undo this, add one by arithmetic on whole words as well.
    """
    per_word = 32 if bits == 3 else 32 // bits
    held = packed.shape[1] * 32 // bits
    fields = unpack(stream(packed), bits, held)
    if plus_one:
        words = fields.reshape(*fields.shape[:-1], -1, per_word).astype(np.uint16)
        carry = np.zeros_like(words[..., 0])
        for i in range(per_word):
            raised = words[..., i] + 1 + carry
            words[..., i], carry = raised & (2**bits - 1), raised >> bits
        fields = words.astype(np.uint8).reshape(fields.shape)
    return fields[:, :n]


FORMAT = Format(
    ("gptq",), weights, codes=(".qweight", ".qzeros", ".g_idx"),
    settings=settings_in("quantize_config.json", "gptq"),  # AutoGPTQ
    used=("bits", "group_size", "desc_act", "checkpoint_format", "format", "is_marlin_format", "dynamic"),
    # About the quantisation procedure, software or kernels, or inferred from the tensors.
    without_effect=(
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware",
        "sym", "lm_head", "pack_dtype", "meta", "method", "model_file_base_name", "model_name_or_path",
        "quantizer", "tokenizer", "dataset", "batch_size", "pad_token_id", "model_seqlen", "max_input_length",
        "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "cache_block_outputs", "backend",
    ),
)  # fmt: skip
