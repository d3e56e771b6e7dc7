"""The table of architectures: how each differs from a plain decoder, and how to read its `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ..interop.files.model_config import Config, UnsupportedConfigError, refused, whole
from .rope import Rope, rope_for


@dataclasses.dataclass(frozen=True, eq=False)  # the entries of the table are compared by identity
class Family:
    """The options of a decoder that its architecture determines; the defaults are Llama's."""

    activation: Literal["silu", "gelu_pytorch_tanh", "gelu_new"] = "silu"
    fused: bool = False
    """Whether queries, keys and values are fused into one matrix, and the two halves of a gated layer too."""
    gated: bool = True
    qkv_bias: bool | None = None
    """Whether these projections have biases; None to follow `attention_bias`."""
    output_bias: bool | None = None
    qk_norm: Literal["", "heads", "whole"] = ""
    """Whether queries and keys are normalised, head by head or all heads together."""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """The norms before and after attention, and before and after the feed-forward layer."""
    layer_norm: bool = False
    """Whether norms are LayerNorms with biases."""
    norm_offset: float | int = 0.0
    """The number that is added to the weights of norms."""
    scaled_embedding: bool = False
    learned_positions: bool = False
    conv1d: bool = False
    """Whether weights are stored as (in, out)."""
    sinks: bool = False
    tied: bool = False
    """Whether the output layer is tied to the embedding if `tie_word_embeddings` is absent."""

    windows: int | Literal["upper"] | None = None
    """Which layers see only a window: all but every n-th (0: all of them), those from `max_window_layers` on
    ("upper"), or none. `layer_types` overrides it."""
    window_switch: bool = False
    """Whether windows are off unless `use_sliding_window` is set."""
    plain_windows: bool = False
    """Whether rotations in layers with a window are never scaled for longer texts."""
    unrotated: int = 0
    """If not 0: every n-th layer does not rotate queries and keys, and only such layers may have windows.
    `no_rope_layers` overrides it."""

    experts: Literal["", "out_in", "in_out"] = ""
    """Whether there are experts, and how their matrices are stored."""
    router: str = "gate"
    expert_files: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's matrices in files that store experts one by one."""
    expert_bias: bool = False
    interleaved: bool = False
    """Whether gates and values of experts alternate, and are clamped."""

    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The family's names for entries of `config.json`, by their usual names."""
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The family's names for parts of the model, by their usual names."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parts whose names in files differ from those in the model."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values of `config.json` entries that are absent."""
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values that entries must have."""


_GEMMA = Family(
    activation="gelu_pytorch_tanh", norm_offset=1.0, scaled_embedding=True, windows=2, tied=True,
    norms=(
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    defaults={"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    required={"use_bidirectional_attention": (None, False)},
)  # fmt: skip
_QWEN = Family(qkv_bias=True, output_bias=False, windows="upper", window_switch=True)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(required={"pretraining_tp": 1, "sliding_window": None}),
    "MistralForCausalLM": Family(windows=0, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": dataclasses.replace(
        _QWEN, qkv_bias=None, output_bias=None, qk_norm="heads", defaults={"head_dim": 128}
    ),
    "Gemma2ForCausalLM": dataclasses.replace(
        _GEMMA, defaults={**_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "Gemma3ForCausalLM": dataclasses.replace(
        _GEMMA, qk_norm="heads", windows=6,
        defaults={
            **_GEMMA.defaults, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262208,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        },
        required={**_GEMMA.required, "attn_logit_softcapping": None},
    ),
    "Phi3ForCausalLM": Family(fused=True, windows=0, qkv_bias=False, output_bias=False),
    "MixtralForCausalLM": Family(
        windows=0, experts="out_in", expert_files=("w1", "w3", "w2"), files={"mlp": "block_sparse_moe"},
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "Qwen2MoeForCausalLM": dataclasses.replace(_QWEN, experts="out_in"),
    "Qwen3MoeForCausalLM": Family(qk_norm="heads", windows=0, window_switch=True, experts="out_in"),
    "GptOssForCausalLM": Family(
        windows=2, sinks=True, experts="in_out", router="router", expert_bias=True, interleaved=True,
        defaults={"attention_bias": True, "norm_topk_prob": True, "head_dim": 64, "sliding_window": 128},
        required={"swiglu_alpha": 1.702},
    ),
    "Olmo2ForCausalLM": Family(
        qk_norm="whole", norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    ),
    "Olmo3ForCausalLM": Family(
        qk_norm="whole", norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        windows=4, plain_windows=True,
        defaults={"sliding_window": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": Family(defaults={"attention_multiplier": 1.0, "logits_scaling": 1.0}),
    "SmolLM3ForCausalLM": Family(
        window_switch=True, unrotated=4, tied=True, defaults={"rope_theta": 2000000.0}
    ),
    "Ministral3ForCausalLM": Family(
        windows=0, defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }},
    ),
    "GPT2LMHeadModel": Family(
        activation="gelu_new", fused=True, gated=False, qkv_bias=True, output_bias=True, layer_norm=True,
        norms=("ln_1", "", "ln_2", ""), learned_positions=True, conv1d=True, tied=True,
        renamed={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
        },
        parts={
            "model": "transformer", "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "self_attn": "attn",
            "qkv_proj": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
        },
        defaults={"rms_norm_eps": 1e-5, "mlp_bias": True},
        required={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False
        },
    ),
}  # fmt: skip


#: Architectures of which a decoder is a part, and the architecture of that by its `model_type`.
TEXT_TOWERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM",
    },
}  # fmt: skip


def text_tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the decoder in a model that reads images as well; unchanged for other models.

    **Raises:** `UnsupportedConfigError` for a decoder of another architecture.
    """
    names, text = config.get("architectures"), config.get("text_config")
    whole = next((x for x in TEXT_TOWERS if isinstance(names, list) and x in names), None)
    if whole is None:
        return dict(config)
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    known = TEXT_TOWERS[whole]
    if not isinstance(text, Mapping) or not isinstance(kind, str) or kind not in known:
        raise refused("text_config", text, whole, f"one with model_type {' or '.join(known)}")
    shared = {name: config[name] for name in _OF_WHOLE if config.get(name) is not None}
    return {**text, **shared, "architectures": [known[kind]]}


_OF_WHOLE = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Config):
    """The configuration of a decoder: `config.json` under the usual names, and values derived from it."""

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
    attention_multiplier: float | int = 0
    """The factor of scores; 0 for one over the square root of a head's size."""
    logits_scaling: float | int = 1
    """The divisor of logits."""
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    swiglu_limit: float | int = 7.0
    tie_word_embeddings: bool = False
    headless: bool = False
    """Whether there is no output layer at all, as in decoders that sentence-transformers made embed texts."""
    pad_token_id: int = -1

    architecture: str = ""
    windows: tuple[bool, ...] = ()
    """For each layer, whether it is one of those that see only the last `sliding_window` tokens (0: all), and
    have a rotation of their own."""
    sparse: tuple[bool, ...] = ()
    """For each layer, whether it has experts."""
    ropes: tuple[Rope, ...] = ()
    """The rotations of layers without and with a window; none if positions are learned."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Reads a `config.json` of transformers 4 or 5.

        **Raises:** `UnsupportedConfigError` for an architecture that is not in the table, or a value that
        the decoder does not support.
        """
        names = config.get("architectures")
        known = [name for name in FAMILIES if isinstance(names, list | tuple) and name in names]
        if not known:
            raise UnsupportedConfigError(
                f"config.json names no architecture of a decoder; supported are {', '.join(FAMILIES)}."
            )
        family = FAMILIES[known[0]]
        label = known[0].removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        fields = {**family.defaults, "tie_word_embeddings": family.tied, **config, "architecture": known[0]}
        fields |= dict.fromkeys(("headless", "windows", "sparse", "ropes"))  # not in files
        fields |= {ours: config[theirs] for ours, theirs in family.renamed.items() if theirs in config}
        if fields.get("num_experts") is not None:
            fields["num_local_experts"] = fields["num_experts"]
        activation = family.renamed.get("hidden_act", "hidden_act")
        required = {activation: family.activation, "hidden_activation": (family.activation, None)}
        out = cls.read(fields, label, **required, **family.required)
        out = dataclasses.replace(
            out,
            num_key_value_heads=out.num_key_value_heads or out.num_attention_heads,
            head_dim=out.head_dim or out.hidden_size // max(out.num_attention_heads, 1),
            intermediate_size=out.intermediate_size or 4 * out.hidden_size,
            moe_intermediate_size=out.moe_intermediate_size or out.intermediate_size,
        )
        windows = _windows(out, fields, label)
        off = family.window_switch and not out.use_sliding_window
        return dataclasses.replace(
            out,
            sliding_window=out.sliding_window if any(windows) and not off else 0,
            use_sliding_window=False,
            windows=windows,
            sparse=_sparse(out, fields, label),
            ropes=() if family.learned_positions else _ropes(out, fields, any(windows), label),
        )


def _windows(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    family, layers = config.family, range(config.num_hidden_layers)
    if family.unrotated:
        return _unrotated(config, fields, label)
    off = family.windows is None or not config.sliding_window
    if off or (family.window_switch and not config.use_sliding_window):
        return (False,) * len(layers)
    if types := fields.get("layer_types"):
        known = {"full_attention": False, "sliding_attention": True}
        are_known = isinstance(types, list) and all(isinstance(x, str) and x in known for x in types)
        if not are_known or len(types) != len(layers):
            needed = f"{' or '.join(known)} for each of {len(layers)} layers"
            raise refused("layer_types", types, label, needed)
        return tuple(known[kind] for kind in types)
    if family.windows == "upper":
        first = whole(fields, "max_window_layers", 28, label)
        return tuple(i >= first for i in layers)
    default = whole(fields, "_sliding_window_pattern", family.windows, label)
    every = whole(fields, "sliding_window_pattern", default, label) if family.windows else 0
    return tuple(not every or (i + 1) % every != 0 for i in layers)


def _unrotated(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    """The layers without rotation, which alone may have windows (SmolLM3)."""
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


def _sparse(config: DecoderConfig, fields: Mapping[str, Any], label: str) -> tuple[bool, ...]:
    step = whole(fields, "decoder_sparse_step", 1, label) or 1
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise refused("mlp_only_layers", dense, label, "a list of the numbers of layers")
    sparse = lambda i: bool(config.family.experts) and i not in dense and (i + 1) % step == 0
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
    if config.family.unrotated:
        rope = rope_for(full, config, label)
        return (rope, Rope((0.0,) * len(rope.frequencies))) if windows else (rope,)
    return tuple(rope_for(rope, config, label) for rope in ([full, sliding] if windows else [full]))
