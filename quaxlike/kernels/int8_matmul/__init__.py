"""`x @ W.T` and `x @ W` for int8 weights with scales."""

from .api import int8_matmul as int8_matmul
from .api import int8_matmul_p as int8_matmul_p
