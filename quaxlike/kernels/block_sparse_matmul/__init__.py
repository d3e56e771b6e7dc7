"""Computes `x @ W.T` and `x @ W` for block-sparse weights, i.e. with only some square blocks stored."""

from .api import block_sparse_matmul as block_sparse_matmul
from .api import block_sparse_matmul_p as block_sparse_matmul_p
from .reference import transposed_index as transposed_index
