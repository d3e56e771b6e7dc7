"""Older names for `quaxlike.models`."""

from collections.abc import Mapping
from typing import Any

from ...models import Decoder as GPT2
from ...models import DecoderConfig

__all__ = ["GPT2", "GPT2Config"]


class GPT2Config:
    """`DecoderConfig.from_json` with the architecture filled in."""

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_json({**config, "architectures": ["GPT2LMHeadModel"]})
