"""`load` and `save`, for models in the format of transformers' checkpoint directories."""

import dataclasses
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.quantized import AbstractQuantizedArray
from ..core.quaxify import quaxify
from ..core.values import is_value, materialise
from ..files.errors import CheckpointError, listed, quoted
from ..files.json_text import read_json_file
from ..kernels.native.library import Library, library
from ..sharding.placing import Rule as SpecRule
from ..sharding.placing import by_name
from ..sharding.reading import RowReader, read_onto
from ..surgery.quantize import is_quantised, quantizers
from ..surgery.trees import layer_of, named_arrays, replace, tensors_of, unstacked
from .architectures import architecture_of, is_of_pretraining, unknown, without_pretraining
from .checkpoints.checkpoint import Checkpoint, open_checkpoint
from .checkpoints.saving import save_like
from .families import BESIDE_TEXT, BODY_OF_TOWER, FAMILIES, IN_TOWER
from .folders.companions import hint_for, modules_of
from .folders.file_pair import Pair
from .folders.labels import Labels, numbered
from .formats.mxfp4 import in_published_layout
from .gguf.container import holds_gguf
from .gguf.mixtures import mixture_of
from .models.classifier import AbstractClassifier
from .models.decoder_config import (
    DecoderConfig,
    is_text_tower,
    is_tied_by_default,
    text_tower,
    warn_of_unread,
)
from .models.vocabulary import embeddings, is_of_tokens
from .sharding import usual_rule
from .to_gguf import save_gguf


@checked
def load(
    directory: str | os.PathLike[str],
    *,
    quantize: str | Mapping[str, Any] | None = None,
    head: bool = False,
    dtype: DTypeLike | None = None,
    compute: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    sharding: SpecRule | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Loads a model from a checkpoint directory or a GGUF file.

    A directory must contain `config.json` and `model.safetensors`. (The latter can be split into shards.)
    GGUF files already contain their configuration.

    Weights are loaded one at a time and keep their dtypes. Quantised weights can be in any format supported
    by [`quaxlike.lm.read`][]. They become quantised arrays, with the configuration's `dtype` as their logical
    dtype. If the format also quantises embeddings (GGUF and MLX), then the model computes in float32, except
    that products with quantised weights are as for `compute="bfloat16"` on CPUs multiplying this natively
    (AVX-512 BF16, AMX). You can override any of these using `dtype`.

    **Arguments:**

    - `directory`: a folder written by transformers' `save_pretrained`, a GGUF file, a folder containing one,
        or the first part of a split GGUF file.
    - `quantize`: how to quantise the weights of linear layers and experts: a [`quaxlike.quantize`][] scheme,
        a recipe, or a dict with `"scheme"` and its options. Weights are quantised as they are loaded, so at
        most one of them is in memory unquantised. Defaults to not quantising.
    - `head`: whether to also quantise the output layer, or the embedding if tied to it. See
        [`quaxlike.quantize`][]. This has no effect if the head is already quantised. Defaults to False.
    - `dtype`: the dtype to compute in, such as `"bfloat16"`. This is then also the logical dtype of quantised
        weights. Defaults to the above.
    - `compute`: if `"int8"`, then products with quantised weights on a CPU round their inputs to 8 bits, in
        blocks of 32, like llama.cpp. This needs the native products: compile them with
        [`quaxlike.kernels.native.build`][]. If `"bfloat16"`, then these products round their inputs to that
        dtype. Defaults to the above.
    - `mesh`, `sharding`: as for [`quaxlike.lm.read`][]. Weights are quantised as they are loaded. The default
        `sharding` also takes the classes of layers into account, like [`quaxlike.lm.tensor_parallel`][].

    **Returns:** the model and its `config.json` (or the equivalent for a GGUF file). For multimodal models
    (Gemma 3, Mistral 3), both are for just the decoder. If a decoder was saved without its output layer
    (`LlamaModel`), then the model has hidden states, but no logits. If an encoder was saved with its
    pretraining head (`BertForMaskedLM`), then this is left out with a warning. Any unused entries in
    `config.json` also result in a warning. So does an output layer tied to the embedding if `lm_head.weight`
    has different values: these are then used, as in transformers.

    **Raises:** `FileNotFoundError` if there is no checkpoint. `UnsupportedConfigError` if the architecture or
    an option is not supported. `CheckpointError` if a tensor is missing or unexpected, has the wrong shape,
    or has a dtype that can't be used for computation. `ValueError` if `dtype` can't be used for computation,
    if `sharding` is passed without a mesh or doesn't fit a weight, if `head` is passed without `quantize`, or
    if `compute` is passed without any quantised weights or for a format that doesn't support it.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        def logits(directory):
            model, config = ql.lm.load(directory, quantize="nf4")
            return ql.quaxify(model)(jnp.arange(5))
        ```
    """
    skeleton, config, weights = open_model(directory)
    if sharding is not None and mesh is None:
        raise ValueError("`sharding` says how weights are spread over a mesh: pass `mesh` too.")
    is_recipe = isinstance(quantize, Mapping) and "scheme" not in quantize
    options = {"scheme": quantize} if isinstance(quantize, str) or is_recipe else quantize
    if head and not options:
        raise ValueError("`head` says that the output layer is quantised as well: pass `quantize` too.")
    if dtype is not None and not _computes(dtype):
        raise ValueError(
            "Models compute in bfloat16, float16, float32, or with jax_enable_x64 in float64; found "
            f"dtype={dtype!r}."
        )
    given = compute
    if compute is None and dtype is None and weights.quantises_embeddings:
        compute = _usual_compute()
    chosen = quantizers(skeleton, **{"head": head, "compute": compute, **options}) if options else {}

    def made(name: str, leaf: Any) -> Any:
        """Converts a weight (or just some of its rows) to the array used in the model."""
        leaf = leaf.astype(jnp.float32) if weights.quantises_embeddings else leaf
        if compute is not None and isinstance(leaf, AbstractQuantizedArray):
            leaf = _computed(name, leaf, compute)
        leaf = leaf if name not in chosen or is_value(leaf) else chosen[name](leaf)
        return leaf if dtype is None else leaf.astype(dtype)

    arrays = named_arrays(skeleton)
    loaded: dict[str, Any] = {}
    rule: Any = None  # without a mesh
    if sharding is not None:
        rule = by_name(sharding, arrays)
    elif mesh is not None:
        like = {name: eqx.filter_eval_shape(partial(made, name), leaf) for name, leaf in arrays.items()}
        rule = usual_rule(mesh, replace(skeleton, like))
    for name, files in sources(skeleton, weights, directory).items():
        rows = _rows_of(name, files, tuple(arrays[name].shape), weights, directory)
        rows = dataclasses.replace(rows, then=partial(made, name))
        loaded[name] = rows.then(rows.read()) if mesh is None else read_onto(name, rows, mesh, rule)
    if given is not None and not is_quantised(loaded):
        raise ValueError(
            f"compute={given!r} only affects products with quantised weights, and this model has none. "
            "Pass `quantize` as well, or leave `compute` out."
        )
    return replace(skeleton, loaded), config


def _usual_compute() -> str | None:
    """Chooses how to compute products with weights in a format that doesn't specify a dtype.

    Rounding to bfloat16 changes products by less than storing weights in 8 bits did, and by much less than
    rounding inputs to 8 bits, as llama.cpp does.
    """
    found = library()
    narrow = isinstance(found, Library) and found.multiplies_bfloat16 and jax.default_backend() == "cpu"
    return "bfloat16" if narrow else None


def _computed(name: str, w: AbstractQuantizedArray, compute: str) -> AbstractQuantizedArray:
    try:
        return dataclasses.replace(w, compute=compute)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@checked
def save(
    directory: str | os.PathLike[str],
    model: PyTree,
    source: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    quantize: str | Mapping[Any, Any] | None = None,
) -> None:
    """Saves a model to a directory for use with transformers, or to a GGUF file for use with llama.cpp.

    Arrays are saved under the same names as in the original checkpoint, including separate tensors for each
    expert if it has these. The tokeniser, templates and generation settings are copied under transformers'
    usual names, replacing those of any other model. In `config.json`, this updates the sizes of the
    vocabulary, learned positional embeddings and the classification layer, as well as the architecture if
    [`quaxlike.lm.models.with_classifier`][] was used. A GGUF file contains all of these itself, but doesn't
    support classifiers.

    **Arguments:**

    - `directory`: the folder to write to, created if necessary. For GGUF, a file, or a folder for
        `model.gguf`.
    - `model`: the output of [`quaxlike.lm.load`][], possibly with different weights. Supported types are
        plain arrays; `NF4Array` and `FP4Array`, saved in bitsandbytes' format; `BlockArray` with codec
        `mxfp4`, saved in GPT-OSS's format; and `Int8Array` and any other `BlockArray`, saved in
        compressed-tensors' format. For GGUF, plain arrays and `BlockArray` with llama.cpp's codecs. Adapters
        must be merged first.
    - `source`: the directory the model was loaded from. For GGUF, this can also be a GGUF file.
    - `format`: `"safetensors"`, `"gguf"`, or `"quaxlike"`. The latter is a directory for
        [`quaxlike.lm.load`][], and can contain any type of weight, e.g. from a recipe.
    - `quantize`: the type to convert weights to, for GGUF: `"f32"`, `"f16"`, `"bf16"`, `"q8_0"`, `"q4_0"`,
        `"q4_1"`, `"q5_0"`, `"q5_1"`, `"q2_k"` to `"q6_k"`, `"iq4_nl"`, `"iq4_xs"` or `"mxfp4"`.
        Alternatively, a [`quaxlike.quantize`][] recipe or the name of one. If llama.cpp's own tool has a
        preset of this name, then each weight has the same type as there: `"q4_k_m"`, `"q5_k_m"`,
        `"mxfp4_moe"`, and all types but `"q3_k"`, `"q4_k"`, `"q5_k"` and `"mxfp4"`. For example, values have
        5 bits in `"iq4_nl"` if four heads share them. Weights already quantised to another type are rounded
        again. As in llama.cpp, vectors and routers stay in float32, the output layer (or tied embedding) uses
        `q6_k` or `q8_0` if other weights have fewer bits, and rows that aren't a multiple of the block size
        use a fallback type. Defaults to the weights' existing types.

    **Raises:** `ValueError` if `format` or `quantize` is unknown. `CheckpointError` if weights have an
    unsupported type or are in several formats; if shapes contradict each other or the configuration; or if a
    file to be copied is not a regular file, or links to outside `source` (other than into a Hugging Face
    cache). For GGUF, also if the architecture, an option, the tokeniser or a value can't be represented. In
    all of these cases nothing is written.

    !!! example

        ```python
        import quaxlike as ql
        from quaxlike.lm import peft

        def merged(base, adapter, out):
            model, _ = ql.lm.load(base)
            ql.lm.save(out, ql.merge(peft.load_adapter(adapter, model)), base)

        def for_llama_cpp(model, base):
            file = "model-q8_0.gguf"
            ql.lm.save(file, model, base, format="gguf", quantize="q8_0")
        ```
    """
    source = Path(source)
    if format not in ("safetensors", "gguf", "quaxlike"):
        raise ValueError(f"models.save writes format='safetensors', 'gguf' or 'quaxlike'; found {format!r}.")
    if quantize is not None and format != "gguf":
        raise ValueError(f"quantize={quantize!r} is for format='gguf'; call `quaxlike.quantize` before.")
    path = Pair(source).config_path()
    if format != "gguf" and holds_gguf(source) and not path.is_file():
        raise CheckpointError(
            f"{source} is a GGUF file, whose tokeniser and settings are only written to other GGUF files: "
            "use format='gguf', or a directory of the same model as the source."
        )
    if format == "gguf" and holds_gguf(source):
        config = dict(open_checkpoint(source).config)
    else:
        config = without_pretraining(text_tower(read_json_file(path, "the configuration")))
    model = unstacked(model)
    mixture = None if quantize is None else mixture_of(model, quantize)
    arrays, names = named_arrays(model), list(text_tensors(open_checkpoint(source)))
    if not arrays:
        raise TypeError(f"models.save takes a model from models.load; found {model!r}, without arrays.")
    if isinstance(model, AbstractClassifier):
        config |= model.entries()
        names = _under_own_names(model, names)
    elif "lm_head.weight" in arrays:
        names = _with_untied(model, names)
    config = _described_by(arrays, config, source)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(next(iter(arrays.values())).dtype)
    if format == "gguf":
        save_gguf(Path(directory), arrays, config, source, mixture)
        return
    own = format == "quaxlike"
    if own:
        tensors = {name: in_published_layout(name, x) for name, x in arrays.items()}
    else:
        tensors = _split_into_tensors(arrays, sources(model, names, source))
    save_like(source, Path(directory), tensors, config, own)


#: Entries of `config.json` for the number of rows in an array, together with the suffix of its name. (The
#: vocabulary size is instead determined by the embeddings.)
_ROWS = {
    "max_position_embeddings": ("wpe.weight", "position_embeddings.weight"),
    "type_vocab_size": ("token_type_embeddings.weight",),
    "num_labels": ("classifier.weight", "score.weight"),
    "vocab_size_per_layer_input": ("embed_tokens_per_layer.weight",),
}


def _described_by(arrays: Mapping[str, Any], config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Updates a checkpoint's configuration to match the array shapes in a model.

    **Raises:** `CheckpointError` if an array still doesn't match, or if a special token is outside a shrunk
    vocabulary. (Either way the checkpoint couldn't be loaded.)
    """
    config, path = dict(config), source if source.is_file() else source / "config.json"
    read, make = architecture_of(path, config, arrays)
    parsed = read.from_json(config)
    renamed: Mapping[str, str] = parsed.family.renamed if isinstance(parsed, DecoderConfig) else {}
    of_tokens = tuple(f"{name}.weight" for name in embeddings())
    for entry, ends in {"vocab_size": of_tokens, **_ROWS}.items():
        size = next((x.shape[0] for name, x in arrays.items() if name.endswith(ends)), None)
        if size is None or getattr(parsed, entry, size) == size:
            continue
        # The real names are unknown, so use transformers' default names.
        if entry == "num_labels":
            config |= Labels(numbered(size), parsed.labels.problem_type).entries()
            continue
        config[renamed.get(entry, entry)] = size
        for token in ("bos_token_id", "eos_token_id", "pad_token_id") if entry == "vocab_size" else ():
            ids = config.get(token)
            if any(type(i) is int and i >= size for i in (ids if isinstance(ids, list) else [ids])):
                raise CheckpointError(
                    f"The model has a vocabulary of {size} tokens, and {path} has {token}={quoted(ids)}. Set "
                    "that to a token that is left, in a copy of the checkpoint, and pass that as `source`."
                )
    writes = isinstance(parsed, DecoderConfig) and parsed.writes
    if writes and parsed.tie_word_embeddings == ("lm_head.weight" in arrays):
        config["tie_word_embeddings"] = not parsed.tie_word_embeddings
    skeleton = named_arrays(eqx.filter_eval_shape(make, read.from_json(config), key=jax.random.key(0)))
    if added := [name for name in arrays if name not in skeleton]:
        raise CheckpointError(
            f"The model has {listed(added)}, for which a model with the configuration in {path} has no "
            "place. If an adapter added biases to layers without any (`lora_bias`), save it as an adapter."
        )
    for name, leaf in skeleton.items():
        if name in arrays and tuple(arrays[name].shape) != tuple(leaf.shape):
            raise CheckpointError(
                f"{name} is of shape {tuple(arrays[name].shape)}, where a model with the configuration in "
                f"{path} has {tuple(leaf.shape)}, so that nothing could load it. Change the entry that gives "
                "this size in a copy of the checkpoint, and pass that as `source`; "
                "`quaxlike.lm.resize_vocabulary` changes all arrays of a vocabulary."
            )
    return config


def open_model(directory: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], Checkpoint]:
    """Returns a checkpoint's model (with `jax.ShapeDtypeStruct`s for arrays), `config.json`, and weights.

    This doesn't read the weights yet.

    **Raises:** as for `load`, except for any errors about the weights.
    """
    path = Pair(Path(directory)).config_path()
    if not path.is_file() and not holds_gguf(Path(directory)):
        raise FileNotFoundError(
            f"There is no {path}: a checkpoint directory must hold config.json or a GGUF file."
            f"{hint_for(directory)}"
        )
    weights = open_checkpoint(directory)
    kind = weights.metadata.get("general.type", "model") if weights.format == "gguf" else "model"
    if kind != "model":
        raise CheckpointError(
            f"{directory} is a GGUF file of type {quoted(kind)} rather than a model. An adapter is read from "
            "the directory that PEFT or quaxlike wrote."
        )
    path = path if path.is_file() else Path(directory)
    config = without_pretraining(text_tower(weights.config))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if weights.format != "gguf" and dtype in ("bfloat16", "float16"):
        weights = weights.standing_for(dtype)
    if weights.format == "gguf" and not config:
        found = quoted(weights.metadata.get("general.architecture"))
        known = dict.fromkeys(family.gguf.name for family in FAMILIES.values() if family.gguf)
        raise unknown(path, found, "GGUF", known)
    read, make = architecture_of(path, config, weights)
    _check_sizes(path, config, weights)
    parsed = read.from_json(config)
    warn_of_unread(path, weights.config, config, parsed)
    writes = isinstance(parsed, DecoderConfig) and parsed.writes
    if writes and not parsed.tie_word_embeddings and "lm_head.weight" not in text_tensors(weights):
        if is_tied_by_default(weights.config):
            config["tie_word_embeddings"] = True
            parsed = read.from_json(config)
        else:
            parsed = dataclasses.replace(parsed, headless=bool(modules_of(Path(directory))))
    if isinstance(parsed, DecoderConfig) and is_text_tower(weights.config):
        parsed = dataclasses.replace(parsed, body_name=BODY_OF_TOWER)
    model = eqx.filter_eval_shape(make, parsed, key=jax.random.key(0))
    if left_out := [name for name in weights if is_of_pretraining(model, name)]:
        warnings.warn(
            f"{path} is of an encoder with the head that it was pretrained with, which is left out: "
            f"{listed(left_out)}.",
            stacklevel=3,
        )
    if writes and parsed.tie_word_embeddings and _has_own_head(model, weights, path):
        warnings.warn(
            f"{path} ties the output layer to the embedding, and the checkpoint has both with different "
            "numbers. Its lm_head.weight is the output layer, untied, as in transformers. "
            "`tie_word_embeddings` false in that file says the same without this warning.",
            stacklevel=3,
        )
        config["tie_word_embeddings"] = False
        parsed = dataclasses.replace(parsed, tie_word_embeddings=False)
        model = eqx.filter_eval_shape(make, parsed, key=jax.random.key(0))
    return model, config, weights


def _has_own_head(model: Any, weights: Checkpoint, source: Any) -> bool:
    """Returns whether the output layer in a file differs from the embedding it is supposedly tied to."""
    if (head := text_tensors(weights).get("lm_head.weight")) is None:
        return False
    name = f"{model.config.family.name('model.embed_tokens')}.weight"
    (embedding,) = sources(model, weights, source)[name]
    ours, theirs = weights.rows(embedding), weights.rows(head)
    if ours.count is None or ours.count != theirs.count:
        return not _are_equal(weights[embedding], weights[head])
    step = math.lcm(ours.step, theirs.step, _ROWS_AT_ONCE)
    starts = range(0, ours.count, step)
    spans = ((start, min(start + step, ours.count)) for start in starts)
    return not all(_are_equal(ours.read(*span), theirs.read(*span)) for span in spans)


_ROWS_AT_ONCE = 4096


def _are_equal(a: Any, b: Any) -> bool:
    a, b = (np.asarray(materialise(x) if is_value(x) else x) for x in (a, b))
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def _check_sizes(path: Path, config: Mapping[str, Any], weights: Checkpoint) -> None:
    """Checks that the sizes in the configuration are possible, given the tensors in the checkpoint.

    Do this before anything else, so that a damaged file can't result in building a huge model.

    **Raises:** `CheckpointError` if a size is impossible.
    """
    sizes = (*_SIZES, *(entry for family in FAMILIES.values() for entry in family.sizes))
    limits = dict.fromkeys(sizes, (32 * weights.longest_axis, "the axes of its tensors"))
    # There are at least four weights in every layer.
    limits |= dict.fromkeys(_LAYERS, (len(weights) // 4, f"its {len(weights):,} weights"))
    for name, (most, why) in limits.items():
        if type(size := config.get(name)) is int and size > most:
            raise CheckpointError(f"{path} has {name}={quoted(size)}; no more than {most:,} fit {why}.")


_LAYERS = ("num_hidden_layers", "n_layer")
_SIZES = (
    *("hidden_size", "n_embd", "intermediate_size", "n_inner", "vocab_size", "type_vocab_size"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input"),
)


def text_tensors(names: Collection[str]) -> dict[str, str]:
    """Maps tensor names in a checkpoint of just the decoder to their names in this checkpoint."""
    if not any("language_model." in name for name in names):
        return {name: name for name in names}
    found = {IN_TOWER.sub("", name): name for name in names if not BESIDE_TEXT.match(name)}
    return {new if new.startswith("lm_head.") else f"model.{new}": name for new, name in found.items()}


def sources(model: Any, names: Collection[str], directory: Any) -> dict[str, list[str]]:
    """Returns the tensors making up each array in the model.

    **Raises:** `CheckpointError` if any tensors are missing or unexpected.
    """
    config, (wanted, files) = getattr(model, "config", None), _wanted_and_found(model, names)
    used = {file for own in wanted.values() for file in own}
    missing = sorted(used - files.keys())
    known = {*used, "lm_head.weight"}  # some files contain this even though it is tied
    beside = config.family.beside if isinstance(config, DecoderConfig) else ""
    is_apart = re.compile(rf"(model\.)?{beside}\..*" if beside else "(?!)").fullmatch
    unknown = [x for x in files if not (x in known or _BUFFERS.fullmatch(x) or is_apart(x))]
    if missing or unknown:
        raise CheckpointError(
            f"{directory} does not fit the model of its config.json. "
            f"Missing: {listed(missing) or 'none'}. Unknown: {listed(unknown) or 'none'}."
        )
    return {name: [files[file] for file in own] for name, own in wanted.items()}


def _wanted_and_found(model: Any, names: Collection[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the tensors making up each array in the model, and where to find each tensor in the file.

    The former are transformers' names. The names in the file may differ, if it was saved as part of a larger
    model or vice versa.
    """
    config = getattr(model, "config", None)
    text = {
        _OLDER_NORM.sub(lambda found: _OF_NORM[found[0]], name): file
        for name, file in text_tensors(names).items()
        if not is_of_pretraining(model, name)
    }
    experts = config.num_local_experts * sum(config.sparse) if isinstance(config, DecoderConfig) else 0
    joined = experts > len(names)  # there aren't enough tensors for each expert to have its own
    arrays = named_arrays(model)
    # A stack of experts can be a single tensor, also in the files of a body.
    whole = {name for name in arrays if joined or name in text or name.partition(".")[2] in text}
    wanted = {name: [name] if name in whole else tensors_of(model, name) for name in arrays}
    used, files = {file for own in wanted.values() for file in own}, text
    if not used & files.keys():
        head = Counter(file.partition(".")[0] for file in used).most_common(1)[0][0]
        inside = {name.partition(".")[2]: file for name, file in text.items()}
        files = inside if used & inside.keys() else {f"{head}.{name}": file for name, file in text.items()}
    if "lm_head.weight" in files and "lm_head.weight" not in used:
        # Some programs only keep one name of a tied weight, and choose the other one.
        embeds = [name for name in used - files.keys() if layer_of(name).rpartition(".")[2] in embeddings()]
        files = {**files, **dict.fromkeys(embeds, files["lm_head.weight"])}
    return wanted, files


def _with_untied(model: Any, names: list[str]) -> list[str]:
    """Returns the tensor names for a model with its own output layer.

    If the checkpoint ties this to the embedding, then it may contain just one of the two. In this case all
    arrays get transformers' names, so that the other one gets a name consistent with these.
    """
    wanted, files = _wanted_and_found(model, names)
    lacking = [name for name in wanted if is_of_tokens(name) and name not in files]
    return [*files, *lacking] if lacking else names


def _under_own_names(model: Any, names: Collection[str]) -> list[str]:
    """Returns the tensor names for a model with a replaced head.

    Arrays have the same names as in the checkpoint, except for the new head. This keeps its own name even if
    the checkpoint has tensors with the same prefix.
    """
    parts = {name: tensors_of(model, name) for name in named_arrays(model)}
    return [file for name, own in parts.items() for file in (own if {*own} <= {*names} else [name])]


# Reads arrays, each of which is either a single tensor or a stack of experts ----------------------


def _rows_of(
    name: str, files: Sequence[str], shape: tuple[int, ...], weights: Checkpoint, source: Any
) -> RowReader:
    """Returns a reader for the rows of an array stored as the tensors `files`.

    The reader raises `CheckpointError` if the shape is wrong, or if the dtype can't be used for computation.
    """

    def checked(leaf: Any, start: int = 0, stop: int = shape[0]) -> Any:
        expected = (min(stop, shape[0]) - start, *shape[1:])
        if tuple(leaf.shape) != expected:
            raise CheckpointError(f"{source}: {name} must be of shape {expected}; found {tuple(leaf.shape)}.")
        if not _computes(leaf.dtype):
            raise CheckpointError(
                f"{source}: {name} must be of float32, bfloat16 or float16 (or float64 with jax_enable_x64); "
                f"found {leaf.dtype}."
            )
        return leaf

    if len(files) > 1:
        each = len(files) // shape[0]

        def stacked(start: int = 0, stop: int = shape[0]) -> Any:
            wanted, parts = files[start * each : stop * each], []
            for file in wanted:
                parts.append(weights[file])
                found, expected = tuple(parts[-1].shape), (shape[1] // each, *shape[2:])
                if found != expected or parts[-1].dtype != parts[0].dtype:
                    raise CheckpointError(
                        f"{source}: {file} must be of {parts[0].dtype} and of shape {expected}, like the "
                        f"other parts of {name}; found {parts[-1].dtype} of shape {found}."
                    )
            return checked(_joined(parts, stop - start), start, stop)

        return RowReader(shape[0], stacked)
    (file,) = files
    rows = weights.rows(file)

    def read(*span: int) -> Any:
        return checked(in_published_layout(name, rows.read(*span) if span else weights[file]), *span)

    return RowReader(rows.count, read, rows.step) if rows.count == shape[0] else RowReader(None, read)


def _split_into_tensors(arrays: Mapping[str, Any], sources: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Splits the arrays in a model into tensors, named according to `sources`."""
    out: dict[str, Any] = {}
    for name, files in sources.items():
        parts = [in_published_layout(name, arrays[name])]
        if len(files) > 1:
            parts = _matrices_of(arrays[name], len(files))
        out |= zip(files, parts, strict=True)
    return out


def _matrices_of(stack: Any, count: int) -> list[Any]:
    """Inverts `_joined`: splits a stack into `count` matrices, each with some of an expert's rows."""
    experts, rows = stack.shape[:2]
    size = rows * experts // count

    def cut(stack: Any, expert: int, start: int) -> Any:
        return stack[expert, start : start + size]

    return [quaxify(cut)(stack, i, start) for i in range(experts) for start in range(0, rows, size)]


def _joined(parts: list[Any], count: int) -> Any:
    """Stacks `count` matrices, each obtained by concatenating an equal number of consecutive parts."""
    each = len(parts) // count
    concatenate, stack = quaxify(jnp.concatenate), quaxify(jnp.stack)
    rows = [concatenate(parts[i : i + each]) if each > 1 else parts[i] for i in range(0, len(parts), each)]
    return stack(rows)


def _computes(dtype: Any) -> bool:
    """Returns whether JAX can compute with a dtype in its current configuration."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    return wide and jax.dtypes.canonicalize_dtype(dtype) == dtype


# Constants (positions, frequencies and the mask in GPT-2) saved by some versions of transformers. GGUF also
# stores scaling factors for the frequencies, but the configuration already has these.
_BUFFERS = re.compile(
    r"(.*\.)?(position_ids|rotary_emb\.inv_freq|h\.\d+\.attn\.(bias|masked_bias))"
    r"|rope_(freqs|factors_long|factors_short)\.weight"
)

# The first checkpoints of BERT have the names of TensorFlow.
_OF_NORM = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_OLDER_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")
