"""The arrays of a model, looked at once: a record for each, with its layout and its bias.

`traced_layouts` finds the layouts of parameters in dicts by the classes of the Linen and Haiku modules that
use them.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.layout import Layout
from . import weight_axes
from .trees import bias_of, leaves_with_path, matches, named_arrays, owner_of, path_of, suggestion
from .weight_axes import MATRIX

LayoutLike = str | Layout | None
Layouts = LayoutLike | Mapping[str, LayoutLike]


@checked
def layouts(model: PyTree, layout: Layouts = None) -> dict[str, Layout | None]:
    """Finds out which axes of each array of a model are outputs and which are inputs.

    The argument `layout` takes precedence; then the class of the layer, if it is from Equinox or Flax's NNX,
    or has an attribute `weight_layouts`, a mapping from fields to layouts; then the name of the array,
    together with the shape of the bias beside it:

    | name | layout |
    | --- | --- |
    | `….weight` of two axes (PyTorch) | `"oi"`, a mere convention: see `fan_in_fan_out` |
    | `….kernel` of two axes (Flax) | `"io"` |
    | `query.kernel`, `key.kernel`, `value.kernel` of three | `"ioo"`: (in, heads, dim) |
    | `out.kernel` of three | `"iio"`: (heads, dim, out) |
    | `kernel`, `weight` of a layer whose name contains `conv` | `"hwio"`, `"oihw"` |
    | `w` of a Haiku module | `"io"`, or `"hwio"` for `conv2_d` and the like |
    | `embedding`, `embeddings`, and all arrays of a layer named `embed…`, `wte`, `wpe` | `"vo"` |
    | an array that is the whole name, such as `w` | `"oi"`, by the same convention |
    | `bias`, `scale` and the like, and all arrays of a layer whose name says that it is a norm | no weight |

    **Arguments:**

    - `model`: any pytree.
    - `layout`: a mapping from names, or their last components as in [`quaxlike.select`][], to layouts; None
        for an array that is not a weight of a layer. A single layout applies to all matrices of which nothing
        else is known. [`quaxlike.Layout`][] explains the notation.

    **Returns:**

    By name: a layout, or None for an array that is not a weight of a layer. Where the layout cannot be told,
    its `kind` is `"unknown"`.

    **Raises:**

    `ValueError` for a name that matches nothing, with near misses; for a layout that has more axes than its
    array, or that contradicts the bias beside it.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        params = {"query": {"kernel": jnp.ones((64, 4, 16)), "bias": jnp.ones((4, 16))}}
        str(ql.layouts(params)["query.kernel"])  # ioo
        ql.layouts({"mixer": jnp.ones((8, 16))}, {"mixer": "io"})
        ```
    """
    return {name: record.layout for name, record in records_of(model, layout).items()}


@dataclasses.dataclass(frozen=True)
class Record:
    """What surgery knows of one array of a model, or of a Value, which counts as one."""

    array: Any
    layout: Layout | None
    """Which of its axes are outputs and which inputs; None for an array that is not a weight of a layer."""
    bias: str | None
    """The name of the bias beside it, if its layer has one."""


def records_of(model: PyTree, layout: Layouts = None, *, fan_in_fan_out: bool = False) -> dict[str, Record]:
    """The records of all arrays of a model, by name. With `fan_in_fan_out`, matrices that are `(out, in)` by
    convention are `(in, out)`."""
    found = {path_of(path, model): (path, leaf) for path, leaf in leaves_with_path(model)}
    arrays = {name: leaf for name, (_, leaf) in found.items()}
    stated = _stated(arrays, layout)
    otherwise = layout if isinstance(layout, str | Layout) else "io" if fan_in_fan_out else None
    records: dict[str, Record] = {}
    for name, (path, leaf) in found.items():
        bias = bias_of(name, arrays)
        if name in stated:
            own = _checked(name, leaf, stated[name], bias, arrays)
        else:
            own = _found(name, leaf, owner_of(model, path), bias, arrays)
            if otherwise is not None and _is_open(own, leaf):
                own = _checked(name, leaf, otherwise, bias, arrays)
        records[name] = Record(leaf, own, bias)
    return records


def _stated(arrays: Mapping[str, Any], layout: Layouts) -> dict[str, LayoutLike]:
    stated: dict[str, LayoutLike] = {}
    for pattern, value in layout.items() if isinstance(layout, Mapping) else ():
        names = [name for name in arrays if matches(pattern, name, regex=False)]
        if not names:
            hint = suggestion(pattern, arrays)
            raise ValueError(f"{pattern!r} in `layout` matches none of the arrays of the model. {hint}")
        # The name of a layer stands for its weight; the name of an array takes precedence over it.
        stated |= {name: value for name in names if name not in stated or name.endswith(pattern)}
    return stated


def _found(name: str, leaf: Any, owner: Any, bias: str | None, arrays: Mapping[str, Any]) -> Layout | None:
    if not (len(leaf.shape) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)):
        return None
    shape = tuple(leaf.shape)
    by_class = weight_axes.by_class(owner, name.rpartition(".")[2], shape)
    if by_class != "not known":
        return by_class
    shapes = {n: tuple(arrays[n].shape) for n in arrays} if len(shape) > 2 else {}
    return weight_axes.by_name(name, shape, None if bias is None else tuple(arrays[bias].shape), shapes)


def _checked(
    name: str, leaf: Any, layout: LayoutLike, bias: str | None, arrays: Mapping[str, Any]
) -> Layout | None:
    """The user's own layout, checked against the shapes of the array and its bias."""
    if layout is None:
        return None
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    shape = tuple(leaf.shape)
    if len(layout.out_axes) + len(layout.in_axes) > len(shape):
        raise ValueError(f"The layout {layout} has more axes than {name}, which is of shape {shape}.")
    if bias is not None and not layout.fits(shape, tuple(arrays[bias].shape)):
        raise ValueError(
            f"The layout {layout} of {name} {shape} gives outputs of {layout.out_shape(shape)}; "
            f"found {bias} of shape {tuple(arrays[bias].shape)}."
        )
    return layout


def require_layout(name: str, record: Record) -> Layout:
    """The layout of a weight to adapt or quantise; raises if it cannot be told."""
    layout = record.layout
    if layout is not None and layout.is_known:
        return layout
    if layout is not None and layout.kind == "other" and "." not in name:
        return MATRIX
    shape = tuple(record.array.shape)
    raise ValueError(
        f"It cannot be told which axes of {name} {shape} are outputs and which are inputs: neither its layer "
        f"nor its name says so. {how_to_state_layout(name, shape)}"
    )


def _is_open(layout: Layout | None, leaf: Any) -> bool:
    """Whether the axes of a matrix are known by convention only, or not at all."""
    if layout is None:
        return False
    return layout.kind == "matrix" or (not layout.is_known and len(leaf.shape) == 2)


def how_to_state_layout(name: str, shape: tuple[int, ...]) -> str:
    examples = {2: "'io' for (in, out), 'oi' for (out, in)"}.get(
        len(shape), "'ioo' for (in, heads, dim), 'iio' for (heads, dim, out), 'io' for a stack of (in, out)"
    )
    return f"Pass layout={{{name!r}: ...}}: {examples}, None for arrays that are not weights of layers."


def traced_layouts(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Layout]:
    """Traces a function, and finds the layout of each parameter from the Linen or Haiku module that uses it.

    Linen and Haiku keep parameters in dicts, without the modules that made them. Names suffice for most
    layers (see [`quaxlike.layouts`][]); this covers the rest, such as `DenseGeneral` and layers that you
    named.

    **Arguments:**

    - `fn`: `module.apply` in Linen, or `transformed.apply` in Haiku. It is traced, not run.
    - `args`, `kwargs`: its arguments, in which `jax.ShapeDtypeStruct`s may stand for arrays.

    **Returns:**

    Layouts by names of parameters, without the collection (`params`): pass them as `layout=` to
    [`quaxlike.loraify`][] and the like.

    **Raises:**

    `ValueError` if `fn` calls no module of Linen or Haiku with parameters.

    !!! example

        ```python
        import quaxlike as ql

        def adapted(module, variables, x, key):  # a Linen module
            layout = ql.traced_layouts(module.apply, variables, x)
            return ql.loraify(variables, rank=4, layout=layout, key=key)
        ```
    """
    found: dict[str, Layout] = {}

    def note(module: Any, path: str, params: Any) -> None:
        for name, x in named_arrays(params).items():
            if len(x.shape) < 2 or "." in name:  # of an inner module
                continue
            layout = weight_axes.by_class(module, name, tuple(x.shape))
            if isinstance(layout, Layout):
                found[f"{path}.{name}" if path else name] = layout

    def linen(next_fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fn(*args, **kwargs)
        if context.module.scope is not None:
            params = dict(context.module.variables.get("params", {}))
            note(context.module, ".".join(map(str, context.module.path)), params)
        return out

    def haiku(next_fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fn(*args, **kwargs)
        if context.method_name == "__call__":
            name = context.module.module_name
            own = {k: x for k, x in context.module.params_dict().items() if k.rpartition("/")[0] == name}
            note(context.module, name, {k.rpartition("/")[2]: x for k, x in own.items()})
        return out

    with ExitStack() as stack:
        for package, interceptor in (("flax.linen", linen), ("haiku", haiku)):
            if package in sys.modules:
                stack.enter_context(sys.modules[package].intercept_methods(interceptor))
        eqx.filter_eval_shape(fn, *args, **kwargs)
    if not found:
        raise ValueError("fn calls no module of Linen or Haiku with weights of a known class.")
    return found
