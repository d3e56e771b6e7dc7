"""`Method`: the record for a published method, i.e. its array type, initialisation, and file format."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._checked import is_finite
from .._patterns import is_pattern, value_for
from ..arrays.adapted import AdaptedArray
from ..arrays.dot_axes import in_float32
from ..arrays.layout import Layout

Start = Callable[..., Any]

#: The prefixes of tensor names in PEFT's files: for tensors of a layer, and for those of the whole model
#: (e.g. VeRA's random matrices).
PREFIX = "base_model.model."
ROOT = "base_model."


class Option(NamedTuple):
    """A configuration entry, with its default in PEFT and its supported values."""

    default: Any
    expected: str
    fits: Callable[[Any], bool]
    is_recent: bool = False
    """Whether to omit this entry if it has its default value: older PEFT versions don't support it."""


def flag(default: bool = False) -> Option:
    return Option(default, "true or false", lambda x: type(x) is bool)


def count(default: int, least: int = 1) -> Option:
    """An integer of at least `least`."""
    return Option(default, f"an integer of at least {least}", lambda x: type(x) is int and x >= least)


def number(default: float | int) -> Option:
    return Option(default, "a number", is_finite)


def by_pattern(each: Option) -> Option:
    """A dict from name patterns to values, overriding an option in particular layers."""

    def fits(x: Any) -> Any:
        return isinstance(x, dict) and all(map(is_pattern, x)) and all(map(each.fits, x.values()))

    return Option({}, f"{each.expected}, by pattern", fits)


def one_of(default: Any, *others: Any) -> Option:
    allowed = (default, *others)

    def found(x: Any) -> Any:
        return any(type(x) is type(y) and x == y for y in allowed)

    return Option(default, f"one of {', '.join(map(repr, allowed))}", found)


#: A dropout rate, accepted for compatibility with PEFT but ignored: these methods don't implement dropout.
DROPOUT = Option(0.0, "a number from 0 to 1", lambda x: is_finite(x) and 0 <= x <= 1)


def _fits_bias(x: Any) -> bool:
    return isinstance(x, str) and (x in ("none", "all") or x.endswith("_only"))


#: Which biases are trained. For example, `"vera_only"` means those of the adapted layers: PEFT only checks
#: the ending.
BIAS = Option("none", "'none', 'all' or the name of the method and '_only'", _fits_bias)
RANK = {"r": count(8), "rank_pattern": by_pattern(count(8))}


@runtime_checkable
class Source(Protocol):
    """The tensors in an adapter file. Methods access them through a `Layer`."""

    def read(self, key: str, shape: Sequence[int], *, integers: bool = False) -> Any: ...

    def error(self, key: str, problem: str) -> ValueError: ...

    def shape(self, key: str) -> tuple[int, ...]: ...


@dataclasses.dataclass(eq=False)
class OnLayout:
    """A weight, its layout, and the sizes that follow from them."""

    w: Any
    layout: Layout

    @property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape[axis] for axis in self.layout.out_axes)

    @property
    def in_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape[axis] for axis in self.layout.in_axes)

    @property
    def outputs(self) -> int:
        return math.prod(self.out_shape)

    @property
    def inputs(self) -> int:
        return math.prod(self.in_shape)

    def on(self, kind: Callable[..., AdaptedArray], *parts: Any, **options: Any) -> Any:
        """Creates an adapter of this kind on the weight."""
        layout = self.layout
        return kind(self.w, *parts, out_axes=layout.out_axes, in_axes=layout.in_axes, **options)


@dataclasses.dataclass(eq=False)
class Layer(OnLayout):
    """A layer of the model with its tensors in the file: the argument of `Method.read`."""

    name: str
    bias: Any
    options: Mapping[str, Any]
    file: Source
    keys: Mapping[str, str]
    """The keys of its tensors, by part."""
    method: "Method"
    kind: str
    """The kind of its layout, or "parameter" for matrices (or stacks) that aren't a layer's weight."""
    target: str
    """The name matched with patterns. PEFT includes `.weight` if it adapts this as a parameter."""
    has_base: bool = False
    """Whether the weight is from the file rather than the model.

    PEFT saves embeddings and output layers along with their adapters, after any initialisation that changed
    them.
    """
    shared: Any = None
    """The result of `Method.prepare`."""

    def __post_init__(self) -> None:
        self._unread = {*self.keys}

    @property
    def window(self) -> tuple[int, ...]:
        """The window of a convolution. This is empty for any other kind of layer."""
        return self.in_shape[1:] if self.layout.is_conv else ()

    def option(self, name: str) -> Any:
        """Returns the value of an option for this layer.

        If this option is one of `Method.patterns`, then another option can override its value in particular
        layers. For example, `rank_pattern` overrides `r`.
        """
        pattern, value = self.method.patterns.get(name), self.options[name]
        return value if pattern is None else self.method.by_pattern(self.options[pattern], self.target, value)

    @property
    def is_in_file(self) -> bool:
        return bool(self.keys)

    def has(self, part: str) -> bool:
        return part in self.keys

    def shape_of(self, part: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in the file, raising an error if it is missing."""
        if part not in self.keys:
            # The file may name this layer differently than the model, so derive the key from another of its
            # tensors, if there is one.
            other, key = next(iter(self.keys.items()), ("", f"{PREFIX}{self.name}"))
            stem = key.removesuffix(self.method.parts.get(other, ""))
            raise self.file.error(f"{stem}{self.method.parts[part]}", "is missing")
        return self.file.shape(self.keys[part])

    def read(self, part: str, *shape: int, integers: bool = False) -> Any:
        """Reads a tensor, raising an error if it doesn't have this shape.

        This also tracks which tensors were read, for `check_all_read`.
        """
        self.shape_of(part)
        self._unread.discard(part)
        return self.file.read(self.keys[part], shape, integers=integers)

    def error(self, part: str | None, problem: str) -> ValueError:
        """Creates an error for a problem with this tensor.

        If `part` is `None`, then this refers to the layer's first tensor instead.
        """
        if part is not None:
            self.shape_of(part)
        return self.file.error(self.keys[part or next(iter(self.keys))], problem)

    def missing_for_all(self, name: str) -> ValueError:
        """Creates an error for a missing tensor shared by all layers."""
        key = f"{ROOT}{self.method.shared[name]}"
        return self.file.error(key, "is missing: `save_projection` says that the file holds it")

    def check_all_read(self) -> None:
        for part in sorted(self._unread):
            raise self.file.error(self.keys[part], "is not expected with this configuration")


class Written(NamedTuple):
    """An adapted layer to write to a file."""

    name: str
    array: Any
    layout: Layout
    bias: Any
    """The layer's bias (or the Value replacing it), if there is one."""
    path: str
    """The array's name in the model."""
    kind: str
    """The kind of its layout, or "parameter", as in `Layer`."""
    has_base: bool = False
    """Whether the weight is written as well, as in `Layer`."""

    @property
    def window(self) -> tuple[int, ...]:
        """The window of a convolution. This is empty for any other kind of layer."""
        into = self.layout.in_axes[1:] if self.layout.is_conv else ()
        return tuple(self.array.w.shape[axis] for axis in into)

    @property
    def is_fan_in_fan_out(self) -> bool:
        """Whether the checkpoint stores the weight as `(in, out)`, as for GPT-2.

        Kernels from other frameworks are `(in, out)` as well, but checkpoints store them transposed to
        `(out, in)`.
        """
        is_weight = self.path.rpartition(".")[2] == "weight" and self.kind in ("linear", "matrix")
        return is_weight and self.array.out_axes == self.layout.out_axes == (-1,)


@dataclasses.dataclass(eq=False)
class Weight(OnLayout):
    """A weight to adapt, with some utilities for initialising the parameters of a new adapter."""

    keys: Iterator[Any]

    @property
    def batch(self) -> tuple[int, ...]:
        return self.layout.batch_shape(tuple(self.w.shape))

    @property
    def dtype(self) -> Any:
        """The dtype of new parameters. This is the weight's dtype, or float32 if the weight is 16-bit."""
        return in_float32(self.w.dtype)

    def zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros((*self.batch, *shape), self.dtype)

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones((*self.batch, *shape), self.dtype)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(self.keys), (*self.batch, *shape), self.dtype)

    def kaiming(self, *shape: int, fan_in: int) -> jax.Array:
        """Samples from the same distribution as PyTorch's `kaiming_uniform_(a=sqrt(5))`."""
        bound = fan_in**-0.5
        return jax.random.uniform(next(self.keys), (*self.batch, *shape), self.dtype, -bound, bound)

    def must_divide(self, method: str, option: str, n: int, *sizes: int) -> None:
        if n < 1 or any(size % n for size in sizes):
            found = " and ".join(map(str, sizes))
            raise ValueError(f"{method} needs {option} that divides {found}; found {n}.")


def starts(start: Callable[..., Any]) -> Start:
    """Wraps a function of a `Weight` and some options, for use as `make` in [`quaxlike.adapt`][].

    This also updates the signature, because `adapt` inspects it.
    """

    @functools.wraps(start)
    def make(w: Any, *, key: Any, layout: Layout, **options: Any) -> Any:
        keys = iter(() if key is None else jax.random.split(key, 4))
        return start(Weight(w, layout, keys), **options)

    _, *own = inspect.signature(start).parameters.values()
    named = [inspect.Parameter("w", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("key", "layout")]
    make.__signature__ = inspect.Signature([*named, *own])  # pyright: ignore[reportAttributeAccessIssue]
    return make


class Method(NamedTuple):
    """The record for a PEFT method."""

    peft_type: str
    type: type[AdaptedArray] | tuple[type[AdaptedArray], ...]
    start: Start
    """Creates a new adapter on a weight. This is a valid `make` for [`quaxlike.adapt`][]."""
    parts: Mapping[str, str]
    """Maps the names used in `read` and `write` to tensor suffixes in the file."""
    options: Mapping[str, Option]
    """Configuration entries that affect the adapter, except for the ones common to all methods."""
    read: Callable[[Layer], Any]
    """Returns either the adapted weight, or a pair of this and a replacement for the bias."""
    write: Callable[[Written], tuple[dict[str, Any], dict[str, Any]]] | None = None
    """Returns a layer's tensors (by part, without any None) and its options.

    This should be `None` if the array is `rewritten`.
    """
    kinds: Collection[str] = ("linear", "matrix")
    """The kinds of layers that can be adapted."""
    others: Mapping[str, str] = {}
    """Maps other kinds of layers to the reason why they can't be adapted."""
    conv1d: bool = True
    """Whether PEFT supports GPT-2's `Conv1D`, with its `(in, out)` weights."""
    patterns: Mapping[str, str] = {}
    """Maps options that can differ between layers to the entries overriding them by pattern."""
    by_pattern: Callable[[Mapping[str, Any], str, Any], Any] = value_for
    """Looks up a layer's value in one of these entries, given a default."""
    settle: (
        Callable[[Mapping[str, Written], dict[str, dict[str, Any]], Sequence[str]], dict[str, Any]] | None
    ) = None
    """Returns the entries that depend on all layers at once, given the options of each layer and the names in
    `target_modules`.

    This should pop any options of individual layers that they replace.
    """
    informative: Collection[str] = ("init_weights",)
    """Entries that only concern initialisation or training: these are ignored for a trained adapter."""
    shared: Mapping[str, str] = {}
    """The names (without the prefix) of the whole model's tensors."""
    prepare: Callable[[Sequence[Layer], Mapping[str, Any]], Any] | None = None
    """Called once before any layers are read, with the layers and the `shared` tensors in the file.

    The result is available as the attribute `shared` of each layer.
    """
    write_shared: Callable[[Sequence[Written]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    """Returns the tensors and options shared by all layers."""
    entry: str = "target_modules"
    """The configuration entry listing the adapted layers."""
    named: Callable[[Any, Mapping[str, Layout | None]], Mapping[str, Sequence[str]]] | None = None
    """Returns the candidates for each layer listed in `entry`, given the layouts for all layers.

    The file should contain exactly one candidate. This is only used if `entry` isn't `target_modules`.
    """
    beside: Sequence["Method"] = ()
    """Methods for other layers, with adapters in the same file."""
    refused: Callable[[Mapping[str, Any]], tuple[str, str] | None] | None = None
    """Returns an unsupported option (if there is one) and the reason.

    The reason can contain `{}` as a placeholder for the option's value.
    """
    read_stack: Callable[[str, Sequence[Layer]], Any] | None = None
    """Reads a stack of weights, given its name and its layers in order.

    Layers that aren't adapted don't have any tensors in the file.
    """
    tied: bool = False
    """Whether an adapter on an embedding can be written for the output layer tied to it, too."""
    rewritten: Callable[[Any], Any] | None = None
    """Converts the array to another method, to write to the file instead."""

    @property
    def name(self) -> str:
        """The method's name in Python."""
        return self.peft_type.lower()

    def refusal(self, name: str, kind: str, description: str | None = None) -> str:
        """Returns a message explaining why a layer of this kind can't be adapted."""
        if kind in self.others:
            return f"{name} is {self.others[kind]}"
        found = description or f"of kind {kind!r}"
        return f"PEFT's {self.peft_type} is for {', '.join(self.kinds)} layers; {name} is {found}"


def as_written(path: str, x: Any) -> float | int:
    """Converts an adapter's hyperparameter to a Python number, undoing float32 rounding if possible.

    For example, a scaling of 0.1 stored in float32 is written as 0.1 rather than 0.10000000149.

    **Raises:** `ValueError` if it is traced, or if its value differs between stacked layers.
    """
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"A number of the adapter on {path} is traced. Save adapters outside of `jax.jit`.")
    found = sorted({*np.ravel(x).tolist()})
    if len(found) != 1:
        raise ValueError(
            f"{path} has a stack of adapters with the numbers {found}, and PEFT's files have one for each "
            "weight. Save the adapters one by one."
        )
    short = float(f"{found[0]:.6g}")
    x = short if abs(found[0] - short) < 5e-7 * abs(short) else float(str(np.float32(found[0])))
    return int(x) if x == int(x) else x
