"""The supported decoder architectures, each described by its differences from Llama.

This table is used for building models, converting GGUF files, sharding layers, and folding activation scales
into weights. To avoid circular imports, this file doesn't import anything from the rest of the package.

The entries for GGUF follow `gguf-py/gguf/constants.py` and `conversion` in llama.cpp,
<https://github.com/ggml-org/llama.cpp>.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """How a llama.cpp tensor differs from transformers' array."""

    rows: str = ""
    """The row order, as a name in `quaxlike.lm.gguf.layouts.ORDERS`. Empty for the same order."""
    columns: str = ""
    """The column order."""
    squeezed: bool = False
    """Whether the array has a second axis of size 1, missing from the tensor."""
    is_row: bool = False
    """Whether the tensor may be a vector where the array is a matrix with one row."""
    numbers: str = ""
    """The function giving its numbers, as a name in `quaxlike.lm.gguf.layouts.FUNCTIONS`."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """The llama.cpp tensors making up one array, each with some of its rows."""

    tensors: tuple[str, ...]
    """Their names within a block."""
    rows: str
    """How the array's rows are spread over them, as a name in `quaxlike.lm.gguf.layouts.ORDERS`."""


@dataclasses.dataclass(frozen=True)
class Gguf:
    """How llama.cpp's files for an architecture differ from transformers' files."""

    name: str
    """The value of `general.architecture`. If several families share it, then choose one with its `marker` in
    the file, falling back to the first family without a marker."""
    model_type: str
    """The value of `model_type` in transformers."""
    marker: str = ""
    """A metadata key distinguishing this family from others with the same `name`."""
    predictors: str = ""
    """The prefix for blocks only predicting further tokens (llama.cpp appends them to the decoder's own). It
    must match `Family.beside`. Empty if there are none."""
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps llama.cpp's additional names within a block to transformers' names."""
    layouts: Mapping[str, TensorLayout] = dataclasses.field(default_factory=dict)
    """Layouts by llama.cpp's name within a block. An empty one overrides the usual layout for the name."""
    joined: Mapping[str, Joined] = dataclasses.field(default_factory=dict)
    """Arrays stored as several tensors, by transformers' name within a layer."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps additional metadata keys to entries of `config.json`."""
    rope_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps additional metadata keys to entries of `rope_parameters`."""
    products: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Metadata keys for the product of two entries. The first entry has its own key."""
    sections: bool = False
    """Whether llama.cpp divides rotations between the axes of images. Text tokens have the same position
    along all axes, so this doesn't affect texts."""
    same: tuple[str, ...] = ()
    """Entries llama.cpp takes to be equal."""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Maps entries to the largest values for which llama.cpp computes the same, up to rounding."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of `config.json` without a metadata key, or with a different default in llama.cpp."""
    nulls: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The numbers standing for None, for entries with a llama.cpp default if the key is missing."""
    permuted: bool = False
    """Whether llama.cpp's rotary embeddings require the rows of q and k to be permuted."""
    output: Literal["", "own", "tied"] = ""
    """Whether files must contain a separate output layer ("own"), must not ("tied"), or either ("")."""
    large: int = 0
    """The number of layers in the only Gemma model scaling its scores by a different head size."""
    biases: bool = False
    """Whether llama.cpp supports any value of `attention_bias` and `mlp_bias`. Otherwise these must be as in
    `config`, or False."""
    square: bool = False
    """Whether llama.cpp takes the hidden size to be the number of heads times the head size."""
    yarn: bool = False
    """Whether llama.cpp reads the bounds of YaRN's ramp, rather than always using the defaults."""
    windowed: bool = False
    """Whether sizes and rotations differ between layers with and without a window. If so,
    `quaxlike.lm.gguf.window_layers` reads and writes them."""
    without_adapters: tuple[str, ...] = ()
    """Tensors without support for adapters in llama.cpp."""
    adapter_scales: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The scales for experts, by transformers' names within a layer. llama.cpp applies these before adding
    adapters, so adapters must contain them."""
    vocabulary: str = ""
    """The value of `tokenizer.ggml.model` for vocabularies with byte fallback, if it isn't "llama"."""


#: Suffixes of class names for sequence and token classification.
SEQUENCES, TOKENS = "ForSequenceClassification", "ForTokenClassification"
#: The names of classification layers in all models.
HEADS = ("score", "classifier")

#: The names of each activation function in `config.json`.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_pytorch_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}

_EXPERT_FILES = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity since some fields aren't hashable
class Family:
    """The options distinguishing a model family. All defaults are Llama's."""

    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    fused: bool = False
    """Whether queries, keys and values are fused into one matrix, and gate and up into another."""
    gated: bool = True
    qkv_bias: bool | None = None
    """Whether q, k and v have biases, or None to use `attention_bias`."""
    output_bias: bool | None = None
    qk_norm: Literal["", "heads", "whole"] = ""
    """Whether queries and keys are normalised, either per head or across all heads."""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """The norms before and after attention, and before and after the feed-forward layer."""
    layer_norm: bool = False
    """Whether to use LayerNorm with biases."""
    norm_offset: float | int = 0.0
    """A constant added to the weights of norms."""
    scaled_embedding: bool = False
    learned_positions: bool = False
    conv1d: bool = False
    """Whether weights have shape (in, out)."""
    sinks: bool = False
    gated_attention: bool = False
    """Whether each query head's output is multiplied by a gate."""
    tied: bool = False
    """The default value of `tie_word_embeddings`."""

    windows: int | Literal["upper", "lower"] | None = None
    """Which layers use a sliding window: all except every n-th (0 for all), all from `max_window_layers` on
    ("upper"), every other layer below that ("lower"), or none. Overridden by `layer_types`."""
    window_switch: bool = False
    """Whether sliding windows are only used if `use_sliding_window` is set."""
    plain_windows: bool = False
    """Whether sliding-window layers use rotary embeddings without any long-context scaling."""
    partial: bool = False
    """Whether to respect `partial_rotary_factor`, rather than always rotating whole heads."""
    unrotated: int = 0
    """If nonzero, every n-th layer has no rotary embedding, and only these layers can use sliding windows.
    Overridden by `no_rope_layers`."""

    mixers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps kinds of layer in `layer_types`, other than attention, to names in `quaxlike.lm.models.MIXERS`."""
    attends: int = 0
    """If nonzero, every n-th layer uses attention and all others use the first mixer. Overridden by
    `full_attention_interval` and by `layer_types`."""
    sharing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps each mixer to its counterpart in the last `num_kv_shared_layers` layers. These read the keys and
    values of the last layer before them with the former mixer."""
    ends_global: bool = False
    """Whether the last layer has no window, whatever `layer_types` says."""
    layer_scalars: bool = False
    """Whether each layer's output is multiplied by an untrained number."""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Integer entries of `config.json` used by mixers, with defaults. They must all be positive."""

    experts: Literal["", "out_in", "in_out"] = ""
    """Whether there are experts, and the layout of their matrices."""
    experts_beside: str = ""
    """The boolean entry adding experts next to each feed-forward layer, rather than in place of it."""
    router: str = "gate"
    expert_files: tuple[str, ...] = _EXPERT_FILES
    """The names of an expert's matrices in files with a separate tensor for each expert."""
    expert_bias: bool = False
    interleaved: bool = False
    """Whether experts interleave the gate and up projections. If so, these are also clamped."""

    entries: tuple[str, ...] = ("attention_bias", "mlp_bias")
    """The entries in `OF_FEW` used by this family. All others are ignored."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps the usual names of `config.json` entries to this family's names."""
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps the usual names of a model's parts to this family's names."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps parts to their names in files, if these differ from the names in the model."""
    beside: str = ""
    """A regular expression for unused parts found in some files."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Default values for entries of `config.json`."""
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of `config.json` and the values they must have if present."""
    gguf: Gguf | None = None
    """How llama.cpp stores this architecture, or None if it isn't supported."""
    heads: tuple[str, ...] = (SEQUENCES, TOKENS)
    """The available classification heads, as suffixes of transformers' class names."""
    head_stem: str = ""
    """The prefix of these class names, and of the body's, if it differs from the decoder's prefix."""
    taken_for_experts: tuple[str, ...] = ()
    """Suffixes of layer names PEFT would mistake for transformers 4's experts in `target_modules`. PEFT
    doesn't rewrite `target_parameters`, so use those instead."""
    token_head: str = "score"
    """The name of the token classification layer."""

    def name(self, role: str) -> str:
        """Translates the usual name of a part, such as `self_attn.q_proj`, to this family's name."""
        return ".".join(self.parts.get(part, part) for part in role.split("."))

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the default values of entries missing from a configuration."""
        # The older name of an entry stands for it, too.
        given = {"rope_parameters"} if config.get("rope_scaling") else set[str]()
        return {name: x for name, x in self.defaults.items() if name not in given} | dict(config)

    def folds(self) -> dict[str, list[str]]:
        """Returns the layers `quaxlike.balance` can fold scales into, as regular expressions.

        Only linear layers may use the output of such a layer. Norms with an offset are also excluded, because
        scaling their weight doesn't scale their output. The same goes for the norm before attention if some
        layers don't have their own keys.
        """
        first = ["qkv_proj"] if self.fused else ["q_proj", "k_proj", "v_proj"]
        wide = ["gate_proj", "up_proj"] if self.gated and not self.fused else ["up_proj"]
        wide = ["gate_up_proj"] if self.gated and self.fused else wide
        before, _, before_mlp, _ = self.norms
        folds: dict[str, list[str]] = {}
        if not self.norm_offset:
            folds["" if self.sharing else before] = [f"self_attn.{x}" for x in first]
            folds["" if self.experts and not self.experts_beside else before_mlp] = [f"mlp.{x}" for x in wide]
        if self.gated and not self.fused:
            folds["mlp.up_proj"] = ["mlp.down_proj"]
        return {
            rf"(.*)\.{re.escape(self.name(layer))}": [rf"\1.{self.name(x)}" for x in into]
            for layer, into in folds.items()
            if layer
        }


_SOFTCAPPING = ("attn_logit_softcapping", "final_logit_softcapping")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_SPARSE = ("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_GEMMA4_ENTRIES = (
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers"),
    *("use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "per_layer_config"),
    *("enable_moe_block", "top_k_experts"),
)
#: Entries of `config.json` only used by some families.
OF_FEW = (
    *("attention_bias", "mlp_bias", "query_pre_attn_scalar", *_SOFTCAPPING, *_MULTIPLIERS, *_SPARSE),
    *("shared_expert_intermediate_size", "swiglu_limit", "sliding_window_pattern"),
    *_GEMMA4_ENTRIES,
)

_WINDOW = "attention.sliding_window"
_GEMMA_KEYS = {
    _WINDOW: "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}

_GEMMA = Family(
    activation="gelu_pytorch_tanh", norm_offset=1.0, scaled_embedding=True, windows=2, tied=True,
    norms=(
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    defaults={
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
    required={"use_bidirectional_attention": (None, False)},
    entries=("attention_bias", "query_pre_attn_scalar", *_SOFTCAPPING),
)  # fmt: skip
_QWEN = Family(
    qkv_bias=True,
    output_bias=False,
    windows="upper",
    window_switch=True,
    entries=(),
    defaults={"max_position_embeddings": 32768},
    gguf=Gguf("qwen2", "qwen2", square=True),
)
_LINEAR_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    **{
        f"ssm_{theirs}": f"linear_attn.{ours}"
        for theirs, ours in (("conv1d", "conv1d"), ("norm", "norm"), ("out", "out_proj"))
    },
}
_DELTA_NET_GGUF = Gguf(
    "qwen35", "qwen3_5_text", predictors="mtp",
    parts={
        **_LINEAR_PARTS, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    },
    layouts={
        "ssm_a": TensorLayout(rows="value_heads", numbers="negative_exponential"),
        "ssm_conv1d.weight": TensorLayout(rows="queries_keys_values", squeezed=True),
        "ssm_norm.weight": TensorLayout(),
        "attn_qkv.weight": TensorLayout(rows="queries_keys_values"),
        "ssm_out.weight": TensorLayout(columns="value_heads"),
        **dict.fromkeys(
            ("ssm_dt.bias", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight"),
            TensorLayout(rows="value_heads"),
        ),
    },
    keys={
        "full_attention_interval": "full_attention_interval", "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    products={"ssm.inner_size": ("linear_num_value_heads", "linear_value_head_dim")},
    same=("linear_key_head_dim", "linear_value_head_dim"),
    limits={"rms_norm_eps": 1e-5},  # llama.cpp adds this to the norms of queries and keys, too, and not 1e-6
    sections=True,
)  # fmt: skip
_DELTA_NET = Family(
    qk_norm="heads", norm_offset=1.0, gated_attention=True, attends=4, beside="mtp", partial=True,
    entries=("attention_bias", *_SPARSE, "shared_expert_intermediate_size"),
    sizes={
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
    defaults={
        "head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
        "max_position_embeddings": 32768,
    },
    required={"attn_output_gate": True},
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        required={"pretraining_tp": 1, "sliding_window": None},
        gguf=Gguf("llama", "llama", permuted=True, biases=True),
    ),
    "MistralForCausalLM": Family(
        windows=0, entries=(), defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
        gguf=Gguf("llama", "mistral", permuted=True, biases=True),
    ),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": dataclasses.replace(
        _QWEN, qkv_bias=None, output_bias=None, qk_norm="heads", defaults={**_QWEN.defaults, "head_dim": 128},
        entries=("attention_bias",), gguf=Gguf("qwen3", "qwen3"),
    ),
    "Gemma2ForCausalLM": dataclasses.replace(
        _GEMMA, defaults={**_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gguf=Gguf("gemma2", "gemma2", keys=_GEMMA_KEYS, output="tied", large=46),
    ),
    "Gemma3ForCausalLM": dataclasses.replace(
        _GEMMA, qk_norm="heads", windows=6, entries=(*_GEMMA.entries, "sliding_window_pattern"),
        defaults={
            **_GEMMA.defaults, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262208,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        },
        required={**_GEMMA.required, "attn_logit_softcapping": None},
        heads=(SEQUENCES,), head_stem="Gemma3Text",
        gguf=Gguf("gemma3", "gemma3_text", keys=_GEMMA_KEYS, large=62),
    ),
    "Gemma4ForCausalLM": dataclasses.replace(
        _GEMMA, norm_offset=0.0, qk_norm="heads", windows=6, ends_global=True, layer_scalars=True,
        mixers={"full_attention": "global_attention", "sliding_attention": "local_attention"},
        sharing={"global_attention": "global_queries", "local_attention": "local_queries"},
        beside=r"layers\.\d+\.self_attn\.[kv]_(proj|norm)",  # of layers that share them
        entries=("attention_bias", "final_logit_softcapping", "moe_intermediate_size", *_GEMMA4_ENTRIES),
        experts="out_in", experts_beside="enable_moe_block", renamed={"num_experts_per_tok": "top_k_experts"},
        defaults={
            "norm_topk_prob": True,
            "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "vocab_size": 262144, "max_position_embeddings": 131072,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
                },
            },
        },
        required={"use_bidirectional_attention": (None, "vision")},
        heads=(), head_stem="Gemma4Text",
        gguf=Gguf(
            "gemma4", "gemma4_text", windowed=True, vocabulary="gemma4",
            without_adapters=("per_layer_model_proj.weight",),
            adapter_scales={"experts.down_proj": "router.per_expert_scale"},
            config={"final_logit_softcapping": 30.0}, nulls={"final_logit_softcapping": 0.0},
            parts={
                "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm", "layer_output_scale.weight": "layer_scalar",
                "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "ffn_gate_up_exps.weight": "experts.gate_up_proj",
                "ffn_down_exps.weight": "experts.down_proj",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            keys={
                _WINDOW: "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
                "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "expert_count": "num_experts", "expert_used_count": "top_k_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
            },
        ),
    ),
    "Phi3ForCausalLM": Family(
        fused=True, windows=0, qkv_bias=False, output_bias=False, partial=True, entries=(),
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        },
        gguf=Gguf("phi3", "phi3", square=True, keys={
            "rope.scaling.original_context_length": "original_max_position_embeddings"
        }),
    ),
    "MixtralForCausalLM": Family(
        windows=0, experts="out_in", expert_files=("w1", "w3", "w2"), files={"mlp": "block_sparse_moe"},
        entries=(),
        defaults={
            "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "max_position_embeddings": 131072,
        },
        gguf=Gguf("llama", "mixtral", marker="expert_count", keys=_EXPERT_KEYS, permuted=True, biases=True),
    ),
    "Qwen2MoeForCausalLM": dataclasses.replace(
        _QWEN, experts="out_in", required={"qkv_bias": True}, windows="lower",
        entries=(*_SPARSE, "shared_expert_intermediate_size"),
        defaults={**_QWEN.defaults, "num_experts_per_tok": 4},
        gguf=Gguf("qwen2moe", "qwen2_moe", square=True, keys=_EXPERT_KEYS, output="own")
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="heads", windows=0, window_switch=True, experts="out_in", taken_for_experts=_EXPERT_FILES,
        entries=("attention_bias", *_SPARSE),
        defaults={"num_experts_per_tok": 8, "max_position_embeddings": 32768},
        gguf=Gguf("qwen3moe", "qwen3_moe", keys=_EXPERT_KEYS, config={"norm_topk_prob": True}),
    ),
    "GptOssForCausalLM": Family(
        windows=2, sinks=True, experts="in_out", router="router", expert_bias=True, interleaved=True,
        entries=("attention_bias", "swiglu_limit"),
        defaults={
            "attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 4, "head_dim": 64,
            "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "rope_theta": 150000.0, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        required={"swiglu_alpha": 1.702},
        gguf=Gguf(
            "gpt-oss", "gpt_oss", parts={"post_attention_norm": "post_attention_layernorm"},
            keys={
                _WINDOW: "sliding_window", "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
            },
            config={"attention_bias": True}, output="own",
        ),
    ),
    "Olmo2ForCausalLM": Family(
        qk_norm="whole", entries=("attention_bias",), heads=(SEQUENCES,), defaults={"rms_norm_eps": 1e-5},
        norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        gguf=Gguf("olmo2", "olmo2", square=True, output="own"),
    ),
    "Olmo3ForCausalLM": Family(
        qk_norm="whole", entries=("attention_bias",),
        norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        windows=4, plain_windows=True, heads=(SEQUENCES,),
        defaults={"sliding_window": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        gguf=Gguf(
            "olmo2", "olmo3", marker=_WINDOW, keys={_WINDOW: "sliding_window"}, square=True,
            output="own",
        ),
    ),
    "GraniteForCausalLM": Family(
        entries=("attention_bias", "mlp_bias", *_MULTIPLIERS),
        heads=(),
        defaults={"attention_multiplier": 1.0, "logits_scaling": 1.0},
        gguf=Gguf(
            "granite", "granite", permuted=True, biases=True, config={"attention_multiplier": 0},
            keys={
                "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
                "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
            },
        ),
    ),
    "SmolLM3ForCausalLM": Family(
        window_switch=True, unrotated=4, tied=True,
        defaults={"rope_theta": 2000000.0, "max_position_embeddings": 32768},
        gguf=Gguf("smollm3", "smollm3", permuted=True),
    ),
    "Ministral3ForCausalLM": Family(
        windows=0, entries=(), defaults={
            "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        gguf=Gguf(
            "mistral3", "ministral3", permuted=True, biases=True, yarn=True,
            rope_keys={"attention.temperature_scale": "llama_4_scaling_beta"},
        ),
    ),
    "Qwen3NextForCausalLM": dataclasses.replace(
        _DELTA_NET, mixers={"linear_attention": "fused_gated_delta_net"}, experts="out_in",
        taken_for_experts=_EXPERT_FILES,
        gguf=dataclasses.replace(
            _DELTA_NET_GGUF, name="qwen3next", model_type="qwen3_next",
            parts={
                **_LINEAR_PARTS, "ssm_ba": "linear_attn.in_proj_ba",
                "ssm_in": "linear_attn.in_proj_qkvz",  # only in old files
            },
            layouts={
                "ssm_a": TensorLayout(numbers="negative_exponential"), "ssm_norm.weight": TensorLayout(),
                "ssm_conv1d.weight": TensorLayout(squeezed=True),
            },
            joined={
                "linear_attn.in_proj_qkvz.weight": Joined(
                    ("attn_qkv.weight", "attn_gate.weight"), "by_key_head"
                ),
            },
            keys={**_DELTA_NET_GGUF.keys, **_EXPERT_KEYS}, config={"norm_topk_prob": True}, sections=False,
        ),
        defaults={
            **_DELTA_NET.defaults, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen3_5ForCausalLM": dataclasses.replace(
        _DELTA_NET, mixers={"linear_attention": "gated_delta_net"},
        heads=(SEQUENCES,), head_stem="Qwen3_5Text", gguf=_DELTA_NET_GGUF,
        defaults={**_DELTA_NET.defaults, "num_key_value_heads": 4},
    ),
    "Qwen3_5MoeForCausalLM": dataclasses.replace(
        _DELTA_NET, mixers={"linear_attention": "gated_delta_net"}, experts="out_in", heads=(),
        head_stem="Qwen3_5MoeText",
        gguf=dataclasses.replace(
            _DELTA_NET_GGUF, name="qwen35moe", model_type="qwen3_5_moe_text",
            keys={**_DELTA_NET_GGUF.keys, **_EXPERT_KEYS}, config={"norm_topk_prob": True},
        ),
        defaults={
            **_DELTA_NET.defaults, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "GPT2LMHeadModel": Family(
        activation="gelu_pytorch_tanh", fused=True, gated=False, qkv_bias=True, output_bias=True,
        layer_norm=True, norms=("ln_1", "", "ln_2", ""), learned_positions=True, conv1d=True, tied=True,
        entries=(),
        token_head="classifier",
        renamed={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
        },
        parts={
            "model": "transformer", "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "self_attn": "attn",
            "qkv_proj": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
        },
        defaults={"rms_norm_eps": 1e-5, "mlp_bias": True, "max_position_embeddings": 1024},
        required={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False
        },
    ),
}  # fmt: skip


class Multimodal(NamedTuple):
    """A multimodal model, of which only the decoder is used."""

    decoders: dict[str, str]
    """The decoders it can contain, keyed by their `model_type`."""
    tied: bool
    """Whether the output layer is tied if `config.json` doesn't say, whatever its `text_config` says."""


MULTIMODAL = {
    "Gemma3ForConditionalGeneration": Multimodal({"gemma3_text": "Gemma3ForCausalLM"}, tied=True),
    "Gemma4ForConditionalGeneration": Multimodal({"gemma4_text": "Gemma4ForCausalLM"}, tied=True),
    "Mistral3ForConditionalGeneration": Multimodal(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, tied=True
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal({"qwen3_5_text": "Qwen3_5ForCausalLM"}, tied=False),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, tied=False
    ),
}
#: The decoder's path within a multimodal model. (Tensor names in files are different.)
BODY_OF_TOWER = "model.language_model"
#: Prefixes of the decoder's tensors in files saved by transformers 4 and 5, and of all other tensors.
IN_TOWER = re.compile(r"(model\.)?language_model\.(model\.)?")
BESIDE_TEXT = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)


def classifiers() -> dict[str, tuple[str, str]]:
    """Maps each architecture with a classification head to its decoder and its head."""
    return {_stem(name) + head: (name, head) for name, family in FAMILIES.items() for head in family.heads}


def bodies() -> dict[str, str]:
    """Maps each architecture without any head (transformers' `AutoModel`) to its decoder."""
    return {_stem(name) + "Model": name for name in FAMILIES}


def _stem(name: str) -> str:
    """Returns the prefix of a decoder's class names with another head, or with none."""
    return FAMILIES[name].head_stem or re.sub("(ForCausalLM|LMHeadModel)$", "", name)


def names_of(role: str) -> list[str]:
    """Returns all names of a part across architectures, starting with Llama's."""
    names = [family.parts.get(role, role) for family in FAMILIES.values()]
    if role in _EXPERT_FILES:
        names += [family.expert_files[_EXPERT_FILES.index(role)] for family in FAMILIES.values()]
    return list(dict.fromkeys([role, *names]))
