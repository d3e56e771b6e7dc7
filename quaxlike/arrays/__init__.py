"""Array types, one package each. Importing a package registers rules for its own types only."""

from typing import TYPE_CHECKING

from .._lazy import lazily

# These are imported to register their rules.
from . import adapted_rules as _adapted_rules  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import axis_rules as _axis_rules  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import pairs as _pairs  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .adapted import AdaptedArray
from .annotated import AnnotatedArray

if TYPE_CHECKING:
    from .. import adapters as adapters
    from . import lora as lora
    from . import named as named
    from . import prng as prng
    from . import quantized as quantized
    from . import sparse as sparse
    from . import structured as structured
    from . import unitful as unitful
    from . import zero as zero

__all__ = ["AdaptedArray", "AnnotatedArray"]

__getattr__, __dir__ = lazily(
    __name__,
    ["adapters", "lora", "named", "prng", "quantized", "sparse", "structured", "unitful", "zero"],
    globals(),
)
