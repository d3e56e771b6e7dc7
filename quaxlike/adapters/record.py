"""`Method`: the record of a published method, with its array type, its start, and its files."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
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

#: Prefixes of tensor names: for layers, and for the whole model.
PREFIX = "base_model.model."
ROOT = "base_model."


class Option(NamedTuple):
    """A configuration entry: PEFT's default, and the supported values."""

    default: Any
    expected: str
    fits: Callable[[Any], bool]
    is_recent: bool = False
    """Whether to omit this entry if it has the default, because older PEFT versions do not know it."""


def flag(default: bool = False) -> Option:
    return Option(default, "true or false", lambda x: type(x) is bool)


def count(default: int, least: int = 1) -> Option:
    """An integer of at least `least`."""
    return Option(default, f"an integer of at least {least}", lambda x: type(x) is int and x >= least)


def number(default: float | int) -> Option:
    return Option(default, "a number", is_finite)


def by_pattern(each: Option) -> Option:
    """Values for some layers, by name pattern."""

    def fits(x: Any) -> Any:
        return isinstance(x, dict) and all(map(is_pattern, x)) and all(map(each.fits, x.values()))

    return Option({}, f"{each.expected}, by pattern", fits)


def one_of(default: Any, *others: Any) -> Option:
    allowed = (default, *others)

    def found(x: Any) -> Any:
        return any(type(x) is type(y) and x == y for y in allowed)

    return Option(default, f"one of {', '.join(map(repr, allowed))}", found)


#: Dropout rate. Accepted and ignored: we do not implement it for these methods.
DROPOUT = Option(0.0, "a number from 0 to 1", lambda x: is_finite(x) and 0 <= x <= 1)
RANK = {"r": count(8), "rank_pattern": by_pattern(count(8))}


@runtime_checkable
class Source(Protocol):
    """The tensors in an adapter's file."""

    def read(self, key: str, shape: Sequence[int], *, integers: bool = False) -> Any: ...

    def error(self, key: str, problem: str) -> ValueError: ...

    def shape(self, key: str) -> tuple[int, ...]: ...


class Layer:
    """A layer of the model, and its tensors in the file."""

    def __init__(
        self, name: str, w: Any, layout: Layout, bias: Any, options: Mapping[str, Any], file: Source,
        keys: Mapping[str, str], method: "Method", kind: str,
    ) -> None:  # fmt: skip
        self.name, self.w, self.layout, self.bias, self.options = name, w, layout, bias, options
        #: As in the layout, or "parameter" for a matrix (or stack) that is not a layer's weight.
        self.kind = kind
        #: The result of `Method.prepare`.
        self.shared: Any = None
        self._file, self._keys, self._method = file, dict(keys), method
        self._unread = {*keys}

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

    @property
    def window(self) -> tuple[int, ...]:
        """A convolution's window; empty for other layers."""
        return self.in_shape[1:] if self.layout.is_conv else ()

    def option(self, name: str, pattern: str | None = None) -> Any:
        """An option's value. With `pattern`, this may differ between layers."""
        value = self.options[name]
        return value if pattern is None else value_for(self.options[pattern], self.name, value)

    @property
    def is_in_file(self) -> bool:
        return bool(self._keys)

    def has(self, part: str) -> bool:
        return part in self._keys

    def shape_of(self, part: str) -> tuple[int, ...]:
        """A tensor's stored shape. Raises if it is missing."""
        if part not in self._keys:
            # The file may use another name for this layer than the model.
            other, key = next(iter(self._keys.items()), ("", f"{PREFIX}{self.name}"))
            stem = key.removesuffix(self._method.parts.get(other, ""))
            raise self._file.error(f"{stem}{self._method.parts[part]}", "is missing")
        return self._file.shape(self._keys[part])

    def read(self, part: str, *shape: int, integers: bool = False) -> Any:
        """Reads a tensor, which must have this shape."""
        self.shape_of(part)
        self._unread.discard(part)
        return self._file.read(self._keys[part], shape, integers=integers)

    def error(self, part: str | None, problem: str) -> ValueError:
        """Makes the error for a problem with this tensor, or with the layer's first one."""
        if part is not None:
            self.shape_of(part)
        return self._file.error(self._keys[part or next(iter(self._keys))], problem)

    def on(self, kind: Callable[..., AdaptedArray], *parts: Any, **options: Any) -> Any:
        """Puts an adapter of this kind on the weight."""
        layout = self.layout
        return kind(self.w, *parts, out_axes=layout.out_axes, in_axes=layout.in_axes, **options)

    def missing_for_all(self, name: str) -> ValueError:
        """Makes the error for a missing tensor that belongs to all layers."""
        key = f"{ROOT}{self._method.shared[name]}"
        return self._file.error(key, "is missing: `save_projection` says that the file holds it")

    def check_all_read(self) -> None:
        for part in sorted(self._unread):
            raise self._file.error(self._keys[part], "is not expected with this configuration")


class Written(NamedTuple):
    """An adapted layer to write."""

    name: str
    array: Any
    layout: Layout
    bias: Any
    """The layer's bias, or its replacement; None if there is none."""
    path: str
    """The array's name in the model."""
    kind: str
    """As in the layout, or "parameter", as for `Layer`."""

    @property
    def window(self) -> tuple[int, ...]:
        """A convolution's window; empty for other layers."""
        into = self.layout.in_axes[1:] if self.layout.is_conv else ()
        return tuple(self.array.w.shape[axis] for axis in into)

    @property
    def is_fan_in_fan_out(self) -> bool:
        """Whether the checkpoint stores the weight as `(in, out)`, like GPT-2.

        Other frameworks' kernels are `(in, out)`, too, but stored as `(out, in)`.
        """
        is_weight = self.path.rpartition(".")[2] == "weight" and self.kind in ("linear", "matrix")
        return is_weight and self.array.out_axes == self.layout.out_axes == (-1,)


class Weight(NamedTuple):
    """A weight, and the shapes of its batch axes, outputs and inputs."""

    w: Any
    layout: Layout
    batch: tuple[int, ...]
    out: tuple[int, ...]
    into: tuple[int, ...]
    dtype: Any
    """The dtype for new parameters: the weight's, or float32 for 16-bit weights."""
    keys: Any

    @property
    def outputs(self) -> int:
        return math.prod(self.out)

    @property
    def inputs(self) -> int:
        return math.prod(self.into)

    def on(self, kind: Any, *parts: Any, **options: Any) -> Any:
        return kind(
            self.w, *parts, out_axes=self.layout.out_axes, in_axes=self.layout.in_axes, **options
        )  # fmt: skip

    def zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros((*self.batch, *shape), self.dtype)

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones((*self.batch, *shape), self.dtype)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(self.keys), (*self.batch, *shape), self.dtype)

    def kaiming(self, *shape: int, fan_in: int) -> jax.Array:
        """Like PyTorch's `kaiming_uniform_(a=sqrt(5))`."""
        bound = fan_in**-0.5
        return jax.random.uniform(next(self.keys), (*self.batch, *shape), self.dtype, -bound, bound)

    def must_divide(self, method: str, option: str, n: int, *sizes: int) -> None:
        if n < 1 or any(size % n for size in sizes):
            found = " and ".join(map(str, sizes))
            raise ValueError(f"{method} needs {option} that divides {found}; found {n}.")


def starts(start: Callable[..., Any]) -> Start:
    """Turns a function of a `Weight` and options into `make`."""

    @functools.wraps(start)
    def make(w: Any, *, key: Any, layout: Layout, **options: Any) -> Any:
        shape = tuple(w.shape)
        out, into = (tuple(shape[axis] for axis in axes) for axes in (layout.out_axes, layout.in_axes))
        keys = iter(() if key is None else jax.random.split(key, 4))
        weight = Weight(w, layout, layout.batch_shape(shape), out, into, in_float32(w.dtype), keys)
        return start(weight, **options)

    _, *own = inspect.signature(start).parameters.values()
    named = [inspect.Parameter("w", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("key", "layout")]
    make.__signature__ = inspect.Signature([*named, *own])  # pyright: ignore[reportAttributeAccessIssue]
    return make


class Method(NamedTuple):
    """One of PEFT's methods."""

    peft_type: str
    type: type[AdaptedArray] | tuple[type[AdaptedArray], ...]
    start: Start
    """Puts a new adapter on a weight: the function for [`quaxlike.adapt`][]."""
    parts: Mapping[str, str]
    """The suffixes of its tensors, by the names in `read` and `write`."""
    options: Mapping[str, Option]
    """The configuration entries that matter, in addition to those for all methods."""
    read: Callable[[Layer], Any]
    """Returns the adapted weight, or a pair with what replaces the bias."""
    write: Callable[[Written], tuple[dict[str, Any], dict[str, Any]]] | None = None
    """Returns a layer's tensors by part, and its options. None if the array is `rewritten`."""
    kinds: Collection[str] = ("linear", "matrix")
    """The kinds of layers it can adapt."""
    others: Mapping[str, str] = {}
    """For other kinds of layers, why it cannot adapt them."""
    conv1d: bool = True
    """Whether PEFT supports GPT-2's `Conv1D`, with `(in, out)` weights."""
    patterns: Mapping[str, str] = {}
    """Options that may differ between layers, and the entries with their values by pattern."""
    settle: Callable[[Mapping[str, Written], dict[str, dict[str, Any]]], dict[str, Any]] | None = None
    """Entries that depend on all layers. Removes these from the layers' own options."""
    informative: Collection[str] = ("init_weights",)
    """Entries that do not affect a trained adapter: how it starts, and how it is trained."""
    shared: Mapping[str, str] = {}
    """The names of tensors that belong to the whole model, without prefix."""
    prepare: Callable[[Sequence[Layer], Mapping[str, Any]], Any] | None = None
    """Makes what all layers share, from the layers and the `shared` tensors in the file."""
    write_shared: Callable[[Sequence[Written]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    """The tensors and options that all layers share."""
    entry: str = "target_modules"
    """The entry that names its layers."""
    named: Callable[[Any, Mapping[str, Layout | None]], Mapping[str, Sequence[str]]] | None = None
    """The layers that `entry` names, if it is not `target_modules`; the file has one of them per key.

    Takes all layers' layouts.
    """
    beside: Sequence["Method"] = ()
    """Adapters for other layers that its files may contain as well."""
    refused: Callable[[Mapping[str, Any]], tuple[str, str] | None] | None = None
    """An unsupported option, and why, with `{}` for the value."""
    read_stack: Callable[[str, Sequence[Layer]], Any] | None = None
    """Reads a stack of weights, given its name and its layers in order. Not all need be adapted."""
    tied: Mapping[str, str] = {}
    """For an output layer tied to an embedding: which parts of the embedding's adapter are (transposed) parts
    of its adapter. Empty if files have no such adapter.
    """
    rewritten: Callable[[Any], Any] | None = None
    """Converts the array to another method's, which files contain instead."""

    @property
    def name(self) -> str:
        """The method's name in Python."""
        return self.peft_type.lower()

    def refusal(self, name: str, kind: str, description: str | None = None) -> str:
        """Explains why a layer of this kind cannot be adapted."""
        if kind in self.others:
            return f"{name} is {self.others[kind]}"
        found = description or f"of kind {kind!r}"
        return f"PEFT's {self.peft_type} is for {', '.join(self.kinds)} layers; {name} is {found}"


def as_written(path: str, x: Any) -> float | int:
    """A number of an adapter for a file: the shortest that float32 rounds to it, after some arithmetic.

    **Raises:** `ValueError` if it is traced, or if there are several.
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


def short_names(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Returns the last components of these names, unless other names end with them, too; else whole names."""

    def last(name: Any) -> Any:
        return name.rpartition(".")[2]

    theirs = {last(name) for name in others if name not in chosen}
    return sorted({name if last(name) in theirs else last(name) for name in chosen})
