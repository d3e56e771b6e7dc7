"""`jax.numpy.linalg`, already quaxified."""

from typing import TYPE_CHECKING

import jax.numpy.linalg

from ._namespace import names_of, quaxified

if TYPE_CHECKING:
    from jax.numpy.linalg import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

__getattr__ = quaxified(jax.numpy.linalg, globals())


def __dir__() -> list[str]:
    return names_of(jax.numpy.linalg)
