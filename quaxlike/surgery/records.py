"""Records with the layout and bias of each array in a model.

This is the only source of layouts in `surgery`: if any two functions disagreed about the input axes, they
would silently train or quantise along the wrong ones. Linen and Haiku store parameters apart from their
modules, so `traced_layouts` infers layouts by tracing a call.
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
from .trees import bias_of, matches, named_arrays, named_leaves_with_path, owner_of, suggestion
from .weight_axes import MATRIX

LayoutLike = str | Layout | None
Layouts = LayoutLike | Mapping[str, LayoutLike]


@checked
def layouts(model: PyTree, layout: Layouts = None) -> dict[str, Layout | None]:
    """Determines the output and input axes of each array in a model.

    The `layout` argument takes precedence. Next comes the layer's class, if it is from Equinox or Flax NNX,
    or has an attribute `weight_layouts` mapping fields to layouts. Failing that, the layout is inferred from
    the array's name and the shape of its bias (if any), as follows:

    | name | layout |
    | --- | --- |
    | `….weight` with two axes (PyTorch) | `"oi"`, by convention (see `fan_in_fan_out`) |
    | `….kernel` with two axes (Flax) | `"io"` |
    | `query.kernel`, `key.kernel`, `value.kernel` with three | `"ioo"`: (in, heads, dim) |
    | `out.kernel` with three | `"iio"`: (heads, dim, out) |
    | `kernel`, `weight` in a layer with `conv` in its name | `"hwio"`, `"oihw"` |
    | `w` in a Haiku module | `"io"`, or `"hwio"` for `conv2_d` etc. |
    | `embedding`, `embeddings`, and all arrays in a layer named `embed…`, `wte`, `wpe` | `"vo"` |
    | a name with a single component, such as `w` | `"oi"`, by the same convention |
    | `bias`, `scale` etc., and all arrays in a layer named like a norm | not a weight |

    **Arguments:**

    - `model`: any pytree.
    - `layout`: a mapping from names to layouts, or to `None` for arrays other than layers' weights. A name's
        last components are enough, as in [`quaxlike.select`][]. A single layout applies to all otherwise
        undetermined matrices. See [`quaxlike.Layout`][] for the notation.

    **Returns:**

    A dict from names to layouts, or to `None` for arrays other than layers' weights. Undetermined layouts
    have `kind="unknown"`.

    **Raises:**

    `ValueError` if a name matches nothing (the message includes close matches), or if a layout has more axes
    than its array, or contradicts the bias.

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
    """An array's metadata. (A Value counts as a single array.)"""

    array: Any
    layout: Layout | None
    """The output and input axes, or `None` if this is not the weight of a layer."""
    bias: str | None
    """The name of the bias in the same layer, if there is one."""
    in_head: bool = False
    """Whether this belongs to a classification head, i.e. to a module in the model's `head_parts`. Heads are
    small, and trained in full."""


def records_of(model: PyTree, layout: Layouts = None, *, fan_in_fan_out: bool = False) -> dict[str, Record]:
    """Returns the records for all arrays, by name.

    Matrices without any other indication are `(out, in)` by convention, or `(in, out)` if
    `fan_in_fan_out=True`.
    """
    found = named_leaves_with_path(model)
    arrays = {name: leaf for name, (_, leaf) in found.items()}
    stated = _stated(arrays, layout)
    otherwise = layout if isinstance(layout, str | Layout) else "io" if fan_in_fan_out else None
    records: dict[str, Record] = {}
    heads = getattr(model, "head_parts", ())
    for name, (path, leaf) in found.items():
        bias = bias_of(name, arrays)
        if name in stated:
            own = _checked(name, leaf, stated[name], bias, arrays)
        else:
            own = _found(name, leaf, owner_of(model, path), bias, arrays)
            if otherwise is not None and _is_open(own, leaf):
                own = _checked(name, leaf, otherwise, bias, arrays)
        records[name] = Record(leaf, own, bias, name.partition(".")[0] in heads)
    return records


def _stated(arrays: Mapping[str, Any], layout: Layouts) -> dict[str, LayoutLike]:
    stated: dict[str, LayoutLike] = {}
    for pattern, value in layout.items() if isinstance(layout, Mapping) else ():
        names = [name for name in arrays if matches(pattern, name, regex=False)]
        if not names:
            hint = suggestion(pattern, arrays)
            raise ValueError(f"{pattern!r} in `layout` matches none of the arrays of the model. {hint}")
        # The name of a layer refers to its weight, but the full name of an array takes precedence.
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
    """Validates a user's layout against the shapes of the array and its bias."""
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
    """Returns the layout of a weight to adapt or quantise, or raises `ValueError` if unknown."""
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
    """Returns whether the layout of a matrix is unknown or merely conventional.

    If so, a user's layout for the whole model overrides it.
    """
    if layout is None:
        return False
    return layout.kind == "matrix" or (not layout.is_known and len(leaf.shape) == 2)


def how_to_state_layout(name: str, shape: tuple[int, ...]) -> str:
    examples = {2: "'io' for (in, out), 'oi' for (out, in)"}.get(
        len(shape), "'ioo' for (in, heads, dim), 'iio' for (heads, dim, out), 'io' for a stack of (in, out)"
    )
    return f"Pass layout={{{name!r}: ...}}: {examples}, None for arrays that are not weights of layers."


def traced_layouts(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Layout]:
    """Determines each parameter's layout from the Linen or Haiku module that uses it.

    Linen and Haiku store parameters in plain dicts, apart from their modules, so layouts are usually inferred
    from names alone (see [`quaxlike.layouts`][]). This is fine for most layers; use this function for e.g.
    `DenseGeneral`, or for layers with custom names.

    **Arguments:**

    - `fn`: `module.apply` for Linen, or `transformed.apply` for Haiku. It is only traced, not run.
    - `args`, `kwargs`: its arguments. `jax.ShapeDtypeStruct`s can replace arrays.

    **Returns:**

    A dict from parameter names, without the collection (`params`), to layouts: the `layout` argument of
    [`quaxlike.loraify`][] etc.

    **Raises:**

    `ValueError` if `fn` doesn't call any Linen or Haiku module with parameters.

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
            if len(x.shape) < 2 or "." in name:  # Dotted names belong to a submodule.
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
