"""Array types, one module each; importing one registers rules for its own type only."""

from . import kernel_notes as _kernel_notes  # noqa: F401  # pyright: ignore[reportUnusedImport] (explain)
from . import pairs as _pairs  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
