"""Older names for `quaxlike.models`."""

from collections.abc import Mapping
from typing import Any

from ...models import Decoder as Llama
from ...models import DecoderConfig

__all__ = ["Llama", "LlamaConfig"]


class LlamaConfig:
    """`DecoderConfig.from_json` with the architecture filled in."""

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_json({**config, "architectures": ["LlamaForCausalLM"]})
