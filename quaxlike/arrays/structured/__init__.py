"""Matrices that are known by less than their elements.

A product, a linear system or a determinant costs what the structure asks for: `jnp.linalg.solve`,
`jnp.linalg.inv`, `jnp.linalg.slogdet` and `jnp.linalg.det` reach it under `quaxify`.
"""

from . import arithmetic as _arithmetic  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import contraction as _contraction  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .base import StructuredMatrix as StructuredMatrix
from .diagonal import DiagonalMatrix as DiagonalMatrix
from .kronecker import KroneckerMatrix as KroneckerMatrix
from .linalg import logdet as logdet
from .linalg import solve as solve
from .low_rank import LowRankUpdate as LowRankUpdate
from .tridiagonal import TridiagonalMatrix as TridiagonalMatrix
