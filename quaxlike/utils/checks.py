"""Guards that raise an error if a function is traced or differentiated."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from .._checked import checked

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


class NotJaxCompatibleError(TypeError):
    """Raised if a [`no_jax_tracing`][quaxlike.utils.no_jax_tracing] function is called with traced values."""


def is_traced(x: Any) -> bool:
    """Returns whether a value (or any leaf of a pytree) is traced by a JAX transform.

    **Arguments:**

    - `x`: anything.

    **Returns:**

    `True` if `x` is a tracer or contains one.

    !!! example

        ```python
        from quaxlike.utils import is_traced

        def log(loss: jax.Array) -> None:
            if not is_traced(loss):
                print(float(loss))
        ```
    """
    return any(isinstance(leaf, Tracer) for leaf in _leaves(x))


@checked
def no_jax_tracing(fn: _F) -> _F:
    """Wraps a function to raise an error when called with traced values.

    Use this for functions with side effects: under `jax.jit` these only happen once, during tracing.

    Every leaf of the arguments is checked. Tracers can also be smuggled in by closing over them. So this also
    checks everything captured by the function (through closures, defaults, `functools.partial` and bound
    methods), and by any functions amongst the arguments.

    **Arguments:**

    - `fn`: a function that has side effects or needs concrete values.

    **Returns:**

    The wrapped function.

    **Raises:**

    - `NotJaxCompatibleError`: if it is called with a tracer. The error message names the function and the
        argument.

    !!! example

        ```python
        import numpy as np
        from quaxlike.utils import no_jax_tracing

        @no_jax_tracing
        def save(path: str, x: jax.Array) -> None:
            np.save(path, x)

        save("x.npy", jnp.ones(3))  # under jax.jit: NotJaxCompatibleError
        ```
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for index, arg in enumerate(args):
            _forbid_tracers(arg, name, f"argument {index}")
        for key, arg in kwargs.items():
            _forbid_tracers(arg, name, f"argument {key!r}")
        _forbid_tracers(fn, name, "what it has captured")
        return fn(*args, **kwargs)

    return cast(_F, guarded)


def _forbid_tracers(x: Any, name: str, where: str) -> None:
    for leaf in _leaves_and_captures(x, set()):
        if isinstance(leaf, Tracer):
            raise NotJaxCompatibleError(
                f"{name} must not be traced by JAX (jit, grad, vmap, ...), but {where} holds the "
                f"tracer {leaf.aval}. Call it outside of the transform, or by jax.pure_callback."
            )


def _leaves_and_captures(x: Any, seen: set[int]) -> Iterator[Any]:
    for leaf in _leaves(x):
        yield leaf
        # Functions can capture each other in a cycle, so track what we've already seen.
        if callable(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _leaves_and_captures(_captures(leaf), seen)


def _leaves(x: Any) -> Iterator[Any]:
    # JAX sorts the keys of dictionaries, and raises an error if they can't be compared. An untraced function
    # may be passed anything, so look into dictionaries ourselves.
    for leaf in jax.tree.leaves(x, is_leaf=_sorts_keys):
        if _sorts_keys(leaf):
            for item in leaf.values():
                yield from _leaves(item)
        else:
            yield leaf


def _sorts_keys(x: Any) -> bool:
    return type(x) in (dict, collections.defaultdict)


def _captures(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [fn.func, fn.args, fn.keywords]
    places = ("__wrapped__", "__self__", "__func__", "__defaults__", "__kwdefaults__")
    captured = [getattr(fn, place, None) for place in places]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:  # raised if the variable hasn't been assigned yet
            continue
    return captured


def non_differentiable(x: _T) -> _T:
    """The identity function, except it raises an error if differentiated.

    Use this to mark a quantity on which no derivative should depend, so a mistake isn't silently treated as a
    zero gradient. Derivatives that are symbolically zero or never used (for example because of
    `jax.lax.stop_gradient`) don't raise an error.

    Forward mode outside `jax.jit` eagerly computes every tangent, used or not, so it always raises an error.

    **Arguments:**

    - `x`: a pytree.

    **Returns:**

    `x`.

    **Raises:**

    - `NotImplementedError`: if it is differentiated.

    !!! example

        ```python
        from quaxlike.utils import non_differentiable


        def energy(positions: jax.Array, charges: jax.Array) -> jax.Array:
            return jnp.sum(positions**2 * non_differentiable(charges))


        # with argnums=1: NotImplementedError
        jax.grad(energy)(jnp.ones(3), jnp.ones(3))
        ```
    """
    return jax.tree.map(lambda leaf: _identity(leaf) if _has_tangents(leaf) else leaf, x)


def _has_tangents(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.custom_jvp
def _identity(x: jax.Array) -> jax.Array:
    return x


def _identity_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, SymbolicZero) else _forbidden_tangent_p.bind(t)


_identity.defjvp(_identity_jvp, symbolic_zeros=True)


class _ForbiddenError(NotImplementedError):
    pass


def _raise(*args: Any, **params: Any) -> Any:
    raise _ForbiddenError(
        "A derivative passes through `non_differentiable`, which allows none. Stop it with "
        "jax.lax.stop_gradient, or differentiate with respect to something else."
    )


def _forbidden_tangent_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (t,) = tangents
    out = _forbidden_tangent_p.bind(*primals)
    return out, t if type(t) is ad.Zero else _forbidden_tangent_p.bind(t)


def _forbidden_tangent_transpose(ct: Any, t: Any) -> list[Any]:
    return [ct] if type(ct) is ad.Zero else _raise()


# Applied to the tangent of `non_differentiable`: a linear identity raising an error when evaluated or
# transposed. Importantly, it does *not* raise an error whilst being traced: only later is it known whether
# the result depends on it. (If it doesn't then JAX never transposes it.)
_forbidden_tangent_p = Primitive("non_differentiable_tangent")
_forbidden_tangent_p.def_abstract_eval(lambda aval: aval)
_forbidden_tangent_p.def_impl(_raise)
ad.primitive_jvps[_forbidden_tangent_p] = _forbidden_tangent_jvp
ad.primitive_transposes[_forbidden_tangent_p] = _forbidden_tangent_transpose
batching.defvectorized(_forbidden_tangent_p)
mlir.register_lowering(_forbidden_tangent_p, _raise)


def check_differentiable(jvp: Callable[..., Any], primals: Sequence[Any]) -> None:
    """Raises an error if a linearised function's result depends on a tangent of `non_differentiable`.

    `linearize` only stages out the forbidden tangent, so without this check the error would only appear once
    the linearised function is called.
    """
    leaves, tree = jax.tree.flatten(tuple(primals))
    avals = [jax.typeof(x) for x in leaves]
    moving = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def of_moving(*tangents: Any) -> list[Any]:
        whole: list[Any] = [np.zeros(aval.shape, jax.dtypes.float0) for aval in avals]
        for i, t in zip(moving, tangents, strict=True):
            whole[i] = t
        out = jax.tree.leaves(jvp(*jax.tree.unflatten(tree, whole)))
        return [t for t in out if t.dtype != jax.dtypes.float0]

    of = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in moving]
    jaxpr = jax.make_jaxpr(of_moving)(*of)
    if not _is_forbidden(getattr(jaxpr, "jaxpr", jaxpr)):
        return

    def pull(cotangents: Any) -> Any:
        return jax.linear_transpose(of_moving, *of)(cotangents)

    try:
        jax.eval_shape(pull, jax.eval_shape(of_moving, *of))
    except _ForbiddenError:
        raise
    except (NotImplementedError, TypeError, ValueError):
        return  # there isn't a transpose to check, but calling the function still raises an error


def _is_forbidden(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is _forbidden_tangent_p or any(map(_is_forbidden, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
