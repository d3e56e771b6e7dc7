"""`Layout`: a weight's output and input axes, and a string notation for them."""

import dataclasses
from typing import Literal

from .._checked import checked

_WINDOW = "dhw"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight's output and input axes, counted from the end.

    A layout can also be written as a string with one letter per axis: `i` for inputs, `o` for outputs, `d`,
    `h`, `w` for a convolution's window, and `v` for an embedding's rows. For example, a linear layer's weight
    is `"oi"` in PyTorch and Equinox, and `"io"` in Flax; `"ioo"` is a kernel with shape (in, heads, dim); a
    convolution's kernel is `"hwio"` in Flax and `"oihw"` in PyTorch; and `"vo"` is an embedding. Additional
    leading axes are batch axes, e.g. of stacked layers or experts.

    **Arguments:**

    - `out_axes`, `in_axes`: as for [`quaxlike.LoraArray`][]. A convolution's window counts as inputs, after
        the channels.
    - `kind`: the kind of layer: `"linear"`, `"embedding"`, `"conv"`, `"grouped conv"`, `"other conv"` (either
        transposed, or with weights that aren't shared between positions); `"matrix"` for a weight assumed to
        belong to a linear layer, with shape `(out, in)` unless `fan_in_fan_out` reverses this; `"unknown"` if
        we can't tell; `"other"` for an array that isn't necessarily a weight. Default: `"linear"`.
    """

    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]
    kind: Literal[
        "linear", "matrix", "embedding", "conv", "grouped conv", "other conv", "unknown", "other"
    ] = "linear"

    @classmethod
    @checked
    def parse(cls, text: str) -> "Layout":
        """Parses the notation. Raises a `ValueError` for unknown letters, or without outputs or inputs."""
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
        if self.is_conv:  # the channels come before the window
            window = self.in_axes[1:]
            letters |= dict(zip(window, _WINDOW[-len(window) :] if window else "", strict=True))
        return "".join(letters.get(axis, "*") for axis in range(min(letters, default=0), 0))

    @property
    def is_conv(self) -> bool:
        """Whether this is a convolution's kernel."""
        return self.kind in ("conv", "grouped conv", "other conv")

    @property
    def is_known(self) -> bool:
        """Whether the output and input axes are known."""
        return self.kind not in ("unknown", "other")

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of the batch axes, then the output axes."""
        return (*self.batch_shape(shape), *(shape[axis] for axis in self.out_axes))

    def in_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of the batch axes, then the input axes (for a convolution: the channels, then the
        window).
        """
        return (*self.batch_shape(shape), *(shape[axis] for axis in self.in_axes))

    def batch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of all axes that are neither outputs nor inputs."""
        matrix = {len(shape) + axis for axis in (*self.out_axes, *self.in_axes)}
        return tuple(size for i, size in enumerate(shape) if i not in matrix)

    def fits(self, shape: tuple[int, ...], bias: tuple[int, ...]) -> bool:
        """Returns whether a bias with this shape fits the weight, i.e. has the output axes, and then only
        axes of size 1.
        """
        out = self.out_shape(shape)
        return bias[: len(out)] == out and set(bias[len(out) :]) <= {1}
