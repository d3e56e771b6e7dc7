"""`x @ W.T` and `x @ W` for weights in any block format: how a row is decoded is a parameter."""

from .api import block_matmul as block_matmul
from .api import block_matmul_p as block_matmul_p
