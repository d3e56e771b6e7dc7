"""`AnnotatedArray`: an array with static metadata.

Metadata must never survive a primitive by accident: e.g. a unit would silently become wrong. So a primitive
without a rule is applied to the bare array, unless it's known to only move elements (`STRUCTURAL`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..core import compat
from ..core.jaxprs.unify import widened
from ..core.operators import ArrayOperators
from ..core.policy import dense_operands
from ..core.quaxify import quaxify
from ..core.rules import register
from ..core.values import ArrayValue, is_value, replace_fields
from ..primitives.classes import REARRANGEMENTS, installed

_Self = TypeVar("_Self", bound="AnnotatedArray")
_Rule = TypeVar("_Rule", bound=Callable[..., Any])

STRUCTURAL = REARRANGEMENTS + installed(
    "copy copy_p convert_element_type dynamic_slice gather reduce_precision sharding_constraint"
)
"""Primitives that only move or round elements, and so preserve an array's metadata."""


class AnnotatedArray(ArrayOperators, ArrayValue):
    """An array with static metadata, such as a unit, axis names, a frame of reference or a calendar.

    To create your own type, subclass this, declare the metadata as static fields, and register rules for the
    primitives that read or change it. The shape and dtype are taken from the array. You don't need any rules
    for indexing, stacking, sharding, differentiation, loop carries, or the operators of `jax.Array`.
    Primitives that only move elements don't need rules either; they preserve the metadata. Any other
    primitive without a rule is applied to the bare array, and the policy of [`quaxlike.on_materialise`][]
    applies.

    **Arguments:**

    - `array`: any array or `ArrayValue`.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql
        from jax.extend.core import Primitive


        class Framed(ql.AnnotatedArray):
            frame: str = eqx.field(static=True)


        @ql.register_on_either_side(("add", "sub"), Framed, other=Framed)
        def _(primitive: Primitive, x, y, **params):
            if x.frame != y.frame:
                raise ValueError(
                    f"{primitive} of a vector in {x.frame!r} and one in {y.frame!r}"
                )
            return x.with_array(Framed.bind(primitive, (x, y), params))


        x = Framed(jnp.ones(3), "earth")
        assert (x + x)[:2].frame == "earth"
        ```
    """

    array: Any

    linear = True
    _several: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Copy this, so that rules registered by a subclass don't apply to its parent.
        cls._several = dict(cls._several)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> Any:
        return self.array

    def with_array(self: _Self, array: Any) -> _Self:
        """Attaches this metadata to another array, without the constructor's checks."""
        return replace_fields(self, array=array)

    @classmethod
    def bind(cls, primitive: Primitive, operands: Iterable[Any], params: dict[str, Any]) -> Any:
        """Binds the primitive to the operands, with this class's metadata removed. For use in rules."""
        # Only unwrap this class. Any other Values amongst the operands should still use their own rules.
        arrays = [x.array if isinstance(x, cls) else x for x in operands]
        return quaxify(primitive.bind)(*arrays, **params)

    @classmethod
    def rule_for_several(cls, primitives: str | Sequence[str]) -> Callable[[_Rule], _Rule]:
        """Registers a rule for primitives with any number of operands, if at least one has this class.

        The rule is only tried if no [`quaxlike.register`][] rule matches.

        **Arguments:**

        - `primitives`: the name of a primitive, or several names.

        **Returns:**

        A decorator returning the rule unchanged. The rule is called with the primitive and its operands as
        positional arguments, and the primitive's parameters as keyword arguments.
        """

        def decorator(rule: _Rule) -> _Rule:
            names = [primitives] if isinstance(primitives, str) else primitives
            cls._several.update(dict.fromkeys(names, rule))
            return rule

        return decorator

    @classmethod
    def default(cls, primitive: Any, values: Any, params: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule = cls._several.get(primitive.name)
        out = NotImplemented if rule is None else rule(primitive, *values, **params)
        return cls.without_rule(primitive, values, params) if out is NotImplemented else out

    @classmethod
    def without_rule(cls, primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Applies a primitive without a rule to the bare array. Subclasses can override this.

        All other operands are passed on unchanged.
        """
        own = [i for i, x in enumerate(values) if isinstance(x, cls)]
        return cls.bind(primitive, dense_operands(primitive, values, own), primitive.get_bind_params(params))

    @classmethod
    def promote(cls, array: Any, like: Any) -> Any:
        return like.with_array(widened(array, like.array))

    def leading_axis(self) -> Any:
        return self.array.leading_axis() if is_value(self.array) else (0,)

    def shard_spec(self, spec: jax.P) -> Any:
        return self.array.shard_spec(spec) if is_value(self.array) else (spec,)


@register(STRUCTURAL)
def _moved(primitive: Primitive, x: AnnotatedArray, *rest: ArrayLike | ArrayValue, **params: Any) -> Any:
    if any(isinstance(y, AnnotatedArray) for y in rest):
        return NotImplemented  # an index with metadata, such as a unit
    out = type(x).bind(primitive, (x, *rest), params)
    return [x.with_array(part) for part in out] if primitive.multiple_results else x.with_array(out)


# Primitives combining elements of several arrays, and a slice selecting these arrays from the operands.
_JOINING = {
    "concatenate": slice(None),
    "stack": slice(None),
    "pad": slice(None),
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(0, 2),
    "scatter": slice(0, None, 2),
}


@AnnotatedArray.rule_for_several(tuple(_JOINING))
def _joined(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    """Combines several arrays with the same metadata."""
    arrays = xs[_JOINING[primitive.name]]
    if params.get("update_jaxpr") is not None and isinstance(xs[0], AnnotatedArray):
        # `at[...].apply` calls an arbitrary function of the elements, and ignores the updates
        element = jax.ShapeDtypeStruct((), xs[0].dtype)
        elements = (xs[0].with_array(element), element)
        arrays = [xs[0], *of_elements(params["update_jaxpr"], params["update_consts"], elements)]
    # If the metadata differs, no choice is correct for all elements of the result.
    if not isinstance(arrays[0], AnnotatedArray) or len(set(map(_metadata, arrays))) > 1:
        return NotImplemented
    return arrays[0].with_array(type(arrays[0]).bind(primitive, xs, params))


def of_elements(jaxpr: Any, consts: Sequence[Any], elements: Iterable[Any]) -> list[Any]:
    """Returns a primitive's results from its elementwise function; only their metadata is valid."""
    fn = jexc.jaxpr_as_fun(compat.closed(jaxpr, consts))
    out: list[Any] = []
    jax.eval_shape(lambda *xs: out.extend(quaxify(fn)(*xs)), *elements)
    return out


def _metadata(x: Any) -> Any:
    return jtu.tree_structure(x.with_array(0)) if isinstance(x, AnnotatedArray) else None
