"""The file format of LoRA, including rsLoRA, DoRA, PiSSA, OLoRA and activated LoRA.

The array itself, `LoraArray`, is defined in `quaxlike.arrays`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..arrays.layout import Layout
from ..arrays.lora.array import RANK, LoraArray, labels
from ..arrays.lora.inits import initialise, taken_by
from ..arrays.lora.matrices import as_matrix, halves, scaling_of, svd, with_factors
from ..arrays.lora.trainable import LoraBias, TrainableRows
from ..core.values import is_value
from .alora import ALoRAArray
from .record import BIAS, Layer, Method, Option, Weight, Written, as_written, by_pattern, flag, number, starts

# Some initialisations don't modify the base, and others move a part of it into the adapter. For the second
# group, this part can be recomputed from the base alone. The last group (listed by prefix) modifies the base
# in a way that can't be reproduced from the file.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
_CHANGES_BASE = ("pissa", "olora")
_UNKNOWN_CHANGES = {
    "pissa_niter_": "a part of the base that depends on random numbers",
    "corda": "a part of the base that depends on the inputs of its layers",
    "lora_ga": "a part of the base that depends on gradients",
    "loftq": "the rounding error of a base that PEFT quantised",
}
#: The reason why grouped and transposed convolutions can't be adapted.
GROUPED = (
    "a grouped or transposed convolution; PEFT's adapters of those are not low-rank changes of the weight"
)


@starts
def lora(x: Weight, *, rank: int = 8, alpha: float = 8, rslora: bool = False) -> LoraArray:
    """Creates a LoRA with the default initialisation. For all options, use [`quaxlike.loraify`][]."""
    a, b = x.kaiming(rank, *x.in_shape, fan_in=x.inputs), x.zeros(*x.out_shape, rank)
    return x.on(LoraArray, a, b, alpha=alpha, rslora=rslora)


# Options ------------------------------------------------------------------------------------------


def _init_of(options: Mapping[str, Any]) -> Any:
    init = options["init_lora_weights"]
    return init.lower() if isinstance(init, str) else init


def changes_base(options: Mapping[str, Any]) -> bool:
    """Returns whether the initialisation moves a part of the base into the adapter."""
    return options.get("init_lora_weights") is not None and _init_of(options) in _CHANGES_BASE


def _fits_init(x: Any) -> bool:
    lower = x.lower() if isinstance(x, str) else x
    return lower in (*_KEEPS_BASE, *_CHANGES_BASE) or (
        isinstance(lower, str) and lower.startswith(tuple(_UNKNOWN_CHANGES))
    )


def _refused(options: Mapping[str, Any]) -> tuple[str, str] | None:
    init = _init_of(options)
    for start, taken in _UNKNOWN_CHANGES.items():
        if isinstance(init, str) and init.startswith(start):
            return "init_lora_weights", (
                f"with {{}} the adapter holds {taken}, which is not in the file. If the model holds the base "
                "as it was left then, write true here; else save the adapter in PEFT again, with "
                "`path_initial_model_for_weight_conversion`"
            )
    if options["alora_invocation_tokens"]:
        changing = {"init_lora_weights": init in _CHANGES_BASE}
        changing |= {name: options[name] for name in ("use_dora", "lora_bias")}
        for name in (name for name, changes in changing.items() if changes):
            return name, "{} is not supported beside alora_invocation_tokens"
    return None


#: Entries that only concern initialisation or training. Their values can be ignored: other options decide
#: whether they are used at all.
INFORMATIVE = (
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "megatron_core", "qalora_group_size"),
    *("runtime_config", "velora_config"),
)


def _is_tokens(x: Any) -> bool:
    return isinstance(x, list) and all(type(token) is int and token >= 0 for token in x)


_RANK = Option(8, "a positive integer", lambda x: type(x) is int and x > 0)
_OPTIONS = {
    "r": _RANK,
    "lora_alpha": number(8),
    "rank_pattern": by_pattern(_RANK)._replace(expected="positive integers by pattern"),
    "alpha_pattern": by_pattern(number(8))._replace(expected="numbers by pattern"),
    "bias": BIAS,
    "lora_bias": flag()._replace(is_recent=True),
    "lora_dropout": Option(
        0.0, "a number from 0 to 1", lambda x: number(0).fits(x) and 0 <= x < 1
    ),
    "use_rslora": flag(),
    "use_dora": flag(),
    "fan_in_fan_out": flag(),
    "init_lora_weights": Option(
        True, f"one of {', '.join(map(repr, (*_KEEPS_BASE, *_CHANGES_BASE)))}", _fits_init
    ),
    "target_parameters": Option(
        [], "a list of names", lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x),
        is_recent=True,
    ),
    "trainable_token_indices": Option(
        None, "tokens, or tokens by the name of an embedding",
        lambda x: all(map(_is_tokens, x.values())) if isinstance(x, dict) else _is_tokens(x),
    ),
    "ensure_weight_tying": flag()._replace(is_recent=True),
    "alora_invocation_tokens": Option(
        None, "one or more tokens", lambda x: _is_tokens(x) and x != [], is_recent=True
    ),
}  # fmt: skip


# Reading ------------------------------------------------------------------------------------------


def _on(layer: Layer, a: Any, b: Any, count: int = 1, **options: Any) -> LoraArray:
    """Creates an adapter from these factors.

    A concatenation of `count` adapters has a rank larger by this factor. `alpha` increases accordingly, so
    that the scaling stays the same.
    """
    rslora, alpha = layer.option("use_rslora"), float(layer.option("lora_alpha"))
    return layer.on(
        LoraArray, a, b, rslora=rslora, alpha=alpha * (count**0.5 if rslora else count),
        dropout=layer.option("lora_dropout"), **options,
    )  # fmt: skip


def read_factors(layer: Layer, rank: int) -> tuple[Any, Any]:
    """Returns the factors `a` and `b` of a low-rank matrix, with separate input and output axes."""
    start = "embedding_" if layer.kind == "embedding" else ""
    into = layer.in_shape if layer.kind == "conv" else (layer.inputs,)
    a = layer.read(f"{start}a", rank, *into).reshape(rank, *layer.in_shape)
    b = layer.read(f"{start}b", layer.outputs, rank, *[1] * len(layer.window))
    return a, b.reshape(*layer.out_shape, rank)


def written_factors(layer: Written, a: Any, b: Any) -> dict[str, Any]:
    """The inverse of `read_factors`."""
    start, rank = "embedding_" if layer.kind == "embedding" else "", b.shape[-1]
    a = a if layer.kind == "conv" else a.reshape(rank, -1)
    return {f"{start}a": a, f"{start}b": b.reshape(-1, rank, *[1] * len(layer.window))}


def _read(layer: Layer) -> Any:
    start, rank = "embedding_" if layer.kind == "embedding" else "", layer.option("r")
    tokens = layer.option("alora_invocation_tokens")
    if tokens and layer.kind not in ("linear", "matrix"):
        raise layer.error(None, f"PEFT's aLoRA is for linear layers; {layer.name} is none")
    if layer.kind == "parameter":
        return _read_parameter(layer, rank)
    if (found := layer.shape_of(f"{start}a")[:1]) != (rank,):  # Check this before allocating any memory.
        raise layer.error(
            f"{start}a",
            f"the configuration gives rank {rank}; found {found[0] if found else 'a scalar'}",
        )
    a, b = read_factors(layer, rank)
    if layer.has("projection"):  # VeLoRA's, which only compresses what training keeps of the inputs
        layer.read("projection", *layer.shape_of("projection"))
    magnitude = None
    if layer.option("use_dora"):
        shape = (layer.outputs,)
        shape = (1, *shape, *[1] * len(layer.window)) if layer.kind == "conv" else shape
        magnitude = layer.read("magnitude", *shape).reshape(layer.out_shape)
    array = _on(layer, a, b, magnitude=magnitude)
    init = _init_of(layer.options)
    # PEFT doesn't modify embeddings either.
    if init in _CHANGES_BASE and layer.kind != "embedding" and not layer.has_base:
        if layer.kind == "conv" or (init == "olora" and layer.option("fan_in_fan_out")):
            raise layer.error("a", f"PEFT has no {init} for {layer.name}")
        try:
            array = initialise(init, layer.kind, layer.name, array, None).replace(a=a, b=b)
        except ValueError as error:
            raise layer.error("a", str(error)) from None
    if tokens:
        return ALoRAArray.of(array, tokens)
    if layer.option("lora_bias") and not start:
        if layer.bias is None and layer.kind == "conv":
            raise layer.error(
                "bias", f"the model's {layer.name} is a convolution without a bias, so it can't add one"
            )
        shape = layer.out_shape if layer.bias is None else tuple(layer.bias.shape)
        bias = layer.read("bias", layer.outputs).reshape(shape)
        return array, LoraBias(layer.bias, bias, array.scaling)
    return array


def _check_plain(layer: Layer) -> None:
    if layer.option("use_dora") or layer.option("lora_bias") or _init_of(layer.options) in _CHANGES_BASE:
        raise layer.error(None, "adapters of parameters have no DoRA, no biases and no PiSSA or OLoRA")


# For a stack of shape `(experts, …)`, PEFT flattens the factors into two matrices. `A` is
# `(experts * rank, in)` with experts as the slower index, but `B` is `(out, rank * experts)` with experts as
# the faster index.


def _read_parameter(layer: Layer, rank: int) -> LoraArray:
    _check_plain(layer)
    batch = layer.layout.batch_shape(tuple(layer.w.shape))
    count = math.prod(batch)
    a = layer.read("a", count * rank, layer.inputs).reshape(*batch, rank, layer.inputs)
    b = layer.read("b", layer.outputs, rank * count).reshape(layer.outputs, rank, *batch)
    return _on(layer, a, jnp.moveaxis(b, (0, 1), (-2, -1)))


def _read_stack(name: str, layers: Sequence[Layer]) -> Any:
    """Reads a stack of experts with separate adapters, as in transformers 4.

    If an expert fuses several matrices along the outputs, then their factors `a` are concatenated, and `b` is
    block-diagonal, so that each matrix is only changed by its original adapter.
    """
    first, *_ = adapted = [layer for layer in layers if layer.is_in_file]
    for layer in adapted:
        _check_plain(layer)
        if layer.option("alora_invocation_tokens"):
            raise layer.error(None, f"PEFT's aLoRA is for linear layers; {layer.name} is none")
    sizes = {(x.option("r"), float(x.option("lora_alpha"))) for x in adapted}
    if len(sizes) > 1:
        raise first.error(None, f"the experts of {name} must have one rank and one alpha; found {sizes}")
    (rank, _), n = sizes.pop(), first.w.shape[0]
    each = len(layers) // n
    out = first.outputs // each
    parts = {
        i: (layer.read("a", rank, first.inputs), layer.read("b", out, rank))
        for i, layer in enumerate(layers)
        if layer.is_in_file
    }
    dtype = next(iter(parts.values()))[0].dtype
    a = np.zeros((n, each * rank, first.inputs), dtype)
    b = np.zeros((n, first.outputs, each * rank), dtype)
    for index, (own_a, own_b) in parts.items():
        i, j = divmod(index, each)
        own = slice(j * rank, (j + 1) * rank)
        a[i, own] = own_a
        b[i, j * out : (j + 1) * out, own] = own_b
    return _on(first, jnp.asarray(a), jnp.asarray(b), each)


# Writing ------------------------------------------------------------------------------------------


def _write(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    if isinstance(x, ALoRAArray):
        if len(x.w.shape) != 2:
            raise ValueError(f"PEFT's aLoRA is for linear layers; {layer.path} is of shape {x.w.shape}.")
        x = x.lora()
    options = {
        "r": x.rank,
        "lora_alpha": as_written(layer.path, x.alpha),
        "lora_dropout": x.dropout,
        "use_rslora": x.rslora,
        "use_dora": x.magnitude is not None,
    }
    parts = _written_parameter(layer, x) if layer.kind == "parameter" else _written(layer, x)
    if isinstance(layer.bias, LoraBias):  # In PEFT, either all layers have this or none do.
        parts, options = parts | {"bias": layer.bias.b.reshape(-1)}, options | {"lora_bias": True}
    return parts, options


def _written(layer: Written, x: LoraArray) -> dict[str, Any]:
    if x.shape != x.w.shape or layer.layout.batch_shape(x.shape):
        raise ValueError(
            f"{layer.name} is of shape {x.shape}, with adapters of shapes {x.a.shape} and {x.b.shape}: "
            "PEFT's files hold one adapter per layer. Save layers and adapters of a stack one by one."
        )
    axes, own = (x.out_axes, x.in_axes), (layer.layout.out_axes, layer.layout.in_axes)
    if axes == own[::-1]:  # An output layer that shares its adapter with the embedding it's tied to.
        if x.magnitude is not None:
            raise ValueError(
                f"PEFT has no DoRA that {layer.name} shares with the embedding that it is tied to. Merge the "
                "model instead."
            )
        return {"a": x.b.T, "b": x.a.T}
    if axes != own:
        raise ValueError(
            f"The adapter on {layer.name} has out_axes={axes[0]} and in_axes={axes[1]}; those of the layer "
            f"are {own[0]} and {own[1]}."
        )
    parts = written_factors(layer, x.a, x.b)
    if x.magnitude is not None:
        ones = [1] * len(layer.window)
        parts["magnitude"] = x.magnitude.reshape((1, -1, *ones) if layer.kind == "conv" else (-1,))
    return parts


def _written_parameter(layer: Written, x: LoraArray) -> dict[str, Any]:
    if not x.a.ndim == x.b.ndim == len(x.w.shape) or x.magnitude is not None:
        raise ValueError(
            "PEFT's files have one low-rank adapter for each matrix of a parameter, each expert for example; "
            f"that of {layer.path}, {x.w.shape}, has factors of shapes {x.a.shape} and {x.b.shape}"
            f"{'' if x.magnitude is None else ', and a magnitude'}."
        )
    if len(x.shape) == 2 and x.out_axes != (-2,):
        raise ValueError(
            f"PEFT's files have no place for {layer.path}, of shape {x.shape}: it is stored as (in, out), "
            "and no layer's weight."
        )
    b = jnp.moveaxis(x.b, (-2, -1), (0, 1))
    return {"a": x.a.reshape(-1, x.a.shape[-1]), "b": b.reshape(len(b), -1)}


def _settle(
    layers: Mapping[str, Written], options: dict[str, dict[str, Any]], targets: Sequence[str]
) -> dict[str, Any]:
    """Returns the entry for the adapters' initialisation, or for their invocation tokens."""
    activated = {name: x.array for name, x in layers.items() if isinstance(x.array, ALoRAArray)}
    if not activated:
        return {"init_lora_weights": _started(layers)}
    invocations = sorted({x.invocation for x in activated.values()})
    others = [x.path for name, x in layers.items() if name not in activated]
    if len(invocations) > 1 or others:
        what = f"those of {others[0]} on all" if others else f"others on those from {list(invocations[1])} on"
        raise ValueError(
            "PEFT's files hold adapters that act on the same tokens; here some act on those from "
            f"{list(invocations[0])} on, {what}."
        )
    return {"alora_invocation_tokens": [*invocations[0]]}


# -------------------------------------------------------------------------------------------------
# Adapters whose initialisation subtracted something from the base.
#
# The base isn't part of the file. For "pissa" and "olora", PEFT recomputes the change from the base when
# loading the adapter, and subtracts it again. For any other initialisation, or for layers in which PEFT
# doesn't support this, the file must include the change, as follows: if the adapted base is `base + taken`,
# and `scaling * b' a' = taken`, then `[a, a'], [b, b']` represents the same weight on top of `base`, albeit
# at twice the rank. (This is what `path_initial_model_for_weight_conversion` does in PEFT.)
# -------------------------------------------------------------------------------------------------


def _started(layers: Mapping[str, Written]) -> str | bool:
    """Returns the value for the `init_lora_weights` option.

    **Raises:** `ValueError` if this can't represent what was subtracted from the base.
    """
    # For the other layers, PEFT replaces whatever it computes by the base in the file.
    layers = {layer: x for layer, x in layers.items() if not x.has_base}
    names = {str(x.array.taken[0]) for x in layers.values() if x.array.taken is not None}
    if not names:
        return True
    name = next(iter(names)) if len(names) == 1 else None
    own_biases = any(isinstance(x.bias, LoraBias) for x in layers.values())
    for layer, x in layers.items():
        taken = x.array.taken
        # PEFT's OLoRA decomposes the weight as stored, in this case the transpose of ours.
        turned = taken is not None and taken[0] == "olora" and x.is_fan_in_fan_out
        in_peft = x.kind in ("linear", "matrix") and not turned and not own_biases
        is_derivable = name in _CHANGES_BASE and in_peft and taken == taken_by(str(name), x.array)
        if not (is_derivable or (taken is None and not in_peft)):
            raise ValueError(
                f"The initialisations of the adapters ({', '.join(sorted(names))}) changed the base, and a "
                f"file without the base cannot tell how for {layer}. Pass `base`: the model before it was "
                "adapted, to put that part into the file; or this model, if its base is saved as well and "
                "the adapter will be loaded on that."
            )
    return str(name)


def relative_to(w: Any, name: str, x: LoraArray) -> LoraArray:
    """Returns the adapter for the same weight on top of a different base `w`.

    Typically `w` is the base before an initialisation such as PiSSA changed it.
    """
    if x.w is w or eqx.tree_equal(x.w, w) is True:
        return x.replace(taken=None)

    def kind(x: Any) -> Any:
        return f"{x.dtype} {type(x).__name__ if is_value(x) else 'array'} of shape {x.shape}"

    if is_value(w) or is_value(x.w) or kind(w) != kind(x.w):
        raise ValueError(
            f"As {name}, `base` has {kind(w)}, and the adapted base {kind(x.w)}: the "
            "file can hold the difference of plain arrays only. Quantise the model after the adapter is "
            "loaded."
        )
    before = as_matrix(x, w)
    taken = as_matrix(x, x.w) - before
    u, s, vt = svd(taken, x.rank)
    rest = taken - jnp.matmul(u * s[..., None, :], vt, precision="highest")
    share = float(jnp.linalg.norm(rest) / jnp.linalg.norm(before))
    if not share <= 8 * max(float(jnp.finfo(x.dtype).eps), 1e-6):
        raise ValueError(
            f"`base` and the adapted base differ in {name} by more than an initialisation of rank {x.rank} "
            f"takes out (the rest is {share:.1g} of the weight)."
        )
    other = with_factors(x, *halves(u, s / scaling_of(x, s), vt))
    _, a_labels, b_labels = labels(x)
    return x.replace(
        a=jnp.concatenate([x.a, other.a], a_labels.index(RANK)),
        b=jnp.concatenate([x.b, other.b], b_labels.index(RANK)),
        alpha=x.alpha * (math.sqrt(2) if x.rslora else 2),
        w=w,
        taken=None,
    )


# Trained tokens -----------------------------------------------------------------------------------


def _named_embeddings(tokens: Any, layouts: Mapping[str, Layout | None]) -> dict[str, Sequence[str]]:
    """Returns the embeddings with trained tokens. By default this is just the input embedding."""
    if isinstance(tokens, Mapping):
        return {own: [x for x in layouts if x == own or x.endswith(f".{own}")] or [own] for own in tokens}

    def is_embedding(x: Any) -> Any:
        return (layout := layouts[x]) is not None and layout.kind == "embedding"

    return {"embed_tokens": sorted(layouts, key=is_embedding, reverse=True)} if tokens else {}


def _read_rows(layer: Layer) -> TrainableRows:
    tokens = layer.option("trainable_token_indices")
    if isinstance(tokens, Mapping):
        tokens = next(own for name, own in tokens.items() if f".{layer.name}".endswith(f".{name}"))
    rows = layer.read("embedding_rows", len(tokens), layer.w.shape[1])
    if is_value(layer.w) or any(token >= layer.w.shape[0] for token in tokens):
        raise layer.error(
            "embedding_rows", f"the model's {layer.name} must be dense and have rows {list(tokens)}"
        )
    last = {token: i for i, token in enumerate(tokens)}  # PEFT takes a token twice; the last one counts
    return TrainableRows(layer.w, rows[np.array([*last.values()], int)], tuple(last))


def _settle_tokens(
    layers: Mapping[str, Written], options: dict[str, dict[str, Any]], targets: Sequence[str]
) -> dict[str, Any]:
    found: Any = {name.rpartition(".")[2]: list(x.array.indices) for name, x in layers.items()}
    if found.keys() <= {"embed_tokens"}:  # PEFT's default
        found = found.get("embed_tokens")
    return {"trainable_token_indices": found}


@starts
def rows(x: Weight, *, tokens: Sequence[int]) -> TrainableRows:
    return TrainableRows(x.w, x.w[jnp.asarray(tokens)].astype(x.dtype), tuple(tokens))


TOKENS = Method(
    "TRAINABLE_TOKENS", TrainableRows, rows,
    parts={"embedding_rows": ".token_adapter.trainable_tokens_delta"}, options={},
    read=_read_rows, write=lambda layer: ({"embedding_rows": layer.array.rows}, {}), settle=_settle_tokens,
    kinds=("embedding",), entry="trainable_token_indices", named=_named_embeddings,
)  # fmt: skip

LORA = Method(
    "LORA", (LoraArray, ALoRAArray), lora,
    parts={
        "a": ".lora_A.weight", "b": ".lora_B.weight", "bias": ".lora_B.bias",
        "magnitude": ".lora_magnitude_vector", "projection": ".lora_velora_embed",
        "embedding_a": ".lora_embedding_A", "embedding_b": ".lora_embedding_B",
    },
    options=_OPTIONS, patterns={"r": "rank_pattern", "lora_alpha": "alpha_pattern"},
    read=_read, write=_write, settle=_settle, refused=_refused, read_stack=_read_stack,
    kinds=("linear", "matrix", "conv", "embedding", "parameter"),
    others={"grouped conv": GROUPED, "other conv": GROUPED},
    tied=True, beside=(TOKENS,), informative=INFORMATIVE,
)  # fmt: skip
