"""`load_adapter`: an adapter's directory, put on a model."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._checked import checked
from ..._patterns import PatternError
from ...adapters.record import PREFIX, ROOT, Layer, Method
from ...arrays.adapted import innermost
from ...arrays.layout import Layout
from ...arrays.lora import LoraBias, TrainableArray
from ...files.errors import CheckpointError, file_error, hub_hint
from ...files.tensors import Tensors, open_tensors
from ...surgery.records import Layouts, records_of
from ...surgery.select import is_router, select
from ...surgery.trees import layer_of, named_arrays, replace, suggestion
from ...surgery.weight_axes import MATRIX
from ..families import names_of
from ..folders.file_pair import consistent
from .config import AdapterConfig, files_of, read_config
from .stored import (
    Stored,
    file_name,
    is_parameter,
    is_targeted,
    renamed_parameters,
    separate_experts,
    stored_as,
    why_unsupported,
)
from .towers import leave_out_other_parts, tower_in

Rename = Mapping[str, str] | Callable[[str], str] | None


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
        (`AutoModelForCausalLM`) or without (`AutoModel`), alone or within a model that reads images as well.
        The adapters of the parts of that which this model lacks are left out, with a warning.
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


class _Names(NamedTuple):
    """The arrays of the model under the names that they have in the file."""

    arrays: Mapping[str, tuple[str, Any]]
    """The name in the model, and the array."""
    layers: Mapping[str, tuple[str, Any]]
    """The weights, by the names of their layers."""
    layouts: Mapping[str, Layout | None]
    """By the names of arrays in the model."""
    parameters: Collection[str]


def _adapted(config: AdapterConfig, file: "_File", model: PyTree, rename: Rename, layout: Layouts) -> PyTree:
    method = config.method
    if hasattr(model, "tensors_of"):
        leave_out_other_parts(file)
    model = _with_separate_head(config, file, model)
    tensors_of = getattr(model, "tensors_of", lambda name: [name])
    if rename is None:  # rename layers to their names in published files
        published = {name: own[0] for name in named_arrays(model) if len(own := tensors_of(name)) == 1}
        if hasattr(model, "tensors_of") and (tower := tower_in(file)) is not None:
            rename = lambda name: tower.name_in_file(published.get(name, name))
        elif (body := _body_of_headless(file, map(layer_of, published.values()))) is not None:
            rename = lambda name: published.get(name, name).removeprefix(body)
        else:
            rename = {
                name: new for name, new in published.items() if name != new and layer_of(new) in file.adapters
            }
    arrays = {new: (name, innermost(leaf)) for new, name, leaf in names_in_file(model, rename)}
    records = records_of(model, layout, fan_in_fan_out=bool(config.option("fan_in_fan_out")))
    layouts = {name: record.layout for name, record in records.items()}
    parameters = [
        new
        for new, (name, leaf) in arrays.items()
        if leaf is not None and is_parameter(new, leaf.shape, layouts.get(name))
    ]
    apart = separate_experts(file.adapters, {new: arrays[new][0] for new in parameters}, tensors_of)
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
        array = TrainableArray(file.read_as(key, stored_as(name, leaf.shape, layouts), leaf.shape))
        held = loaded.get(name)
        loaded[name] = LoraBias(array, held.b, held.scaling) if isinstance(held, LoraBias) else array
    return replace(model, loaded)


def _body_of_headless(file: "_File", layers: Iterable[str]) -> str | None:
    """How the names of a decoder's body begin, if the adapter is of the body alone (`AutoModel`)."""
    named, layers = {layer for _, own in [(None, file.adapters), *file.beside] for layer in own}, set(layers)
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
    if config.option("ensure_weight_tying"):
        for held in (file.adapters, file.bases, file.trained):
            for name in [name for name in held if name.partition(".")[0] == "lm_head"]:
                del held[name]
        return model
    changed = [*file.adapters, *map(layer_of, file.trained)]
    apart = any(name.rpartition(".")[2] in (*names_of("embed_tokens"), "lm_head") for name in changed)
    return separated() if apart else model


# With bias="all", PEFT writes the biases of modules that are saved whole again under these names.
_REPEATED = re.compile(r"\.(original_module|modules_to_save)\.")


class _File:
    """The tensors of an adapter, sorted by what they apply to."""

    def __init__(self, tensors: Tensors, method: Method) -> None:
        self.tensors = tensors
        self.shared: dict[str, str] = {}  # name -> key: tensors of all layers
        self.adapters: dict[str, dict[str, str]] = defaultdict(dict)  # layer, part -> key
        #: The same for what files hold beside them.
        self.beside = [(other, defaultdict[str, dict[str, str]](dict)) for other in method.beside]
        self.trained: dict[str, str] = {}  # name in the model -> key
        self.bases: dict[str, str] = {}  # layer -> key: embeddings that are saved along
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
            elif name.endswith(".base_layer.weight"):
                self.bases[name.removesuffix(".base_layer.weight")] = key
            elif name.endswith(".bias") and _REPEATED.search(name):
                repeated[_REPEATED.sub(".", name)] = key
            else:
                self.trained[name.replace(".base_layer.", ".")] = key
        for name, key in repeated.items():
            if name not in self.trained:
                raise self.error(
                    key, f"is not expected: the file has no {PREFIX + name}, which it would repeat"
                )
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


# layer, part -> key
_Found = Mapping[str, Mapping[str, str]]


def _check_layers(
    method: Method, found: _Found, config: AdapterConfig, file: _File, model: PyTree, names: _Names
) -> None:
    """Raises unless the file has adapters for exactly the layers that the configuration names."""
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
    """The layers that `target_modules` and `target_parameters` name."""
    # `target_modules` names no parameters, which experts and routers are in transformers 5.
    modules = {
        layer: name
        for layer, (name, _) in names.layers.items()
        if layer in file.adapters or not (layer in names.parameters or is_router(layer, names.parameters))
    }
    if config.target_modules == "all-linear":
        chosen = select(model, "all-linear")
        targets = [layer for layer, name in modules.items() if name in chosen and not config.saves(layer)]
    else:
        targets = [layer for layer in modules if config.targets(layer)]
    named = config.option("target_parameters") or ()
    for layer in names.layers:
        parameter = layer if layer in names.parameters else f"{layer}.weight"
        if layer not in targets and is_targeted(parameter, named):
            targets.append(layer)
    return targets


def _check_found(method: Method, file: _File, found: _Found, named: Iterable[Sequence[str]]) -> None:
    """Raises unless the file has an adapter for one layer of each of those named, and for no other."""
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
    """The adapted weights of a method, and the biases that change along, by their names in the model."""
    layers: dict[str, Layer] = {}
    biases: dict[str, str] = {}
    parameters = config.option("target_parameters") or ()
    for layer, keys in found.items():
        name, leaf = names.layers[layer]
        biases[layer], bias = names.arrays.get(f"{layer}.bias", (f"{layer_of(name)}.bias", None))
        leaf = file.read(file.bases[layer], leaf.shape) if layer in file.bases else leaf
        layout = names.layouts[name]
        if any(part.startswith("embedding") for part in keys):
            layout = Layout.parse("vo")
        elif layout is not None and layout.kind == "embedding":  # its name only looks like an embedding's
            layout = MATRIX
        is_parameter = layer in names.parameters and is_targeted(layer, parameters)
        key = next(iter(keys.values()))
        is_stack = layout is not None and layout.batch_shape(tuple(leaf.shape)) and not is_parameter
        if layout is None or not layout.is_known or is_stack:
            raise file.error(key, f"the model's {layer} is {why_unsupported(layout)}")
        kind = "parameter" if is_parameter else layout.kind
        if kind not in method.kinds:
            raise file.error(key, method.refusal(f"the model's {layer}", kind))
        layers[layer] = Layer(layer, leaf, layout, bias, config.options, file, keys, method, kind)
    shared = None
    if method.prepare is not None:
        shared = method.prepare(
            [*layers.values()], {name: file.read(key, file.shape(key)) for name, key in file.shared.items()}
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
    """The adapted stack of experts with adapters of their own; `experts` has the keys of all, by layer."""
    method = config.method
    if method.read_stack is None:
        key = next(key for keys in experts.values() for key in keys.values())
        raise file.error(key, method.refusal(f"the model's {name}", "parameter", "a stack of experts"))
    layers = [
        Layer(layer, leaf, layout, None, config.options, file, keys, method, "parameter")
        for layer, keys in experts.items()
    ]
    array = method.read_stack(name, layers)
    for layer in layers:
        layer.check_all_read()
    return array


def _trained_in_full(
    config: AdapterConfig, file: _File, arrays: Mapping[str, tuple[str, Any]]
) -> dict[str, str]:
    """The arrays that the file trains in full, by their names in the file."""
    held = {new: leaf for new, (_, leaf) in arrays.items() if leaf is not None}
    floats = [new for new, leaf in held.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wanted = [new for new in floats if config.saves(new)]
    if config.option("bias") == "all":
        wanted += [new for new in floats if new.endswith(".bias") and new not in wanted]
    elif config.option("bias") == "lora_only":
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
