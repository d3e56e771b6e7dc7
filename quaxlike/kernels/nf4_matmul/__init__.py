"""`x @ W.T` and `x @ W` for weights stored as 4-bit codes with block scales."""

from .api import nf4_matmul as nf4_matmul
from .api import nf4_matmul_p as nf4_matmul_p
from .scales import NestedScales as NestedScales
