"""Warnings about unused configuration entries that may affect the result."""

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from ...files.errors import listed, quoted

#: Entries of `config.json` that don't affect the logits, grouped by the reason.
WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "where the model comes from, and what wrote it": (
        *("architectures", "model_type", "_name_or_path", "name_or_path", "transformers_version", "auto_map"),
        *(
            "_commit_hash",
            r"unsloth_\w+",
            r"transformers\.js_config",
            "is_llama_config",
            "torch_dtype",
            "dtype",
        ),
    ),
    "training: dropout, losses, how weights start": (
        *(r"\w*dropout\w*", r"\w+_pdrop", r"initializer_\w+", r"\w+_loss(_\w+)?", "router_jitter_noise"),
        *("gradient_checkpointing", "finetuning_task", "sparse_pred_ignore_index", "sparse_prediction"),
    ),
    "how transformers computes the same": (
        *("use_cache", "cache_implementation", r"_?attn_implementation(_\w+)?", r"_flash_attn\w*"),
        *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "torchscript"),
        *("use_bfloat16", "chunk_size_feed_forward", "pretraining_tp", "_experts_implementation"),
        *("reorder_and_upcast_attn", "use_kernels", "_pre_quantization_dtype"),
    ),
    "what transformers returns": (
        *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("output_past", "keys_to_ignore_at_inference"),
    ),
    "tokens, which texts are made of": (
        *(r"\w+_token_id", r"\w+_token_index", "tokenizer_class", "prefix", "task_specific_params"),
    ),
    "the generation of texts": (
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    ),
    "heads and parts that these models do not have": (
        *("id2label", "label2id", "problem_type", r"summary_\w+", r"classifier_(activation|bias|pooling)"),
        *("decoder_bias", r"pooler_\w+", "directionality", "n_special", "predict_special_tokens"),
        *("is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size"),
        *("tie_encoder_decoder", "pruned_heads", "tie_word_embeddings"),
    ),
    "of other programs' models of the same name, and not read by transformers": (
        *("interpolate_factor", "full_attn_mod", "layer_norm_epsilon", "layer_norm_eps"),
        *("mamba_ssm_dtype", r"mtp_\w+"),
    ),
    "read with the weights": ("quantization", "quantization_config"),
    "said by other entries as well": ("n_ctx", "initial_context_length", "experts_per_token"),
}
_IS_WITHOUT_EFFECT = re.compile("|".join(f"({x})" for names in WITHOUT_EFFECT.values() for x in names))


def is_off(value: Any) -> bool:
    """Returns whether an entry's value disables the corresponding option."""
    return value is None or value is False or value in ({}, [])


def _is_without_effect(name: str) -> bool:
    # Bounding the length also bounds the regex's running time.
    return len(name) < 100 and bool(_IS_WITHOUT_EFFECT.fullmatch(name))


def warn_of_unknown(where: str, entries: Mapping[str, Any], known: Collection[str]) -> None:
    """Warns about entries not in `known`, unless they are disabled or don't affect the result."""
    unknown = [
        f"{name}={quoted(value)}"
        for name, value in entries.items()
        if name not in known and not is_off(value) and not _is_without_effect(name)
    ]
    if unknown:
        warnings.warn(
            f"{where} has {listed(unknown)}, which nothing here reads. If what the model computes depends on "
            "that, its numbers are others than where it comes from.",
            stacklevel=2,
        )
