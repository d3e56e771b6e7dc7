"""Older names for `quaxlike.models`."""

from collections.abc import Mapping
from typing import Any

from ...models import *  # noqa: F403
from ...models import Decoder, DecoderConfig, load

GPT2 = Llama = Decoder
load_model = load


class GPT2Config:
    """`DecoderConfig.from_json` with the architecture filled in."""

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_json({**config, "architectures": ["GPT2LMHeadModel"]})


class LlamaConfig:
    """`DecoderConfig.from_json` with the architecture filled in."""

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_json({**config, "architectures": ["LlamaForCausalLM"]})
