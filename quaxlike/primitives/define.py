"""`define_primitive`: turns a function into a JAX primitive."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jax.interpreters import ad, batching

from .._checked import checked
from ..core import compat
from . import derive, experimental
from .partitioning import Partitioning
from .primitive import DefinedPrimitive, Rules, where

_lock = threading.Lock()
_defined: dict[str, DefinedPrimitive] = {}

# Our own parameters, and an argument to JAX's `apply_primitive`: a parameter of this name would clash with
# it.
_RESERVED = ("in_tree", "forms", "_param_types", "prim")

_DefinedT = TypeVar("_DefinedT", bound=DefinedPrimitive)


@checked
def define_primitive(
    name: str,
    impl: Callable[..., Any],
    *,
    multiple_results: bool = False,
    cpu: Callable[..., Any] | None = None,
    gpu: Callable[..., Any] | None = None,
    tpu: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    vjp: Callable[..., Any] | None = None,
    vjp_with_results: bool = False,
    transpose: Callable[..., Any] | None = None,
    batching: Callable[..., Any] | None = None,
    partitioning: Partitioning | Callable[..., Partitioning] | None = None,
    cls: type[_DefinedT] = DefinedPrimitive,
    replace: bool = False,
) -> _DefinedT:
    """Turns a function into a JAX primitive and derives all the rules required by JAX.

    The primitive is preserved under `jit`, `grad`, `jvp`, `linearize` and `vmap`. That is, the jaxpr contains
    it (or a primitive derived from it), so interpreters such as [`quaxify`][quaxlike.quaxify] can dispatch on
    it. It is only replaced by its implementation when lowered.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.primitives import define_primitive

        def _scaled_tanh(x, *, scale):
            return scale * jnp.tanh(x)

        scaled_tanh_p = define_primitive("scaled_tanh", _scaled_tanh)
        jax.grad(lambda x: scaled_tanh_p(x, scale=2.0))(0.5)
        ```

    Any rules you provide are used instead of the derived ones. JAX traces through these rules, so they can
    use the primitive itself. If a rule accepts or returns a tree of tangents, cotangents or dims, then `None`
    in place of a leaf (or of a whole operand) represents a zero (or, for dims, "not mapped"). A rule can
    return `NotImplemented` to fall back to the derived one.

    **Arguments:**

    - `name`: the name of the primitive. This must be an identifier, and must not be the name of a JAX
        primitive or of any other primitive defined using this function. (If another library happens to use
        the same name, then register rules using the primitive itself, rather than its name.)
    - `impl`: a function with arrays (or pytrees) as positional arguments and static parameters as keyword
        arguments. Its derivatives may recompute it, repeating side effects such as printing.
    - `multiple_results`: whether `impl` returns a pytree of arrays, rather than just one array.
    - `cpu`, `gpu`, `tpu`: implementations for each platform. One of these is picked when the primitive is
        lowered.
    - `jvp`: `jvp(primals, tangents, **params) -> tangent of the result`. Both arguments are tuples with one
        entry per operand. (The primal result is computed by the primitive itself.)
    - `vjp`: `vjp(cotangent, *operands, **params) -> (cotangent of each operand, ...)`. Forward-mode
        differentiation is still derived from `impl`.
    - `vjp_with_results`: whether to call `vjp` with the primal result as well, i.e. as `vjp(cotangent,
        result, *operands, **params)`.
    - `transpose`: for a primitive that is linear in some operands, `transpose(cotangent, *operands, **params)
        -> (cotangent, ...)`. The operands (leaves) for which a cotangent is required are passed as
        `jax.interpreters.ad.UndefinedPrimal`s.
    - `batching`: `batching(axis_size, operands, dims, **params) -> (result, dims of the result)`. The batch
        axis of the result can be at any position.
    - `partitioning`: how to partition the primitive over devices, for implementations that are opaque to the
        compiler. This is a [`Partitioning`][quaxlike.primitives.Partitioning], or a function returning one
        given the types of the operands (leaves) and the parameters.
    - `cls`: the class of the primitive. This must be a subclass of `DefinedPrimitive`.
    - `replace`: whether to allow redefining an existing primitive with this name, e.g. when rerunning a
        notebook cell. Rules registered for the old primitive do not apply to the new one.

    **Returns:** the primitive, called with the same arguments as `impl`.

    **Raises:** `ValueError` if the name isn't an identifier or is already taken.
    """
    if not name.isidentifier():
        raise ValueError(f"the name of a primitive must be an identifier, got {name!r}")
    parameters = inspect.signature(impl).parameters
    for reserved in _RESERVED:
        if reserved in parameters:
            raise ValueError(
                f"primitive {name!r}: {where(impl)} has a parameter {reserved!r}, which "
                "is reserved; give it another name"
            )
    with _lock:
        if name in _defined and not replace:
            raise ValueError(
                f"a primitive called {name!r} was already defined from {where(_defined[name].impl_fn)}; "
                "pass `replace=True` to redefine it"
            )
        # Another library may use the same name: primitives are compared by identity.
        if name in compat.public_primitives():
            raise ValueError(f"the name {name!r} is taken by a primitive of JAX")
        platforms: dict[str | None, Callable[..., Any] | None]
        platforms = {None: impl, "cpu": cpu, "gpu": gpu, "tpu": tpu}
        primitive = cls(
            name,
            {platform: fn for platform, fn in platforms.items() if fn is not None},
            multiple_results=multiple_results,
            rules=Rules(jvp, vjp, vjp_with_results, transpose, batching),
            install=_install,
            partitioning=partitioning,
        )
        if name in _defined:
            _defined[name].is_replaced = True
        _defined[name] = primitive
        if name in compat.named_primitives():
            compat.named_primitives.cache_clear()
    return primitive


def _install(p: DefinedPrimitive) -> None:
    """Adds a primitive's rules, both handwritten and derived, to JAX's tables."""
    ad.primitive_jvps[p] = functools.partial(derive.jvp, p)
    ad.primitive_transposes[p] = functools.partial(derive.transpose, p)
    batching.fancy_primitive_batchers[p] = functools.partial(derive.batch, p)
    experimental.register(p)
