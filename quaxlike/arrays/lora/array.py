"""`LoraArray`: a weight with a low-rank adapter.

The whole point of LoRA is to save memory, so neither `b @ a` nor its gradient is ever formed (unless the
array is materialised). Every rule operates on `w`, `a` and `b` separately.
"""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core import compat
from ...core.jaxprs.unify import dense_when_incompatible, widened_part
from ...core.quaxify import quaxify
from ...core.values import ArrayValue, Value, is_value, materialise
from ...kernels.multilinear import spread_like
from ..adapted import (
    AdaptedArray,
    constant,
    frozen,
    gradients_through,
    is_one,
    labels_of,
    matrix_labels,
    number,
    reached_by,
    with_gradients,
    with_numbers_of,
)
from ..batch_axes import with_batch_of
from ..dot_axes import Labels, arrange, cast, common_dtype, contract, in_float32
from ..gradients import Gradients
from .matrices import factored

# The label of the axis shared by `a` and `b`. The axes of the whole array have labels 0, 1, ...
RANK = -1


class LoraArray(AdaptedArray):
    """The array `w + scaling * (b @ a)`: a frozen weight with a low-rank adapter.

    A product with this array is computed as a product with `w` plus two thin products with `a` and `b`:
    neither the sum nor its gradient is ever formed. `w` can be any Value, e.g. a 4-bit array (QLoRA).

    Additional leading axes are batch axes, in any of `w`, `a` and `b`. For example, all three have an axis
    for stacked layers, whereas only `a` and `b` have an axis for several adapters sharing one base.

    **Arguments:**

    - `w`: the base, an array or a Value with shape `(..., out, in)`. The LoraArray has its dtype.
    - `a`: shape `(..., rank, in)`.
    - `b`: shape `(..., out, rank)`.
    - `alpha`: a number, or an array with only batch axes: `scaling = alpha / rank`. Treated as a constant in
        differentiation. (It's a leaf, so changing it doesn't trigger recompilation.) Default: the rank, so
        that `scaling` is 1.
    - `rslora`: `scaling = alpha / sqrt(rank)` instead. Default: False.
    - `dropout`: the dropout rate for the adapter's inputs, if there is a `key`. Default: 0.
    - `magnitude`: shape `(..., out)`; the sum's rows are rescaled to these norms (DoRA). The original norms
        are treated as constants in differentiation. Default: None.
    - `key`: a typed PRNG key for dropout. Default: None, for inference without dropout.
    - `gradients`: `"none"` if `w` should be treated as a constant in differentiation; `"pass"` if gradients
        should be propagated through it, without training it (this is set by arithmetic with traced arrays);
        `"train"` if it should also be trained. Default: `"none"`.
    - `out_axes`, `in_axes`: the axes of this array belonging to `b` and `a` respectively, counted from the
        end. For example, a convolution's kernel `(out, in, height, width)` has `out_axes=(-4,)` and
        `in_axes=(-3, -2, -1)`; a weight stored as `(in, out)`, or an embedding, has `out_axes=(-1,)` and
        `in_axes=(-2,)`. Default: `(-2,)` and `(-1,)`.

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

    alpha: Any
    a: Any
    b: Any
    magnitude: Any | None
    key: Any | None
    rslora: bool = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    out_axes: tuple[int, ...] = eqx.field(static=True)
    in_axes: tuple[int, ...] = eqx.field(static=True)
    # What the initialisation moved out of `w` (`inits.taken_by`), for files that don't include the base.
    taken: tuple[Any, ...] | None = eqx.field(static=True, default=None)

    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = "warn"
    faster: ClassVar[Sequence[str]] = ("b",)
    any_axes: ClassVar[bool] = True
    cuttable: ClassVar[Sequence[str]] = ("out", "in")
    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank in", "b": "out rank", "magnitude": "out", "key": ""
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = ("alpha",)

    @checked
    def __init__(
        self,
        w: ArrayLike | ArrayValue,
        a: ArrayLike | ArrayValue,
        b: ArrayLike | ArrayValue,
        *,
        alpha: ArrayLike | None = None,
        rslora: bool = False,
        dropout: float | int = 0.0,
        magnitude: ArrayLike | ArrayValue | None = None,
        key: Any = None,
        gradients: Gradients = "none",
        out_axes: Sequence[int] = (-2,),
        in_axes: Sequence[int] = (-1,),
    ) -> None:
        for part, value in (("w", w), ("a", a), ("b", b)):
            if not hasattr(value, "shape"):
                raise TypeError(f"LoraArray takes an array as {part}; found {value!r}.")
        self.w, self.a, self.b = w, a, b
        self.magnitude, self.key = magnitude, key
        self.out_axes, self.in_axes = tuple(out_axes), tuple(in_axes)
        self.alpha = number(self.rank if alpha is None else alpha)
        self.rslora, self.dropout = rslora, float(dropout)
        self.gradients = gradients
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
    def scaling(self) -> Any:
        """The factor of `b @ a`, or an array with one factor per adapter."""
        return self.scaling_in(jnp.float32)

    def scaling_in(self, dtype: Any) -> Any:
        """`scaling` in this dtype.

        Multiplying an array with this dtype doesn't promote it.
        """
        # Avoid dividing by zero.
        if self.rank == 0:
            return np.zeros(self.alpha.shape, dtype)
        # Divide in at least float32, so that the result is only rounded once.
        wide = np.dtype(in_float32(dtype))
        divisor = np.full(self.alpha.shape, math.sqrt(self.rank) if self.rslora else self.rank, wide)
        # NumPy arrays are concrete, so the scaling is known during tracing, and can be skipped if it's 1.
        if isinstance(self.alpha, np.ndarray):
            return (self.alpha.astype(wide) / divisor).astype(dtype)
        return cast(jax.lax.div(cast(constant(self.alpha), wide), divisor), dtype)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(_shape(self), self.w.dtype)

    def materialise(self) -> jax.Array:
        return dense(self, self.base)

    def unmerged(self, weight: jax.Array) -> "LoraArray":
        dtype = in_float32(weight.dtype)
        total, delta = weight.astype(dtype), self.delta().astype(dtype)
        if self.magnitude is None:
            return self.with_base((total - delta).astype(weight.dtype))
        # DoRA rescales the rows of the sum. Undo this before subtracting the adapter.
        scale, axes = row_scale(self)
        scale = arrange(scale, axes, range(self.ndim)).astype(dtype)
        base = total / jnp.where(scale == 0, jnp.ones_like(scale), scale) - delta
        # A row multiplied by zero can't be recovered from `weight`.
        base = jnp.where(scale == 0, materialise(self.w).astype(dtype), base)
        return self.with_base(base.astype(weight.dtype))

    def adds_nothing(self) -> bool:
        """Returns whether this equals the base if all parts are zero: not for DoRA or with dropout."""
        return self.magnitude is None and self.key is None

    def times(self, factor: jax.Array) -> Any:
        """Multiplies by a scalar, or by one scalar per row or column, if some part can absorb it."""
        if self.magnitude is not None:
            if factor.ndim:
                return NotImplemented
            # Rows are rescaled to this magnitude, so there's no need to multiply the base or the adapter.
            return self.replace(magnitude=self.magnitude * cast(factor, self.magnitude.dtype))
        _, a_labels, b_labels = labels(self)
        # It's enough to multiply one of `a` and `b`, provided it has all axes along which the factor varies.
        varying = [i for i, size in enumerate(factor.shape) if size != 1]
        name, own = ("b", b_labels) if set(varying) <= set(b_labels) else ("a", a_labels)
        fits = set(varying) <= set(own) and all(factor.shape[i] == self.shape[i] for i in varying)
        if factor.ndim and not (fits and factor.ndim == self.ndim and has_all_axes(self)):
            return NotImplemented
        part = getattr(self, name)
        numbers = jax.lax.squeeze(factor, [i for i in range(factor.ndim) if i not in varying])
        part = part * cast(arrange(numbers, varying, own), part.dtype)
        w = quaxify(jnp.multiply)(self.base, factor)
        return reached_by(self, factor).replace(w=w, **{name: part})

    def alike(self, others: Sequence[Any]) -> Sequence[Any] | NotImplementedType:
        """Pads all adapters to the same rank, without changing their scalings."""
        forms = {
            (x.shape, x.out_axes, x.in_axes, x.dropout, x.magnitude is None, x.gradients == "train")
            for x in others
        }
        if len(forms) > 1 or not all(map(has_all_axes, others)):
            return NotImplemented
        if len({(x.rank, x.rslora) for x in others}) > 1:
            rank = max(x.rank for x in others)
            others = [padded_to(x, rank) for x in others]
        if len({x.alpha.shape for x in others}) > 1:
            others = [with_all_numbers(x) for x in others]
        return others

    def combined(self, others: Sequence[Any], weights: Sequence[Any], method: str, rank: int | None) -> Any:
        if self.magnitude is not None:
            raise ValueError("a sum of DoRAs is not a DoRA")
        _, a_labels, b_labels = labels(self)
        if method == "svd":
            deltas = [x.delta() for x in others]
            delta = _sum(d * jnp.asarray(w, d.dtype) for w, d in zip(weights, deltas, strict=True))
            return factored(self, delta, max(x.rank for x in others) if rank is None else rank)
        factors = [jnp.asarray(w * x.scaling) for w, x in zip(weights, others, strict=True)]
        if method == "linear":
            if len({x.rank for x in others}) > 1:
                raise ValueError("method='linear' needs adapters of the same rank; found several")
            # Divide each weight evenly between the two factors.
            halves = [(jnp.sqrt(abs(f)), jnp.sign(f) * jnp.sqrt(abs(f))) for f in factors]
            a = _sum(_times(x, x.a, a_labels, half) for (half, _), x in zip(halves, others, strict=True))
            b = _sum(_times(x, x.b, b_labels, half) for (_, half), x in zip(halves, others, strict=True))
        else:
            # Concatenating along the rank gives the exact sum, but its rank is the sum of all ranks.
            a = jnp.concatenate([x.a for x in others], axis=a_labels.index(RANK))
            weighted = [_times(x, x.b, b_labels, f) for f, x in zip(factors, others, strict=True)]
            b = jnp.concatenate(weighted, axis=b_labels.index(RANK))
        return self.replace(a=a, b=b, alpha=float(b.shape[-1]), rslora=False)

    def resized(self, axis: int, resize: Callable[..., Any]) -> "LoraArray":
        """Resizes an axis. The adapter's change to new entries is the mean of those to existing ones."""

        def part(x: Any, own: Any) -> Any:
            return resize(x, own.index(axis)) if axis in own else x

        w, a, b = labels(self)
        out = self.replace(w=part(self.w, w), a=part(self.a, a), b=part(self.b, b), taken=None)
        if self.magnitude is None:
            return out
        scale, own = row_scale(self)  # existing rows aren't rescaled
        out = out.replace(magnitude=None)
        magnitude = part(scale, own) * row_norm(out)[0]
        return out.replace(magnitude=arrange(magnitude, own, b[:-1]).astype(self.magnitude.dtype))

    def description(self) -> str:
        dropout = f", dropout {self.dropout:g}{' (no key: off)' if self.key is None else ''}"
        kind = f"{'dora, ' if self.magnitude is not None else ''}r={self.rank}"
        return f"{type(self).__name__}[{kind}{dropout if self.dropout else ''}]"

    def delta(self) -> jax.Array:
        """Materialises `scaling * (b @ a)`, with axes in this array's order."""
        a, b = materialise((self.a, self.b))
        dtype = common_dtype(a, b)
        _, a_labels, b_labels = labels(self)
        out = contract(cast(b, dtype), b_labels, cast(a, dtype), a_labels, range(self.ndim))
        return arrange(*scaled(self, *out), range(self.ndim))

    def widen(self, like: Value) -> Value | jax.Array | NotImplementedType:
        """Pads to a common rank and common batch axes, and widens the base (trained if either is).

        Materialises if the axes, or the kinds of adapter, differ.
        """
        if not isinstance(like, LoraArray):
            return NotImplemented
        x = _swapped(self) if (self.out_axes, self.in_axes) == (like.in_axes, like.out_axes) else self
        if x._kind() != like._kind():
            return NotImplemented if x.dropout or like.dropout else dense_when_incompatible(x)
        if (x.rank, x.rslora) != (like.rank, like.rslora):
            x = padded_to(x, max(x.rank, like.rank))
        x = with_gradients(x, gradients_through(like, x))
        # Both arrays must have the same `taken`, because it's static.
        x = x if x.taken == like.taken else x.replace(taken=None)
        a, b = (
            with_batch_of(widened_part(x.a, like.a), like.a, 1 + len(x.in_axes)),
            with_batch_of(widened_part(x.b, like.b), like.b, 1 + len(x.out_axes)),
        )
        alpha = with_batch_of(with_numbers_of(x, like).alpha, like.alpha, 0)
        return x.replace(w=with_batch_of(widened_part(x.w, like.w), like.w, 0), a=a, b=b, alpha=alpha)

    def _kind(self) -> Any:
        """Returns whatever must agree for arrays to be widened without materialising."""
        return self.out_axes, self.in_axes, self.magnitude is None, self.key is None, self.dropout


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, arrays)


def _times(x: LoraArray, part: Any, own: Labels, factor: jax.Array) -> Any:
    """Multiplies a part by a factor with the same axes as `alpha`."""
    return part * cast(arrange(factor, labels_of(x)["alpha"], own), part.dtype)


# Scaling ------------------------------------------------------------------------------------------


def scaled(lora: LoraArray, part: Any, own: Labels) -> tuple[Any, Labels]:
    """Multiplies a part of a product by the scaling, first adding any batch axes of only `alpha`."""
    scaling = lora.scaling_in(part.dtype)
    if is_one(scaling):
        return part, own
    of_alpha = labels_of(lora)["alpha"]
    more = [*(i for i in of_alpha if i not in own), *own]
    factor = arrange(jnp.asarray(scaling), of_alpha, more) if of_alpha else scaling

    def product(part: Any) -> Any:
        return arrange(part, own, more) * factor

    return (quaxify(product) if is_value(part) else product)(part), more


# The same array with other static fields ----------------------------------------------------------


def _swapped(x: LoraArray) -> LoraArray:
    """Swaps outputs and inputs, and hence also the two factors.

    With a magnitude or dropout, outputs and inputs aren't interchangeable, so `x` is returned unchanged.
    """
    if x.magnitude is not None or x.key is not None or x.dropout:
        return x
    move = quaxify(jnp.moveaxis)
    a, b = move(x.b, -1, -1 - len(x.out_axes)), move(x.a, -1 - len(x.in_axes), -1)
    return x.replace(a=a, b=b, out_axes=x.in_axes, in_axes=x.out_axes)


def plainly_scaled(x: LoraArray) -> LoraArray:
    """Returns an equal array with `scaling` 1."""
    b, _ = scaled(x, x.b, labels(x)[2])
    return x.replace(b=b, alpha=float(x.rank), rslora=False, dropout=0.0)


def padded_to(x: LoraArray, rank: int, before: int = 0) -> LoraArray:
    """Pads the adapter to this rank with zeros. Keeps the scaling, but doesn't use rsLoRA."""
    if x.rank == 0:
        alpha = number(rank, x.alpha.shape)
    else:
        alpha = x.alpha * rank / (math.sqrt(x.rank) if x.rslora else x.rank)
    _, a_labels, b_labels = labels(x)

    def pad(part: Any, own: Labels) -> Any:
        if rank == x.rank:
            return part  # share it with `x` rather than copying
        widths = [(before, rank - before - x.rank) if i == RANK else (0, 0) for i in own]
        return quaxify(lambda part: jnp.pad(part, widths))(part)

    return x.replace(a=pad(x.a, a_labels), b=pad(x.b, b_labels), alpha=alpha, rslora=False)


def with_all_numbers(x: LoraArray) -> LoraArray:
    """Broadcasts `alpha`, so that each matrix of a stack has its own."""
    batch = [size for i, size in enumerate(x.shape) if i not in matrix_labels(x)]
    return x.replace(alpha=jnp.broadcast_to(x.alpha, batch))


# Axes ---------------------------------------------------------------------------------------------


def labels(lora: LoraArray) -> tuple[Labels, Labels, Labels]:
    """Returns the labels of `w`, `a` and `b`, i.e. the corresponding axes of the whole array."""
    own = labels_of(lora)
    return own["w"], own["a"], own["b"]


def parts_of(lora: LoraArray) -> dict[str, Labels]:
    """Returns the labels of each array, by field name. Excludes the key and `alpha`."""
    return {name: own for name, own in labels_of(lora).items() if name not in ("key", "alpha")}


def has_all_axes(x: LoraArray) -> bool:
    """Returns whether each part has all batch axes."""
    batch = set(range(x.ndim)) - matrix_labels(x)
    return all(batch <= set(own) for own in labels(x))


def _shape(lora: LoraArray) -> tuple[int, ...]:
    ndims = lora.a.ndim - len(lora.in_axes), lora.b.ndim - len(lora.out_axes), lora.alpha.ndim
    if ndims == (1, 1, 0):
        return lora.w.shape  # a single adapter
    own = labels_of(lora)
    parts = [zip(own[name], getattr(lora, name).shape, strict=True) for name in ("alpha", "w", "a", "b")]
    sizes = {i: size for part in parts for i, size in part}
    return tuple(sizes[i] for i in sorted(sizes) if i >= 0)


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
    for name, own in labels_of(lora).items():
        if name == "key":
            continue
        found = tuple(lora.rank if i == RANK else shape[i] for i in own)
        if getattr(lora, name).shape != found:
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
    """Returns DoRA's factor for each row, `magnitude / norm`, and its labels.

    A row of zeros has no direction, and hence no norm to divide by. Its factor is 1. (With 0, neither the
    magnitude nor `b` receives gradients, so the row stays zero in training.)
    """
    norm, out = row_norm(lora)
    # As in the DoRA paper, treat the norm as a constant in differentiation. This saves memory.
    norm = frozen(norm)
    is_zero, one = norm == 0, jnp.ones_like(norm)
    # Avoid dividing by zero: `where` has NaN gradients if the branch not chosen does.
    magnitude = cast(arrange(lora.magnitude, labels(lora)[2][:-1], out), norm.dtype)
    return quaxify(jnp.where)(is_zero, one, magnitude / jnp.where(is_zero, one, norm)), out


def row_norm(lora: LoraArray) -> tuple[Any, Labels]:
    """Returns the row norms of `w + s * b @ a`, and their labels.

    The sum isn't formed, because |w + s b a|² = |w|² + (2s w aᵀ + s² b a aᵀ)·b for each row.
    """
    w_labels, a_labels, b_labels = labels(lora)
    rows, into = b_labels[:-1], {lora.ndim + axis for axis in lora.in_axes}
    w, a, b = materialise((lora.w, lora.a, lora.b))
    dtype = common_dtype(a, b, jax.ShapeDtypeStruct((), jnp.float32))
    w, a, b = cast(w, dtype), cast(a, dtype), cast(b, dtype)
    of_alpha = labels_of(lora)["alpha"]
    out = sorted({*rows, *w_labels, *a_labels, *of_alpha} - into - {RANK})
    # The quadratic term sums over the rank twice, so this needs a second label.
    other = RANK - 1
    other_a = [other if i == RANK else i for i in a_labels]
    other_b = [other if i == RANK else i for i in b_labels]
    thin = [*out, other]
    wa = arrange(*contract(w, w_labels, a, other_a, thin), thin)
    aa = contract(a, a_labels, a, other_a, {*thin, RANK})
    baa = arrange(*contract(b, b_labels, *aa, thin), thin)
    s = arrange(jnp.asarray(lora.scaling_in(dtype)), of_alpha, thin)
    cross = contract(2 * s * wa + s * s * baa, thin, b, other_b, out)
    squares = arrange(*contract(w, w_labels, w, w_labels, out), out) + arrange(*cross, out)
    # Rounding errors may make this slightly negative.
    return jnp.sqrt(jnp.maximum(squares, 0)), out


class DropoutWarning(UserWarning):
    """Issued if adapters with dropout are trained without a key, so that nothing is dropped."""


def drops(lora: LoraArray) -> bool:
    """Returns whether dropout is applied."""
    return lora.key is not None and lora.dropout > 0


def warn_of_dropout(lora: LoraArray) -> None:
    """Warns if an adapter with dropout but no key is being differentiated (so presumably trained)."""
    if lora.dropout > 0 and lora.key is None and any(map(compat.is_differentiated, (lora.a, lora.b))):
        warnings.warn(
            f"An adapter with dropout={lora.dropout} is trained without a key, so nothing is dropped. Call "
            "`quaxlike.with_dropout_key(model, key)` at each step, with a new key; or adapt the model with "
            "`dropout=0`.",
            DropoutWarning,
            stacklevel=2,
        )
