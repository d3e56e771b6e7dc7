"""LoRA and other adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Source: PEFT, <https://github.com/huggingface/peft>, with the conventions of its version 0.21.
"""

from .gguf import save_gguf_adapter
from .load import load_adapter
from .save import save_adapter

__all__ = ["load_adapter", "save_adapter", "save_gguf_adapter"]
