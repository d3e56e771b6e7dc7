"""JAX primitives for fused operations that act directly on quantised, adapted and sparse weights.

Every operation has a reference implementation in plain JAX, which runs on every platform and defines the
correct result. Kernels may only differ from it by rounding.
"""

from .backends import Backend, Choice, KernelFallbackWarning, backend, chosen_backend
from .block_matmul import (
    NestedScales,
    int8_matmul,
    int8_matmul_p,
    lora_matmul,
    lora_matmul_p,
    nf4_matmul,
    nf4_matmul_p,
)
from .block_sparse_matmul import block_sparse_matmul, block_sparse_matmul_p, transposed_index
from .csr_matmul import (
    CsrIndex,
    csr_index,
    csr_matmul,
    csr_matmul_p,
    csr_sampled_matmul,
    csr_sampled_matmul_p,
)
from .remat import dots_with_no_batch_dims_saveable

__all__ = [
    "Backend",
    "Choice",
    "CsrIndex",
    "KernelFallbackWarning",
    "NestedScales",
    "backend",
    "block_sparse_matmul",
    "block_sparse_matmul_p",
    "chosen_backend",
    "csr_index",
    "csr_matmul",
    "csr_matmul_p",
    "csr_sampled_matmul",
    "csr_sampled_matmul_p",
    "dots_with_no_batch_dims_saveable",
    "int8_matmul",
    "int8_matmul_p",
    "lora_matmul",
    "lora_matmul_p",
    "nf4_matmul",
    "nf4_matmul_p",
    "transposed_index",
]
