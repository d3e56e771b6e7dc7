"""Computes `x @ W.T` and `x @ W` for weights in CSR format, i.e. with arbitrary sparsity patterns."""

from .api import CsrIndex as CsrIndex
from .api import csr_index as csr_index
from .api import csr_matmul as csr_matmul
from .api import csr_matmul_p as csr_matmul_p
from .api import csr_sampled_matmul as csr_sampled_matmul
from .api import csr_sampled_matmul_p as csr_sampled_matmul_p
from .reference import coo_matmul as coo_matmul
from .reference import sum_dtype as sum_dtype
