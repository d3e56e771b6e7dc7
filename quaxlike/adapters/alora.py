"""`ALoRAArray`: a LoRA that only acts from its invocation tokens onwards."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax.extend.core import Primitive

from ..arrays import precedence
from ..arrays.dot_axes import arrange, dot_axes
from ..arrays.lora.array import LoraArray
from ..arrays.lora.dot import add, multiply
from ..arrays.zero import Zero
from ..core.quaxify import quaxify
from ..core.rules import register_on_either_side
from .combinators import AxesArray

# The fields shared with `LoraArray`.
_OPTIONS = ("key", "alpha", "rslora", "dropout", "out_axes", "in_axes", "gradients")


class ALoRAArray(AxesArray):
    """Activated LoRA: a weight with a low-rank adapter that only acts from its invocation tokens onwards.

    This is useful for applying many adapters to the same text: all earlier tokens are only multiplied by the
    base, so their cached keys and values are the same as without adapters, and can be reused.

    The weight is different for each token, so it can't be materialised or merged. You can only multiply it by
    its layer's inputs, with one row per token. To tell it which tokens to act on, first call
    [`quaxlike.activate`][].

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`, `b`, `alpha`, `rslora`, `dropout`, `key`: as in [`quaxlike.LoraArray`][].
    - `invocation`: the tokens that invoke the adapter: it acts from their last (contiguous) occurrence in the
        text onwards, inclusive.
    - `active`: for each token, whether the adapter acts on it. Default: None, i.e. not known yet.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.adapters import ALoRAArray

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        alora = ALoRAArray(w, a, b, invocation=(7, 8))
        alora = ql.activate(alora, jnp.array([5, 7, 8, 9]))
        # only `w` acts on the first row
        ql.quaxify(lambda w, x: x @ w.T)(alora, jnp.ones((4, 3)))
        ```

    Greenewald et al., Activated LoRA: Fine-tuned LLMs for Intrinsics (2025). Conventions follow PEFT.
    """

    a: Any
    b: Any
    key: Any = None
    active: Any = None
    invocation: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    alpha: Any = eqx.field(default=None, kw_only=True)
    rslora: bool = eqx.field(static=True, default=False, kw_only=True)
    dropout: float = eqx.field(static=True, default=0.0, kw_only=True)

    any_axes: ClassVar[bool] = True
    faster: ClassVar[Sequence[str]] = LoraArray.faster
    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank in", "b": "out rank", "key": "", "active": "tokens"
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = LoraArray.numbers

    def __check_init__(self) -> None:
        if not self.invocation:
            raise ValueError("ALoRAArray takes one or more tokens as `invocation`; found none.")
        object.__setattr__(self, "alpha", self.lora().alpha)  # this also validates shapes

    @classmethod
    def of(cls, lora: LoraArray, invocation: Sequence[int]) -> "ALoRAArray":
        """Converts a LoRA to one that only acts from the invocation tokens onwards."""
        options = {name: getattr(lora, name) for name in _OPTIONS}
        return cls(lora.w, lora.a, lora.b, invocation=tuple(map(int, invocation)), **options)

    def lora(self) -> LoraArray:
        """Returns the weight for the adapter's active tokens."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return LoraArray(self.w, self.a, self.b, **options)

    def materialise(self) -> jax.Array:
        raise ValueError(
            f"An activated LoRA of shape {self.shape} has no dense array: it is another weight for tokens "
            f"from {list(self.invocation)} on than for those before. It can be multiplied with one row for "
            "each token; `lora()` is the weight for those that it acts on."
        )

    def adds_nothing(self) -> bool:
        return self.lora().adds_nothing()

    def description(self) -> str:
        return f"ALoRAArray[r={self.lora().rank}, from {' '.join(map(str, self.invocation))} on]"


@register_on_either_side("dot_general", ALoRAArray, precedence=precedence.ACTIVATED)
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any):
    """Multiplies every token by the base, then adds the low-rank change for active tokens."""
    on_left = isinstance(x, ALoRAArray)
    w, x = (x, y) if on_left else (y, x)
    _, of_x = dot_axes(w, x, params["dimension_numbers"], on_left=on_left)
    rows = _rows(w, [x.shape[axis] for axis in of_x.free])

    def product(w: Any, x: Any) -> Any:
        return primitive.bind(*((w, x) if on_left else (x, w)), **params)

    change = w.lora().with_base(Zero(w.w.shape, w.w.dtype))
    chosen = quaxify(multiply)(x, arrange(rows, of_x.free, range(x.ndim)))
    return quaxify(add)(quaxify(product)(w.base, x), quaxify(product)(change, chosen))


def _rows(w: ALoRAArray, found: list[int]) -> Any:
    """Returns a mask over the rows multiplied by `w`.

    This also checks that their shape `found` has one row for each token.
    """
    if w.active is None:
        raise ValueError(
            f"An activated LoRA acts on the tokens from {list(w.invocation)} on, and it is not known where "
            "they are. Call `quaxlike.activate(model, ids)` for each text, outside of `quaxlike.quaxify`."
        )
    if found != [*w.active.shape]:
        raise ValueError(
            f"An activated LoRA that knows {w.active.shape[-1]} tokens is multiplied with one row for each "
            f"of them; found rows of shape {tuple(found)}. Run one text at a time, or `jax.vmap` outside of "
            "`quaxlike.quaxify`; leave out an output layer that sees fewer tokens."
        )
    return w.active.astype(w.a.dtype)
