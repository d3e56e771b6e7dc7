"""`save_adapter`, for saving an adapter in PEFT's format.

Anything this format can't represent must raise an error. (Otherwise PEFT would still load the file, but
compute different results.)
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._checked import checked
from ...adapters.ia3 import ScaledBias
from ...adapters.lora import relative_to
from ...adapters.record import PREFIX, ROOT, Method, Written
from ...arrays.adapted import AdaptedArray, innermost
from ...arrays.layout import Layout
from ...arrays.lora import LoraArray, LoraBias, TrainableArray, TrainableRows
from ...core.values import is_value, materialise
from ...surgery.records import Layouts, records_of
from ...surgery.select import is_router
from ...surgery.trees import layer_of, map_arrays, named_arrays, replace, suggestion, unstacked
from ...surgery.weight_axes import MATRIX
from ..families import FAMILIES, HEADS, IN_TOWER, Family, names_of
from ..models.classifier import AbstractClassifier
from ..models.decoder import Decoder
from ..models.vocabulary import embeddings, is_of_tokens
from .config import BY_TYPE, TIED_BY_PEFT, files_of
from .load import Rename, names_in_file
from .stored import biases_of, is_bias, is_parameter, stored_as, why_unsupported, wrapped_names


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
    """Writes a model's adapter in PEFT's format. The base model isn't included.

    When overwriting an adapter, `load_adapter` always loads either the old or the new one, even if the
    process is killed part-way through.

    **Arguments:**

    - `directory`: the folder to write to. This is created if it doesn't exist.
    - `model`: the output of [`quaxlike.loraify`][], of `load_adapter`, or of [`quaxlike.adapt`][] with any
        method in `quaxlike.adapters`. Stacked layers of a [`quaxlike.lm.models.Decoder`][] are written
        separately.
    - `base_model`: the name or path of the base model, for PEFT to load it automatically. Defaults to none.
    - `rename`: a function or mapping from names in the model to names in the file, as for `load_adapter`.
        Defaults to transformers' names for the original checkpoint, e.g. `model.language_model.layers` for
        the layers in a decoder from Gemma 3 or Mistral 3. With `"FEATURE_EXTRACTION"`, the names come from
        the decoder's body: PEFT applies the adapter to `AutoModel`.
    - `adapter_name`: the name of the adapter. Unless this is `"default"`, the adapter is written to a
        subfolder with this name.
    - `task_type`: the task type in PEFT, such as `"CAUSAL_LM"`, `"SEQ_CLS"` or `"FEATURE_EXTRACTION"`. For
        classification, the file includes the head. Defaults to the model's, if this is from
        [`quaxlike.lm.load`][] or [`quaxlike.lm.models.with_classifier`][], and otherwise to none.
    - `layout`: as for `load_adapter`.
    - `base`: the model to apply the adapter to. This is only needed if an initialisation has modified the
        base. Then the file also includes this modification, doubling the rank. For `"pissa"` and `"olora"`,
        this defaults to the base model before adaptation.

    **Raises:**

    `ValueError` for anything the format doesn't support, e.g. stacked adapters, layers without an equivalent
    in PyTorch, layers differing in more than rank and alpha, or adapters from more than one method. The
    message names the array.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.lm import peft

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=2, key=jax.random.key(1))
        peft.save_adapter("adapter", model)
        again = peft.load_adapter("adapter", mlp)
        ```

    The base model isn't included, so you must also save it if its weights were rounded by LoftQ, or if its
    weights or scales were trained (`gradients="train"` or [`quaxlike.train_scales`][]). In this case, pass
    `base=model`.
    """
    task_type = _task_of(model) if task_type is None else task_type
    if base is not None:
        model = _relative_to_base(unstacked(model), unstacked(base))
    stored, entries = tensors_and_config(model, rename=rename, task_type=task_type, layout=layout)
    config = {"base_model_name_or_path": base_model, "task_type": task_type, **entries}
    folder = Path(directory) if adapter_name == "default" else Path(directory) / adapter_name
    folder.mkdir(parents=True, exist_ok=True)
    stored = {key: np.asarray(array) for key, array in stored.items()}
    files_of(folder).write(stored, json.dumps(_DEFAULTS | config, indent=2, sort_keys=True).encode())


def _task_of(model: PyTree) -> str | None:
    if isinstance(model, AbstractClassifier):
        return "TOKEN_CLS" if model.of_tokens else "SEQ_CLS"
    return "CAUSAL_LM" if isinstance(model, Decoder) and not model.config.headless else None


def tensors_and_config(
    model: PyTree, *, rename: Rename = None, task_type: str | None = None, layout: Layouts = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors and the configuration for an adapter file.

    **Raises:** as for `save_adapter`.
    """
    model, ties_head = _with_written_head(_rewritten(unstacked(model)), task_type)
    body = getattr(getattr(model, "config", None), "body_name", "")
    if rename is None:
        rename = {"model": body} if body else None
        if task_type == "FEATURE_EXTRACTION":
            rename = _without_head(model, body)
    arrays = names_in_file(model, rename)
    layouts = {name: record.layout for name, record in records_of(model, layout).items()}
    in_file = {new: layouts[name] for new, name, _ in arrays}
    names = {new: leaf for new, _, leaf in arrays}
    old = {new: name for new, name, _ in arrays}
    method = _method_of({name: leaf for _, name, leaf in arrays})
    with_embeddings = getattr(getattr(model, "config", None), "new_embeddings", False)
    adapters = _layers(method, names, in_file, old, with_embeddings)
    trained = _trained(names, adapters)
    for new, leaf in names.items():
        layer = new.rpartition(".")[0].rpartition(".")[2]
        if layer in _HEADS.get(task_type or "", ()) and not is_value(leaf):
            trained[new] = leaf
    in_full = _trained_config(method, names, adapters, trained)
    _check_held(method, model, names, adapters, in_full)
    family = getattr(getattr(model, "config", None), "family", None)
    tensors, of_all, entries = _entries(method, names, in_file, adapters, family)
    for other in method.beside:
        beside = _layers(other, names, in_file, old, with_embeddings)
        more, _, others = _entries(other, names, in_file, beside, family)
        tensors, entries[other.entry] = tensors | more, others[other.entry]
    entries |= {name: x for name, x in in_full.items() if name in (*entries, "modules_to_save")}
    if ties_head and "ensure_weight_tying" in method.options:
        entries["ensure_weight_tying"] = True
        for entry in ("target_modules", "modules_to_save"):  # PEFT itself adds the output layer
            kept = [name for name in entries[entry] or () if name.rpartition(".")[2] != "lm_head"]
            entries[entry] = kept or None
    for new, array in trained.items():
        array = stored_as(old[new], array.shape, layouts).put(array)
        layer, _, field = new.rpartition(".")
        tensors[f"{layer}.base_layer.bias" if field == "bias" and layer in adapters else new] = array
    if with_embeddings:  # the checkpoint has others
        tensors |= {key: x for key, x in _embeddings(arrays, layouts, method).items() if key not in tensors}
    stored = {PREFIX + key: array for key, array in tensors.items()}
    return stored | {ROOT + key: array for key, array in of_all.items()}, entries


# PEFT trains these heads by default, so it expects them in the file.
_HEADS = {
    "SEQ_CLS": HEADS,
    "TOKEN_CLS": HEADS,
    "QUESTION_ANS": ("qa_outputs",),
}
_DEFAULTS = {
    "auto_mapping": None, "exclude_modules": None, "inference_mode": True,
    "layers_pattern": None, "layers_to_transform": None, "revision": None,
}  # fmt: skip


def _with_written_head(model: PyTree, task_type: str | None) -> tuple[PyTree, bool]:
    """Unties an output layer from the embedding if this is changed as a whole: PEFT's files have this change
    once for each.

    Also returns whether PEFT can tie them again (by the embedding's name).
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "with_separate_head") or getattr(config, "headless", False):
        return model, False
    separated = model.with_separate_head()
    if separated is model or task_type == "FEATURE_EXTRACTION":  # `AutoModel` has no output layer
        return model, False
    ends = tuple(f"{name}.weight" for name in names_of("embed_tokens"))
    for name, x in named_arrays(model).items():
        if name.endswith(ends) and isinstance(x, LoraArray | TrainableArray):
            as_parameter = isinstance(x, LoraArray) and x.out_axes == MATRIX.out_axes
            return separated, not as_parameter and layer_of(name).rpartition(".")[2] in TIED_BY_PEFT
    return model, False


def _record_of(x: Any) -> Method | None:
    """Returns the method of an adapter."""
    return next((method for method in BY_TYPE.values() if isinstance(x, method.type)), None)


def _rewritten(model: PyTree) -> PyTree:
    """Replaces any adapters that PEFT doesn't support with equivalent adapters from another method."""
    new: dict[str, Any] = {}
    for method in BY_TYPE.values():
        if method.rewritten is not None:
            rewritten = method.rewritten
            found = {name: x for name, x in named_arrays(model).items() if isinstance(x, method.type)}
            new |= map_arrays(lambda _, x, rewritten=rewritten: rewritten(x), found)
    return replace(model, new)


def _method_of(arrays: Mapping[str, Any]) -> Method:
    """Returns the method shared by all adapters in a model."""
    beside = (LoraBias, TrainableArray, TrainableRows, ScaledBias)
    found: dict[str, str] = {}
    for name, leaf in arrays.items():
        if not isinstance(leaf, AdaptedArray) or isinstance(leaf, beside):
            continue
        if (method := _record_of(leaf)) is None:
            raise ValueError(
                f"{name} is of type {type(leaf).__name__}, which the files of PEFT's methods cannot hold. "
                "Merge it into the weight first, or save the whole model with `quaxlike.files.safetensors`."
            )
        found.setdefault(method.peft_type, name)
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
    return BY_TYPE[next(iter(found))]


def _layers(
    method: Method, names: Mapping[str, Any], layouts: Mapping[str, Layout | None],
    paths: Mapping[str, str], with_embeddings: bool,
) -> dict[str, Written]:  # fmt: skip
    """Returns the layers adapted by a method, keyed by their names in the file.

    `with_embeddings` says whether the file also holds the embeddings and output layers.
    """
    layers: dict[str, Written] = {}
    for new, x in names.items():
        if not isinstance(x, method.type):
            continue
        layer, path = layer_of(new), paths[new]
        # This is an embedding even if its name suggests otherwise.
        is_embedding = [*method.kinds] == ["embedding"]
        layout = Layout.parse("vo") if is_embedding else _layout(path, x, layouts[new])
        if "parameter" in method.kinds and layout.kind == "embedding" and x.out_axes == MATRIX.out_axes:
            layout = MATRIX  # this was adapted as a parameter, or isn't an embedding despite its name
        is_one = "parameter" in method.kinds and is_parameter(new, x.shape, layout)
        kind = "parameter" if is_one else layout.kind
        has_base = with_embeddings and is_of_tokens(path)
        layers[layer] = Written(layer, x, layout, names.get(f"{layer}.bias"), path, kind, has_base)
    return layers


def _check_held(
    method: Method, model: PyTree, names: Mapping[str, Any], adapters: Mapping[str, Written],
    in_full: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raises an error for any trained arrays that can't be stored in the same file as these adapters."""
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    head = adapters.get("lm_head")
    if is_tied and head is not None and getattr(head.array, "taken", None) is not None:
        raise ValueError(
            f"The initialisation of the adapter on {head.path} ({head.array.taken[0]}) changed this weight "
            "alone. PEFT changes the embedding, too, since the checkpoint ties these. Pass `base`: the model "
            "before it was adapted."
        )
    found = None
    own_biases = any(isinstance(leaf, LoraBias) for leaf in names.values())
    if (own_biases and "lora_bias" not in method.options) or (
        "bias" not in method.options and in_full["bias"] != "none"
    ):
        found = "biases that are trained"
    elif any(isinstance(x, TrainableRows) for x in names.values()) and not method.beside:
        found = "rows of embeddings that are trained"
    elif not method.tied and hasattr(model, "with_separate_head") and getattr(model, "lm_head", None) is None:
        embedding = next((x for x in adapters if x.endswith(tuple(names_of("embed_tokens")))), None)
        found = embedding and f"one adapter of {embedding} and the output layer that is tied to it"
    elif alone := _rows_alone(model, names):
        found = (
            f"tokens of {alone} that are trained for the embedding alone, whose output layer has a change of "
            "its own: PEFT trains them in both, since the checkpoint ties these"
        )
    if found:
        raise ValueError(f"PEFT's files of {method.peft_type} do not hold {found}. Merge the model instead.")


def _rows_alone(model: PyTree, names: Mapping[str, Any]) -> str | None:
    """Finds an embedding with trained rows, if PEFT also trains the rows of a tied output layer.

    This is an issue if our model's output layer has been untied, unless other rows of it are trained.
    """
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    head, rows = names.get("lm_head.weight"), None
    for name, leaf in names.items():
        if isinstance(leaf, TrainableRows) and name.endswith(tuple(f"{x}.weight" for x in embeddings())):
            rows = name, leaf.indices
    if not is_tied or head is None or rows is None:
        return None
    name, indices = rows
    return None if isinstance(head, TrainableRows) and head.indices != indices else name


def _entries(
    method: Method, names: Mapping[str, Any], layouts: Mapping[str, Layout | None],
    adapters: Mapping[str, Written], family: Family | None,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Returns the tensors for individual layers, the tensors for the whole model, and the configuration."""
    assert method.write is not None
    wrapped = wrapped_names(layer for layer, written in adapters.items() if written.kind == "parameter")
    by_weight = _adapted_by_weight(method, names, layouts, adapters, family)
    tensors: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for layer, written in adapters.items():
        _check_kind(method, written)
        parts, options[layer] = method.write(written)
        stem = wrapped.get(layer, layer)
        tensors |= {f"{stem}{method.parts[part]}": x for part, x in parts.items() if x is not None}
    config = {name: option.default for name, option in method.options.items() if not option.is_recent}
    modules = {layer: x for layer, x in adapters.items() if layer not in (*wrapped, *by_weight)}
    targets = config["target_modules"] = _targets(names, modules, layouts)
    if others := _matched_too(names, targets or (), modules, layouts):
        config["exclude_modules"] = others
    if method.settle is not None:
        config |= method.settle(adapters, options, config["target_modules"] or ())
    for name in dict.fromkeys(name for own in options.values() for name in own):
        values = {layer: own[name] for layer, own in options.items() if name in own}
        if name in method.patterns:
            targets = {f"{layer}.weight" if layer in by_weight else layer: x for layer, x in values.items()}
            config[name], config[method.patterns[name]] = _by_pattern(name, targets, method)
        else:
            config[name] = _in_common(name, values)
    of_all: dict[str, Any] = {}
    if method.write_shared is not None:
        shared, entries = method.write_shared([*adapters.values()])
        of_all = {method.shared[name]: array for name, array in shared.items()}
        config |= entries
    if "fan_in_fan_out" in config:
        config["fan_in_fan_out"] = any(x.is_fan_in_fan_out for x in adapters.values())
    if parameters := [*wrapped, *(f"{layer}.weight" for layer in by_weight)]:
        config["target_parameters"] = sorted(parameters)
        if config.get("lora_dropout"):
            warnings.warn(
                f"PEFT has no dropout for parameters such as {parameters[0]}: the file has lora_dropout=0, "
                "and computes the same. Whoever goes on with it trains without dropout.",
                stacklevel=5,
            )
            config["lora_dropout"] = 0.0
    return tensors, of_all, config | {"peft_type": method.peft_type}


def _adapted_by_weight(
    method: Method, names: Mapping[str, Any], layouts: Mapping[str, Layout | None],
    adapters: Mapping[str, Written], family: Family | None,
) -> list[str]:  # fmt: skip
    """Returns the layers with weights adapted as parameters by PEFT."""
    if "parameter" not in method.kinds:
        return []
    every = [new for new, leaf in names.items() if is_parameter(new, leaf.shape, layouts[new])]
    taken = () if family is None else family.taken_for_experts
    tables = {layer_of(new) for new, x in layouts.items() if x is not None and x.kind == "embedding"}
    out = [
        layer
        for layer, x in adapters.items()
        if (x.kind == "matrix" and layer in tables)
        or (x.kind != "parameter" and (is_router(layer, every) or layer.rpartition(".")[2] in taken))
    ]
    for layer in out:
        _check_parameter(adapters[layer])
    return out


def _check_parameter(layer: Written) -> None:
    """Raises an error if PEFT can't apply a layer's adapter to its weight as a parameter."""
    for what, is_there in {
        "DoRA": getattr(layer.array, "magnitude", None) is not None,
        "lora_bias": isinstance(layer.bias, LoraBias),
    }.items():
        if is_there:
            raise ValueError(
                f"PEFT has no {what} for {layer.path}, which it adapts as a parameter, since it is a router, "
                "an embedding, or would be taken for experts."
            )


def _check_kind(method: Method, layer: Written) -> None:
    """Raises an error if this method's files can't store a layer."""
    x, kind = layer.array, layer.kind
    is_stack = x.shape != x.w.shape or layer.layout.batch_shape(x.shape)
    if is_stack and method.read_stack is None:  # all other methods check for stacks themselves
        raise ValueError(
            f"{layer.path} is of shape {x.shape}, on a weight of shape {x.w.shape}: PEFT's files hold one "
            "adapter for each layer. Save layers and adapters of a stack one by one."
        )
    is_conv1d = layer.is_fan_in_fan_out and not method.conv1d
    if kind not in method.kinds or is_conv1d:
        description = "a Conv1D, whose weight is (in, out)" if is_conv1d else None
        name = layer.name if kind in method.others else layer.path
        raise ValueError(f"{method.refusal(name, kind, description)}.")


def _without_head(model: PyTree, published: str) -> Rename:
    """Returns a function from array names in a decoder to names in its body, or None for other models.

    `published` is the name of the body inside a larger model.
    """
    arrays, inside = named_arrays(model), published.partition(".")[2]
    for family in FAMILIES.values():
        body = f"{family.name('model')}."
        if any(name.startswith(f"{body}{family.name('embed_tokens')}.") for name in arrays):
            begins = f"{inside}." if inside else ""
            return lambda name: begins + name.removeprefix(body)
    return None


def _layout(name: str, lora: Any, layout: Layout | None) -> Layout:
    """Returns the layout of a layer, or its adapter's if unknown."""
    if layout is not None and layout.is_known and layout.kind != "matrix":
        return layout
    if len(lora.in_axes) > 1:  # attention heads, or the window of a convolution
        raise ValueError(
            f"PEFT's files have no place for {name}, of shape {lora.shape}: it is {why_unsupported(layout)}."
        )
    return Layout(lora.out_axes, lora.in_axes, "matrix")


def _embeddings(
    arrays: Sequence[tuple[str, str, Any]], layouts: Mapping[str, Layout | None], method: Method
) -> dict[str, Any]:
    """Returns the entries for resized embeddings and output layers, as PEFT saves them."""
    out: dict[str, Any] = {}
    for new, name, leaf in arrays:
        base = innermost(leaf)
        if not is_of_tokens(name) or base is None or isinstance(leaf, TrainableArray):
            continue
        layer, _, field = new.rpartition(".")
        wrapped = {TrainableRows: ".token_adapter.base_layer.", LoraBias: ".base_layer."}.get(type(leaf), ".")
        wrapped = ".base_layer." if isinstance(leaf, method.type) else wrapped
        base = materialise(base)
        out[f"{layer}{wrapped}{field}"] = stored_as(name, base.shape, layouts).put(base)
    return out


def _trained(names: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays trained directly, keyed by name."""
    own_biases: set[str] = set()
    trained: dict[str, Any] = {}
    for new, leaf in names.items():
        if isinstance(leaf, LoraBias):
            own_biases.add(new.removesuffix(".bias"))
            leaf = leaf.w
        if isinstance(leaf, TrainableArray):
            if is_value(leaf.array):
                raise ValueError(
                    f"{new} is trained in full (`modules_to_save`), where PEFT takes a dense array; "
                    f"found {type(leaf.array).__name__}. Leave it out of `quantize` (`where`), or adapt it."
                )
            trained[new] = leaf.array
    if own_biases and own_biases != adapters.keys():
        raise ValueError(
            "In PEFT's files all adapters have biases of their own, or none; here these differ: "
            f"{', '.join(sorted(own_biases ^ adapters.keys()))}."
        )
    return trained


def _in_common(what: str, values: dict[str, Any]) -> Any:
    if len(set(values.values())) > 1:
        differing = ", ".join(f"{layer}: {value}" for layer, value in values.items())
        raise ValueError(f"PEFT's files have one {what} for all layers; found {differing}.")
    return next(iter(values.values()))


def _by_pattern(what: str, values: dict[str, Any], method: Method) -> tuple[Any, dict[str, Any]]:
    """Returns the most common value, and a dict from name patterns to all other values."""
    counts = Counter(values.values())
    # If several are equally common, pick the smallest, so the result is deterministic.
    common = max(counts, key=lambda value: (counts[value], -value))
    out: dict[str, Any] = {}
    for layer, value in values.items():
        last = _last(layer)
        alike = {v for other, v in values.items() if _last(other) == last} == {value}
        if value != common:
            # Not all methods match an anchor.
            exact = layer if method.by_pattern({f"^{layer}": True}, layer, None) is None else f"^{layer}"
            out[last if alike else exact] = value
    for layer, value in values.items():
        if method.by_pattern(out, layer, common) != value:
            raise ValueError(
                f"PEFT's files of {method.peft_type} have {what} by the ends of names, and cannot tell "
                f"{layer} from another layer whose {what} differs."
            )
    return common, out


def _last(target: str) -> str:
    """Returns the last component of a layer's name. For `….gate.weight`, this is `gate.weight`."""
    return ".".join(target.split(".")[-2 if target.endswith(".weight") else -1 :])


def _targets(
    names: Mapping[str, Any], adapters: Mapping[str, Any], layouts: Mapping[str, Layout | None]
) -> list[str] | None:
    """Returns the last component of each adapted layer's name, or full names if these are ambiguous."""
    if not adapters:
        return None
    # Another part of the model may use the same last components.
    if any(IN_TOWER.match(new) for new in names):
        return sorted(adapters)
    short = sorted({layer.rpartition(".")[2] for layer in adapters})
    meant = {
        layer_of(new)
        for new, leaf in names.items()
        if layouts[new] is not None and layer_of(new).rpartition(".")[2] in short
        and not isinstance(leaf, TrainableArray | TrainableRows)
    }  # fmt: skip
    return short if meant == adapters.keys() else sorted(adapters)


def _matched_too(
    names: Mapping[str, Any], targets: Iterable[str], adapters: Mapping[str, Any],
    layouts: Mapping[str, Layout | None],
) -> list[str]:  # fmt: skip
    """Returns the layers without an adapter that `targets` match as well: PEFT compares the ends of names."""
    if not set(targets) <= set(adapters):  # last components, which match nothing else
        return []
    layers = {layer_of(new) for new in names if layouts[new] is not None} - set(adapters)
    found = sorted(x for x in layers if any(x.endswith(f".{target}") for target in targets))
    for layer in found:
        if also := next((x for x in adapters if x.endswith(f".{layer}")), None):
            raise ValueError(
                f"PEFT's files name layers by the ends of their names, and cannot tell {also}, which has an "
                f"adapter, from {layer}, which has none. Adapt both, or rename one."
            )
    return found


def _trained_config(
    method: Method, names: Mapping[str, Any], adapters: Mapping[str, Any], trained: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the configuration entries for arrays trained directly."""
    modules = {new.rpartition(".")[0] or new for new in trained if not is_bias(new)}
    # PEFT saves a module with everything inside it, so only list the outermost ones.
    outer = {module for module in modules if not _is_inside(module, modules)}
    for new, leaf in names.items():
        if _is_inside(new, outer) and new not in trained and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"PEFT's files hold whole modules; {new} is not trained, and other arrays of its module are. "
                "Name the module in `modules_to_save`."
            )
    biases = {new for new in trained if not _is_inside(new, outer)}
    others = [new for new in names if not _is_inside(new, outer)]
    modes = ("none", f"{method.name}_only", "all")
    bias = next((mode for mode in modes if {*biases_of(mode, others, adapters)} == biases), None)
    if bias is None:
        raise ValueError(
            "PEFT's files hold the biases of all layers, of the adapted ones or of none; here are trained: "
            f"{', '.join(sorted(biases))}."
        )
    return {"bias": bias, "modules_to_save": _unambiguous(outer, names) or None}


def _is_inside(name: str, modules: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in modules for n in range(1, len(parts)))


def _unambiguous(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """Adds PEFT's prefix to any ambiguous module names. (PEFT matches every module ending with an entry.)"""
    parts = [name.split(".")[:-1] for name in names]
    every = {".".join(own[:n]) for own in parts for n in range(1, len(own) + 1)}

    def others(module: Any) -> Any:
        return any(x != module and x.endswith(module) for x in every)

    return sorted(f"{PREFIX}{module}" if others(module) else module for module in modules)


def _relative_to_base(model: PyTree, base: PyTree) -> PyTree:
    """Rewrites the adapters to give the same weights when applied to `base`."""
    if "lm_head.weight" in named_arrays(model) and hasattr(base, "with_separate_head"):
        base = base.with_separate_head()  # the adapter may be on an output layer tied in the base
    arrays = named_arrays(base)
    new: dict[str, LoraArray] = {}
    for name, lora in named_arrays(model).items():
        if isinstance(lora, LoraArray):
            if name not in arrays:
                raise ValueError(f"`base` has no {name}, which the model adapts. {suggestion(name, arrays)}")
            w = arrays[name]
            new[name] = relative_to(w.w if isinstance(w, LoraArray) else w, name, lora)
    return replace(model, new)
