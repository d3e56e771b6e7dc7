"""`jax.numpy`, already quaxified. Typically imported as `import quaxlike.numpy as qnp`.

This has every name in the installed `jax.numpy`, including `linalg` and `fft`. Functions are quaxified on
first access, and keep their signature and docstring. Dtypes and constants are the same objects as in JAX.

!!! example

    ```python
    import jax.numpy as jnp
    import quaxlike as ql
    import quaxlike.numpy as qnp

    w = ql.LoraArray(jnp.ones((4, 3)), a=jnp.ones((1, 3)), b=jnp.ones((4, 1)))
    y = qnp.matmul(w, jnp.arange(3.0))
    ```
"""

from typing import TYPE_CHECKING

import jax.numpy

from ._namespace import names_of, quaxified

if TYPE_CHECKING:
    from jax.numpy import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

    from . import fft as fft
    from . import linalg as linalg

__getattr__ = quaxified(jax.numpy, globals())


def __dir__() -> list[str]:
    return names_of(jax.numpy)
