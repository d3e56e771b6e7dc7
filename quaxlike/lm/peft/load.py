"""`load_adapter`, for loading an adapter from PEFT's files.

Every tensor in the file must be used, and every adapted layer must exist in the model. Otherwise we raise an
error, since a partially loaded adapter would silently compute incorrect results.
"""

import copy
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._arrays import from_numpy
from ..._checked import checked
from ..._patterns import PatternError
from ...adapters.lora import changes_base
from ...adapters.record import PREFIX, ROOT, Layer, Method
from ...arrays.adapted import innermost
from ...arrays.layout import Layout
from ...arrays.lora import LoraBias, TrainableArray
from ...core.values import is_value
from ...files.errors import CheckpointError, file_error, hub_hint, listed
from ...files.tensors import Tensors, open_tensors
from ...surgery.records import Layouts, records_of
from ...surgery.select import is_router, select
from ...surgery.trees import layer_of, named_arrays, replace, suggestion, tensors_of
from ...surgery.weight_axes import MATRIX
from ..families import HEADS, names_of
from ..folders.file_pair import consistent
from ..models.vocabulary import embeddings, is_of_tokens, with_new_embeddings
from .config import AdapterConfig, files_of, read_config
from .stored import (
    biases_of,
    file_name,
    is_bias,
    is_parameter,
    is_targeted,
    renamed_parameters,
    separate_experts,
    stored_as,
    why_unsupported,
)
from .towers import leave_out_other_parts, tower_in

Rename = Mapping[str, str] | Callable[[str], str] | None


class VocabularySizeError(CheckpointError):
    """Raised if an adapter was trained after resizing its model's vocabulary."""

    def __init__(self, message: str, n: int) -> None:
        super().__init__(message)
        self.n = n


@checked
def load_adapter(
    directory: str | os.PathLike[str],
    model: PyTree,
    *,
    rename: Rename = None,
    adapter_name: str = "default",
    layout: Layouts = None,
) -> PyTree:
    """Loads an adapter saved by PEFT. This can be LoRA or any of the methods in `quaxlike.adapters`.

    **Arguments:**

    - `directory`: the folder containing `adapter_config.json` and `adapter_model.safetensors`.
    - `model`: the base model. This can be any pytree with dotted names (after `rename`) matching the state
        dict of the adapter's base model. An existing adapter is replaced.
    - `rename`: a function or mapping from the names of the model's arrays and layers to names in the file.
        The keys of a mapping can be full names or prefixes. Defaults to transformers' names for the model,
        either with its head (`AutoModelForCausalLM`) or without (`AutoModel`), and either on its own or as
        part of a multimodal model. Adapters for other parts of a multimodal model are skipped with a warning.
    - `adapter_name`: the name of the adapter. Unless this is `"default"`, the adapter is read from the
        subfolder with this name.
    - `layout`: the layouts of any arrays, if the layer or the name doesn't tell, as for
        [`quaxlike.layouts`][]. Defaults to none.

    Weights, biases and norms from Flax and Haiku are matched to the corresponding PyTorch layers. For
    example, `dense.kernel` of shape `(in, out)` corresponds to `dense.weight` of shape `(out, in)` in the
    file.

    **Returns:**

    The adapted model. If `alora_invocation_tokens` is set, call [`quaxlike.activate`][] for each input.

    **Raises:**

    `FileNotFoundError` if there is no adapter. `CheckpointError` if an entry is missing, unknown, damaged or
    has the wrong shape, or if the adapter uses an unsupported option of PEFT. The message names the file and
    the entry.

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
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{config_file.name}"))]
        hint = f" These of its folders hold adapters: {listed(inside)}." if inside else hub_hint(directory)
        raise FileNotFoundError(
            f"There is no {config_file}: an adapter's directory must hold {config_file.name}.{hint}"
        )
    if (pickle := folder / "adapter_model.bin").is_file() and not (folder / pair.tensors).is_file():
        raise FileNotFoundError(
            f"There is no {folder / pair.tensors}, and {pickle.name} is a pickle, which can run any program. "
            "If you trust it, load it with PEFT and save it again with `PeftModel.save_pretrained`, which "
            "writes safetensors."
        )
    tensors, config = consistent(
        lambda: open_tensors(folder / pair.tensors), lambda: read_config(pair.config_path()), folder
    )
    try:
        return _adapted(config, _File(tensors, config.method), model, rename, layout)
    except PatternError as error:
        raise file_error(config_file, None, f"has an expression that {error}") from None


class _Names(NamedTuple):
    """The arrays in a model, keyed by their names in the adapter file."""

    arrays: Mapping[str, tuple[str, Any]]
    """Maps each name in the file to the array, together with its name in the model."""
    layers: Mapping[str, tuple[str, Any]]
    """Maps the names of layers to their weights."""
    layouts: Mapping[str, Layout | None]
    """Maps the names of arrays in the model to their layouts."""
    parameters: Collection[str]


def _adapted(config: AdapterConfig, file: "_File", model: PyTree, rename: Rename, layout: Layouts) -> PyTree:
    method = config.method
    if hasattr(model, "tensors_of"):
        leave_out_other_parts(file)
    file.sort_embeddings(config)
    config, model = _parted(config, file, model)
    if rename is None:  # use the layer names in published files
        paths = [*named_arrays(model)]
        published = {name: own[0] for name in paths if len(own := tensors_of(model, name)) == 1}
        if hasattr(model, "tensors_of") and (tower := tower_in(file)) is not None:
            rename = {name: tower.name_in_file(published.get(name, name)) for name in paths}
        elif (body := _body_of_headless(file, map(layer_of, published.values()))) is not None:
            rename = {name: published.get(name, name).removeprefix(body) for name in paths}
        else:
            rename = {
                name: new for name, new in published.items() if name != new and layer_of(new) in file.adapters
            }
    arrays = {new: (name, innermost(leaf)) for new, name, leaf in names_in_file(model, rename)}
    records = records_of(model, layout, fan_in_fan_out=bool(config.option("fan_in_fan_out")))
    layouts = {name: record.layout for name, record in records.items()}
    model, arrays = _with_embeddings(file, model, arrays, layouts)
    parameters = [
        new
        for new, (name, leaf) in arrays.items()
        if leaf is not None and is_parameter(new, leaf.shape, layouts.get(name))
    ]
    apart = separate_experts(
        file.adapters, {new: arrays[new][0] for new in parameters}, partial(tensors_of, model)
    )
    apart = {new: {layer: file.adapters.pop(layer, {}) for layer in own} for new, own in apart.items()}
    targets = config.option("target_parameters") or ()
    file.adapters = renamed_parameters(file.adapters, parameters, targets)
    layers = {
        layer_of(new): (name, leaf)
        for new, (name, leaf) in arrays.items()
        if leaf is not None and len(leaf.shape) >= 2
    }
    names = _Names(arrays, layers, layouts, parameters)

    loaded: dict[str, Any] = dict(arrays.values())
    for each, found in ((method, file.adapters), *file.beside):
        _check_layers(each, found, config, file, model, names)
        loaded |= _read_layers(each, found, config, file, names)
    for new, experts in apart.items():
        name, leaf = arrays[new]
        wanted = [[layer] for layer in experts if config.targets(layer)]
        _check_found(method, file, experts, wanted)
        if any(experts.values()):
            loaded[name] = _read_stack(config, file, new, leaf, layouts[name], experts)
    for new, key in _trained_in_full(config, file, arrays).items():
        name, leaf = arrays[new]
        array = TrainableArray(_read_whole(file, key, name, leaf, layouts))
        held = loaded.get(name)
        loaded[name] = LoraBias(array, held.b, held.scaling) if isinstance(held, LoraBias) else array
    return replace(model, loaded)


def _body_of_headless(file: "_File", layers: Iterable[str]) -> str | None:
    """Returns the prefix of the decoder's body, if the adapter is just for the body (`AutoModel`)."""
    named, layers = {layer for _, own in [(None, file.adapters), *file.beside] for layer in own}, set(layers)
    if not named or not named.isdisjoint(layers):
        return None
    bodies = (f"{name}." for name in names_of("model"))
    return next((x for x in bodies if named <= {layer.removeprefix(x) for layer in layers}), None)


def _parted(config: AdapterConfig, file: "_File", model: PyTree) -> tuple[AdapterConfig, PyTree]:
    """Unties the output layer from the embedding if the file modifies them differently.

    Otherwise, this removes the duplicate entries for the output layer from the file and its configuration.
    Models support untying by implementing `with_separate_head`. By default, PEFT only modifies the named
    layer, not the layer tied to it. With `ensure_weight_tying` (see `AdapterConfig.ties_head`), or for
    trained tokens, PEFT modifies both in the same way, and the file may contain this change once or twice.
    DoRA's magnitudes are never shared: they belong to an embedding's columns, but to an output layer's rows.
    """
    separated = getattr(model, "with_separate_head", None)
    if separated is None or any(name.startswith("lm_head") for name in named_arrays(model)):
        return config, model
    tokens = config.option(_TOKENS) or {}
    tokens = tokens if isinstance(tokens, Mapping) else {"embed_tokens": tokens}
    of_head = [own for layer, own in tokens.items() if _is_head(layer)]
    of_embedding = [own for layer, own in tokens.items() if not _is_head(layer)]
    others = [x for x in (*file.adapters, *map(layer_of, file.trained)) if _is_head(x) or _is_embedding(x)]
    if others and of_embedding and of_head in ([], of_embedding):
        rows = (key for _, found in file.beside for keys in found.values() for key in keys.values())
        raise file.error(
            next(rows, f"{PREFIX}{others[0]}"),
            "is for tokens of the embedding and of the output layer that is tied to it, of which "
            f"{others[0]} has a change of its own: that is not supported",
        )
    adapted_head = next((keys for x, keys in file.adapters.items() if _is_head(x)), None)
    has_base = any(f"{x}.weight" in file.bases for x in others)
    if adapted_head and changes_base(config.options) and not has_base:
        raise file.error(
            next(iter(adapted_head.values())),
            f"is for an output layer, and {config.option('init_lora_weights')!r} takes a part of its weight "
            "and so of the embedding that is tied to it. We support this if the file holds what is left: "
            "save the adapter in PEFT with `save_embedding_layers=True`",
        )
    changed_apart = bool(others) or not file.has_one_embedding()
    own_magnitudes = any(_is_head(layer) and "magnitude" in keys for layer, keys in file.adapters.items())
    apart = changed_apart and (own_magnitudes or not config.ties_head)
    if apart or (of_head and of_head != of_embedding):
        return config, separated()
    file.drop_head()
    if of_head:
        kept = {layer: own for layer, own in tokens.items() if not _is_head(layer)}
        config = config._replace(options={**config.options, _TOKENS: kept})
    return config, model


_TOKENS = "trainable_token_indices"


def _is_head(layer: str) -> bool:
    return layer.rpartition(".")[2] == "lm_head"


def _is_embedding(layer: str) -> bool:
    return layer.rpartition(".")[2] in embeddings()


def _with_embeddings(
    file: "_File", model: PyTree, arrays: Mapping[str, tuple[str, Any]],
    layouts: Mapping[str, Layout | None],
) -> tuple[PyTree, dict[str, tuple[str, Any]]]:  # fmt: skip
    """Replaces a model's embeddings with the file's.

    Returns the model, and its arrays keyed by their names in the file. Tied arrays remain tied, unless the
    file has a separate embedding for each of their names.
    """
    out, is_new, n = dict(arrays), False, 0
    for new, key in file.bases.items():
        if new not in arrays or arrays[new][1] is None:
            found = {new: leaf for new, (_, leaf) in arrays.items() if leaf is not None}
            raise file.error(key, f"the model has no array {new!r}. {suggestion(new, found)}")
        name, leaf = arrays[new]
        read = _read_whole(file, key, name, leaf, layouts)
        if is_of_tokens(new) and (is_value(leaf) or not np.array_equal(leaf, read)):
            is_new, n = True, read.shape[0]
        out |= {
            other: (own, read)
            for other, (own, held) in arrays.items()
            if other == new or (held is leaf and other not in file.bases)
        }
    return with_new_embeddings(model, n) if is_new else model, out


def _read_whole(
    file: "_File", key: str, name: str, leaf: Any, layouts: Mapping[str, Layout | None]
) -> jax.Array:
    """Reads an array to replace one in the model, with the same dtype, as in PEFT."""
    stored = stored_as(name, leaf.shape, layouts)
    found, expected = file.shape(key), stored.shape
    if is_of_tokens(name) and found[1:] == expected[1:] and found[:1] != expected[:1]:
        n = found[0]
        error = file.error(
            key,
            f"expected shape {expected}; found {found}. The adapter was trained with {n} tokens: load it on "
            f"`quaxlike.lm.resize_vocabulary(model, {n})`",
        )
        raise VocabularySizeError(str(error), n)
    return stored.take(file.read(key, expected), leaf.shape).astype(leaf.dtype)


# PEFT inserts these between a layer's name and the names of its original arrays.
_BENEATH = re.compile(r"\.(token_adapter\.)?(base_layer|original_module)\.")


# PEFT saves additional copies under these names: of biases if bias="all", and of embeddings.
_REPEATED = re.compile(r"\.(original_module|modules_to_save)\.")


class _File:
    """The tensors in an adapter file, grouped by what they apply to."""

    def __init__(self, tensors: Tensors, method: Method) -> None:
        self.tensors = tensors
        self._base: Any = None  # the dtype of the adapted array
        self.shared: dict[str, str] = {}  # name -> key, for tensors shared between layers
        self.adapters: dict[str, dict[str, str]] = defaultdict(dict)  # layer, part -> key
        #: Like `adapters`, but for other methods in combination with this one.
        self.beside = [(other, defaultdict[str, dict[str, str]](dict)) for other in method.beside]
        self.trained: dict[str, str] = {}  # name in the model -> key
        # Name in the model -> key, for embeddings saved alongside the adapter.
        self.bases: dict[str, str] = {}
        endings = [
            (end, part, found)
            for each, found in [(method, self.adapters), *self.beside]
            for part, end in each.parts.items()
        ]
        repeated: dict[str, str] = {}
        of_all = {f"{ROOT}{end}": name for name, end in method.shared.items()}
        for key in tensors:
            if key in of_all:
                self.shared[of_all[key]] = key
                continue
            if not key.startswith(PREFIX):
                raise self.error(key, f"expected a name that starts with {PREFIX!r}")
            name = key.removeprefix(PREFIX)
            ending, part, found = next((x for x in endings if name.endswith(x[0])), ("", "", None))
            if found is not None:
                found[name.removesuffix(ending)][part] = key
            elif (plain := _BENEATH.sub(".", name)) != name and (
                name.endswith(".base_layer.weight") or is_of_tokens(plain)
            ):
                self.bases[plain] = key
            elif (plain := _REPEATED.sub(".", name)) != name and (is_bias(name) or is_of_tokens(plain)):
                repeated[plain] = key
            else:
                self.trained[name.replace(".base_layer.", ".")] = key
        for name, key in repeated.items():
            if name not in self.trained:
                raise self.error(
                    key, f"is not expected: the file has no {PREFIX + name}, which it would repeat"
                )
        for name, key in self.bases.items():
            if layer_of(name) not in self.adapters and not is_of_tokens(name):
                raise self.error(key, "is not expected: the layer has no adapter")

    def sort_embeddings(self, config: AdapterConfig) -> None:
        """Moves any embeddings and output layers saved without training from `trained` to `bases`.

        PEFT saves these automatically after `resize_token_embeddings`.
        """
        trains_biases = config.option("bias") not in (None, "none")
        for name in [name for name in self.trained if is_of_tokens(name)]:
            if not config.saves(name) and not (is_bias(name) and trains_biases):
                self.bases.setdefault(name, self.trained.pop(name))

    def has_one_embedding(self) -> bool:
        """Returns whether the embedding and the output layer have at most one distinct array in `bases`."""

        def whole(key: Any) -> Any:
            return np.asarray(self.tensors[key])

        weights = {name: key for name, key in self.bases.items() if name.endswith(".weight")}
        of_head = [key for name, key in weights.items() if _is_head(layer_of(name))]
        of_embedding = [key for name, key in weights.items() if _is_embedding(layer_of(name))]
        return all(np.array_equal(whole(x), whole(y)) for x in of_head for y in of_embedding)

    def drop_head(self) -> None:
        """Removes the duplicate entries for an output layer tied to the embedding."""
        is_repeated = any(_is_embedding(layer_of(name)) for name in (*self.bases, *self.trained))
        bases = [self.bases] if is_repeated else []
        for held in (self.adapters, self.trained, *bases, *(found for _, found in self.beside)):
            for name in [name for name in held if name.partition(".")[0] == "lm_head"]:
                del held[name]

    def error(self, key: str, problem: str) -> CheckpointError:
        return self.tensors.error(key, problem)

    def over(self, leaf: Any) -> "_File":
        """Returns this file, for reading adapters of the array `leaf`."""
        out = copy.copy(self)
        out._base = leaf.dtype
        return out

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
        array = from_numpy(self.tensors[key])
        # PEFT computes all adapters in float32. We keep 16 bits if the base has the same dtype.
        is_narrow = array.dtype.itemsize < 4 and array.dtype != self._base
        return array.astype(jnp.float32) if is_narrow else array

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors.info[key].shape


# layer, part -> key
_Found = Mapping[str, Mapping[str, str]]


def _check_layers(
    method: Method, found: _Found, config: AdapterConfig, file: _File, model: PyTree, names: _Names
) -> None:
    """Checks that the file has adapters for exactly the layers in the configuration."""
    for layer, keys in found.items():
        if layer not in names.layers:
            near = suggestion(layer, {layer: leaf for layer, (_, leaf) in names.layers.items()})
            raise file.error(next(iter(keys.values())), f"the model has no layer {layer!r}. {near}")
    if method.named is not None:
        layouts = {layer: names.layouts[name] for layer, (name, _) in names.layers.items()}
        named = method.named(config.option(method.entry), layouts)
        _check_found(method, file, found, named.values())
    elif config.target_modules is not None or config.option("target_parameters"):
        _check_found(method, file, found, [[layer] for layer in _targets(config, file, model, names)])


def _targets(config: AdapterConfig, file: _File, model: PyTree, names: _Names) -> list[str]:
    """Returns the layers matched by `target_modules` or `target_parameters`."""
    # `target_modules` can't match parameters. In transformers 5, experts and routers are parameters.
    modules = {
        layer: name
        for layer, (name, _) in names.layers.items()
        if layer in file.adapters or not (layer in names.parameters or is_router(layer, names.parameters))
    }
    if config.target_modules == "all-linear":
        chosen = select(model, "all-linear")
        targets = [layer for layer, name in modules.items() if name in chosen and not config.excludes(layer)]
    else:
        targets = [layer for layer in modules if config.targets(layer)]
    if config.ties_head and any(_is_head(x) or _is_embedding(x) for x in targets):
        # PEFT then adapts both layers. Unless they differ, the output layer is already left out.
        targets += [x for x in modules if _is_head(x) and x in file.adapters and x not in targets]
    named = config.option("target_parameters") or ()
    for layer in names.layers:
        parameter = layer if layer in names.parameters else f"{layer}.weight"
        if layer not in targets and is_targeted(parameter, named):
            targets.append(layer)
    return targets


def _check_found(method: Method, file: _File, found: _Found, named: Iterable[Sequence[str]]) -> None:
    """Checks that the file has an adapter for at least one layer in each named group, and for no others."""
    named = [*named]
    for layers in named:
        if not any(found.get(layer) for layer in layers):
            key = f"{PREFIX}{layers[0]}{next(iter(method.parts.values()))}"
            raise file.error(key, f"is missing: {method.entry} names this layer")
    expected = {layer for layers in named for layer in layers}
    for layer, keys in found.items():
        if keys and layer not in expected:
            problem = f"is not expected: {method.entry} does not name this layer"
            raise file.error(next(iter(keys.values())), problem)


def _read_layers(
    method: Method, found: _Found, config: AdapterConfig, file: _File, names: _Names
) -> dict[str, Any]:
    """Reads the adapted weights and biases, keyed by their names in the model."""
    layers: dict[str, Layer] = {}
    biases: dict[str, str] = {}
    parameters = config.option("target_parameters") or ()
    for layer, keys in found.items():
        name, leaf = names.layers[layer]
        biases[layer], bias = names.arrays.get(f"{layer}.bias", (f"{layer_of(name)}.bias", None))
        layout = names.layouts[name]
        if any(part.startswith("embedding") for part in keys):
            layout = Layout.parse("vo")
        elif layout is not None and layout.kind == "embedding":  # this isn't an embedding, despite its name
            layout = MATRIX
        is_parameter = layer in names.parameters and is_targeted(layer, parameters)
        key = next(iter(keys.values()))
        is_stack = layout is not None and layout.batch_shape(tuple(leaf.shape)) and not is_parameter
        if layout is None or not layout.is_known or is_stack:
            raise file.error(key, f"the model's {layer} is {why_unsupported(layout)}")
        kind = "parameter" if is_parameter else layout.kind
        if kind not in method.kinds:
            raise file.error(key, method.refusal(f"the model's {layer}", kind))
        own = file.over(leaf)
        by_weight = is_targeted(f"{layer}.weight", parameters) and not config.targets(layer)
        target = f"{layer}.weight" if by_weight else layer
        has_base = f"{layer}.weight" in file.bases
        layers[layer] = Layer(
            leaf, layout, layer, bias, config.options, own, keys, method, kind, target, has_base
        )
    shared = None
    if method.prepare is not None:
        own = next((layer.file for layer in layers.values()), file)
        shared = method.prepare(
            [*layers.values()], {name: own.read(key, file.shape(key)) for name, key in file.shared.items()}
        )
    out: dict[str, Any] = {}
    for name, layer in layers.items():
        layer.shared = shared
        read = method.read(layer)
        layer.check_all_read()
        array, bias = read if isinstance(read, tuple) else (read, None)
        out[names.layers[name][0]] = array
        if bias is not None:
            out[biases[name]] = bias
    return out


def _read_stack(
    config: AdapterConfig, file: _File, name: str, leaf: Any, layout: Any, experts: _Found
) -> Any:
    """Reads a stack of experts, each with its own adapter. `experts` maps layers to keys."""
    method = config.method
    if method.read_stack is None:
        key = next(key for keys in experts.values() for key in keys.values())
        raise file.error(key, method.refusal(f"the model's {name}", "parameter", "a stack of experts"))
    layers = [
        Layer(leaf, layout, layer, None, config.options, file.over(leaf), keys, method, "parameter", layer)
        for layer, keys in experts.items()
    ]
    array = method.read_stack(name, layers)
    for layer in layers:
        layer.check_all_read()
    return array


def _trained_in_full(
    config: AdapterConfig, file: _File, arrays: Mapping[str, tuple[str, Any]]
) -> dict[str, str]:
    """Returns the arrays trained directly, keyed by their names in the file."""
    held = {new: leaf for new, (_, leaf) in arrays.items() if leaf is not None}
    floats = [new for new, leaf in held.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wanted = [new for new in floats if config.saves(new)]
    biases = biases_of(config.option("bias"), floats, file.adapters)
    wanted += [new for new in biases if new not in wanted]
    for new in wanted:
        if new not in file.trained:
            raise file.error(
                PREFIX + new, "is missing: modules_to_save or bias of the configuration names it"
            )
    for new, key in file.trained.items():
        if new not in wanted:
            hint = suggestion(new, held) if new not in arrays else "modules_to_save and bias do not name it."
            if new not in arrays and new.partition(".")[0] in HEADS:
                hint = (
                    "It is the layer that classifies, which the model does not have: load the adapter on "
                    "`quaxlike.lm.models.with_classifier(model, labels, key=...)`."
                )
            raise file.error(key, f"is not expected. {hint}")
    return {new: file.trained[new] for new in wanted}


def names_in_file(model: PyTree, rename: Rename) -> list[tuple[str, str, Any]]:
    """Lists a model's arrays, as tuples of the name in the file, the name in the model, and the array."""
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
