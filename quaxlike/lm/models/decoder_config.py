"""Parses a decoder's `config.json` into the entries used here, plus values derived from them."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..families import ACTIVATIONS, FAMILIES, MULTIMODAL, OF_FEW, Family, bodies, classifiers
from ..folders.entries import warn_of_unknown
from ..folders.labels import ENTRIES as LABEL_ENTRIES
from ..folders.labels import UNNAMED, Labels
from ..folders.model_config import ATTENTION, Config, UnsupportedConfigError, kinds_of, refused, whole
from .rope import ENTRIES as ROPE_ENTRIES
from .rope import Rope, rope_for


def is_text_tower(config: Mapping[str, Any]) -> bool:
    """Returns whether the decoder is only part of a multimodal model."""
    return _whole_of(config) is not None


def is_tied_by_default(config: Mapping[str, Any]) -> bool:
    """Returns whether a multimodal model's output layer is tied just because `config.json` doesn't say."""
    whole = _whole_of(config)
    return whole is not None and MULTIMODAL[whole].tied and config.get("tie_word_embeddings") is None


def _whole_of(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return next((name for name in MULTIMODAL if isinstance(names, list) and name in names), None)


def text_tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Extracts a decoder's `config.json` from a multimodal model. Any others are returned unchanged.

    **Raises:** `UnsupportedConfigError` if the decoder's architecture is unknown.
    """
    whole, text = _whole_of(config), config.get("text_config")
    if whole is None:
        return dict(config)
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    known = MULTIMODAL[whole].decoders
    if not isinstance(text, Mapping) or not isinstance(kind, str) or kind not in known:
        raise refused("text_config", text, whole, f"one with model_type {' or '.join(known)}")
    shared = {name: config[name] for name in _OF_WHOLE if config.get(name) is not None}
    return {**text, **shared, "architectures": [known[kind]]}


_OF_WHOLE = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def warn_of_unread(path: Path, whole: Mapping[str, Any], config: Mapping[str, Any], parsed: Config) -> None:
    """Warns about unread entries, either in the `whole` file or in the decoder's part (`config`).

    Any of these may change what the model computes, so don't silently ignore them.
    """
    if is_text_tower(whole):
        warn_of_unknown(str(path), whole, (*_OF_WHOLE, *_OF_OTHER_PARTS))
    warn_of_unknown(str(path), config, parsed.known_entries())
    partial = isinstance(parsed, DecoderConfig) and parsed.family.partial
    shares = [config.get("partial_rotary_factor")]
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, Mapping):
            continue
        kinds = {kind: part for kind in ATTENTION if isinstance(part := given.get(kind), Mapping)}
        ropes = [rope for rope in (given, *kinds.values()) if rope.get("rope_type") != "proportional"]
        shares += [rope.get("partial_rotary_factor") for rope in ropes]
        for part in kinds.values():
            warn_of_unknown(f"{path}, {name},", part, ROPE_ENTRIES)
        warn_of_unknown(f"{path}, {name},", given, ATTENTION if kinds else ROPE_ENTRIES)
    if not partial and (found := next((x for x in shares if x not in (None, 1)), None)):
        warnings.warn(
            f"{path}: partial_rotary_factor={found} has no effect: such models rotate whole heads, as in "
            "transformers.",
            stacklevel=2,
        )


# Entries for the other parts of a multimodal model, e.g. its vision tower.
_OF_OTHER_PARTS = (
    *("text_config", "vision_config", "mm_tokens_per_image", "spatial_merge_size", "vision_feature_layer"),
    *("projector_hidden_act", "multimodal_projector_bias"),
    *("audio_config", "vision_soft_tokens_per_image"),
    *(f"{kind}_token_id" for kind in ("boi", "eoi", "boa", "eoa", "image", "video", "audio")),
    "eoa_token_index",
)


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Config):
    """A decoder's configuration: entries under their usual names, plus values derived from them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 0
    rms_norm_eps: float | int = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int = 0
    use_sliding_window: bool = False
    query_pre_attn_scalar: float | int = 0
    attn_logit_softcapping: float | int = 0
    final_logit_softcapping: float | int = 0
    embedding_multiplier: float | int = 1
    residual_multiplier: float | int = 1
    """The factor to multiply each block's output by, before adding it to the residual stream."""
    attention_multiplier: float | int = 0
    """The factor to multiply attention scores by. 0 means 1/sqrt(head_dim)."""
    logits_scaling: float | int = 1
    """The number to divide the logits by."""
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    swiglu_limit: float | int = 7.0
    global_head_dim: int = 0
    """The head size in layers without a window. This and the next entry are 0 if a family uses the same
    heads in all layers."""
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False
    """Whether layers without a window use their keys as values, instead of having a `v_proj`."""
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    """Whether the feed-forward layer is twice as wide in layers reading another layer's keys and values."""
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    tie_word_embeddings: bool = False
    headless: bool = False
    """Whether there is no output layer, as in the body of a decoder (transformers' `AutoModel`) and in
    embedding models from sentence-transformers."""
    body_name: str = ""
    """The decoder's module path inside transformers' model, if it is only one part there."""
    head: str = ""
    """The class name's suffix in transformers. Empty for a causal language model."""
    labels: Labels = UNNAMED
    """A classifier's labels."""
    token_classification_bias: bool = True
    pad_token_id: int = -1
    new_embeddings: bool = False
    """Whether embeddings differ from the checkpoint's. If so, an adapter file must include them."""

    architecture: str = ""
    windows: tuple[bool, ...] = ()
    """Whether each layer uses a sliding window. If so, it attends only to the last `sliding_window` tokens (0
    for all), and has a separate rotary embedding."""
    mixers: tuple[str, ...] = ()
    """Each layer's mixer, as a key of `MIXERS`."""
    sources: tuple[int, ...] = ()
    """The index of the layer whose memory each layer reads. Usually this is the layer itself, but some layers
    of Gemma 4 read an earlier one instead."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Integer-valued entries for the mixers."""
    sparse: tuple[bool, ...] = ()
    """Whether each layer is a mixture of experts."""
    ropes: tuple[Rope, ...] = ()
    """The rotary embeddings: first for layers without a window, then for those with one. Empty if positions
    are learned."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def writes(self) -> bool:
        """Whether the output layer writes tokens, and so can be tied to the embedding."""
        return not self.head and not self.headless

    @property
    def switches(self) -> list[int]:
        """The text lengths beyond which a rotary embedding has other frequencies."""
        return [rope.switch for rope in self.ropes if rope.long is not None]

    def mlp_size(self, layer: int) -> int:
        """The size of a feed-forward layer without experts."""
        is_wide = self.use_double_wide_mlp and self.sources[layer] != layer
        return self.intermediate_size * (2 if is_wide else 1)

    def size(self, entry: str) -> int:
        """Looks up an integer-valued entry for the mixers."""
        return dict(self.sizes)[entry]

    def known_entries(self) -> set[str]:
        renamed, family = self.family.renamed, self.family
        own = {*renamed, *renamed.values(), *family.required, *family.sizes}
        known = super().known_entries() | {*_DERIVED, *own} | ({*LABEL_ENTRIES} if self.head else set())
        return known.difference(OF_FEW) | {*family.entries, *family.required}

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Parses a `config.json` from transformers 4 or 5.

        **Raises:** `UnsupportedConfigError` if the architecture is unknown or a value isn't supported.
        """
        names = config.get("architectures")
        heads = {name: (name, "") for name in FAMILIES} | classifiers()
        known = heads | {body: (name, "") for body, name in bodies().items()}
        found = [name for name in known if isinstance(names, list | tuple) and name in names]
        if not found:
            raise UnsupportedConfigError(
                f"config.json names no architecture of a decoder; supported are {', '.join(heads)}."
            )
        architecture, head = known[found[0]]
        family = FAMILIES[architecture]
        label = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        # Some entries only matter for a few families, so drop them for all others.
        config = {x: config[x] for x in config if x not in OF_FEW or x in (*family.entries, *family.required)}
        fields = {"tie_word_embeddings": family.tied, **family.with_defaults(config)}
        fields |= {"architecture": architecture, "head": head}
        # Derived fields can't be set in a file, so drop any entries of the same name.
        own = ("headless", "body_name", "labels", "new_embeddings")
        fields |= dict.fromkeys((*own, "windows", "mixers", "sources", "sizes", "sparse", "ropes"))
        fields |= {ours: config[theirs] for ours, theirs in family.renamed.items() if theirs in config}
        if family.experts_beside:
            sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            if not fields.get(family.experts_beside):
                fields |= dict.fromkeys(sizes)
            elif missing := next((name for name in sizes if not fields.get(name)), None):
                name = family.renamed.get(missing, missing)
                raise refused(name, fields.get(missing), label, f"a number with {family.experts_beside}=True")
        if fields.get("num_experts") is not None:
            fields["num_local_experts"] = fields["num_experts"]
        activation = family.renamed.get("hidden_act", "hidden_act")
        names = ACTIVATIONS[family.activation]
        required = {activation: names, "hidden_activation": (*names, None)}
        out = cls.read(fields, label, **required, **family.required)
        windows = _windows(out, fields, label)
        out = dataclasses.replace(
            out,
            **_of_global_layers(fields, windows, label),
            headless=found[0] not in heads,
            labels=Labels.from_json(config) if head else UNNAMED,
            num_key_value_heads=out.num_key_value_heads or out.num_attention_heads,
            head_dim=out.head_dim or out.hidden_size // max(out.num_attention_heads, 1),
            intermediate_size=out.intermediate_size or 4 * out.hidden_size,
            moe_intermediate_size=out.moe_intermediate_size or out.intermediate_size,
        )
        # Neither has an effect on its own.
        out = dataclasses.replace(
            out,
            use_double_wide_mlp=out.use_double_wide_mlp and out.num_kv_shared_layers > 0,
            vocab_size_per_layer_input=out.hidden_size_per_layer_input and out.vocab_size_per_layer_input,
        )
        rows = out.vocab_size_per_layer_input
        if out.hidden_size_per_layer_input and rows < out.vocab_size:
            wanted = f"at least vocab_size={out.vocab_size}, a row for each token"
            raise refused("vocab_size_per_layer_input", rows, label, wanted)
        mixers, sources = _shared(out, _mixers(out, fields, label, windows), label)
        off = family.window_switch and not out.use_sliding_window
        sparse = _sparse(out, fields, label)
        if any(sparse) and not 0 < out.num_experts_per_tok <= out.num_local_experts:
            wanted = f"numbers from 1 to that of the experts, {out.num_local_experts}"
            raise refused("num_experts_per_tok", fields.get("num_experts_per_tok"), label, wanted)
        return dataclasses.replace(
            out,
            sliding_window=out.sliding_window if any(windows) and not off else 0,
            use_sliding_window=False,
            windows=windows,
            mixers=mixers,
            sources=sources,
            sizes=_sizes(family, fields, label),
            sparse=sparse,
            ropes=() if family.learned_positions else _ropes(out, fields, any(windows), label),
        )


# Entries read above, but without a field of their own.
_DERIVED = (
    *("num_experts", "layer_types", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"),
    *("no_rope_layers", "no_rope_layer_interval", "decoder_sparse_step", "mlp_only_layers"),
    *("full_attention_interval", "per_layer_config"),
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"),
    *("hidden_act", "hidden_activation"),
)


def _of_global_layers(fields: Mapping[str, Any], windows: tuple[bool, ...], label: str) -> dict[str, Any]:
    """Reads the head sizes of layers without a window.

    Older versions of transformers write two entries, and newer ones a `per_layer_config`. Any missing values
    are the same as in layers with a window.
    """
    if "global_head_dim" not in fields:
        return {}
    usual = {
        "head_dim": fields.get("head_dim"),
        "num_key_value_heads": fields.get("num_key_value_heads") or fields.get("num_attention_heads"),
    }
    if fields.get("per_layer_config"):
        given = _of_each_layer(fields, windows, label)
    else:
        heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
        given = {"head_dim": fields["global_head_dim"], "num_key_value_heads": heads}
    size, heads = (whole(given, name, None, label) or usual[name] for name in usual)
    if not size:
        raise refused("global_head_dim", size, label, "a positive head size, here or as head_dim")
    return {"global_head_dim": size, "num_global_key_value_heads": heads}


def _of_each_layer(fields: Mapping[str, Any], windows: tuple[bool, ...], label: str) -> Mapping[str, Any]:
    """Returns the entries of `per_layer_config`, which are the same for each layer without a window."""
    layers, told = fields["per_layer_config"], "head_dim and num_key_value_heads of layers without a window"
    if not isinstance(layers, Mapping):
        raise refused("per_layer_config", layers, label, told)
    wanted = [str(i) for i, window in enumerate(windows) if not window]
    sizes, names = list(layers.values()), ("head_dim", "num_key_value_heads")
    are_alike = all(isinstance(x, Mapping) and x == sizes[0] and {*x} <= {*names} for x in sizes)
    if sorted(map(str, layers)) != sorted(wanted) or not are_alike:
        raise refused("per_layer_config", layers, label, told)
    return sizes[0]


def _windows(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    family, layers = config.family, range(config.num_hidden_layers)
    if family.unrotated:
        return _unrotated(config, fields, label)
    if family.ends_global and not config.sliding_window:  # the two kinds of layers differ in their heads, too
        raise refused("sliding_window", config.sliding_window, label, "a window of at least one token")
    off = family.windows is None or not config.sliding_window
    if off or (family.window_switch and not config.use_sliding_window):
        return (False,) * len(layers)
    if types := fields.get("layer_types"):
        kinds = kinds_of(types, len(layers), label, {**ATTENTION, **family.mixers})
        found = [ATTENTION.get(kind, False) for kind in kinds]
    elif isinstance(family.windows, str):
        first = whole(fields, "max_window_layers", 28, label)
        found = [i >= first if family.windows == "upper" else i < first and i % 2 == 0 for i in layers]
    else:
        # Every layer has a window except for each `every`-th one. (0 means no exceptions.)
        every = whole(fields, "sliding_window_pattern", family.windows, label) if family.windows else 0
        found = [not every or (i + 1) % every != 0 for i in layers]
    return (*found[:-1], False) if family.ends_global else tuple(found)


def _unrotated(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    """Returns which layers have no rotary embedding. In SmolLM3, only these can have a sliding window."""
    layers, rotated = range(config.num_hidden_layers), fields.get("no_rope_layers")
    if rotated is None:
        every = whole(fields, "no_rope_layer_interval", config.family.unrotated, label)
        rotated = [(i + 1) % every != 0 for i in layers] if every else [True] * len(layers)
    if not isinstance(rotated, list) or len(rotated) < len(layers) or any(x not in (0, 1) for x in rotated):
        raise refused("no_rope_layers", rotated, label, f"0 or 1 for each of {len(layers)} layers")
    found = tuple(not rotated[i] for i in layers)
    kind = "sliding_attention" if config.sliding_window and config.use_sliding_window else "full_attention"
    wanted = [kind if without else "full_attention" for without in found]
    if fields.get("layer_types") not in (None, wanted):
        raise refused("layer_types", fields["layer_types"], label, "windows in layers without rotation alone")
    return found


def _mixers(
    config: DecoderConfig, fields: Mapping[str, Any], label: str, windows: tuple[bool, ...]
) -> tuple[str, ...]:
    family, layers = config.family, config.num_hidden_layers
    if not family.mixers:
        return ("attention",) * layers
    kinds = {"full_attention": "attention", **family.mixers}
    if family.windows is not None:
        kinds.setdefault("sliding_attention", "attention")
    if family.ends_global:
        return tuple(kinds["sliding_attention" if window else "full_attention"] for window in windows)
    if (types := fields.get("layer_types")) is not None:
        return tuple(kinds[kind] for kind in kinds_of(types, layers, label, kinds))
    every = whole(fields, "full_attention_interval", family.attends, label)
    other = next(iter(family.mixers.values()))
    return tuple("attention" if every and (i + 1) % every == 0 else other for i in range(layers))


def _shared(
    config: DecoderConfig, mixers: tuple[str, ...], label: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Finds which of the last layers read the keys and values of an earlier one.

    Returns the mixers of all layers along with their `sources`.
    """
    layers, count = len(mixers), config.num_kv_shared_layers
    if not config.family.sharing or not count:
        return mixers, tuple(range(layers))
    own = mixers[: max(layers - count, 0)]
    last = {mixer: i for i, mixer in enumerate(own)}
    if count >= layers or not {*mixers} <= last.keys():
        needed = "fewer layers, so that one of each kind before them has keys and values"
        raise refused("num_kv_shared_layers", count, label, needed)
    rest = mixers[len(own) :]
    sharing = tuple(config.family.sharing[mixer] for mixer in rest)
    return own + sharing, (*range(len(own)), *(last[mixer] for mixer in rest))


def _sizes(family: Family, fields: Mapping[str, Any], label: str) -> tuple[tuple[str, int], ...]:
    sizes = {name: whole(fields, name, default, label) for name, default in family.sizes.items()}
    for name, size in sizes.items():
        if not 1 <= size < 2**31:
            raise refused(name, size, label, "whole numbers from 1 to 2**31 - 1")
    return tuple(sizes.items())


def _sparse(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    step = whole(fields, "decoder_sparse_step", 1, label) or 1
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise refused("mlp_only_layers", dense, label, "a list of the numbers of layers")
    some = bool(config.family.experts) and fields.get("num_experts") != 0
    if entry := config.family.experts_beside:
        some = bool(fields.get(entry))

    def sparse(layer: int) -> bool:
        return some and layer not in dense and (layer + 1) % step == 0

    return tuple(map(sparse, range(config.num_hidden_layers)))


def _ropes(config: DecoderConfig, fields: Mapping[str, Any], windows: bool, label: str) -> tuple[Rope, ...]:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise refused("rope_parameters", given, label, "an object")
    nested = [given.get(f"{kind}_attention") for kind in ("full", "sliding")]
    if not all(isinstance(part, Mapping | None) for part in nested):
        raise refused("rope_parameters", given, label, "an object for each kind of attention")
    names = [x for x in ("rope_theta", "partial_rotary_factor") if fields.get(x) is not None]
    shared = {"rope_theta": 10000.0} | {name: fields[name] for name in names}
    full = sliding = {**shared, **(nested[0] or given)}
    if nested[1]:
        sliding = {"rope_theta": 10000.0, **nested[1]}
    elif fields.get("rope_local_base_freq") and not fields.get("rope_parameters"):
        sliding = {"rope_theta": fields["rope_local_base_freq"]}
    elif config.family.plain_windows:
        sliding = shared
    read = functools.partial(rope_for, config=config, label=label, partial=config.family.partial)
    if config.global_head_dim:
        large = dataclasses.replace(config, head_dim=config.global_head_dim)
        rope = rope_for(full, large, label, partial=config.family.partial)
        return (rope, read(sliding)) if windows else (rope,)
    if config.family.unrotated:
        rope = read(full)
        # Zero frequencies, i.e. no rotation.
        return (rope, Rope((0.0,) * len(rope.frequencies))) if windows else (rope,)
    return tuple(map(read, [full, sliding] if windows else [full]))


# Sizes that depend on the kind of layer, and can be given in several ways.
_OF_KINDS = (
    *("head_dim", "num_key_value_heads", "global_head_dim", "num_global_key_value_heads"),
    *("num_kv_shared_layers", "use_double_wide_mlp", "intermediate_size"),
)


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the architecture's default values for entries missing from a configuration."""
    names = [name for name in FAMILIES if name in (config.get("architectures") or ())]
    if not names:
        return dict(config)
    family, parsed = FAMILIES[names[0]], DecoderConfig.from_json(config)
    whole = {**family.with_defaults(config), **dict(parsed.sizes)}
    whole["sliding_window"] = parsed.sliding_window or None
    if parsed.global_head_dim:
        whole |= {name: getattr(parsed, name) for name in _OF_KINDS}
    if family.experts_beside and not any(parsed.sparse):
        whole |= dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))
    kinds = {mixer: kind for kind, mixer in family.mixers.items()}
    usual = ["sliding_attention" if window else "full_attention" for window in parsed.windows]
    whole["layer_types"] = [kinds.get(mixer, kind) for mixer, kind in zip(parsed.mixers, usual, strict=True)]
    if family.attends:
        first = parsed.mixers.index("attention") if "attention" in parsed.mixers else len(parsed.mixers)
        whole["full_attention_interval"] = first + 1
    return whole
