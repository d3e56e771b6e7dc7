"""Structured matrices: diagonal, block-diagonal, block-circulant, tridiagonal, Kronecker and low-rank.

Under `quaxify`, products, `jnp.linalg.solve`, `jnp.linalg.inv`, `jnp.linalg.slogdet` and `jnp.linalg.det`
exploit this structure. This is typically much faster than using the dense matrix.
"""

# These are imported to register their rules.
from . import dot, elementwise, shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .base import StructuredMatrix
from .block_diagonal import BlockDiagonalMatrix
from .circulant import BlockCirculantMatrix
from .diagonal import DiagonalMatrix
from .kronecker import KroneckerMatrix
from .linalg import logdet, solve
from .low_rank import LowRankUpdate
from .tridiagonal import TridiagonalMatrix

__all__ = [
    "BlockCirculantMatrix",
    "BlockDiagonalMatrix",
    "DiagonalMatrix",
    "KroneckerMatrix",
    "LowRankUpdate",
    "StructuredMatrix",
    "TridiagonalMatrix",
    "logdet",
    "solve",
]
