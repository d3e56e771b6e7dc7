"""`save_adapter`: the adapter of a model, in a directory that PEFT loads."""

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._checked import a_or_an, checked
from ...adapters.adalora import AdaLoRAArray
from ...adapters.alora import ALoRAArray
from ...adapters.ia3 import ScaledBias
from ...adapters.record import Method, Written
from ...arrays.adapted import AdaptedArray
from ...arrays.layout import Layout
from ...arrays.lora import RANK, LoraArray, LoraBias, TrainableArray, TrainableRows, labels, padded_to
from ...core.values import is_value
from ...surgery.inits import as_matrix, halves, svd, taken_by, with_factors
from ...surgery.records import Layouts, records_of
from ...surgery.select import is_router
from ...surgery.trees import layer_of, map_arrays, named_arrays, replace, suggestion
from ..families import FAMILIES, names_of
from .config import BY_TYPE, CHANGES_BASE, PREFIX, files_of
from .load import ROOT, Rename, names_in_file
from .stored import ENDINGS, TOKENS, is_parameter, parts_as_stored, stored_as, why_unsupported, wrapped_names


@checked
def save_adapter(
    directory: str | os.PathLike[str],
    model: PyTree,
    *,
    base_model: str | None = None,
    rename: Rename = None,
    adapter_name: str = "default",
    task_type: str | None = None,
    layout: Layouts = None,
    base: PyTree = None,
) -> None:
    """Writes the adapter of a model in PEFT's format: the trained arrays, without the base.

    If it overwrites an adapter, `load_adapter` finds either the old or the new one, even after a kill.

    **Arguments:**

    - `directory`: the folder to write to, which is created if it does not exist.
    - `model`: the result of [`quaxlike.loraify`][], `load_adapter`, or [`quaxlike.adapt`][] with one of the
        methods of `quaxlike.adapters`. Stacked layers of a [`quaxlike.lm.models.Decoder`][] are written
        one by one.
    - `base_model`: the name or path of the base model, so that PEFT can find it. Default: none.
    - `rename`: a function or mapping from names of the model to names in the file, as for `load_adapter`.
        Default: those of the model; of a decoder with `"FEATURE_EXTRACTION"`, those that it has without its
        head, since PEFT puts such an adapter on `AutoModel`.
    - `adapter_name`: the name of the adapter. One other than `"default"` goes to a folder of this name in
        `directory`.
    - `task_type`: PEFT's, such as `"CAUSAL_LM"`, `"SEQ_CLS"` or `"FEATURE_EXTRACTION"`. With a classifier's,
        the file includes its head. Default: none.
    - `layout`: as for `load_adapter`.
    - `base`: the model that the adapter will be loaded on, where an initialisation changed the base: what it
        took out of `base` goes into the file, with twice the rank. Default: the base before it was adapted,
        where the name of the initialisation (`"pissa"`, `"olora"`) tells what that was.

    **Raises:**

    `ValueError` for anything that PEFT's format cannot hold, with its name, such as stacked adapters, weights
    of layers that PyTorch does not have, layers that differ in more than rank and alpha, or adapters of two
    methods.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.lm import peft

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=2, key=jax.random.key(1))
        peft.save_adapter("adapter", model)
        again = peft.load_adapter("adapter", mlp)
        ```

    The base is not in the file. Save it as well, and pass `base=model`, if it has changed in a way that the
    file cannot tell: because LoftQ rounded it, or because its weights or scales are trained (`train_base`,
    [`quaxlike.train_scales`][]).
    """
    if base is not None:
        model = _relative_to_base(_unstacked(model), _unstacked(base))
    model, invocation = _for_all_tokens(_with_low_rank(_unstacked(model)))
    if rename is None and task_type == "FEATURE_EXTRACTION":
        rename = _without_head(model)
    arrays = names_in_file(model, rename)
    layouts = {name: record.layout for name, record in records_of(model, layout).items()}
    in_file = {new: layouts[name] for new, name, _ in arrays}
    names = {new: leaf for new, _, leaf in arrays}
    kind = _kind_of({name: leaf for _, name, leaf in arrays})
    adapters = {
        layer_of(new): _Adapter(name, leaf, _layout(name, leaf, layouts[name]))
        for new, name, leaf in arrays
        if isinstance(leaf, _TYPES[kind])
    }
    lora_bias, trained = _biases(names, adapters)
    for new, leaf in names.items():
        layer = new.rpartition(".")[0].rpartition(".")[2]
        if layer in _HEADS.get(task_type or "", ()) and not is_value(leaf):
            trained[new] = leaf
    trained_config = _trained_config(names, adapters, trained)
    tensors: dict[str, Any] = {}
    old = {new: name for new, name, _ in arrays}
    for new, array in trained.items():
        array = stored_as(old[new], array.shape, layouts).put(array)
        layer, _, field = new.rpartition(".")
        tensors[f"{layer}.base_layer.bias" if field == "bias" and layer in adapters else new] = array
    of_all: dict[str, Any] = {}
    if (method := BY_TYPE.get(kind)) is None:
        of_layers, entries = _lora_entries(model, names, in_file, adapters, lora_bias, trained)
        entries = {**trained_config, **entries}
        if invocation is not None:
            entries["alora_invocation_tokens"] = [*invocation]
    else:
        _check_alone(method, model, names, adapters, lora_bias, trained_config)
        of_layers, of_all, entries = _method_entries(method, names, in_file, adapters)
        entries["modules_to_save"] = trained_config["modules_to_save"]
    config = {"base_model_name_or_path": base_model, "task_type": task_type, **entries}

    folder = Path(directory) if adapter_name == "default" else Path(directory) / adapter_name
    folder.mkdir(parents=True, exist_ok=True)
    stored = {PREFIX + key: np.asarray(array) for key, array in (of_layers | tensors).items()}
    stored |= {ROOT + key: np.asarray(array) for key, array in of_all.items()}
    files_of(folder).write(stored, json.dumps(_DEFAULTS | config, indent=2, sort_keys=True).encode())


# The heads that PEFT trains for a task by default, and so expects in the file.
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_DEFAULTS = {
    "auto_mapping": None, "exclude_modules": None, "inference_mode": True,
    "layers_pattern": None, "layers_to_transform": None, "peft_type": "LORA", "revision": None,
}  # fmt: skip


def _with_low_rank(model: PyTree) -> PyTree:
    """The model with the adapters of AdaLoRA as the low-rank ones that they are."""
    found = {name: x for name, x in named_arrays(model).items() if isinstance(x, AdaLoRAArray)}
    # PEFT has no rank of zero.
    return replace(model, map_arrays(lambda _, x: padded_to(y := x.composed(), max(y.rank, 1)), found))


def _for_all_tokens(model: PyTree) -> tuple[PyTree, tuple[int, ...] | None]:
    """The model with activated LoRAs as those that act on all tokens, and the tokens that invoke them."""
    arrays = named_arrays(model)
    found = {name: x for name, x in arrays.items() if isinstance(x, ALoRAArray)}
    if not found:
        return model, None
    invocations = sorted({x.invocation for x in found.values()})
    others = [name for name, x in arrays.items() if isinstance(x, LoraArray)]
    if len(invocations) > 1 or others:
        what = f"those of {others[0]} on all" if others else f"others on those from {list(invocations[1])} on"
        raise ValueError(
            "PEFT's files hold adapters that act on the same tokens; here some act on those from "
            f"{list(invocations[0])} on, {what}."
        )
    for name, x in found.items():
        if len(x.w.shape) != 2:
            raise ValueError(f"PEFT's aLoRA is for linear layers; {name} is of shape {x.w.shape}.")
    return replace(model, map_arrays(lambda _, x: x.lora(), found)), invocations[0]


# The type of array of each method, by its name in PEFT.
_TYPES = {"LORA": LoraArray} | {kind: method.type for kind, method in BY_TYPE.items()}


def _kind_of(arrays: Mapping[str, Any]) -> str:
    """The method of all adapters of the model."""
    beside = (LoraBias, TrainableArray, TrainableRows, ScaledBias)
    found: dict[str, str] = {}
    for name, leaf in arrays.items():
        if not isinstance(leaf, AdaptedArray) or isinstance(leaf, beside):
            continue
        kind = next((kind for kind, cls in _TYPES.items() if isinstance(leaf, cls)), None)
        if kind is None:
            raise ValueError(
                f"{name} is {a_or_an(type(leaf))}, which the files of PEFT's methods cannot hold. Merge it "
                "into the weight first, or save the whole model with `quaxlike.files.safetensors`."
            )
        found.setdefault(kind, name)
    if not found:
        raise ValueError(
            "The model has no adapter to save: it holds no LoraArray or array of another method."
        )
    if len(found) > 1:
        named = ", ".join(f"{kind} ({name})" for kind, name in found.items())
        raise ValueError(
            f"PEFT's files hold adapters of one method; the model has {named}. Save the whole model with "
            "`quaxlike.files.safetensors`, or merge those of all methods but one."
        )
    return next(iter(found))


def _lora_entries(
    model: PyTree, names: Mapping[str, Any], layouts: Mapping[str, Layout | None],
    adapters: Mapping[str, "_Adapter"], lora_bias: Mapping[str, Any], trained: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The tensors of LoRA's adapters and of rows of embeddings, and the configuration."""
    every = [new for new, leaf in names.items() if is_parameter(new, leaf.shape, layouts[new])]
    parameters = [
        new
        for new, leaf in names.items()
        if new in adapters and is_parameter(new, leaf.shape, adapters[new].layout)
    ]
    routers = [f"{layer}.weight" for layer in adapters if is_router(layer, every)]
    wrapped = wrapped_names(parameters)
    tensors: dict[str, Any] = {}
    for layer, adapter in adapters.items():
        is_wrapped = layer in wrapped
        tensors |= (
            _parameter_tensors(wrapped[layer], adapter) if is_wrapped else _layer_tensors(layer, adapter)
        )
    tensors |= {f"{layer}{ENDINGS['layer']['bias']}": bias.reshape(-1) for layer, bias in lora_bias.items()}
    tokens = {layer_of(new): leaf for new, leaf in names.items() if isinstance(leaf, TrainableRows)}
    tensors |= {f"{layer}{TOKENS}": leaf.rows for layer, leaf in tokens.items()}
    tied = _tied_head_entries(model, tensors, trained)
    return tensors | tied, {
        **_layers(names, adapters, layouts, {*parameters, *map(layer_of, routers)}),
        "init_lora_weights": _initialisation(
            {layer: adapter.lora for layer, adapter in adapters.items()},
            {
                layer: _changes_base(adapter) and layer not in parameters and not lora_bias
                for layer, adapter in adapters.items()
            },
        ),
        **({"lora_bias": True} if lora_bias else {}),
        **_trained_tokens(tokens),
        **({"ensure_weight_tying": True} if tied else {}),
        **({"target_parameters": sorted([*parameters, *routers])} if parameters or routers else {}),
    }


def _check_alone(
    method: Method, model: PyTree, names: Mapping[str, Any], adapters: Mapping[str, Any],
    lora_bias: Mapping[str, Any], trained_config: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raises for what only the files of LoRA hold."""
    found = None
    if lora_bias or trained_config["bias"] != "none":
        found = "biases that are trained"
    elif any(isinstance(leaf, TrainableRows) for leaf in names.values()):
        found = "rows of embeddings that are trained"
    elif hasattr(model, "with_separate_head") and getattr(model, "lm_head", None) is None:
        embedding = next((x for x in adapters if x.endswith(tuple(names_of("embed_tokens")))), None)
        found = embedding and f"one adapter of {embedding} and the output layer that is tied to it"
    if found:
        raise ValueError(f"PEFT's files of {method.peft_type} do not hold {found}. Merge the model instead.")


def _method_entries(
    method: Method, names: Mapping[str, Any], layouts: Mapping[str, Layout | None],
    adapters: Mapping[str, "_Adapter"],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """The tensors of layers and of the whole model for another method than LoRA, and the configuration."""
    layers: dict[str, Written] = {}
    for layer, adapter in adapters.items():
        name, x, layout = adapter
        if x.shape != x.w.shape or layout.batch_shape(x.shape):
            raise ValueError(
                f"{name} is of shape {x.shape}, on a weight of shape {x.w.shape}: PEFT's files hold one "
                "adapter for each layer. Save layers and adapters of a stack one by one."
            )
        is_conv1d = _is_fan_in_fan_out(adapter)
        if layout.kind not in method.kinds or (is_conv1d and not method.conv1d):
            kind = "a Conv1D, whose weight is (in, out)" if is_conv1d else f"of kind {layout.kind!r}"
            raise ValueError(f"{method.refused}; {name} is {kind}.")
        layers[layer] = Written(layer, x, layout, names.get(f"{layer}.bias"))
    tensors: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for layer, written in layers.items():
        parts, options[layer] = method.write(written)
        tensors |= {f"{layer}{method.parts[part]}": array for part, array in parts.items()}
    config = {name: option.default for name, option in method.options.items()}
    if method.settle is not None:
        config |= method.settle(layers, options)
    for name in dict.fromkeys(name for own in options.values() for name in own):
        values = {layer: own[name] for layer, own in options.items() if name in own}
        if name in method.patterns:
            config[name], config[method.patterns[name]] = _by_pattern(values)
        else:
            config[name] = _in_common(name, values)
    of_all: dict[str, Any] = {}
    if method.write_shared is not None:
        shared, entries = method.write_shared([*layers.values()])
        of_all = {method.shared[name]: array for name, array in shared.items()}
        config |= entries
    if "fan_in_fan_out" in config:
        config["fan_in_fan_out"] = any(map(_is_fan_in_fan_out, adapters.values()))
    targets = _targets(names, adapters, layouts)
    return tensors, of_all, {"peft_type": method.peft_type, **config, "target_modules": targets}


def _without_head(model: PyTree) -> Rename:
    """The names that the arrays of a decoder have in its body alone; None for any other model."""
    arrays = named_arrays(model)
    for family in FAMILIES.values():
        body = f"{family.name('model')}."
        if any(name.startswith(f"{body}{family.name('embed_tokens')}.") for name in arrays):
            return lambda name: name.removeprefix(body)
    return None


def _unstacked(model: PyTree) -> PyTree:
    """Undoes `stack_layers`."""
    return model.unstacked() if hasattr(model, "unstacked") else model


class _Adapter(NamedTuple):
    name: str
    lora: Any
    """A `LoraArray`, or the array of another method."""
    layout: Layout


def _layout(name: str, lora: Any, layout: Layout | None) -> Layout:
    """The layout of a layer. If neither the layer nor its name says it, it is the one that the adapter was
    made for."""
    if layout is not None and layout.is_known and layout.kind != "matrix":
        return layout
    if len(lora.in_axes) > 1:  # the axes of heads, or the window of a convolution
        raise ValueError(
            f"PEFT's files have no place for {name}, of shape {lora.shape}: it is {why_unsupported(layout)}."
        )
    return Layout(lora.out_axes, lora.in_axes, "matrix")


def _layer_tensors(layer: str, adapter: _Adapter) -> dict[str, Any]:
    _, lora, layout = adapter
    if lora.shape != lora.w.shape or layout.batch_shape(lora.shape):
        raise ValueError(
            f"{layer} is of shape {lora.shape}, with adapters of shapes {lora.a.shape} and {lora.b.shape}: "
            "PEFT's files hold one adapter per layer. Save layers and adapters of a stack one by one."
        )
    if layout.kind in ("grouped conv", "other conv"):
        raise ValueError(f"{layer} is {why_unsupported(layout)}.")
    if (lora.in_axes, lora.out_axes) == (layout.out_axes, layout.in_axes):
        # The layer shares its adapter with the embedding that it is tied to.
        if lora.magnitude is not None:
            raise ValueError(f"PEFT has no DoRA for {layer}, an output layer tied to an embedding.")
        turned = {"a": lora.b.T, "b": lora.a.T}
        return {f"{layer}{ENDINGS['layer'][part]}": x for part, x in turned.items()}
    if (lora.out_axes, lora.in_axes) != (layout.out_axes, layout.in_axes):
        raise ValueError(
            f"The adapter on {layer} has out_axes={lora.out_axes} and in_axes={lora.in_axes}; those of the "
            f"layer are {layout.out_axes} and {layout.in_axes}."
        )
    return _tensors(layer, lora, layout.kind)


def _tensors(layer: str, lora: LoraArray, kind: str) -> dict[str, Any]:
    endings = ENDINGS["embedding" if kind == "embedding" else "layer"]
    parts = {part: x for part in ("a", "b", "magnitude") if (x := getattr(lora, part)) is not None}
    stored = parts_as_stored(lora, kind)
    return {f"{layer}{endings[part]}": stored[part].put(x) for part, x in parts.items()}


def _tied_head_entries(
    model: PyTree, tensors: Mapping[str, Any], trained: Mapping[str, Any]
) -> dict[str, Any]:
    """PEFT's entries for an output layer that is tied to the embedding. They repeat the change of the
    embedding."""
    if not hasattr(model, "with_separate_head") or any(name.startswith("lm_head") for name in tensors):
        return {}
    if getattr(model, "lm_head", None) is not None:
        return {}
    out: dict[str, Any] = {}
    for new, array in trained.items():
        if new.endswith(tuple(f"{x}.weight" for x in names_of("embed_tokens"))):
            out["lm_head.weight"] = array
    for part, other in (("a", "b"), ("b", "a")):
        for key, array in tensors.items():
            if key.endswith(ENDINGS["embedding"][part]):
                out[f"lm_head{ENDINGS['layer'][other]}"] = array.T
    return out


def _parameter_tensors(module: str, adapter: _Adapter) -> dict[str, Any]:
    name, lora, _ = adapter
    if not lora.a.ndim == lora.b.ndim == len(lora.w.shape) or lora.magnitude is not None:
        raise ValueError(
            "PEFT's files have one low-rank adapter for each matrix of a parameter, each expert for example; "
            f"that of {name}, {lora.w.shape}, has factors of shapes {lora.a.shape} and {lora.b.shape}"
            f"{'' if lora.magnitude is None else ', and a magnitude'}."
        )
    if len(lora.shape) == 2 and lora.out_axes != (-2,):
        raise ValueError(
            f"PEFT's files have no place for {name}, of shape {lora.shape}: it is stored as (in, out), and "
            "no layer's weight."
        )
    return _tensors(module, lora, "parameter")


def _is_fan_in_fan_out(adapter: _Adapter) -> bool:
    """Whether the checkpoint stores the weight as `(in, out)`, like GPT-2's. Kernels of other frameworks,
    which are `(in, out)` too, are stored as `(out, in)`."""
    name, lora, layout = adapter
    is_weight = name.rpartition(".")[2] == "weight" and layout.kind in ("linear", "matrix")
    return is_weight and lora.out_axes == layout.out_axes == (-1,)


def _changes_base(adapter: _Adapter) -> bool:
    """Whether PEFT takes the same part out of this layer's weight for PiSSA or OLoRA as was taken here."""
    taken, layout = adapter.lora.taken, adapter.layout
    of_stored = taken is not None and taken[0] == "olora"  # the factors of the weight as it is stored
    return layout.kind in ("linear", "matrix") and not (of_stored and _is_fan_in_fan_out(adapter))


def _biases(names: Mapping[str, Any], adapters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The biases of adapters by layer, and the arrays that are trained in full by name."""
    lora_bias: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    for new, leaf in names.items():
        if isinstance(leaf, LoraBias):
            lora_bias[new.removesuffix(".bias")] = leaf.b
            leaf = leaf.w
        if isinstance(leaf, TrainableArray):
            if is_value(leaf.array):
                raise ValueError(
                    f"{new} is trained in full (`modules_to_save`), where PEFT takes a dense array; "
                    f"found {a_or_an(type(leaf.array))}. Leave it out of `quantize` (`where`), or adapt it."
                )
            trained[new] = leaf.array
    if lora_bias and lora_bias.keys() != adapters.keys():
        raise ValueError(
            "In PEFT's files all adapters have biases of their own, or none; here these differ: "
            f"{', '.join(sorted(lora_bias.keys() ^ adapters.keys()))}."
        )
    return lora_bias, trained


def _layers(
    names: Mapping[str, Any],
    adapters: Mapping[str, "_Adapter"],
    layouts: Mapping[str, Layout | None],
    parameters: Collection[str],
) -> dict[str, Any]:
    """The part of the configuration about adapted layers; to PEFT, `parameters` are not layers."""
    loras = {layer: adapter.lora for layer, adapter in adapters.items()}

    r, rank_pattern = _by_pattern({layer: lora.rank for layer, lora in loras.items()})
    alpha, alpha_pattern = _by_pattern({layer: _as_int(lora.alpha) for layer, lora in loras.items()})
    return {
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "lora_dropout": _in_common("dropout", {layer: lora.dropout for layer, lora in loras.items()}),
        "use_rslora": _in_common("use_rslora", {layer: lora.rslora for layer, lora in loras.items()}),
        "use_dora": _in_common(
            "use_dora", {layer: lora.magnitude is not None for layer, lora in loras.items()}
        ),
        "fan_in_fan_out": any(map(_is_fan_in_fan_out, adapters.values())),
        "target_modules": _targets(
            names, {layer: x for layer, x in adapters.items() if layer not in parameters}, layouts
        ),
    }


def _in_common(what: str, values: dict[str, Any]) -> Any:
    if len(set(values.values())) > 1:
        differing = ", ".join(f"{layer}: {value}" for layer, value in values.items())
        raise ValueError(f"PEFT's files have one {what} for all layers; found {differing}.")
    return next(iter(values.values()))


def _by_pattern(values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most common value, and the others by patterns of names."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], -value))  # independent of the order of layers
    out: dict[str, Any] = {}
    for layer, value in values.items():
        last = layer.rpartition(".")[2]
        alike = {v for other, v in values.items() if other.rpartition(".")[2] == last} == {value}
        if value != common:
            out[last if alike else f"^{layer}"] = value
    return common, out


def _as_int(x: float) -> float | int:
    return int(x) if x == int(x) else x


def _targets(
    names: Mapping[str, Any], adapters: Mapping[str, Any], layouts: Mapping[str, Layout | None]
) -> list[str] | None:
    """The last components of the adapted layers' names if they identify them, or else whole names."""
    if not adapters:
        return None
    short = sorted({layer.rpartition(".")[2] for layer in adapters})
    meant = {
        layer_of(new)
        for new, leaf in names.items()
        if layouts[new] is not None and layer_of(new).rpartition(".")[2] in short
        and not isinstance(leaf, TrainableArray | TrainableRows)
    }  # fmt: skip
    return short if meant == adapters.keys() else sorted(adapters)


def _trained_tokens(tokens: Mapping[str, TrainableRows]) -> dict[str, Any]:
    """The part of the configuration about rows of embeddings."""
    found: Any = {layer.rpartition(".")[2]: list(leaf.indices) for layer, leaf in tokens.items()}
    if found.keys() <= {"embed_tokens"}:  # where PEFT looks by default
        found = found.get("embed_tokens")
    return {"trainable_token_indices": found}


def _trained_config(
    names: Mapping[str, Any], adapters: Mapping[str, Any], trained: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of the configuration about arrays that are trained in full."""
    modules = {new.rpartition(".")[0] or new for new in trained if not new.endswith(".bias")}
    for new, leaf in names.items():
        if (
            new.rpartition(".")[0] in modules
            and new not in trained
            and jnp.issubdtype(leaf.dtype, jnp.floating)
        ):
            raise ValueError(
                f"PEFT's files hold whole modules; {new} is not trained, and other arrays of its module are. "
                "Name the module in `modules_to_save`."
            )
    biases = {new for new in trained if new.rpartition(".")[0] not in modules}
    everywhere = {new for new in names if new.endswith(".bias") and new.rpartition(".")[0] not in modules}
    of_adapted = {new for new in everywhere if new.removesuffix(".bias") in adapters}
    modes = {"none": set(), "lora_only": of_adapted, "all": everywhere} if biases else {"none": set()}
    bias = next((mode for mode, those in modes.items() if those == biases), None)
    if bias is None:
        raise ValueError(
            "PEFT's files hold the biases of all layers, of the adapted ones or of none; here are trained: "
            f"{', '.join(sorted(biases))}."
        )
    return {"bias": bias, "modules_to_save": sorted(modules - {""}) or None}


# -------------------------------------------------------------------------------------------------
# Adapters whose initialisation took a part of the base, in files that do not hold the base.
#
# PEFT takes the part out again when it loads "pissa" and "olora", which follow from the base alone. For all
# others, and for layers where it does not, the part goes into the file: with `base + taken` for the base that
# is adapted, `[a, a'], [b, b']` with `scaling * b' a' = taken` give the same sum on `base`, at twice the rank
# (PEFT's `path_initial_model_for_weight_conversion`).
# -------------------------------------------------------------------------------------------------

_HINT = (
    "Pass `base`: the model before it was adapted, to put that part into the file; or this model, if its "
    "base is saved as well and the adapter will be loaded on that."
)


def _initialisation(adapters: Mapping[str, LoraArray], in_peft: Mapping[str, bool]) -> str | bool:
    """The entry `init_lora_weights` for these adapters, by layer; `in_peft` says for which of them PEFT takes
    a part out of the base.

    Raises `ValueError` if the entry cannot tell what was taken out."""
    names = {str(lora.taken[0]) for lora in adapters.values() if lora.taken is not None}
    if not names:
        return True
    name = next(iter(names)) if len(names) == 1 else None
    for layer, lora in adapters.items():
        is_derivable = name in CHANGES_BASE and in_peft[layer] and lora.taken == taken_by(name, lora)
        if not (is_derivable or (lora.taken is None and not in_peft[layer])):
            raise ValueError(
                f"The initialisations of the adapters ({', '.join(sorted(names))}) changed the base, and a "
                f"file without the base cannot tell how for {layer}. {_HINT}"
            )
    assert name is not None
    return name


def _relative_to_base(model: PyTree, base: PyTree) -> PyTree:
    """The model with adapters that give the same weights when they are put on the arrays of `base`."""
    arrays = named_arrays(base)
    new: dict[str, LoraArray] = {}
    for name, lora in named_arrays(model).items():
        if isinstance(lora, LoraArray):
            if name not in arrays:
                raise ValueError(f"`base` has no {name}, which the model adapts. {suggestion(name, arrays)}")
            w = arrays[name]
            new[name] = _relative(name, lora, w.w if isinstance(w, LoraArray) else w)
    return replace(model, new)


def _relative(name: str, lora: LoraArray, w: Any) -> LoraArray:
    if lora.w is w or eqx.tree_equal(lora.w, w) is True:
        return lora.replace(taken=None)
    kind = lambda x: f"{x.dtype} {type(x).__name__ if is_value(x) else 'array'} of shape {x.shape}"
    if is_value(w) or is_value(lora.w) or kind(w) != kind(lora.w):
        raise ValueError(
            f"`base` has {a_or_an(kind(w))} as {name}, and the adapted base is "
            f"{a_or_an(kind(lora.w))}: the file can hold the difference of plain arrays only. Quantise "
            "the model after the adapter is loaded."
        )
    before = as_matrix(lora, w)
    taken = as_matrix(lora, lora.w) - before
    u, s, vt = svd(taken, lora.rank)
    rest = taken - jnp.matmul(u * s[..., None, :], vt, precision="highest")
    share = float(jnp.linalg.norm(rest) / jnp.linalg.norm(before))
    if not share <= 8 * max(float(jnp.finfo(lora.dtype).eps), 1e-6):
        raise ValueError(
            f"`base` and the adapted base differ in {name} by more than an initialisation of rank "
            f"{lora.rank} takes out (the rest is {share:.1g} of the weight)."
        )
    other = with_factors(lora, *halves(u, s / lora.scaling, vt))
    _, a_labels, b_labels = labels(lora)
    return lora.replace(
        a=jnp.concatenate([lora.a, other.a], a_labels.index(RANK)),
        b=jnp.concatenate([lora.b, other.b], b_labels.index(RANK)),
        alpha=lora.alpha * (math.sqrt(2) if lora.rslora else 2),
        w=w,
        taken=None,
    )
