"""`AdaptedArray`: a frozen weight with trained parts, the base class for all adapters.

Invariant: the base receives gradients precisely as specified by `gradients`, whichever rules are applied to
the array. In particular, any rule computing with the base must use `self.base`. With `self.w`, gradients
would leak into a frozen weight. (And computing them, at full size, would waste memory.)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import NotImplementedType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..core import compat
from ..core.jaxprs.slots import leading_axes, part_specs
from ..core.jaxprs.unify import dense_when_incompatible, widened, widened_part
from ..core.values import Value, is_value, replace_fields
from .dot_axes import Labels
from .gradients import Gradients, GradientsArray, strongest, switch

_Self = TypeVar("_Self", bound="AdaptedArray")


class AdaptedArray(GradientsArray):
    """A frozen weight with trained parts: the base class for [`quaxlike.LoraArray`][] and your own adapters.

    To create your own adapter, subclass this, declare the trained parts as fields, and define `materialise`
    from these and `self.base`, which is `w` without gradients. You can then insert it into a model using
    [`quaxlike.adapt`][]. Everything else then works as for any adapter: [`quaxlike.trainable`][],
    [`quaxlike.merge`][], [`quaxlike.summary`][], quantising the base, fine-tuning, and generation. An adapter
    without any rules is materialised whenever it is used, so you will usually want to start by adding a rule
    for `dot_general`.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `gradients`: `"none"` if `w` should be treated as a constant in differentiation; `"pass"` if gradients
        should be propagated through it, without training it (e.g. because it was computed from differentiated
        arrays); `"train"` if it should also be trained. Default: `"none"`.

    A subclass may also set, as class attributes or static fields:

    - `part_axes`: names the last axes of each part, as in `{"a": "rank in", "b": "out rank"}`. Here `out` and
        `in` are the weight's axes; any other word is an axis of the part only. Axes in front of these are
        batch axes (several adapters on one weight, or stacked layers), and `materialise` has to accept them.
        This is required for [`quaxlike.stack_adapters`][], for sharding, and for loops over stacked layers.
        Default: not known.
    - `out_axes`, `in_axes`: the weight's output and input axes, counted from the end. Default: `(-2,)` and
        `(-1,)`.
    - `any_axes`: whether `out_axes` and `in_axes` are static fields with arbitrarily many axes. If so,
        transposes and reshapes update these, and also result in an adapter. Default: False.
    - `cuttable`: the axes (`"out"`, `"in"` or both) along which slicing the parts slices the array, because
        each entry depends only on the same entry in each part. Default: neither.
    - `numbers`: the fields with untrained numbers belonging to each adapter, like LoRA's `alpha`. Python
        numbers are converted to arrays, with one entry for each adapter or layer in a stack, so that changing
        them doesn't trigger recompilation. Apply `jax.lax.stop_gradient` whenever you compute with these.
        Default: none.
    - `faster`: the parts with their own learning rate in [`quaxlike.optim.lora_plus`][], because they begin
        at zero. Default: none.
    - `dropout`: the dropout rate for inputs, if the field `key` is a PRNG key.
    - `invocation`: the sequence of tokens after which the adapter is active, if it isn't always active.
        [`quaxlike.activate`][] then sets the field `active` to one flag per token. Default: None.
    - `taken`: not None if an initialisation moved a part of `w` into the adapter. A file without the base
        can't represent it then. Default: None.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        class Scaled(ql.AdaptedArray):
            scale: jax.Array
            part_axes = {"scale": "out"}

            def materialise(self):
                return ql.materialise(self.base) * self.scale[..., None]

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.adapt(mlp, lambda w, **_: Scaled(w, jnp.ones(w.shape[0])))
        print(ql.summary(model))
        ```
    """

    w: Any
    gradients: Gradients = eqx.field(static=True, default="none", kw_only=True)

    older_switches = "train_base", "open_base"
    train_base, open_base = map(switch, older_switches)

    part_axes: ClassVar[Mapping[str, str]] = {}
    numbers: ClassVar[Sequence[str]] = ()
    faster: ClassVar[Sequence[str]] = ()
    any_axes: ClassVar[bool] = False
    cuttable: ClassVar[Sequence[str]] = ()
    # Not annotated, so that a subclass can turn these into fields, in whichever order it likes.
    out_axes = (-2,)
    in_axes = (-1,)
    dropout = 0.0
    invocation = None
    taken = None

    def __check_init__(self) -> None:
        numbers_as_arrays(self)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        numbers_as_arrays(self)  # these were static until version 0.2

    @property
    def base(self) -> Any:
        """`w`, with `stop_gradient` applied unless `gradients` specifies otherwise.

        An adapter nested inside this one has its own `gradients`, as does a quantised weight with trained
        scales.
        """
        return self.w if self.gradients != "none" or _decides(self.w) else frozen(self.w)

    def trained(self) -> Sequence[str]:
        """Returns the field names to train.

        By default, these are all fields with floating-point arrays, except for `numbers`, and except for `w`
        unless `gradients` is "train". Several adapters on the same weight share any fields that are neither
        trained nor listed in `numbers`.
        """
        names = [name for name in array_fields(self) if name != "w" or self.gradients == "train"]
        names = [name for name in names if name not in self.numbers]
        return [name for name in names if any(map(_is_inexact, jtu.tree_leaves(getattr(self, name))))]

    def merged(self) -> Any:
        """Returns the array [`quaxlike.merge`][] replaces this by, differentiable in all parts.

        By default, this materialises.
        """
        return self.replace(gradients=strongest("pass", self.gradients)).materialise()

    def unmerged(self, weight: jax.Array) -> Any:
        """The inverse of `merged`, i.e. converts a dense `weight` to an adapter with a new base.

        Default: `NotImplemented`.
        """
        return NotImplemented

    def adds_nothing(self) -> bool:
        """Returns whether this is equal to the base if all parts are zero.

        If so, weights with and without an adapter can be combined, both in branches and in
        [`quaxlike.stack_adapters`][]. Default: False.
        """
        return False

    def times(self, factor: jax.Array) -> Any:
        """Multiplies by a finite factor (not an adapter) that broadcasts to this shape.

        Default: `NotImplemented`.
        """
        return NotImplemented

    def alike(self, others: Sequence[Any]) -> Sequence[Any] | NotImplementedType:
        """Converts several adapters on one weight to a common form, for stacking their parts.

        By default, this returns them unchanged if their static fields and part shapes agree.
        """

        def form(x: Any) -> Any:
            leaves, structure = jtu.tree_flatten(x.with_base(None))
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        return others if all(form(x) == form(self) for x in others) else NotImplemented

    def combined(self, others: Sequence[Any], weights: Sequence[Any], method: str, rank: int | None) -> Any:
        """Combines several adapters on one weight (including this one) by computing their weighted sum.

        The weights may be traced. The options are those of [`quaxlike.combine_adapters`][]. Default:
        `NotImplemented`.
        """
        return NotImplemented

    def resized(self, axis: int, resize: Callable[..., Any]) -> Any:
        """Resizes this array along an axis, e.g. for a different vocabulary.

        `resize(part, axis)` resizes the base or a part. New entries are the mean of the existing ones, or of
        the array passed as `like=`. Default: `NotImplemented`.
        """
        return NotImplemented

    def description(self) -> str:
        """Returns the description used in [`quaxlike.summary`][]. Default: the class name."""
        return type(self).__name__

    def replace(self: _Self, **fields: Any) -> _Self:
        """Replaces some fields, without checking their consistency with the others.

        If the old `w` controls its own gradients, but the new one doesn't, gradients are still propagated as
        before.
        """
        fields = self.with_switches(fields, self.gradients)
        if self.numbers:
            fields = _with_numbers(self, fields)
        if _decides(self.w) and not _decides(fields.get("w", self.w)):
            # Otherwise a rule replacing the base (e.g. by a slice of it) would silently freeze it.
            fields = {"gradients": strongest("pass", self.gradients), **fields}
        return replace_fields(self, **fields)

    def with_base(self: _Self, w: Any) -> _Self:
        """Replaces the base, keeping the adapter."""
        return replace_fields(self, w=w)

    @classmethod
    def promote(cls, array: Any, like: Any) -> Value | NotImplementedType:
        """Converts `array` to a base with gradients, adding zero parts, if these don't change the result."""
        if not like.adds_nothing() or not array.shape == like.shape == like.w.shape:
            return NotImplemented
        w = widened(array, like.w)
        # The array couldn't be lifted to the base's type, so the two branches would still differ.
        if is_value(w) != is_value(like.w):
            return NotImplemented
        out = jtu.tree_map(lambda part: jnp.zeros(part.shape, part.dtype), like.with_base(None))
        out = replace_fields(
            out, **{name: np.ones(x.shape, x.dtype) for name in like.numbers for x in [getattr(like, name)]}
        )
        return out.with_base(w).replace(gradients=strongest("pass", like.gradients))

    def widen(self, like: Value) -> Any:
        """Propagates gradients to the base if `like` does so. Materialises if the axes differ."""
        if type(like) is not type(self):
            return NotImplemented
        # The parts correspond to different axes of the weight, so they aren't interchangeable.
        if (self.out_axes, self.in_axes) != (like.out_axes, like.in_axes):
            return dense_when_incompatible(self)
        reach = gradients_through(like, self)
        if reach == "none":
            return NotImplemented
        x = with_numbers_of(with_gradients(self, reach), like)
        return x.replace(w=widened_part(x.w, like.w))

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if not knows_axes(self) or 0 in matrix_labels(self):
            return NotImplemented  # there's no such thing as an adapter for a single row
        return leading_axes((getattr(self, name), 0 in own) for name, own in labels_of(self).items())

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        if not knows_axes(self):
            return NotImplemented
        sharded = (*spec, *[None] * (self.ndim - len(spec)))

        def own(labels: Any) -> Any:
            return jax.P(*[None if i < 0 else sharded[i] for i in labels])

        return part_specs((getattr(self, name), own(labels)) for name, labels in labels_of(self).items())


# Numbers ------------------------------------------------------------------------------------------


def number(x: Any, shape: Sequence[int] = ()) -> Any:
    """Converts to float32. Python numbers become NumPy arrays, whose values are known even when tracing.

    The result isn't weakly typed, since compiled functions distinguish this.
    """
    if isinstance(x, (int, float, np.number)):
        return np.full(shape, x, np.float32)
    if not hasattr(x, "dtype"):
        raise TypeError(f"An adapter's alpha or scaling must be a number or an array; found {x!r}.")
    return x if x.dtype == np.float32 and not getattr(x, "weak_type", False) else x.astype(np.float32)


def with_numbers_of(x: _Self, like: AdaptedArray) -> _Self:
    """Promotes the `numbers` of `x` to the dtypes in `like`.

    They only differ if all leaves of one side have been cast, e.g. to bfloat16.
    """

    promoted: dict[str, Any] = {}
    for name in x.numbers:
        number, other = getattr(x, name), getattr(like, name)
        if number is not None and other is not None and number.dtype != other.dtype:
            promoted[name] = number.astype(jnp.promote_types(number.dtype, other.dtype))
    return replace_fields(x, **promoted) if promoted else x


def numbers_as_arrays(x: AdaptedArray) -> None:
    """Converts the `numbers` of an array to arrays, during its construction.

    Any number that isn't already a JAX array is broadcast to the batch axes shared by the base and all
    trained parts, so that `jax.vmap` and `jax.lax.scan` can map over every part.
    """
    for name in x.numbers:
        if (value := getattr(x, name)) is not None:
            object.__setattr__(x, name, number(value))
    for name in x.numbers:
        value = getattr(x, name)
        if type(value) is np.ndarray and value.ndim == 0:
            if shape := _trained_batch(x):
                object.__setattr__(x, name, np.full(shape, value))
            else:
                object.__setattr__(x, name, _unless_tracing(value))


def _unless_tracing(value: np.ndarray) -> Any:
    """Moves a number to the device, except during tracing, when its value would become unknown."""
    return _on_device(value) if compat.is_eval_trace(compat.current_trace()) else value


# Passing a device array to a compiled function is faster than passing a NumPy array. This is the fastest way
# of converting it, and each result gets its own buffer, so it can be donated.
_on_device = jax.jit(lambda x: x)


def _trained_batch(x: AdaptedArray) -> tuple[int, ...]:
    """Returns the sizes of the batch axes common to the base and all trained parts."""
    if not knows_axes(x) or _labels(*_labels_key(x))[0] == len(x.out_axes) + len(x.in_axes):
        return ()
    labels, matrix = labels_of(x), matrix_labels(x)
    trained = ["w", *(name for name in x.trained() if name in labels and name != "w")]
    shared = [{i for i in labels[name] if i >= 0} - matrix for name in trained]
    sizes = {i: n for name in trained for i, n in zip(labels[name], getattr(x, name).shape, strict=True)}
    return tuple(sizes[i] for i in sorted(set.intersection(*shared)))


def without_numbers(x: Any) -> Any:
    """Replaces the `numbers` of an array's adapters by None."""
    if not isinstance(x, AdaptedArray):
        return x
    x = x.with_base(without_numbers(x.w))
    return replace_fields(x, **dict.fromkeys(x.numbers)) if x.numbers else x


def _with_numbers(x: AdaptedArray, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields to replace, with numbers converted to arrays.

    If the parts are replaced by something other than arrays (e.g. an axis for `jax.vmap`, or a sharding), the
    numbers are replaced by None.
    """
    if any(name in x.part_axes and part is not None and not hasattr(part, "shape")
           for name, part in fields.items()):  # fmt: skip
        return {**dict.fromkeys(x.numbers), **fields}
    for name in x.numbers:
        if type(fields.get(name)) in (int, float) or isinstance(fields.get(name), np.number):
            fields = {**fields, name: _unless_tracing(number(fields[name], np.shape(getattr(x, name))))}
    return fields


def constant(x: Any) -> Any:
    """Returns a number, with `stop_gradient` applied."""
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


def is_one(x: Any) -> bool:
    """Returns whether a factor is known to be 1."""
    return not isinstance(x, jax.Array) and np.ndim(x) == 0 and bool(x == 1)


# The base -----------------------------------------------------------------------------------------


def innermost(x: Any) -> Any:
    """Returns the array inside all adapters."""
    while isinstance(x, AdaptedArray):
        x = x.w
    return x


def on_innermost(change: Callable[[Any], Any], x: Any) -> Any:
    """Applies `change` to the array inside all adapters."""
    return x.with_base(on_innermost(change, x.w)) if isinstance(x, AdaptedArray) else change(x)


def _decides(w: Any) -> bool:
    """Returns whether a base controls its own gradients. If so, it isn't frozen."""
    return isinstance(w, AdaptedArray) or getattr(w, "gradients", None) == "train"


def frozen(x: Any) -> Any:
    """Treats an array or a Value as a constant in differentiation."""
    return jtu.tree_map(jax.lax.stop_gradient, x)


def with_gradients(x: _Self, gradients: Gradients) -> _Self:
    """Sets at least these `gradients`. A base already frozen stays frozen."""
    gradients = strongest(x.gradients, gradients)
    return x if gradients == x.gradients else x.replace(w=x.base, gradients=gradients)


def reached_by(x: _Self, operand: Any) -> _Self:
    """Propagates gradients through the base if `operand` (to be combined with it) is traced."""
    return with_gradients(x, "pass") if isinstance(operand, jax.core.Tracer) else x


def gradients_through(like: AdaptedArray, *others: AdaptedArray) -> Gradients:
    """Returns the `gradients` for the base of `like`.

    This includes any gradients controlled by the base itself, unless all the others also control theirs.
    """
    alone = _decides(like.w) and not all(_decides(x.w) for x in others)
    return strongest("pass", like.gradients) if alone else like.gradients


def alike_in_training(adapted: Sequence[_Self]) -> list[_Self]:
    """Sets the `gradients` of all arrays to the strongest amongst them."""
    marks: list[Gradients] = [gradients_through(x, *adapted) for x in adapted]
    return [with_gradients(x, strongest(*marks)) for x in adapted]


# Axes ---------------------------------------------------------------------------------------------


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)


def array_fields(x: AdaptedArray) -> list[str]:
    """Returns the names of all non-static fields."""
    cls: Any = type(x)
    return _array_fields(cls)


def frozen_parts(x: AdaptedArray) -> list[str]:
    """Returns the names of the untrained parts, which several adapters can share."""
    own = ("w", "key", *x.trained(), *x.numbers)
    return [name for name in array_fields(x) if name not in own]


@functools.cache
def _array_fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]


@functools.cache
def _words(cls: Any) -> dict[str, list[Any]]:
    """Returns `part_axes` as labels (negative for axes that don't occur in the weight)."""
    own: dict[str, int] = {}

    def label(word: Any) -> Any:
        return word if word in ("out", "in") else own.setdefault(word, -1 - len(own))

    axes = dict.fromkeys(cls.numbers, "") | {**cls.part_axes}
    axes = {name: axes[name] for name in _array_fields(cls) if name in axes}
    return {name: [label(word) for word in words.split()] for name, words in axes.items()}


def knows_axes(x: AdaptedArray) -> bool:
    """Returns whether the axes of all parts are known."""
    known = ("w", *x.numbers, *x.part_axes)
    return all(name in known or getattr(x, name) is None for name in array_fields(x))


def labels_of(x: AdaptedArray) -> Mapping[str, Labels]:
    """Returns the axis labels of `w` and each existing part.

    A label is the corresponding axis of the whole array. It's negative if there is none.
    """
    return _labels(*_labels_key(x))[1]


def matrix_labels(x: AdaptedArray) -> set[int]:
    """Returns the labels of all axes except batch axes."""
    n, _ = _labels(*_labels_key(x))
    return {n + axis for axis in (*x.out_axes, *x.in_axes)}


def _labels_key(x: AdaptedArray) -> Any:
    cls: Any = type(x)
    parts = [getattr(x, name) for name in _words(cls)]
    ndims = tuple(None if part is None else part.ndim for part in parts)
    return cls, x.w.ndim, ndims, x.out_axes, x.in_axes


@functools.lru_cache(maxsize=4096)
def _labels(
    cls: type,
    w_ndim: int,
    ndims: tuple[int | None, ...],
    out_axes: tuple[int, ...],
    in_axes: tuple[int, ...],
) -> tuple[int, dict[str, Labels]]:
    """Returns the whole array's axis count, and the labels."""
    size = {"out": len(out_axes), "in": len(in_axes)}
    parts: dict[str, Any] = {}  # the words, and the number of batch axes, of each part
    for (name, words), ndim in zip(_words(cls).items(), ndims, strict=True):
        if ndim is not None:
            parts[name] = words, ndim - sum(size.get(word, 1) for word in words)
    # If several adapters share the base, a part has more batch axes than the base.
    n = max([w_ndim, *(size["out"] + size["in"] + batch for _, batch in parts.values())])
    axes = {"out": [n + axis for axis in out_axes], "in": [n + axis for axis in in_axes]}
    batch = [i for i in range(n) if i not in axes["out"] and i not in axes["in"]]
    labels: dict[str, Labels] = {"w": list(range(n - w_ndim, n))}
    for name, (words, count) in parts.items():
        own = [label for word in words for label in axes.get(word, [word])]
        labels[name] = [*batch[len(batch) - count :], *own]
    return n, labels
