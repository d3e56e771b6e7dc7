"""`AdaptedArray`: a weight with parts beside it, which are trained in its place."""

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

from ..core.jaxprs.slots import leading_axes, part_specs
from ..core.jaxprs.unify import dense_when_incompatible, widened, widened_part
from ..core.values import Value, is_value, replace_fields
from .dot_axes import Labels
from .gradients import Gradients, GradientsArray, strongest, switch

_Self = TypeVar("_Self", bound="AdaptedArray")


class AdaptedArray(GradientsArray):
    """A weight with parts beside it that are trained in its place: the base class of adapters, such as
    [`quaxlike.LoraArray`][] and your own.

    Subclass it, declare the parts as fields, and write `materialise` from them and `self.base`, which is `w`
    without gradients. Put it on a model with [`quaxlike.adapt`][]. Everything that works with adapters then
    works with yours: [`quaxlike.trainable`][], [`quaxlike.merge`][], [`quaxlike.summary`][], quantisation of
    the weight beneath, fine-tuning, generation. Without rules of its own, it is materialised wherever it is
    used; write one for `dot_general` first.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `gradients`: `"none"` if `w` is a constant for derivatives; `"pass"` if derivatives with respect to it
        exist but it is not trained, because arrays that have gradients were put in it; `"train"` if it is
        trained, too. Default: `"none"`.

    A subclass may also set, as class attributes or static fields:

    - `part_axes`: for each part, the axes that it ends with, such as `{"a": "rank in", "b": "out rank"}`.
        `out` and `in` are those of the weight, any other word is an axis of the part alone. Axes in front of
        them are batch axes: several adapters on one weight, or stacked layers; `materialise` has to accept
        them. [`quaxlike.stack_adapters`][], shardings and loops over stacked layers need it. Default: not
        known.
    - `out_axes`, `in_axes`: the axes of the weight that are outputs and inputs, counted from the end.
        Default: `(-2,)` and `(-1,)`.
    - `any_axes`: whether `out_axes` and `in_axes` are static fields that may name any axes, several of each.
        Transposes and reshapes then change them, and the result is an adapter too. Default: False.
    - `cuttable`: whether the array can be cut along the axes `"out"`, `"in"` or both by cutting its parts: an
        entry of the array depends on the same entry of each part alone. Default: neither.
    - `faster`: the parts that learn at a rate of their own under [`quaxlike.optim.lora_plus`][], since they
        begin at zero. Default: none.
    - `dropout`: the share of inputs that is dropped where the field `key` is a PRNG key.
    - `invocation`: the tokens of a text from which on the adapter acts, if it does not on all; the field
        `active` then gets a flag for each token from [`quaxlike.activate`][]. Default: None.
    - `taken`: anything but None if an initialisation took a part of `w` into the adapter, so that files
        without the base cannot hold it. Default: None.

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
    faster: ClassVar[Sequence[str]] = ()
    any_axes: ClassVar[bool] = False
    cuttable: ClassVar[Sequence[str]] = ()
    # Without annotations, so that a subclass that makes them fields decides about their order.
    out_axes = (-2,)
    in_axes = (-1,)
    dropout = 0.0
    invocation = None
    taken = None

    @property
    def base(self) -> Any:
        """`w`, cut off from differentiation unless `gradients` says otherwise. An adapter beneath this one
        decides for itself, and so does a quantised weight whose scales are trained."""
        return self.w if self.gradients != "none" or _decides(self.w) else frozen(self.w)

    def trained(self) -> Sequence[str]:
        """The names of the fields that are trained. Default: all with floating-point arrays, but `w` only if
        `gradients` is "train". Several adapters on one weight share the others."""
        names = [name for name in array_fields(self) if name != "w" or self.gradients == "train"]
        return [name for name in names if any(map(_is_inexact, jtu.tree_leaves(getattr(self, name))))]

    def merged(self) -> Any:
        """The array that `merge` puts in its place, differentiable in all parts. Default: materialised."""
        return self.replace(gradients=strongest("pass", self.gradients)).materialise()

    def unmerged(self, weight: jax.Array) -> Any:
        """The adapter whose `merged` is a dense `weight`: its base is the weight without what this adds.
        Default: `NotImplemented`."""
        return NotImplemented

    def adds_nothing(self) -> bool:
        """Whether the base is left as it is if all parts are zero. Weights without an adapter can then meet
        those that have one: in branches, and in [`quaxlike.stack_adapters`][]. Default: False."""
        return False

    def times(self, factor: jax.Array) -> Any:
        """This array times a finite factor that is no adapter, whose shape broadcasts with its own. Default:
        `NotImplemented`."""
        return NotImplemented

    def alike(self, others: Sequence[Any]) -> Sequence[Any] | NotImplementedType:
        """Several adapters of one weight in a common form, so that their parts can be stacked. Default: as
        they are, if their static fields and the shapes of their parts are equal."""

        def form(x: Any) -> Any:
            leaves, structure = jtu.tree_flatten(x.with_base(None))
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        return others if all(form(x) == form(self) for x in others) else NotImplemented

    def combined(self, others: Sequence[Any], weights: Sequence[float], method: str, rank: int | None) -> Any:
        """The sum of several adapters of one weight, this one among them, each times its weight, as one; the
        options are those of [`quaxlike.combine_adapters`][]. Default: `NotImplemented`."""
        return NotImplemented

    def resized(self, axis: int, resize: Callable[..., Any]) -> Any:
        """This array with more or fewer entries along an axis, as for another vocabulary. `resize(part,
        axis)` does so for the base or a part. New entries are the mean of the others, or, with `like=`, that
        of another array. Default: `NotImplemented`."""
        return NotImplemented

    def description(self) -> str:
        """How [`quaxlike.summary`][] calls it. Default: by the name of its class."""
        return type(self).__name__

    def replace(self: _Self, **fields: Any) -> _Self:
        """This array with some fields computed from its own, without checking them against the others. If `w`
        decided for itself about its gradients and the new one does not, they flow through it as before."""
        fields = self.with_switches(fields, self.gradients)
        if _decides(self.w) and not _decides(fields.get("w", self.w)):
            fields = {"gradients": strongest("pass", self.gradients), **fields}
        return replace_fields(self, **fields)

    def with_base(self: _Self, w: Any) -> _Self:
        """This adapter on another base."""
        return replace_fields(self, w=w)

    @classmethod
    def promote(cls, array: Any, like: Any) -> Value | NotImplementedType:
        """Makes `array` a base that gradients reach, with parts that add nothing, if zeros do."""
        if not like.adds_nothing() or not array.shape == like.shape == like.w.shape:
            return NotImplemented
        w = widened(array, like.w)
        if is_value(w) != is_value(like.w):
            return NotImplemented
        out = jtu.tree_map(lambda part: jnp.zeros(part.shape, part.dtype), like.with_base(None))
        return out.with_base(w).replace(gradients=strongest("pass", like.gradients))

    def widen(self, like: Value) -> Any:
        """Lets gradients through the base if they pass that of `like`; dense if its axes are others."""
        if type(like) is not type(self):
            return NotImplemented
        if (self.out_axes, self.in_axes) != (like.out_axes, like.in_axes):
            return dense_when_incompatible(self)
        reach = gradients_through(like, self)
        if reach == "none":
            return NotImplemented
        x = with_gradients(self, reach)
        return x.replace(w=widened_part(x.w, like.w))

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if not knows_axes(self) or 0 in matrix_labels(self):
            return NotImplemented  # a row of a matrix has no adapter
        return leading_axes((getattr(self, name), 0 in own) for name, own in labels_of(self).items())

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        if not knows_axes(self):
            return NotImplemented
        sharded = (*spec, *[None] * (self.ndim - len(spec)))

        def own(labels: Any) -> Any:
            return jax.P(*[None if i < 0 else sharded[i] for i in labels])

        return part_specs((getattr(self, name), own(labels)) for name, labels in labels_of(self).items())


# The base -----------------------------------------------------------------------------------------


def innermost(x: Any) -> Any:
    """What is beneath all adapters."""
    while isinstance(x, AdaptedArray):
        x = x.w
    return x


def on_innermost(change: Callable[[Any], Any], x: Any) -> Any:
    """`x` with `change(w)` as what is beneath all adapters."""
    return x.with_base(on_innermost(change, x.w)) if isinstance(x, AdaptedArray) else change(x)


def _decides(w: Any) -> bool:
    """Whether a base decides for itself about its gradients."""
    return isinstance(w, AdaptedArray) or getattr(w, "gradients", None) == "train"


def frozen(x: Any) -> Any:
    """`x`, an array or a Value, treated as a constant in differentiation."""
    return jtu.tree_map(jax.lax.stop_gradient, x)


def with_gradients(x: _Self, gradients: Gradients) -> _Self:
    """The same array with at least these `gradients`; they still do not reach a base that was frozen."""
    gradients = strongest(x.gradients, gradients)
    return x if gradients == x.gradients else x.replace(w=x.base, gradients=gradients)


def reached_by(x: _Self, operand: Any) -> _Self:
    """The same array; gradients pass its base if they may have to reach an operand that changes it."""
    return with_gradients(x, "pass") if isinstance(operand, jax.core.Tracer) else x


def gradients_through(like: AdaptedArray, *others: AdaptedArray) -> Gradients:
    """The gradients of the base of `like`: also those that it decides for itself about, unless the bases of
    the others do as well."""
    alone = _decides(like.w) and not all(_decides(x.w) for x in others)
    return strongest("pass", like.gradients) if alone else like.gradients


def alike_in_training(adapted: Sequence[_Self]) -> list[_Self]:
    """The same arrays with the gradients of that which has most."""
    marks: list[Gradients] = [gradients_through(x, *adapted) for x in adapted]
    return [with_gradients(x, strongest(*marks)) for x in adapted]


# Axes ---------------------------------------------------------------------------------------------


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)


def array_fields(x: AdaptedArray) -> list[str]:
    """The names of the fields that are not static."""
    cls: Any = type(x)
    return _array_fields(cls)


def frozen_parts(x: AdaptedArray) -> list[str]:
    """The names of the parts that are not trained: several adapters may share them."""
    own = ("w", "key", *x.trained())
    return [name for name in array_fields(x) if name not in own]


@functools.cache
def _array_fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]


@functools.cache
def _words(cls: Any) -> dict[str, list[Any]]:
    """`part_axes` with a negative label, -1, -2, ..., for each axis that is not the weight's."""
    own: dict[str, int] = {}

    def label(word: Any) -> Any:
        return word if word in ("out", "in") else own.setdefault(word, -1 - len(own))

    axes = {name: cls.part_axes[name] for name in _array_fields(cls) if name in cls.part_axes}
    return {name: [label(word) for word in words.split()] for name, words in axes.items()}


def knows_axes(x: AdaptedArray) -> bool:
    """Whether the axes of all its parts are known."""
    return all(name in ("w", *x.part_axes) or getattr(x, name) is None for name in array_fields(x))


def labels_of(x: AdaptedArray) -> Mapping[str, Labels]:
    """The labels of the axes of `w` and of each part that there is: the axis of the whole array that each
    corresponds to, or a negative one."""
    return _labels(*_form(x))[1]


def matrix_labels(x: AdaptedArray) -> set[int]:
    """The labels of the axes that are not batch axes."""
    n, _ = _labels(*_form(x))
    return {n + axis for axis in (*x.out_axes, *x.in_axes)}


def _form(x: AdaptedArray) -> Any:
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
    """The number of axes of the whole array, and the labels."""
    size = {"out": len(out_axes), "in": len(in_axes)}
    parts = {  # with the number of their batch axes
        name: (words, ndim - sum(size.get(word, 1) for word in words))
        for (name, words), ndim in zip(_words(cls).items(), ndims, strict=True)
        if ndim is not None
    }
    n = max([w_ndim, *(size["out"] + size["in"] + batch for _, batch in parts.values())])
    axes = {"out": [n + axis for axis in out_axes], "in": [n + axis for axis in in_axes]}
    batch = [i for i in range(n) if i not in axes["out"] and i not in axes["in"]]
    labels: dict[str, Labels] = {"w": list(range(n - w_ndim, n))}
    for name, (words, count) in parts.items():
        own = [label for word in words for label in axes.get(word, [word])]
        labels[name] = [*batch[len(batch) - count :], *own]
    return n, labels
