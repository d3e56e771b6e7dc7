"""`x @ W.T` and `x @ W` for weights in any block format, with the decoder of rows as a parameter."""

from .api import block_matmul as block_matmul
from .api import block_matmul_p as block_matmul_p
