"""An older name of `quaxlike.models`."""

from collections.abc import Mapping
from typing import Any

from ... import models as _models
from ..._deprecated import deprecated, names_of


class _Config:
    """`DecoderConfig.from_json` with the architecture filled in."""

    architecture = ""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> _models.DecoderConfig:
        return _models.DecoderConfig.from_json({**config, "architectures": [cls.architecture]})


class _GPT2Config(_Config):
    architecture = "GPT2LMHeadModel"


class _LlamaConfig(_Config):
    architecture = "LlamaForCausalLM"


_NEW = "quaxlike.models"
NAMES: dict[str, tuple[str, Any]] = {
    **names_of(_models),
    "GPT2": (f"{_NEW}.Decoder", _models.Decoder),
    "Llama": (f"{_NEW}.Decoder", _models.Decoder),
    "GPT2Config": (f"{_NEW}.DecoderConfig", _GPT2Config),
    "LlamaConfig": (f"{_NEW}.DecoderConfig", _LlamaConfig),
    "load_model": (f"{_NEW}.load", _models.load),
}
__getattr__, __dir__ = deprecated(__name__, NAMES, removed_in="0.2")
