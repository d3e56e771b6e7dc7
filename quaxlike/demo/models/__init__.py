"""Older names for `quaxlike.models`."""

from collections.abc import Mapping
from typing import Any

from ...models import *  # noqa: F403
from ...models import Decoder, DecoderConfig, load

GPT2 = Llama = Decoder
load_model = load


class _Config:
    """`DecoderConfig.from_json` with the architecture filled in."""

    architecture = ""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_json({**config, "architectures": [cls.architecture]})


class GPT2Config(_Config):
    architecture = "GPT2LMHeadModel"


class LlamaConfig(_Config):
    architecture = "LlamaForCausalLM"
