"""The layouts of parameters in dicts, from the classes of the Linen and Haiku modules that use them."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import equinox as eqx

from . import weight_axes
from .trees import named_arrays
from .weight_axes import Layout


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
