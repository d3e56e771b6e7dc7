"""`define_primitive`: makes a JAX primitive from one function."""

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

# Our own parameters, and one that JAX's `apply_primitive` takes.
_RESERVED = ("in_tree", "forms", "prim")

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
    """Makes a function a JAX primitive, and derives all the rules JAX needs.

    The primitive stays whole under `jit`, `grad`, `jvp`, `linearize` and `vmap`: the jaxpr contains it (or a
    primitive derived from it), so interpreters such as [`quaxify`][quaxlike.quaxify] can dispatch on it.
    It is replaced by its function only when it is lowered.

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

    A hand-written rule replaces the derived one. JAX traces through the rule, so it may use the primitive
    itself. If a rule takes or returns a tree of tangents, cotangents or dims, then `None` instead of a leaf
    or a whole operand is a zero (or, for dims, "not mapped"). If a rule returns `NotImplemented`, the derived
    one is used.

    **Arguments:**

    - `name`: the primitive's name. This must be an identifier. No JAX primitive may have this name, nor any
        other primitive defined in this way. If another library uses the same name, register rules by the
        primitive itself, not by its name.
    - `impl`: a function that takes arrays (or pytrees) by position and static parameters by keyword. Its
        derivatives may recompute it, which repeats side effects such as printing.
    - `multiple_results`: whether `impl` returns a pytree of arrays rather than one.
    - `cpu`, `gpu`, `tpu`: implementations for one platform each, chosen when the primitive is lowered.
    - `jvp`: `jvp(primals, tangents, **params) -> tangent of the result`. Both arguments are tuples with one
        entry per operand; the primitive itself gives the primal result.
    - `vjp`: `vjp(cotangent, *operands, **params) -> (cotangent of each operand, ...)`. Forward-mode
        differentiation is still derived.
    - `vjp_with_results`: whether to call `vjp` with the primal result as well,
        `vjp(cotangent, result, *operands, **params)`.
    - `transpose`: for a primitive linear in some operands, `transpose(cotangent, *operands, **params)
        -> (cotangent, ...)`. The operands (leaves) in need of a cotangent are
        `jax.interpreters.ad.UndefinedPrimal`s.
    - `batching`: `batching(axis_size, operands, dims, **params) -> (result, dims of the result)`.
        The axis of the result may be anywhere.
    - `partitioning`: how to split the primitive over devices, for implementations the compiler cannot
        look into. This is a [`Partitioning`][quaxlike.primitives.Partitioning], or a function that makes one
        from the operands' types (leaves) and the parameters.
    - `cls`: the primitive's class, a subclass of `DefinedPrimitive`.
    - `replace`: whether an existing primitive with this name may be redefined, as when you run a notebook
        cell again. Rules registered for the old primitive do not apply to the new one.

    **Returns:** the primitive; call it with the arguments of `impl`.

    **Raises:** `ValueError` if the name is not an identifier, or is taken.
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
        # Another library may use this name, too: primitives are told apart by identity.
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
    """Adds a primitive's rules (defined or derived) to JAX's tables."""
    ad.primitive_jvps[p] = functools.partial(derive.jvp, p)
    ad.primitive_transposes[p] = functools.partial(derive.transpose, p)
    batching.fancy_primitive_batchers[p] = functools.partial(derive.batch, p)
    experimental.register(p)
