"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

Source: PEFT, <https://github.com/huggingface/peft>, whose conventions are those of its 0.21.
"""

from .load import load_adapter
from .save import save_adapter

__all__ = ["load_adapter", "save_adapter"]
