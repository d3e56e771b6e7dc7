"""Groups of JAX primitives that behave alike, for registering one rule for all of them.

The available primitives vary slightly between JAX versions, so each group only contains those in your
installed JAX version.

!!! example

    ```python
    import jax, quaxlike as ql
    from jax.extend.core import Primitive
    from quaxlike.primitives import classes

    class Stacked(ql.ArrayValue):
        array: jax.Array

        def materialise(self):
            return self.array

    @ql.register(classes.ELEMENTWISE_UNARY)
    def _(primitive: Primitive, x: Stacked, **params):
        return Stacked(primitive.bind(x.array, **params))
    ```
"""

from ..core import compat

__all__ = [
    "COMPARISONS",
    "CUMULATIVE",
    "ELEMENTWISE_BINARY",
    "ELEMENTWISE_UNARY",
    "REARRANGEMENTS",
    "REDUCTIONS",
    "ZERO_PRESERVING",
    "installed",
]


def installed(names: str) -> tuple[str, ...]:
    """Splits a string at spaces and keeps only the primitives in the installed JAX version."""
    known = compat.named_primitives()
    return tuple(name for name in names.split() if name in known)


ZERO_PRESERVING = installed(
    "abs asin asinh atan atanh bessel_i1e cbrt ceil conj convert_element_type erf erf_inv expm1 floor "
    "imag log1p neg real reduce_precision round sign sin sinh sqrt square tan tanh"
)
"""Elementwise functions of one array that map zero to zero. (So these preserve sparsity.)"""

ELEMENTWISE_UNARY = ZERO_PRESERVING + installed(
    "acos acosh bessel_i0e clz cos cosh digamma erfc exp exp2 integer_pow is_finite lgamma log log2 "
    "logistic not one_minus_square population_count rsqrt"
)
"""Elementwise functions of one array."""

COMPARISONS = installed("eq ne lt le gt ge eq_to le_to lt_to")
"""Elementwise functions of two arrays that return booleans."""

ELEMENTWISE_BINARY = COMPARISONS + installed(
    "add sub mul div rem pow max min and or xor atan2 nextafter igamma igammac igamma_grad_a mulhi "
    "polygamma zeta random_gamma_grad shift_left shift_right_logical shift_right_arithmetic complex"
)
"""Elementwise functions of two arrays. Note that one of the arrays might be a scalar, i.e. have shape
`()`.
"""

REARRANGEMENTS = installed(
    "broadcast_in_dim expand_dims reshape rev slice split squeeze tile transpose unstack"
)
"""Functions of one array that move, repeat or drop its elements."""

REDUCTIONS = installed("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor")
"""Functions that reduce one array over `axes`."""

CUMULATIVE = installed("cumsum cumprod cummax cummin cumlogsumexp")
"""Functions that accumulate one array along `axis`. The result has the same shape."""
