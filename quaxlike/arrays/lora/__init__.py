"""Low-rank adapters: a frozen weight plus a small trained correction."""

from . import contraction as _contraction  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import convolution as _convolution  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import joining as _joining  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import reshaping as _reshaping  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import slicing as _slicing  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import RANK as RANK
from .array import LoraArray as LoraArray
from .array import labels as labels
from .array import padded_to as padded_to
from .array import plainly_scaled as plainly_scaled
from .array import row_norm as row_norm
from .array import row_scale as row_scale
from .beside import LoraBias as LoraBias
from .beside import TrainableArray as TrainableArray
from .einsum import arrange as arrange
from .joining import without_adapter as without_adapter
from .layout import has_all_axes as has_all_axes
