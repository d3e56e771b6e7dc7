"""JAX transforms with precise types."""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar, TypeVarTuple, cast, overload

import jax
import jax.numpy as jnp

from .._checked import checked
from .checks import check_differentiable

_F = TypeVar("_F", bound=Callable[..., Any])
_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")
_Aux = TypeVar("_Aux")

UNSPECIFIED: Any = inspect.signature(jax.jit).parameters["in_shardings"].default


@overload
def jit(
    fn: _F,
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
    device: Any = ...,
    backend: str | None = ...,
    inline: Any = ...,
    abstracted_axes: Any = ...,
    compiler_options: Mapping[str, Any] | None = ...,
) -> _F: ...
@overload
def jit(
    fn: None = None,
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
    device: Any = ...,
    backend: str | None = ...,
    inline: Any = ...,
    abstracted_axes: Any = ...,
    compiler_options: Mapping[str, Any] | None = ...,
) -> Callable[[_F], _F]: ...
@checked
def jit(
    fn: Any = None,
    *,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: Any = False,
    abstracted_axes: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Like `jax.jit`, but keeps the type of the function and can be used as a decorator with options.

    At run time this returns the same object as `jax.jit`, including `.lower`, `.trace` and `.clear_cache`.
    Type checkers however only see the original function's type: to use one of these, write e.g.
    `cast(jax.stages.Wrapped, f).lower(x)`.

    **Arguments:**

    - `fn`: the function or method to compile. Omit this to get a decorator with options.
    - the others: as for `jax.jit`, with the same defaults. Only options differing from their default are
        passed on.

    **Returns:**

    The compiled function, or a decorator if `fn` is omitted.

    **Raises:**

    - `TypeError`: if the installed version of JAX doesn't support an option (for example `abstracted_axes`).

    !!! example

        ```python
        from quaxlike.utils import jit

        @jit(static_argnames="n")
        def power(x: jax.Array, n: int) -> jax.Array:
            return x**n

        power(jnp.arange(4.0), 3)
        ```
    """
    options: dict[str, Any] = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "device": device,
        "backend": backend,
        "inline": inline,
        "abstracted_axes": abstracted_axes,
        "compiler_options": compiler_options,
    }
    defaults = inspect.signature(jit).parameters
    given = {name: x for name, x in options.items() if x is not defaults[name].default}
    unknown = given.keys() - inspect.signature(jax.jit).parameters.keys()
    if unknown:
        raise TypeError(
            f"jax.jit of JAX {jax.__version__} has no option {', '.join(sorted(unknown))}. Leave it out."
        )
    if fn is None:
        return lambda fn: jax.jit(fn, **given)
    if not callable(fn):
        raise TypeError(f"jit takes a function; found {fn!r}.")
    return jax.jit(fn, **given)


@overload
def vectorize(pyfunc: _F, *, excluded: Set[int | str] = ..., signature: str | None = ...) -> _F: ...
@overload
def vectorize(
    pyfunc: None = None, *, excluded: Set[int | str] = ..., signature: str | None = ...
) -> Callable[[_F], _F]: ...
@checked
def vectorize(
    pyfunc: Any = None,
    *,
    excluded: Set[int | str] = frozenset(),
    signature: str | None = None,
) -> Any:
    """Like `jnp.vectorize`, but keeps the type of the function and accepts keyword arguments.

    **Arguments:**

    - `pyfunc`: a function on arrays with the core shapes. Omit this to get a decorator with options.
    - `excluded`: the indices or names of any arguments not to map over. Default: none.
    - `signature`: the core shapes, for example `"(m,n),(n)->(m)"`. By default every argument is a scalar.

    **Returns:**

    A function accepting additional leading axes, broadcast against each other. If `pyfunc` is omitted, a
    decorator instead.

    **Raises:**

    - `TypeError`: if a keyword-only argument is passed without being excluded.

    !!! example

        ```python
        from quaxlike.utils import vectorize

        @vectorize(signature="(n)->()", excluded=frozenset({1}))
        def norm(x: jax.Array, order: int = 2) -> jax.Array:
            return jnp.linalg.norm(x, order)

        norm(jnp.ones((5, 3)), order=1)  # shape (5,)
        ```
    """

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        mapped = jnp.vectorize(fun, excluded=excluded, signature=signature)
        has_names = any(isinstance(e, str) for e in excluded)

        @functools.wraps(fun)
        def vectorized(*args: Any, **kwargs: Any) -> Any:
            if not kwargs and not has_names:
                return mapped(*args)
            # `jnp.vectorize` only maps over positional arguments and silently drops the rest, so make as many
            # of the arguments positional as possible.
            args, kept, indices = _by_position(fun, args, kwargs, excluded)
            bound = functools.partial(fun, **kept)
            return jnp.vectorize(bound, excluded=indices, signature=signature)(*args)

        return vectorized

    return decorate if pyfunc is None else decorate(pyfunc)


def _by_position(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    excluded: Set[int | str],
) -> tuple[tuple[Any, ...], dict[str, Any], frozenset[int]]:
    """Returns the positional arguments, any leftover keyword arguments, and the excluded positions."""
    signature = inspect.signature(fun)
    given = signature.bind(*args, **kwargs).arguments
    parameters = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    last = max((i for i, p in enumerate(parameters) if p.name in given), default=-1)
    by_position = [given.get(p.name, p.default) for p in parameters[: last + 1]]
    by_position += args[len(parameters) :]
    indices = {e for e in excluded if isinstance(e, int)}
    indices |= {i for i, p in enumerate(parameters) if p.name in excluded}
    # Earlier parameters that were omitted are filled in with their defaults. Don't map over these.
    indices |= {i for i, p in enumerate(parameters[: last + 1]) if p.name not in given}
    kept = {name: x for name, x in kwargs.items() if name not in signature.parameters}
    kept |= {
        p.name: kwargs[p.name]
        for p in signature.parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name in kwargs
    }
    mapped = sorted(kept.keys() - excluded)
    if mapped:
        raise TypeError(
            f"vectorize maps over positional arguments; {', '.join(mapped)} of {_name(fun)} can "
            "only be given by keyword. Add it to `excluded`, or make the parameter positional."
        )
    return tuple(by_position), kept, frozenset(indices)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__qualname__", repr(fun))


@checked
def shard_map(
    f: _F,
    /,
    *,
    out_specs: Any,
    in_specs: Any = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_names: Set[Hashable] = frozenset(),
    check_vma: bool = True,
) -> _F:
    """Like `jax.shard_map`, but keeps the type of the function and accepts keyword arguments.

    **Arguments:**

    - `f`: the function to apply to each shard.
    - `out_specs`: a pytree prefix of `PartitionSpec`s for the result.
    - `in_specs`: a pytree prefix of `PartitionSpec`s for the tuple of arguments. By default these are
        inferred from the shardings of the arguments. (Only available for mesh axes of type `Explicit`.)
    - `mesh`: the mesh to use. By default this is the current mesh from `jax.set_mesh`.
    - `axis_names`: the mesh axes over which `f` is manual. Default: all of them.
    - `check_vma`: whether JAX should check that outputs are replicated if `out_specs` claims so. Default
        `True`.

    **Returns:**

    A function on whole arrays.

    **Raises:**

    - `ValueError`: if `in_specs` is omitted and one of the mesh axes is of type `Auto`.
    - `TypeError`: if a keyword-only argument is passed: `in_specs` cannot describe these.

    !!! example

        ```python
        from jax.sharding import PartitionSpec as P
        from quaxlike.utils import shard_map

        def total(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x.sum(), "x")

        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=auto)
        shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P())(jnp.ones(8))
        ```
    """
    given = {"in_specs": in_specs, "mesh": mesh, "axis_names": axis_names or None}
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if not check_vma:
        options["check_vma"] = False
    sharded = jax.shard_map(f, out_specs=out_specs, **options)

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if in_specs is None:
            _require_explicit_axes(mesh, axis_names)
        if kwargs:
            bound = inspect.signature(f).bind(*args, **kwargs)
            if bound.kwargs:
                raise TypeError(
                    f"shard_map passes arguments by position, and {', '.join(bound.kwargs)} of "
                    f"{_name(f)} can only be given by keyword here. Make the parameter positional, "
                    "give the ones in front of it too, or bind the value with functools.partial."
                )
            args = bound.args
        return sharded(*args)

    return cast(_F, wrapper)


def _require_explicit_axes(mesh: Any, axis_names: Set[Hashable]) -> None:
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = {
        name: kind.name
        for name, kind in types.items()
        if (not axis_names or name in axis_names) and kind == jax.sharding.AxisType.Auto
    }
    if others:
        raise ValueError(
            "shard_map without `in_specs` infers them from the arguments, for which all its mesh "
            f"axes must be Explicit; found {others}. Give `in_specs`, or make the mesh with "
            "axis_types=(jax.sharding.AxisType.Explicit, ...)."
        )


@overload
def linearize(
    fn: Callable[[*_Ts], tuple[_R, _Aux]], *primals: *_Ts, has_aux: Literal[True]
) -> tuple[_R, Callable[[*_Ts], _R], _Aux]: ...
@overload
def linearize(
    fn: Callable[[*_Ts], _R], *primals: *_Ts, has_aux: Literal[False] = False
) -> tuple[_R, Callable[[*_Ts], _R]]: ...
@checked
def linearize(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Like `jax.linearize`, but with precise types. Returns a function's value and its linear derivative.

    **Arguments:**

    - `fn`: the function to linearise.
    - `*primals`: the point at which to linearise.
    - `has_aux`: whether `fn` returns a pair of its output and some auxiliary data. Default `False`.

    **Returns:**

    A tuple `(output, jvp)`, or `(output, jvp, aux)` if `has_aux=True`. Here `jvp` maps tangents for the
    primals to a tangent for the output.

    **Raises:**

    - `NotImplementedError`: if the derivative passes through
        [`non_differentiable`][quaxlike.utils.non_differentiable].

    !!! example

        ```python
        from quaxlike.utils import linearize

        y, jvp = linearize(jnp.sin, 0.0)
        jvp(1.0)  # cos(0.0)
        ```
    """
    out = jax.linearize(fn, *primals, has_aux=has_aux)
    check_differentiable(out[1], primals)
    return out
