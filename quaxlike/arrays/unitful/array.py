"""`Unitful`: an array and its unit."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import wadler_lindig as wl
from jaxtyping import ArrayLike

from ...core.jaxprs.unify import widened
from ...core.known_constants import may_be_placeholder
from ...core.values import ArrayValue, is_value, level_of, replace_fields
from .. import precedence
from ..annotated import AnnotatedArray
from .unit import ANY, UNKNOWN, DimensionError, Unit

# A unit describes an array whatever that is made of: before the types that say how it is stored.


class Unitful(AnnotatedArray):
    """An array in a unit of the SI.

    Units are worked out while tracing, from the primitives that meet; they cost nothing at run time.
    Whatever does not fit (metres plus seconds, the exponential of a length) is a
    [`quaxlike.arrays.unitful.DimensionError`][] there. A result without a dimension is a plain array.

    A plain array counts as dimensionless. Only 0, infinity and NaN, where they are known while tracing,
    have any unit; and in `jnp.where` a plain array takes the unit of the other, as in
    `jnp.where(x > 0, x, 1)`.

    **Arguments:**

    - `array`: any array, or a Value that stands for one.
    - `unit`: a [`quaxlike.arrays.unitful.Unit`][], or what makes one: `"m/s^2"`, `{"m": 1, "s": -2}`.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.unitful import Unitful, metre, second

        fall = lambda t: 0.5 * (9.81 * metre / second**2) * t**2
        t = Unitful(jnp.array(2.0), "s")
        fall(t)  # 19.62 m
        ql.quaxify(jax.grad(fall))(t)  # 19.62 m/s: a derivative has the unit of the quotient
        ```
    """

    array: Any = eqx.field(converter=lambda x: x if is_value(x) else jnp.asarray(x))
    unit: Unit = eqx.field(static=True, converter=Unit)

    default_precedence = precedence.UNITFUL
    on_materialise = "error"  # dropping a unit has to be asked for

    @classmethod
    def without_rule(cls, primitive: Any, values: Any, params: Any) -> Any:
        units = ", ".join(str(v.unit) if isinstance(v, Unitful) else "no unit" for v in values)
        raise DimensionError(
            f"No rule says what `{primitive}` of arrays in ({units}) has for a unit. Take the units off "
            f"first (`.array`), or register a rule with `quaxlike.register({primitive.name!r})`."
        )

    @classmethod
    def promote(cls, array: Any, like: Any = None) -> Any:
        if like is None:
            inexact = jnp.issubdtype(array.dtype, jnp.inexact)
            return cls(0.0, UNKNOWN).with_array(array) if inexact else NotImplemented
        if like.unit.exponents and not may_be_placeholder(array):
            raise DimensionError(
                f"An array without a unit stands where one in {like.unit} does: in another branch, or before "
                "or after an iteration. Give it the unit by multiplying with it."
            )
        return super().promote(array, like)

    def widen(self, like: Any) -> Any:
        if not isinstance(like, Unitful) or like.unit != ANY:
            return NotImplemented
        return replace_fields(self, array=widened(self.array, like.array), unit=ANY)

    @classmethod
    def cotangent(cls, ct: Any) -> Any:
        # The unit of the function that is differentiated is not known here, so the cotangent has any unit.
        return cls(ct.array if isinstance(ct, Unitful) else ct, ANY)

    def __str__(self) -> str:
        return f"{self.array} {self.unit}"

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.pdoc(self.array, **kwargs) + wl.TextDoc(f" {self.unit}")


def unit_of(x: ArrayLike | ArrayValue) -> Unit:
    """The unit of an array; dimensionless for one that has none."""
    return x.unit if isinstance(x, Unitful) else Unit()


def with_unit(array: Any, unit: Unit) -> Any:
    """The array in a unit; the array itself without a dimension."""
    return array if unit.dimensionless else Unitful(array, unit)


def quantity(array: Any, unit: Unit) -> Any:
    """`array * unit`."""
    if isinstance(array, Unitful):
        return Unitful(array.array, array.unit * unit)
    value = Unitful(array, unit)
    level = level_of(value)
    if level is None:
        return value
    # Inside a quaxified function it has to be an operand at once: a transform that it is passed to
    # would take a Value apart.
    if isinstance(array, jax.core.Tracer):
        return array * level.adopt(Unitful(jnp.ones((), array.dtype), unit))
    return level.adopt(value)
