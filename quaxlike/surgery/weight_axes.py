"""Conventions for the output and input axes of weights.

The layer's class decides or, failing that, the array's name. Classes are identified by name and package, to
avoid importing these packages. An ambiguous layout is `UNKNOWN`, for the user to specify: after a wrong
guess, we would silently train the wrong adapter.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx

from ..arrays.layout import Layout

_Shape = tuple[int, ...]
_Entry = str | Layout | Callable[[Any, _Shape], Layout]

MATRIX = Layout((-2,), (-1,), "matrix")
UNKNOWN = Layout((), (), "unknown")
OTHER = Layout((), (), "other")


def stored_order(layout: Layout, n: int) -> list[int]:
    """Returns the permutation that moves the input axes last, so that blocks of codes run along them.

    This leaves embeddings as they are, because lookups read whole rows. For convolutions, the window goes
    before the input channels: a convolution's gradient reverses it, and must not split any blocks.
    """
    if layout.kind == "embedding":
        return list(range(n))
    n_in = 1 if layout.is_conv else len(layout.in_axes)
    matrix = [n + axis for axis in (*layout.in_axes[n_in:], *layout.out_axes, *layout.in_axes[:n_in])]
    return [*(i for i in range(n) if i not in matrix), *matrix]


# By class -----------------------------------------------------------------------------------------


def _conv(order: str, *, groups: str | None = None, plain: bool = True) -> Callable[[Any, _Shape], Layout]:
    """Creates the entry for a convolution kernel with this axis order, where `*` denotes the window.

    `groups` names the attribute with the number of channel groups. Set `plain=False` for other kinds of
    convolution, such as transposed ones.
    """

    def layout(layer: Any, shape: _Shape) -> Layout:
        window = getattr(layer, "kernel_size", None) or getattr(layer, "kernel_shape", ())
        n = len(window) if isinstance(window, tuple | list) else 1
        text = order.replace("*", "dhw"[3 - n :])
        parsed = Layout.parse(text)
        if plain and (groups is None or getattr(layer, groups) == 1):
            return parsed
        return Layout(parsed.out_axes, parsed.in_axes, "grouped conv" if plain else "other conv")

    return layout


def _transposed(order: str, swapped: str) -> Callable[[Any, _Shape], Layout]:
    return lambda layer, shape: _conv(swapped if layer.transpose_kernel else order, plain=False)(layer, shape)


def _general(layer: Any, shape: _Shape) -> Layout:
    """Returns the layout of `LinearGeneral` and `DenseGeneral`.

    This is (batch, in, out), where each can be several axes.
    """

    def count(x: Any) -> Any:
        return len(x) if isinstance(x, tuple | list) else 1

    n_out, n_in = count(getattr(layer, "out_features", getattr(layer, "features", 1))), count(layer.axis)
    return Layout(tuple(range(-n_out, 0)), tuple(range(-n_in - n_out, -n_out)))


def _einsum(layer: Any, shape: _Shape) -> Layout:
    """Returns the layout of an `Einsum`.

    Contracted axes are inputs, and axes in both operands and the result are batch axes.
    """
    equation = layer.einsum_str
    if equation is None:
        return UNKNOWN
    operands, out = equation.replace(" ", "").split("->")
    x, kernel = operands.split(",")
    n = len(kernel)
    into = tuple(i - n for i, c in enumerate(kernel) if c in x and c not in out)
    outs = tuple(i - n for i, c in enumerate(kernel) if c in out and c not in x)
    return Layout(outs, into) if into and outs else UNKNOWN


_NORMS: dict[str, Mapping[str, _Entry]] = {
    f"{kind}Norm": {} for kind in ("Batch", "Layer", "RMS", "Group", "Instance", "Spectral", "Weight")
}

_FLAX: dict[str, Mapping[str, _Entry]] = {
    "Einsum": {"kernel": _einsum},
    "Conv": {"kernel": _conv("*io", groups="feature_group_count")},
    "ConvTranspose": {"kernel": _transposed("*io", "*oi")},
    "Embed": {"embedding": "vo"},
    **_NORMS,
}

# The weights among each class's fields. All other fields are biases, scales or statistics.
_CLASSES: dict[str, dict[str, Mapping[str, _Entry]]] = {
    "equinox": {
        "Linear": {"weight": "oi"},
        "Conv": {"weight": _conv("oi*", groups="groups")},
        "ConvTranspose": {"weight": _conv("oi*", plain=False)},
        "Embedding": {"weight": "vo"},
        "GRUCell": {"weight_ih": "oi", "weight_hh": "oi"},
        "LSTMCell": {"weight_ih": "oi", "weight_hh": "oi"},
        **_NORMS,
    },
    "flax.nnx": {"Linear": {"kernel": "io"}, "LinearGeneral": {"kernel": _general}, "LoRA": {}, **_FLAX},
    "flax.linen": {"Dense": {"kernel": "io"}, "DenseGeneral": {"kernel": _general}, **_FLAX},
    "haiku": {
        "Linear": {"w": "io"},
        "ConvND": {"w": _conv("*io", groups="feature_group_count")},
        "ConvNDTranspose": {"w": _conv("*oi", plain=False)},
        **{f"DepthwiseConv{n}": {"w": _conv("*io", plain=False)} for n in ("ND", "1D", "2D", "3D")},
        "Embed": {"embeddings": "vo"},
        "GRU": {"w_i": "io", "w_h": "io"},
        **_NORMS,
    },
}


def by_class(owner: Any, field: str, shape: _Shape) -> Layout | Literal["not known"] | None:
    """Returns the layout implied by the layer's class, or "not known" for any other class."""
    stated = getattr(owner, "weight_layouts", None)
    if isinstance(stated, Mapping):
        return _read(stated[field], owner, shape) if field in stated else None
    for cls in type(owner).__mro__:
        for package, classes in _CLASSES.items():
            if cls.__name__ in classes and cls.__module__.startswith(f"{package}."):
                entry = classes[cls.__name__].get(field)
                return None if entry is None else _read(entry, owner, shape)
    if type(owner).__name__.endswith("Norm"):
        return None
    if isinstance(owner, eqx.Module) and not field.startswith(("weight", "kernel")):
        return None if _is_beside(field) else OTHER
    return "not known"


def _read(entry: _Entry | None, owner: Any, shape: _Shape) -> Layout | None:
    if entry is None or isinstance(entry, Layout):
        return entry
    return Layout.parse(entry) if isinstance(entry, str) else entry(owner, shape)


# By name ------------------------------------------------------------------------------------------

_BESIDE = re.compile(r"bias.*|b|scale|offset|beta|gamma|alpha|mean|var|average|hidden|counter")
_NORM = re.compile(r"(.*_)?((layer|rms|batch|group|instance)_?norm|norm|ln|bn)_?\w*", re.IGNORECASE)
# In a model of plain arrays, only names distinguish embeddings from linear layers.
_EMBEDDING = re.compile(r"(.*[._])?(wte|wpe|emb|embed\w*)([._].*)?")
_CONV = re.compile(r"(.*_)?(sep|depthwise_?)?conv(?!.*transpose)[^.]*", re.IGNORECASE)
_HEADS = {"ioo": re.compile(r"query|key|value"), "iio": re.compile(r"out")}


def by_name(name: str, shape: _Shape, bias: _Shape | None, shapes: Mapping[str, _Shape]) -> Layout | None:
    """Returns the layout implied by an array's name and the shape of its bias.

    The array must have at least two axes. `shapes` are the shapes of all arrays in the model.
    """
    *above, field = re.split(r"[./]", name)
    layer = above[-1] if above else ""
    if _is_beside(field) or (is_norm(layer) and field in ("weight", "scale", "w", "kernel")):
        return None
    if field != "kernel" and _EMBEDDING.fullmatch(name):
        return Layout.parse("vo")
    if field == "kernel" or field in ("w_i", "w_h") or (field == "w" and _is_haiku(name, layer)):
        return _kernel(name, layer, shape, bias, shapes)
    if field == "w" and bias is not None:
        return _by_bias([Layout.parse("io"), Layout.parse("oi")], shape, bias)
    if field.endswith(("weight", "weights")) or field.startswith("weight_"):
        if len(shape) == 2:
            return MATRIX if bias is None or MATRIX.fits(shape, bias) else UNKNOWN
        window = _window(shape)
        if _CONV.fullmatch(layer) and window:
            return _by_bias([Layout.parse(f"oi{window}")], shape, bias, alone=True)
        return _by_bias([MATRIX, *([Layout.parse(f"oi{window}")] if window else [])], shape, bias)
    if not above:  # A standalone array, e.g. a factor of a `LoraArray`.
        return MATRIX if len(shape) == 2 else OTHER
    return UNKNOWN if len(shape) == 2 else OTHER


#: Fused layers: their weights are the concatenated weights of several layers.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


def is_norm(layer: str) -> bool:
    return _NORM.fullmatch(re.split(r"[./]", layer)[-1]) is not None


def _is_beside(field: str) -> bool:
    return _BESIDE.fullmatch(field) is not None


def _is_haiku(name: str, layer: str) -> bool:
    return "/" in name or re.fullmatch(r"(linear|conv[123]_d)(_\d+)?", layer) is not None


def _window(shape: _Shape) -> str:
    return {3: "w", 4: "hw", 5: "dhw"}.get(len(shape), "")


def _kernel(
    name: str, layer: str, shape: _Shape, bias: _Shape | None, shapes: Mapping[str, _Shape]
) -> Layout:
    """Returns the layout of a Flax or Haiku kernel."""
    plain = Layout.parse("io")
    if len(shape) == 2:
        return plain
    window = _window(shape)
    if "transpose" in layer.lower():
        return UNKNOWN
    if _CONV.fullmatch(layer) and window:
        conv = Layout.parse(f"{window}io")
        return _by_bias([conv], shape, bias, alone=True)
    if re.fullmatch(r"(Dense|linear)(_\d+)?", layer):
        return plain
    for text, pattern in _HEADS.items():
        if pattern.fullmatch(layer):
            found = _by_bias([Layout.parse(text), plain], shape, bias)
            return found if bias is not None else _by_neighbour(name, layer, shape, shapes)
    general = [Layout.parse("ioo"), Layout.parse("iio")]
    conv = [Layout.parse(f"{window}io")] if window else []
    return _by_bias([plain, *general, *conv], shape, bias)


def _by_bias(candidates: list[Layout], shape: _Shape, bias: _Shape | None, *, alone: bool = False) -> Layout:
    """Returns the only candidate to fit the bias, or `UNKNOWN`.

    Without a bias, only a single candidate with `alone=True` is accepted.
    """
    if bias is None:
        return candidates[0] if alone and len(candidates) == 1 else UNKNOWN
    left = [x for x in candidates if x.fits(shape, bias)]
    return left[0] if len(left) == 1 else UNKNOWN


def _by_neighbour(name: str, layer: str, shape: _Shape, shapes: Mapping[str, _Shape]) -> Layout:
    """Disambiguates attention kernels without a bias.

    The query and output kernels of the same layer share their head axes.
    """
    neighbour = "query" if layer == "out" else "out"
    other = shapes.get(name.removesuffix(f"{layer}.kernel") + f"{neighbour}.kernel", ())
    if len(other) != len(shape):
        return UNKNOWN
    first, last = (other, shape) if layer == "out" else (shape, other)
    if layer in ("key", "value"):  # These can have fewer heads than the query.
        in_heads = first[-1] == last[-2] and first[:-3] == last[:-3]
    else:
        in_heads = first[-2:] == last[-3:-1] and first[:-3] == last[:-3]
    stacked = first[-1] == last[-2] and first[:-2] == last[:-2]
    if in_heads == stacked:
        return UNKNOWN
    return Layout.parse("iio" if layer == "out" else "ioo") if in_heads else Layout.parse("io")
