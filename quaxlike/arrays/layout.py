"""`Layout`: which axes of a weight are outputs and which are inputs, and a notation for this."""

import dataclasses
from typing import Literal

from .._checked import checked

_WINDOW = "dhw"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which axes of a weight are outputs and which are inputs, counted from the end.

    A string means the same, with a letter for each axis: `i` for inputs, `o` for outputs, `d`, `h`, `w` for
    the window of a convolution, and `v` for an embedding's rows. `"oi"` is the weight of a linear layer
    in PyTorch and Equinox, `"io"` a kernel in Flax, `"ioo"` a kernel of shape (in, heads, dim), `"hwio"` a
    convolution's kernel in Flax, `"oihw"` one in PyTorch, `"vo"` an embedding. Any axes in front of these
    count layers or experts in a stack.

    **Arguments:**

    - `out_axes`, `in_axes`: as for [`quaxlike.LoraArray`][]. A convolution's window belongs to the inputs,
        after the channels.
    - `kind`: the kind of layer: `"linear"`, `"embedding"`, `"conv"`, `"grouped conv"`, `"other conv"`
        (transposed, or not shared between positions); `"matrix"` for a weight we assume belongs to a
        linear layer, `(out, in)` unless `fan_in_fan_out` reverses this; `"unknown"` if we cannot tell;
        `"other"` for an array that need not be a weight at all. Default: `"linear"`.
    """

    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]
    kind: Literal[
        "linear", "matrix", "embedding", "conv", "grouped conv", "other conv", "unknown", "other"
    ] = "linear"

    @classmethod
    @checked
    def parse(cls, text: str) -> "Layout":
        """Parses the notation. Raises `ValueError` for any other letter, or without an input or output."""
        n = len(text)
        axes = {letter: tuple(i - n for i in range(n) if text[i] == letter) for letter in set(text)}
        window = tuple(axis for i, axis in enumerate(range(-n, 0)) if text[i] in _WINDOW)
        embedding = "v" in axes
        into = axes.get("v" if embedding else "i", ())
        out = axes.get("o", ())
        strange = set(text) - ({"v", "o"} if embedding else {"i", "o", *_WINDOW})
        twice = any(len(axes.get(letter, ())) > 1 for letter in (*_WINDOW, "v"))
        if strange or twice or not out or not into or (window and len(out + into) > 2):
            raise ValueError(
                "A layout has a letter for each axis: i for inputs, o for outputs, d, h, w for the window of "
                f"a convolution, or v and o for an embedding; found {text!r}. Examples: 'oi', 'io', 'ioo', "
                "'iio', 'hwio', 'oihw', 'vo'."
            )
        kind = "embedding" if embedding else "conv" if window else "linear"
        return cls(out, (*into, *window), kind)

    def __str__(self) -> str:
        if not self.is_known:
            return "?"
        letters = dict.fromkeys(self.out_axes, "o") | dict.fromkeys(self.in_axes, "i")
        if self.kind == "embedding":
            letters |= dict.fromkeys(self.in_axes, "v")
        if self.is_conv:  # channels come first
            window = self.in_axes[1:]
            letters |= dict(zip(window, _WINDOW[-len(window) :] if window else "", strict=True))
        return "".join(letters.get(axis, "*") for axis in range(min(letters, default=0), 0))

    @property
    def is_conv(self) -> bool:
        """Whether this is a convolution's kernel."""
        return self.kind in ("conv", "grouped conv", "other conv")

    @property
    def is_known(self) -> bool:
        """Whether we know which axes are outputs and inputs."""
        return self.kind not in ("unknown", "other")

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of all output axes, after a stack's axes."""
        return (*self.batch_shape(shape), *(shape[axis] for axis in self.out_axes))

    def in_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of all input axes, after a stack's axes. A convolution has channels, then its
        window."""
        return (*self.batch_shape(shape), *(shape[axis] for axis in self.in_axes))

    def batch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of all other axes."""
        matrix = {len(shape) + axis for axis in (*self.out_axes, *self.in_axes)}
        return tuple(size for i, size in enumerate(shape) if i not in matrix)

    def fits(self, shape: tuple[int, ...], bias: tuple[int, ...]) -> bool:
        """Returns whether a layer with this weight may have this bias: its outputs, with trailing axes of
        size 1."""
        out = self.out_shape(shape)
        return bias[: len(out)] == out and set(bias[len(out) :]) <= {1}
