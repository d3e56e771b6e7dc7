"""`load_adapter`: an adapter's directory, put on a model."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._checked import checked
from ..._patterns import PatternError
from ...adapters import ALoRAArray
from ...adapters.record import Layer, Method
from ...arrays.adapted import innermost
from ...arrays.layout import Layout
from ...arrays.lora import LoraArray, LoraBias, TrainableArray, TrainableRows
from ...core.values import is_value
from ...files.errors import CheckpointError, file_error, hub_hint
from ...files.tensors import Tensors, open_tensors
from ...surgery.inits import initialise
from ...surgery.loraify import blank
from ...surgery.records import Layouts, records_of
from ...surgery.select import is_router, select
from ...surgery.trees import layer_of, named_arrays, replace, suggestion
from ...surgery.weight_axes import MATRIX
from ..families import names_of
from ..folders.file_pair import consistent
from .config import CHANGES_BASE, PREFIX, AdapterConfig, files_of, read_config
from .stored import (
    ENDINGS,
    TOKENS,
    Stored,
    file_name,
    is_parameter,
    is_targeted,
    parts_as_stored,
    renamed_parameters,
    separate_experts,
    stacked,
    stored_as,
    why_unsupported,
)

Rename = Mapping[str, str] | Callable[[str], str] | None

# What the names of tensors that belong to a whole model start with.
ROOT = PREFIX.removesuffix("model.")


@checked
def load_adapter(
    directory: str | os.PathLike[str],
    model: PyTree,
    *,
    rename: Rename = None,
    adapter_name: str = "default",
    layout: Layouts = None,
) -> PyTree:
    """Puts an adapter that PEFT saved on a model: LoRA, or a method of `quaxlike.adapters`.

    **Arguments:**

    - `directory`: the folder with `adapter_config.json` and `adapter_model.safetensors`.
    - `model`: the base model; any pytree whose dotted names are those of the state dict that the adapter was
        trained on, possibly after `rename`. An adapter that it already has is removed.
    - `rename`: a function or mapping from names of the model's arrays and layers to names in the file. A
        mapping may have names or their beginnings. Default: transformers' names for the model, with its head
        (`AutoModelForCausalLM`) or without (`AutoModel`).
    - `adapter_name`: the name of the adapter. One other than `"default"` is in a folder of this name in
        `directory`.
    - `layout`: which axes of weights are outputs and which inputs, as for [`quaxlike.layouts`][], where
        neither their layers nor their names say so. Default: none.

    Weights, biases and norms of Flax and Haiku are matched with PyTorch's layers: `dense.kernel` of shape
    `(in, out)` is `dense.weight` of shape `(out, in)` in the file.

    **Returns:**

    The model with the adapter on it; `model` itself does not change. One with `alora_invocation_tokens` has
    to know each text: [`quaxlike.activate`][].

    **Raises:**

    `FileNotFoundError` if there is no adapter; `CheckpointError` for a missing, unknown, misshapen or damaged
    entry, with file, key, expected and found, and for an unsupported option of PEFT, with its name.

    !!! example

        ```python
        import quaxlike as ql
        from quaxlike.lm import peft

        def adapted(base_directory, adapter_directory):
            model, _ = ql.lm.load(base_directory)
            return ql.quaxify(peft.load_adapter(adapter_directory, model))
        ```
    """
    folder = Path(directory) if adapter_name == "default" else Path(directory) / adapter_name
    pair = files_of(folder)
    if not (config_file := pair.config_path()).is_file():
        raise FileNotFoundError(
            f"There is no {config_file}: an adapter's directory must hold {config_file.name}."
            f"{hub_hint(directory)}"
        )
    tensors, config = consistent(
        lambda: open_tensors(folder / pair.tensors), lambda: read_config(pair.config_path()), folder
    )
    try:
        return _adapted(config, _File(tensors, config.method), model, rename, layout)
    except PatternError as error:
        raise file_error(config_file, None, f"has an expression that {error}") from None


def _adapted(config: AdapterConfig, file: "_File", model: PyTree, rename: Rename, layout: Layouts) -> PyTree:
    model = _with_separate_head(config, file, model)
    tensors_of = getattr(model, "tensors_of", lambda name: [name])
    if rename is None:  # rename layers to their names in published files
        published = {name: own[0] for name in named_arrays(model) if len(own := tensors_of(name)) == 1}
        if (body := _body_of_headless(file, map(layer_of, published.values()))) is not None:
            rename = lambda name: published.get(name, name).removeprefix(body)
        else:
            rename = {
                name: new for name, new in published.items() if name != new and layer_of(new) in file.adapters
            }
    arrays = {new: (name, innermost(leaf)) for new, name, leaf in names_in_file(model, rename)}
    records = records_of(model, layout, fan_in_fan_out=config.fan_in_fan_out)
    layouts = {name: record.layout for name, record in records.items()}
    parameters = [
        new
        for new, (name, leaf) in arrays.items()
        if leaf is not None and is_parameter(new, leaf.shape, layouts.get(name))
    ]
    apart = separate_experts(file.adapters, {new: arrays[new][0] for new in parameters}, tensors_of)
    apart = {new: {layer: file.adapters.pop(layer, {}) for layer in own} for new, own in apart.items()}
    file.adapters = renamed_parameters(file.adapters, parameters, config.target_parameters)
    layers = {
        layer_of(new): (name, leaf)
        for new, (name, leaf) in arrays.items()
        if leaf is not None and len(leaf.shape) >= 2
    }
    _check_layers(config, file, model, layers, parameters)
    _check_tokens(config, file, layers, layouts)
    loaded: dict[str, Any] = dict(arrays.values())
    of_lora = file.adapters
    if config.method is not None:
        of_lora = {}
        loaded |= _adapters_of(config.method, config.options, file, layers, layouts, arrays)
    for layer, keys in of_lora.items():
        name, leaf = layers[layer]
        bias_name, bias = arrays.get(f"{layer}.bias", (f"{layer_of(name)}.bias", None))
        if layer in parameters and is_targeted(layer, config.target_parameters):
            _check_plain(config, file, layer, keys)
            loaded[name] = file.read_parts(
                _blank(config, layer, leaf, layouts[name]), "parameter", keys, ("a", "b")
            )
            continue
        lora, lora_bias = _adapter(config, file, layer, keys, (name, leaf), layouts, bias)
        loaded[name] = lora
        if lora_bias is not None:
            loaded[bias_name] = lora_bias
    if config.alora_invocation_tokens is not None:
        _check_linear(file, [*apart.values()], {x: layouts[layers[x][0]] for x in of_lora}, parameters)
        for name in (layers[layer][0] for layer in of_lora):
            loaded[name] = ALoRAArray.of(loaded[name], config.alora_invocation_tokens)
    for new, experts in apart.items():
        name, leaf = arrays[new]
        loaded[name] = _adapter_of_experts(config, file, new, experts, leaf, layouts[name])
    for new, key in _trained_in_full(config, file, arrays).items():
        name, leaf = arrays[new]
        array = TrainableArray(file.read_as(key, stored_as(name, leaf.shape, layouts), leaf.shape))
        held = loaded.get(name)
        loaded[name] = LoraBias(array, held.b, held.scaling) if isinstance(held, LoraBias) else array
    for layer, key in file.tokens.items():
        name, leaf = layers[layer]
        loaded[name] = _with_tokens(config, file, layer, key, leaf)
    return replace(model, loaded)


def _body_of_headless(file: "_File", layers: Iterable[str]) -> str | None:
    """How the names of a decoder's body begin, if the adapter is of the body alone (`AutoModel`)."""
    named, layers = {*file.adapters, *file.tokens}, set(layers)
    if not named or not named.isdisjoint(layers):
        return None
    bodies = (f"{name}." for name in names_of("model"))
    return next((x for x in bodies if named <= {layer.removeprefix(x) for layer in layers}), None)


def _with_separate_head(config: AdapterConfig, file: "_File", model: PyTree) -> PyTree:
    """The model with a separate output layer if the adapter is for the embedding or the output layer alone.

    A model supports this with a method `with_separate_head`. With `ensure_weight_tying`, the file holds the
    change of the shared array twice.
    """
    separated = getattr(model, "with_separate_head", None)
    if separated is None or any(name.startswith("lm_head") for name in named_arrays(model)):
        return model
    if config.ensure_weight_tying:
        for held in (file.adapters, file.bases, file.trained):
            for name in [name for name in held if name.partition(".")[0] == "lm_head"]:
                del held[name]
        return model
    changed = [*file.adapters, *map(layer_of, file.trained)]
    apart = any(name.rpartition(".")[2] in (*names_of("embed_tokens"), "lm_head") for name in changed)
    return separated() if apart else model


def _blank(config: AdapterConfig, layer: str, leaf: Any, layout: Any, count: int = 1) -> LoraArray:
    """An adapter that changes nothing, of the layer's rank and alpha; or as many adapters, side by side."""
    return blank(
        leaf, layout, count * config.rank(layer), dtype=None, rslora=config.use_rslora,
        alpha=config.alpha(layer) * (count**0.5 if config.use_rslora else count), dropout=config.lora_dropout,
    )  # fmt: skip


def _adapter_of_experts(
    config: AdapterConfig, file: "_File", stack: str, experts: Mapping[str, Any], leaf: Any, layout: Any
) -> Any:
    """Puts the adapters of single experts on their stack; `experts` has their keys, by layer."""
    for layer, keys in experts.items():
        _check_target(file, layer, keys, config.targets(layer))
    adapted = {layer: keys for layer, keys in experts.items() if keys}
    for layer, keys in adapted.items():
        _check_plain(config, file, layer, keys)
    if not adapted:
        return leaf
    ranks = {(config.rank(layer), config.alpha(layer)) for layer in adapted}
    if len(ranks) > 1:
        found = next(iter(next(iter(adapted.values())).values()))
        raise file.error(found, f"the experts of {stack} must have one rank and one alpha; found {ranks}")
    each = len(experts) // leaf.shape[0]
    lora = _blank(config, next(iter(adapted)), leaf, layout, each)
    rank = lora.rank // each
    a, b = (rank, lora.a.shape[-1]), (lora.b.shape[1] // each, rank)
    read = lambda keys: (file.read(keys["a"], a), file.read(keys["b"], b)) if keys else None
    return stacked(lora, [read(keys) for keys in experts.values()])


def _check_plain(config: AdapterConfig, file: "_File", layer: str, keys: Mapping[str, str]) -> None:
    """Raises unless the adapter of a parameter or an expert consists of the two factors alone."""
    other = keys.keys() - {"a", "b"}
    if other:
        raise file.error(keys[other.pop()], f"expected lora_A and lora_B alone for {layer}")
    for part in {"a", "b"} - keys.keys():
        (found,) = keys.values()
        missing = found.replace(ENDINGS["layer"]["b" if part == "a" else "a"], ENDINGS["layer"][part])
        raise file.error(missing, f"is missing beside {found!r}")
    if config.use_dora or config.lora_bias or config.init_lora_weights in CHANGES_BASE:
        raise file.error(keys["a"], "adapters of parameters have no DoRA, no biases and no PiSSA or OLoRA")


def _with_tokens(config: AdapterConfig, file: "_File", layer: str, key: str, leaf: Any) -> Any:
    """The embedding with the trained rows in place of its own."""
    tokens = config.trainable_token_indices
    if isinstance(tokens, Mapping):
        tokens = next(own for name, own in tokens.items() if is_targeted(layer, (name,)))
    rows = file.read(key, (len(tokens), leaf.shape[1]))
    if is_value(leaf) or any(token >= leaf.shape[0] for token in tokens):
        raise file.error(key, f"the model's {layer} must be dense and have rows {list(tokens)}")
    return TrainableRows(leaf, rows, tuple(tokens))


class _File:
    """The tensors of an adapter, sorted by what they apply to."""

    def __init__(self, tensors: Tensors, method: Method | None) -> None:
        self.tensors = tensors
        endings = [ending for parts in ENDINGS.values() for ending in parts.items()]
        endings = endings if method is None else [*method.parts.items()]
        self.first = endings[0][1] if method is not None else ENDINGS["layer"]["a"]
        self.shared: dict[str, str] = {}  # name -> key: tensors of all layers
        self.adapters: dict[str, dict[str, str]] = defaultdict(dict)  # layer, part -> key
        self.trained: dict[str, str] = {}  # name in the model -> key
        self.bases: dict[str, str] = {}  # layer -> key: embeddings that are saved along
        self.tokens: dict[str, str] = {}  # layer -> key: rows of embeddings that are trained
        of_all = {} if method is None else {f"{ROOT}{end}": name for name, end in method.shared.items()}
        for key in tensors:
            if key in of_all:
                self.shared[of_all[key]] = key
                continue
            if not key.startswith(PREFIX):
                raise self.error(key, f"expected a name that starts with {PREFIX!r}")
            name = key.removeprefix(PREFIX)
            part, ending = next((x for x in endings if name.endswith(x[1])), (None, ""))
            if part is not None:
                self.adapters[name.removesuffix(ending)][part] = key
            elif name.endswith(TOKENS):
                self.tokens[name.removesuffix(TOKENS)] = key
            elif name.endswith(".base_layer.weight"):
                self.bases[name.removesuffix(".base_layer.weight")] = key
            elif ".original_module." not in name and ".modules_to_save." not in name:
                # (With bias="all", PEFT writes the biases of such modules again under these names.)
                self.trained[name.replace(".base_layer.", ".")] = key
        for layer, key in self.bases.items():
            if layer not in self.adapters:
                raise self.error(key, "is not expected: the layer has no adapter")

    def error(self, key: str, problem: str) -> CheckpointError:
        return self.tensors.error(key, problem)

    def read(self, key: str, shape: Sequence[int], *, integers: bool = False) -> Any:
        info = self.tensors.info[key]
        if info.shape != tuple(shape):
            raise self.error(key, f"expected shape {tuple(shape)}; found {info.shape}")
        if integers:
            array = np.asarray(self.tensors[key])
            if not np.array_equal(array, array.astype(np.int64)):
                raise self.error(key, f"expected integers; found {info.dtype}")
            return array.astype(np.int64)
        if (
            not jnp.issubdtype(info.dtype, jnp.floating)
            or jax.dtypes.canonicalize_dtype(info.dtype) != info.dtype
        ):
            raise self.error(key, f"expected float32, bfloat16 or float16; found {info.dtype}")
        return jnp.asarray(self.tensors[key])

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors.info[key].shape

    def read_as(self, key: str, stored: Stored, shape: Sequence[int]) -> Any:
        """Reads an array of this shape, stored in PyTorch's layout."""
        return stored.take(self.read(key, stored.shape), shape)

    def read_parts(
        self, lora: LoraArray, kind: str, keys: Mapping[str, str], parts: Iterable[str]
    ) -> LoraArray:
        """The adapter with parts of the file, on a layer of this kind."""
        stored = parts_as_stored(lora, kind)
        shapes = {"a": lora.a.shape, "b": lora.b.shape, "magnitude": lora.b.shape[:-1]}
        return lora.replace(**{x: self.read_as(keys[x], stored[x], shapes[x]) for x in parts})


def _check_layers(
    config: AdapterConfig, file: _File, model: PyTree, layers: Mapping[str, Any], parameters: Sequence[str]
) -> None:
    """Raises unless the file has adapters for exactly the layers that the configuration targets."""
    for layer, keys in file.adapters.items():
        if layer not in layers:
            shapes = {layer: leaf for layer, (_, leaf) in layers.items()}
            raise file.error(
                next(iter(keys.values())), f"the model has no layer {layer!r}. {suggestion(layer, shapes)}"
            )
    if config.target_modules is None and not config.target_parameters:
        return
    # `target_modules` names no parameters, which experts and routers are in transformers 5.
    modules = {
        layer: name
        for layer, (name, _) in layers.items()
        if layer in file.adapters or not (layer in parameters or is_router(layer, parameters))
    }
    if config.target_modules == "all-linear":
        chosen = select(model, "all-linear")
        targets = [layer for layer, name in modules.items() if name in chosen and not config.saves(layer)]
    else:
        targets = [layer for layer in modules if config.targets(layer)]
    for layer in layers:
        parameter = layer if layer in parameters else f"{layer}.weight"
        if layer not in targets and is_targeted(parameter, config.target_parameters):
            targets.append(layer)
    for layer in dict.fromkeys([*targets, *file.adapters]):
        _check_target(file, layer, file.adapters.get(layer, {}), layer in targets)


def _check_linear(
    file: _File, apart: Sequence[Mapping[str, Any]], layers: Mapping[str, Layout | None],
    parameters: Sequence[str],
) -> None:  # fmt: skip
    """Raises for adapters of aLoRA that are not on linear layers."""
    experts = [(layer, keys) for own in apart for layer, keys in own.items() if keys]
    others = [
        (layer, file.adapters[layer])
        for layer, layout in layers.items()
        if layer in parameters or layout is None or layout.kind not in ("linear", "matrix")
    ]
    for layer, keys in [*experts, *others]:
        raise file.error(next(iter(keys.values())), f"PEFT's aLoRA is for linear layers; {layer} is none")


def _check_target(file: _File, layer: str, keys: Mapping[str, str], is_target: bool) -> None:
    """Raises if the file has an adapter for a layer that is no target, or none for one that is."""
    if is_target and not keys:
        raise file.error(f"{PREFIX}{layer}{file.first}", "is missing: target_modules names this layer")
    if keys and not is_target:
        problem = "is not expected: target_modules does not name this layer"
        raise file.error(next(iter(keys.values())), problem)


def _check_tokens(
    config: AdapterConfig, file: _File, layers: Mapping[str, Any], layouts: Mapping[str, Layout | None]
) -> None:
    """Raises unless the file has rows for exactly the embeddings whose tokens the configuration names."""
    tokens = config.trainable_token_indices
    if isinstance(tokens, Mapping):
        named = {own: [layer for layer in layers if is_targeted(layer, (own,))] for own in tokens}
    else:  # of the embedding of the inputs, whatever the model calls it
        embeds = lambda layer: (
            (layout := layouts[layers[layer][0]]) is not None and layout.kind == "embedding"
        )
        named = {"embed_tokens": sorted(layers, key=embeds, reverse=True)} if tokens else {}
    for layer, key in file.tokens.items():
        if not any(layer in own for own in named.values()):
            problem = "is not expected" if layer in layers else f"the model has no layer {layer!r}"
            raise file.error(key, f"{problem}: trainable_token_indices does not name it")
    for own, found in named.items():
        if not any(layer in file.tokens for layer in found):
            layer = next(iter(found), own)
            raise file.error(f"{PREFIX}{layer}{TOKENS}", "is missing: trainable_token_indices names tokens")


def _adapter(
    config: AdapterConfig,
    file: _File,
    layer: str,
    keys: Mapping[str, str],
    weight: tuple[str, Any],
    layouts: Mapping[str, Layout | None],
    bias: Any,
) -> tuple[LoraArray, LoraBias | None]:
    embedding = any("lora_embedding" in key for key in keys.values())
    used = {"a", "b", *(["bias"] if config.lora_bias else []), *(["magnitude"] if config.use_dora else [])}
    endings = ENDINGS["embedding" if embedding else "layer"]
    wanted = {part: f"{PREFIX}{layer}{endings[part]}" for part in endings if part in used}
    for part in wanted.keys() | keys.keys():
        if part not in keys:
            raise file.error(wanted[part], "is missing")
        if part not in wanted or keys[part] != wanted[part]:
            raise file.error(keys[part], "is not expected with this configuration")

    name, leaf = weight
    layout = layouts[name]
    if embedding:
        layout = Layout.parse("vo")
    elif layout is not None and layout.kind == "embedding":  # its name only looks like an embedding's
        layout = MATRIX
    if layout is None or not layout.is_known or layout.kind in ("grouped conv", "other conv"):
        raise file.error(keys["a"], f"the model's {layer} is {why_unsupported(layout)}")
    base = file.read(file.bases[layer], leaf.shape) if layer in file.bases else leaf
    rank = config.rank(layer)
    if (found := file.tensors.info[keys["a"]].shape[:1]) != (rank,):  # before allocating that much
        raise file.error(
            keys["a"], f"the configuration gives rank {rank}; found {found[0] if found else 'a scalar'}"
        )
    lora = _blank(config, layer, base, layout)
    if layout.batch_shape(tuple(leaf.shape)):
        raise file.error(keys["a"], f"the model's {layer} is a stack of layers, of shape {base.shape}")
    if config.init_lora_weights in CHANGES_BASE and not embedding:  # PEFT, too, leaves embeddings alone
        if layout.kind == "conv" or (config.init_lora_weights == "olora" and config.fan_in_fan_out):
            raise file.error(keys["a"], f"PEFT has no {config.init_lora_weights} for {layer}")
        try:
            lora = initialise(config.init_lora_weights, layout.kind, layer, lora, None)
        except ValueError as error:
            raise file.error(keys["a"], str(error)) from None
    lora = file.read_parts(lora, layout.kind, keys, wanted.keys() - {"bias"})
    if "bias" not in wanted:
        return lora, None
    stored, shape = parts_as_stored(lora, layout.kind)["bias"], lora.b.shape[:-1]
    return lora, LoraBias(bias, file.read_as(keys["bias"], stored, shape), lora.scaling)


def _adapters_of(
    method: Method,
    options: Mapping[str, Any],
    file: _File,
    layers: Mapping[str, tuple[str, Any]],
    layouts: Mapping[str, Layout | None],
    arrays: Mapping[str, tuple[str, Any]],
) -> dict[str, Any]:
    """The adapted weights of a method, and the biases that change along, by their names in the model."""
    found: dict[str, Layer] = {}
    for layer, keys in file.adapters.items():
        name, leaf = layers[layer]
        layout, key = layouts[name], next(iter(keys.values()))
        if (
            layout is not None
            and layout.kind == "embedding"
            and not any("embedding" in k for k in keys.values())
        ):
            layout = MATRIX  # its name only looks like an embedding's
        if layout is None or not layout.is_known or layout.batch_shape(tuple(leaf.shape)):
            raise file.error(key, f"the model's {layer} is {why_unsupported(layout)}")
        if layout.kind not in method.kinds:
            raise file.error(key, f"{method.refused}; the model's {layer} is of kind {layout.kind!r}")
        _, bias = arrays.get(f"{layer}.bias", ("", None))
        leaf = file.read(file.bases[layer], leaf.shape) if layer in file.bases else leaf
        found[layer] = Layer(layer, leaf, layout, bias, options, file, keys, PREFIX, method)
    shared = None
    if method.prepare is not None:
        shared = method.prepare(
            [*found.values()], {name: file.read(key, file.shape(key)) for name, key in file.shared.items()}
        )
    out: dict[str, Any] = {}
    for name, layer in found.items():
        layer.shared = shared
        read = method.read(layer)
        array, bias = read if isinstance(read, tuple) else (read, None)
        layer.check_all_read()
        out[layers[name][0]] = array
        if bias is not None:
            out[arrays[f"{name}.bias"][0]] = bias
    return out


def _trained_in_full(
    config: AdapterConfig, file: _File, arrays: Mapping[str, tuple[str, Any]]
) -> dict[str, str]:
    """The arrays that the file trains in full, by their names in the file."""
    held = {new: leaf for new, (_, leaf) in arrays.items() if leaf is not None}
    floats = [new for new, leaf in held.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wanted = [new for new in floats if config.saves(new)]
    if config.bias == "all":
        wanted += [new for new in floats if new.endswith(".bias") and new not in wanted]
    elif config.bias == "lora_only":
        wanted += [
            new for new in (f"{layer}.bias" for layer in file.adapters) if new in held and new not in wanted
        ]
    for new in wanted:
        if new not in file.trained:
            raise file.error(
                PREFIX + new, "is missing: modules_to_save or bias of the configuration names it"
            )
    for new, key in file.trained.items():
        if new not in wanted:
            hint = suggestion(new, held) if new not in arrays else "modules_to_save and bias do not name it."
            raise file.error(key, f"is not expected. {hint}")
    return {new: file.trained[new] for new in wanted}


def names_in_file(model: PyTree, rename: Rename) -> list[tuple[str, str, Any]]:
    """For each array of the model, its name in the file, its name in the model, and the array."""
    out: dict[str, tuple[str, str, Any]] = {}
    for name, leaf in named_arrays(model).items():
        new = file_name(renamed(name, rename))
        if new in out:
            raise ValueError(f"`rename` gives {out[new][1]} and {name} the same name, {new}.")
        out[new] = (new, name, leaf)
    return list(out.values())


def renamed(name: str, rename: Rename) -> str:
    if rename is None:
        return name
    if callable(rename):
        if not isinstance(new := rename(name), str):
            raise TypeError(f"`rename` must give a name for {name!r}; found {new!r}.")
        return new
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        if (head := ".".join(parts[:n])) in rename:
            return ".".join([rename[head], *parts[n:]])
    return name
