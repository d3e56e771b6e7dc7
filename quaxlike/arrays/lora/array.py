"""`LoraArray`: a weight with a low-rank adapter."""

import math
import warnings
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core import compat
from ...core.jaxprs.slots import leading_axes, part_specs
from ...core.jaxprs.unify import dense_when_incompatible, widened, widened_part
from ...core.operators import ArrayOperators
from ...core.quaxify import quaxify
from ...core.values import ArrayValue, Value, is_value, materialise, replace_fields
from ...kernels.multilinear import spread_like
from ..batch_axes import with_batch_of
from ..dot_axes import Labels, arrange, cast, common_dtype, contract

# The label of the axis that `a` and `b` share; the axes of the array itself are labelled 0, 1, ...
RANK = -1


class LoraArray(ArrayOperators, ArrayValue):
    """The array `w + scaling * (b @ a)`: a frozen weight with a low-rank adapter.

    A product with it is computed as a product with `w` and two thin ones; neither the sum nor its gradient is
    ever formed. `w` may be any Value: over a 4-bit array this is QLoRA.

    Axes in front of those named below are batch axes. Each of `w`, `a` and `b` may have them or not:
    stacked layers have them everywhere, several adapters on one base only in `a` and `b`.

    **Arguments:**

    - `w`: the base, an array or a Value of shape `(..., out, in)`. Its dtype is that of the LoraArray.
    - `a`: shape `(..., rank, in)`.
    - `b`: shape `(..., out, rank)`.
    - `alpha`: `scaling = alpha / rank`. Default: the rank, so that `scaling` is 1.
    - `rslora`: `scaling = alpha / sqrt(rank)` instead. Default: False.
    - `dropout`: the share of the adapter's inputs that is dropped if there is a `key`. Default: 0.
    - `magnitude`: shape `(..., out)`; the rows of the sum are scaled to have these norms (DoRA). Their
        original norms are treated as constants in differentiation. Default: None.
    - `key`: a typed PRNG key that dropout draws from. Default: None, for inference without dropout.
    - `train_base`: whether `w` is trained: gradients flow to it. Default: False.
    - `open_base`: whether gradients flow through `w` although it is not trained, to traced arrays that were
        added to it or multiplied with it. Set by arithmetic. Default: False.
    - `out_axes`, `in_axes`: the axes of this array, counted from the end, that belong to `b` and to
        `a`; there may be several of each. The kernel of a convolution, `(out, in, height, width)`, has
        `out_axes=(-4,)` and `in_axes=(-3, -2, -1)`; a weight stored as `(in, out)`, or an embedding, has
        `out_axes=(-1,)` and `in_axes=(-2,)`. Default: `(-2,)` and `(-1,)`.

    **Raises:**

    `ValueError` if the shapes are inconsistent.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        lora = ql.LoraArray(w, a, b, alpha=8)  # w + 4 * (b @ a)
        ql.quaxify(jnp.matmul)(lora, jnp.arange(3.0))
        ```

    Hu et al., LoRA (2021); Kalajdzievski, rsLoRA (2023); Liu et al., DoRA (2024); conventions of PEFT.
    """

    w: Any
    a: Any
    b: Any
    magnitude: Any | None
    key: Any | None
    alpha: float = eqx.field(static=True)
    rslora: bool = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    train_base: bool = eqx.field(static=True)
    open_base: bool = eqx.field(static=True)
    out_axes: tuple[int, ...] = eqx.field(static=True)
    in_axes: tuple[int, ...] = eqx.field(static=True)
    # What the initialisation took out of `w` (`surgery.inits.taken_by`), for files without the base.
    taken: tuple[Any, ...] | None = eqx.field(static=True, default=None)

    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = "warn"

    @checked
    def __init__(
        self,
        w: ArrayLike | ArrayValue,
        a: ArrayLike | ArrayValue,
        b: ArrayLike | ArrayValue,
        *,
        alpha: float | int | None = None,
        rslora: bool = False,
        dropout: float | int = 0.0,
        magnitude: ArrayLike | ArrayValue | None = None,
        key: Any = None,
        train_base: bool = False,
        open_base: bool = False,
        out_axes: Sequence[int] = (-2,),
        in_axes: Sequence[int] = (-1,),
    ) -> None:
        for part, value in (("w", w), ("a", a), ("b", b)):
            if not hasattr(value, "shape"):
                raise TypeError(f"LoraArray takes an array as {part}; found {value!r}.")
        self.w, self.a, self.b = w, a, b
        self.magnitude, self.key = magnitude, key
        self.out_axes, self.in_axes = tuple(out_axes), tuple(in_axes)
        self.alpha = float(self.rank if alpha is None else alpha)
        self.rslora, self.dropout = rslora, float(dropout)
        self.train_base, self.open_base = train_base, open_base
        self.taken = None

    def __check_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoraArray takes 0 <= dropout < 1; found {self.dropout}.")
        problem = _misfit(self)
        if problem:
            raise ValueError(
                "LoraArray takes w of shape (..., out, in), a of shape (..., rank, in) and b of shape "
                f"(..., out, rank), here with out_axes={self.out_axes} and in_axes={self.in_axes}; found w "
                f"{self.w.shape}, a {self.a.shape}, b {self.b.shape}: {problem}."
            )

    @property
    def rank(self) -> int:
        return self.a.shape[-1 - len(self.in_axes)]

    @property
    def scaling(self) -> float:
        """The factor of `b @ a`."""
        if self.rank == 0:
            return 0.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def base(self) -> Any:
        """`w`, cut off from differentiation unless `train_base` or `open_base`."""
        return self.w if self.train_base or self.open_base else frozen(self.w)

    def replace(self, **fields: Any) -> "LoraArray":
        """This array with some fields replaced, without checking them against the others."""
        return replace_fields(self, **fields)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(_shape(self), self.w.dtype)

    def materialise(self) -> jax.Array:
        return dense(self, self.base)

    def merged(self) -> jax.Array:
        """The dense array, with gradients to both the base and the adapter."""
        return dense(self, self.w)

    def delta(self) -> jax.Array:
        """`scaling * (b @ a)` as a dense array, with its axes in the order of this array."""
        a, b = materialise((self.a, self.b))
        dtype = common_dtype(a, b)
        _, a_labels, b_labels = labels(self)
        out, out_labels = contract(cast(b, dtype), b_labels, cast(a, dtype), a_labels, range(self.ndim))
        return self.scaling * arrange(out, out_labels, range(self.ndim))

    @classmethod
    def promote(cls, array: Any, like: Value) -> Value | NotImplementedType:
        """Makes `array` a base that gradients reach, with an adapter that adds nothing. Declines for DoRA and
        dropout, which need more, and for another shape."""
        assert isinstance(like, LoraArray)
        if (
            not array.shape == like.shape == like.w.shape
            or like.magnitude is not None
            or like.key is not None
        ):
            return NotImplemented
        w = widened(array, like.w)
        if is_value(w) != is_value(like.w):
            return NotImplemented
        a, b = jtu.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (like.a, like.b))
        return like.replace(w=w, a=a, b=b, open_base=not like.train_base)

    def widen(self, like: Value) -> Value | jax.Array | NotImplementedType:
        """Converts to a rank, batch axes and a base that both can have; the base is trained if that of `like`
        is. Dense if the axes or the kinds of the adapters differ."""
        if not isinstance(like, LoraArray):
            return NotImplemented
        x = _swapped(self) if (self.out_axes, self.in_axes) == (like.in_axes, like.out_axes) else self
        if x._kind() != like._kind():
            return NotImplemented if x.dropout or like.dropout else dense_when_incompatible(x)
        if (x.rank, x.alpha, x.rslora) != (like.rank, like.alpha, like.rslora):
            x = padded_to(plainly_scaled(x), max(x.rank, like.rank)).replace(dropout=x.dropout)
        x = with_trainable_base(x, train=like.train_base) if like.train_base or like.open_base else x
        x = x if x.taken == like.taken else x.replace(taken=None)
        a, b = (
            with_batch_of(x.a, like.a, 1 + len(x.in_axes)),
            with_batch_of(x.b, like.b, 1 + len(x.out_axes)),
        )
        return x.replace(w=with_batch_of(widened_part(x.w, like.w), like.w, 0), a=a, b=b)

    def _kind(self) -> Any:
        """The properties of an adapter that cannot be changed."""
        return self.out_axes, self.in_axes, self.magnitude is None, self.key is None, self.dropout

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if 0 in matrix_labels(self):
            return NotImplemented  # a row of a matrix has no adapter
        return leading_axes((part, 0 in part_labels) for part, part_labels in _parts(self))

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        sharded = (*spec, *[None] * (self.ndim - len(spec)))
        own = lambda part_labels: jax.P(*[None if i == RANK else sharded[i] for i in part_labels])
        return part_specs((part, own(part_labels)) for part, part_labels in _parts(self))


def frozen(x: Any) -> Any:
    """`x`, an array or a Value, treated as a constant in differentiation."""
    return jtu.tree_map(jax.lax.stop_gradient, x)


# The same array with other static fields ----------------------------------------------------------


def with_trainable_base(x: LoraArray, *, train: bool = False) -> LoraArray:
    """The same array with gradients through its base, and with `train_base` if `train`; they still do not
    reach a base that was frozen."""
    train = train or x.train_base
    return x.replace(w=x.base, train_base=train, open_base=not train)


def alike_in_training(loras: Sequence[LoraArray]) -> list[LoraArray]:
    """The same arrays; if the base of any is trained or open, those of all are."""
    train = any(x.train_base for x in loras)
    reached = train or any(x.open_base for x in loras)
    return [with_trainable_base(x, train=train) for x in loras] if reached else [*loras]


def _swapped(x: LoraArray) -> LoraArray:
    """The same array with outputs and inputs, and so both factors, swapped; unchanged if a magnitude or
    dropout distinguishes them."""
    if x.magnitude is not None or x.key is not None or x.dropout:
        return x
    move = quaxify(jnp.moveaxis)
    a, b = move(x.b, -1, -1 - len(x.out_axes)), move(x.a, -1 - len(x.in_axes), -1)
    return x.replace(a=a, b=b, out_axes=x.in_axes, in_axes=x.out_axes)


def plainly_scaled(x: LoraArray) -> LoraArray:
    """The same array with `scaling` 1."""
    b = x.b if x.scaling == 1 else x.b * x.scaling
    return x.replace(b=b, alpha=float(x.rank), rslora=False, dropout=0.0)


def padded_to(x: LoraArray, rank: int, before: int = 0) -> LoraArray:
    """The same array with its adapter padded by zeros to this rank."""
    _, a_labels, b_labels = labels(x)

    def pad(part: Any, own: Labels) -> Any:
        return jnp.pad(part, [(before, rank - before - x.rank) if i == RANK else (0, 0) for i in own])

    return x.replace(a=pad(x.a, a_labels), b=pad(x.b, b_labels), alpha=float(rank))


# Axes ---------------------------------------------------------------------------------------------


def _ndim(lora: LoraArray) -> int:
    n_out, n_in = len(lora.out_axes), len(lora.in_axes)
    return max(lora.w.ndim, lora.a.ndim - 1 + n_out, lora.b.ndim - 1 + n_in)


def labels(lora: LoraArray) -> tuple[Labels, Labels, Labels]:
    """The labels of the axes of `w`, `a` and `b`: the axis of the whole array that each corresponds to."""
    n = _ndim(lora)
    out, into = [n + axis for axis in lora.out_axes], [n + axis for axis in lora.in_axes]
    batch = [i for i in range(n) if i not in out and i not in into]
    a_batch, b_batch = lora.a.ndim - 1 - len(into), lora.b.ndim - 1 - len(out)
    return (
        list(range(n - lora.w.ndim, n)),
        [*batch[len(batch) - a_batch :], RANK, *into],
        [*batch[len(batch) - b_batch :], *out, RANK],
    )


def matrix_labels(lora: LoraArray) -> set[int]:
    """The labels of the axes that are not batch axes."""
    return {_ndim(lora) + axis for axis in (*lora.out_axes, *lora.in_axes)}


def parts_of(lora: LoraArray) -> dict[str, Labels]:
    """The labels of the axes of each array that `lora` has but for a key, by the name of its field."""
    names = ("w", "a", "b") if lora.magnitude is None else ("w", "a", "b", "magnitude")
    w_labels, a_labels, b_labels = labels(lora)
    return dict(zip(names, (w_labels, a_labels, b_labels, b_labels[:-1]), strict=False))


def _parts(lora: LoraArray) -> list[tuple[Any, Labels]]:
    """The array fields and the labels of their axes, in the order of the leaves."""
    parts = [(getattr(lora, name), own) for name, own in parts_of(lora).items()]
    if lora.key is not None:
        batch = [i for i in range(_ndim(lora)) if i not in matrix_labels(lora)]
        parts.append((lora.key, batch[len(batch) - lora.key.ndim :]))
    return parts


def _shape(lora: LoraArray) -> tuple[int, ...]:
    sizes = {i: size for part, ls in _parts(lora)[:3] for i, size in zip(ls, part.shape, strict=True)}
    return tuple(sizes[i] for i in range(_ndim(lora)))


def _misfit(lora: LoraArray) -> str | None:
    for name, part in (("magnitude", lora.magnitude), ("key", lora.key)):
        if part is not None and not hasattr(part, "shape"):
            return f"{name} must be an array, not {part!r}"
    matrix = (*lora.out_axes, *lora.in_axes)
    if not all(type(axis) is int for axis in matrix):
        return "out_axes and in_axes must be whole numbers"
    if len(set(matrix)) < len(matrix) or any(axis >= 0 for axis in matrix):
        return "out_axes and in_axes must name different axes, counted from the end"
    if lora.a.ndim <= len(lora.in_axes) or lora.b.ndim <= len(lora.out_axes):
        return "there are too few axes"
    if any(axis < -lora.w.ndim for axis in matrix):
        return f"w has only {lora.w.ndim} axes"
    if lora.b.shape[-1] != lora.rank:
        return f"a is of rank {lora.rank}, b of rank {lora.b.shape[-1]}"
    shape = _shape(lora)
    for name, (part, part_labels) in zip(("w", "a", "b", "magnitude"), _parts(lora), strict=False):
        found = tuple(lora.rank if i == RANK else shape[i] for i in part_labels)
        if part.shape != found:
            return f"{name} would have to be of shape {found} to fit"
    return None


# The dense array, and the rows of a DoRA ----------------------------------------------------------


def dense(lora: LoraArray, base: Any) -> jax.Array:
    w, delta = materialise(base), lora.delta()
    dtype = common_dtype(w, delta)
    w_arranged = arrange(cast(w, dtype), labels(lora)[0], range(lora.ndim))
    same = w_arranged.shape == delta.shape
    total = w_arranged + cast(spread_like(delta, w_arranged) if same else delta, dtype)
    if lora.magnitude is not None:
        scale, scale_labels = row_scale(lora)
        total = cast(arrange(scale, scale_labels, range(lora.ndim)), dtype) * total
    return cast(total, w.dtype)


def row_scale(lora: LoraArray) -> tuple[Any, Labels]:
    """The factor of the rows in DoRA, `magnitude / norm`, and the labels of its axes."""
    norm, out = row_norm(lora)
    norm = frozen(norm)
    return cast(arrange(lora.magnitude, labels(lora)[2][:-1], out), norm.dtype) / norm, out


def row_norm(lora: LoraArray) -> tuple[Any, Labels]:
    """The norms of the rows of `w + s * b @ a`, and the labels of their axes.

    The sum is not formed: |w + s b a|² = |w|² + (2s w aᵀ + s² b a aᵀ)·b, row by row.
    """
    w_labels, a_labels, b_labels = labels(lora)
    rows, into = b_labels[:-1], {_ndim(lora) + axis for axis in lora.in_axes}
    w, a, b = materialise((lora.w, lora.a, lora.b))
    dtype = common_dtype(a, b, jax.ShapeDtypeStruct((), jnp.float32))
    w, a, b = cast(w, dtype), cast(a, dtype), cast(b, dtype)
    out = sorted({*rows, *w_labels, *a_labels} - into - {RANK})
    other = RANK - 1
    other_a = [other if i == RANK else i for i in a_labels]
    other_b = [other if i == RANK else i for i in b_labels]
    thin = [*out, other]
    wa = arrange(*contract(w, w_labels, a, other_a, thin), thin)
    aa = contract(a, a_labels, a, other_a, {*thin, RANK})
    baa = arrange(*contract(b, b_labels, *aa, thin), thin)
    s = lora.scaling
    cross = contract(2 * s * wa + s * s * baa, thin, b, other_b, out)
    squares = arrange(*contract(w, w_labels, w, w_labels, out), out) + arrange(*cross, out)
    return jnp.sqrt(jnp.maximum(squares, 0)), out


class DropoutWarning(UserWarning):
    """Adapters with dropout are trained without a key to draw from, so that nothing is dropped."""


def drops(lora: LoraArray) -> bool:
    """Whether dropout is on."""
    return lora.key is not None and lora.dropout > 0


def tell_of_dropout(lora: LoraArray) -> None:
    """Warns if an adapter with dropout, but without a key, is being differentiated: it is trained."""
    if lora.dropout > 0 and lora.key is None and any(map(compat.is_differentiated, (lora.a, lora.b))):
        warnings.warn(
            f"An adapter with dropout={lora.dropout} is trained without a key, so nothing is dropped. Call "
            "`quaxlike.with_dropout_key(model, key)` at each step, with a new key; or adapt the model with "
            "`dropout=0`.",
            DropoutWarning,
            stacklevel=2,
        )
