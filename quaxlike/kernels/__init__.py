"""Fused operations on the bytes of quantised, adapted and sparse weights, as JAX primitives."""

from .backends import Backend as Backend
from .backends import Choice as Choice
from .backends import KernelFallbackWarning as KernelFallbackWarning
from .backends import backend as backend
from .backends import chosen_backend as chosen_backend
from .block_sparse_matmul import block_sparse_matmul as block_sparse_matmul
from .block_sparse_matmul import block_sparse_matmul_p as block_sparse_matmul_p
from .block_sparse_matmul import transposed_index as transposed_index
from .csr_matmul import CsrIndex as CsrIndex
from .csr_matmul import csr_index as csr_index
from .csr_matmul import csr_matmul as csr_matmul
from .csr_matmul import csr_matmul_p as csr_matmul_p
from .csr_matmul import csr_sampled_matmul as csr_sampled_matmul
from .csr_matmul import csr_sampled_matmul_p as csr_sampled_matmul_p
from .int8_matmul import int8_matmul as int8_matmul
from .int8_matmul import int8_matmul_p as int8_matmul_p
from .lora_matmul import lora_matmul as lora_matmul
from .lora_matmul import lora_matmul_p as lora_matmul_p
from .nf4_matmul import NestedScales as NestedScales
from .nf4_matmul import nf4_matmul as nf4_matmul
from .nf4_matmul import nf4_matmul_p as nf4_matmul_p
