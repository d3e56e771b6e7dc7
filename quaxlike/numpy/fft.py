"""`jax.numpy.fft`, already quaxified."""

from typing import TYPE_CHECKING

import jax.numpy.fft

from ._namespace import names_of, quaxified

if TYPE_CHECKING:
    from jax.numpy.fft import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

__getattr__ = quaxified(jax.numpy.fft, globals())


def __dir__() -> list[str]:
    return names_of(jax.numpy.fft)
