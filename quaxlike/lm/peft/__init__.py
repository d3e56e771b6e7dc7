"""LoRA and other adapters, in the format used by PEFT.

An adapter consists of an `adapter_config.json` and an `adapter_model.safetensors` file. This follows the
conventions of PEFT 0.21, <https://github.com/huggingface/peft>.
"""

from .gguf import save_gguf_adapter
from .load import load_adapter
from .save import save_adapter

__all__ = ["load_adapter", "save_adapter", "save_gguf_adapter"]
