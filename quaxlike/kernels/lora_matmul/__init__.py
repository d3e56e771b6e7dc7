"""`x @ W.T + scaling · (x @ a.T) @ b.T` with 4-bit `W`, for one adapter, or one of many for each row."""

from .api import lora_matmul as lora_matmul
from .api import lora_matmul_p as lora_matmul_p
