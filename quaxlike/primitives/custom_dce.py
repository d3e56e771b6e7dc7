"""`custom_dce`, for functions that can compute less if some results are unused.

Nothing outliving a trace may contain its tracers. JAX eliminates dead code only after the trace has ended,
and this is when it calls the user-provided rule: a tracer in the rule's closure would be a leak. So all
tracers are extracted from closures beforehand and passed as operands, and the new values are put back in when
the rule is called.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.errors import UnexpectedTracerError
from jax.extend.core import DebugInfo

from .._checked import checked
from ..core import compat
from .dce_call import (
    Narrowed,
    RuleInProgressError,
    Used,
    dce_call_p,
    declares_derivative,
    memoised,
    with_derivative_of,
)
from .forms import merge, split

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R", bound=Callable[..., Any])

# This is part of JAX's cache keys, so that defining a new rule for a function retraces everything traced with
# the old one.
_redefinitions = jax.make_user_context(0)
_num_redefinitions = 0
_lock = threading.Lock()


class custom_dce(Generic[_P, _T]):
    """Gives a function a rule for dead code elimination, i.e. what to compute if only some results are used.

    Normally `jax.jit` removes unused results by itself. It can't do so for a kernel, as this always computes
    all its results. By defining a rule, you can call a different kernel computing only some of them. The rule
    is called when code is staged (that is, under `jax.jit`, and for the bodies of `scan`, `cond`,
    `checkpoint` etc.). It isn't called when running eagerly, or when all results are used. If the rule
    doesn't use some inputs then these aren't computed either.

    The rule is used under every transform. In particular, JAX differentiates the computation defined by the
    rule, so any results used by neither the caller nor the backward pass are never computed. For this to
    work, the backward pass recomputes from the inputs rather than using residuals. (XLA then merges anything
    computed by both passes.) If the function has a custom derivative, either itself or in a function it calls
    (using `jax.custom_vjp`, `jax.custom_jvp` or `jax.lax.stop_gradient`), then this derivative is used,
    regardless of which results are used.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import quaxlike as ql

        @ql.custom_dce
        def sin_and_cos(x, y):
            return jnp.sin(x) * y, jnp.cos(x) * y

        @sin_and_cos.def_dce
        def _(used_outs, x, y):
            return (
                jnp.sin(x) * y if used_outs[0] else None,
                jnp.cos(x) * y if used_outs[1] else None,
            )

        jax.jit(lambda x, y: sin_and_cos(x, y)[0])(1.0, 2.0)
        ```

    **Arguments:**

    - `fun`: a function on pytrees. Any non-array leaves (e.g. activation functions) are passed through.
    - `static_argnums`: the positions of any arguments to pass on unchanged.

    The interface is the same as for `jax.experimental.custom_dce`, part of JAX until version 0.9.
    """

    functions_held = ("fun", "_rule", "__wrapped__")  # these may hold tracers, see `extract_tracers`

    @checked
    def __init__(self, fun: Callable[_P, _T], *, static_argnums: int | Sequence[int] = ()) -> None:
        if not callable(fun):
            raise TypeError(f"custom_dce takes a function; found {fun!r}.")
        self.fun = fun
        functools.update_wrapper(self, fun, updated=())
        self.static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self._rule: Callable[..., Any] | None = None
        self.identity = object()  # shared by all copies, including those with replaced tracers

    def def_dce(self, rule: _R) -> _R:
        """Sets the rule.

        **Arguments:**

        - `rule`: this is called as `rule(*statics, used_outs, *args)`, where `statics` are the arguments at
            `static_argnums`, `used_outs` is a tree of bools specifying which results are used, and `args` are
            the remaining arguments. It should return the function's result. Any unused arrays are ignored. As
            a shorthand, you can return None in place of an unused array or tree. You can also return a single
            array in place of a tree (or the whole result), to use for every array in the tree.

        **Returns:** the rule.
        """
        global _num_redefinitions
        if not callable(rule):
            raise TypeError(f"def_dce of custom_dce function {self.name} takes a function; found {rule!r}.")
        with _lock:
            if self._rule is not None:
                _num_redefinitions += 1
                _redefinitions.set_global(_num_redefinitions)
            self._rule = rule
        return rule

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._rule is None:
            raise AttributeError(
                f"custom_dce function {self.name} has no rule; define one with {self.name}.def_dce(rule)"
            )
        positional = self._resolve(args, kwargs)
        statics, dynamic = self._separate(positional)
        if compat.is_eval_trace(compat.current_trace()):
            return cast(Any, self.fun)(*positional)
        return _call(self, self._rule, statics, dynamic)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else jtu.Partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        # Look up any other attributes on the function itself, e.g. the methods of a `jax.custom_jvp`,
        # `custom_vjp` or `custom_vmap`.
        if name == "fun" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.fun, name)

    @property
    def dce_rule(self) -> Callable[..., Any] | None:
        """The rule, or None if it hasn't been defined yet."""
        return self._rule

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.fun, "__name__", repr(self.fun))

    def _resolve(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
            bound.apply_defaults()
            # Their defaults are fine, as the function itself has these.
            if passed := [name for name in bound.kwargs if name in kwargs]:
                raise TypeError(f"{', '.join(passed)} can be given by keyword only")
        except TypeError as error:
            raise TypeError(
                f"the arguments of the custom_dce function {self.name} cannot be made positional: {error}"
            ) from error
        return list(bound.args)

    def _separate(self, args: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns the static arguments and the other arguments, each as a dictionary from position to value.
        Static arguments are in the order of `static_argnums`.
        """
        positions = []
        for i in self.static_argnums:
            if not -len(args) <= i < len(args):
                raise ValueError(
                    f"static_argnums of custom_dce function {self.name} has {i}, and the function was "
                    f"called with {len(args)} arguments"
                )
            positions.append(i % len(args))
        statics = {i: args[i] for i in positions}
        for i, static in statics.items():
            if any(isinstance(leaf, Tracer) for leaf in _leaves(static)):
                raise UnexpectedTracerError(
                    f"argument {i} of custom_dce function {self.name} is static (static_argnums="
                    f"{self.static_argnums}) and holds a tracer, {static!r}; arrays cannot be static"
                )
        return statics, {i: x for i, x in enumerate(args) if i not in statics}


def _call(
    of: custom_dce[Any, Any], rule: Callable[..., Any], statics: dict[int, Any], dynamic: dict[int, Any]
) -> Any:
    """Calls a `custom_dce` function whilst it is being traced."""
    arrays, given = _Mixed.of(dynamic, is_leaf=becomes_array)
    # By the time the rule is called this trace has ended, so turn the tracers in its closure into operands.
    # (The function itself doesn't need this: it is traced below.)
    held, captured = extract_tracers((rule, list(statics.values())))
    avals = [jax.typeof(x) for x in (*captured, *arrays)]
    debug_info = DebugInfo("custom_dce", of.name, None, None)
    returned: Any = None

    def fun(*operands: Any) -> list[Any]:
        nonlocal returned
        args = statics | given.filled(operands[len(captured) :])
        arrays, returned = _Mixed.of(cast(Any, of.fun)(*[args[i] for i in range(len(args))]))
        return arrays

    jaxpr, consts = compat.trace_to_jaxpr(fun, avals, debug_info)
    jaxpr = compat.with_consts(jaxpr, ())
    narrow = _Narrow(
        name=of.name,
        identity=of.identity,
        refused=_refused(of.identity),
        axes=compat.named_axes(),
        debug_info=debug_info,
        held=held,
        num_captured=len(captured),
        num_consts=len(consts),
        avals=avals,
        given=given,
        returned=returned,
        out_avals=jaxpr.out_avals,
        declares=jaxpr if declares_derivative(jaxpr) else None,
    )
    operands = (*consts, *captured, *arrays)
    out = dce_call_p.bind(*operands, jaxpr=jaxpr, rule=memoised(narrow), name=of.name)
    return returned.filled(out)


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """A tree of both arrays and other objects, with the arrays taken out."""

    tree: Any
    mask: Sequence[bool]  # whether each leaf is an array
    others: Sequence[Any]

    @classmethod
    def of(cls, value: Any, is_leaf: Any = None) -> tuple[list[Any], "_Mixed"]:
        leaves, tree = jtu.tree_flatten(value, is_leaf=is_leaf)
        mask = [_is_array(x) for x in leaves]
        arrays, others = split(mask, leaves)
        return arrays, cls(tree, mask, others)

    def filled(self, arrays: Sequence[Any]) -> Any:
        return jtu.tree_unflatten(self.tree, merge(self.mask, arrays, self.others))


@dataclasses.dataclass(eq=False)
class _Narrow:
    """The rule for one particular call. This outlives the call's trace, so it contains no tracers."""

    name: str
    identity: object
    refused: frozenset[Used]
    axes: dict[Hashable, int]
    debug_info: DebugInfo
    held: Any  # the user-provided rule together with the static arguments
    num_captured: int
    num_consts: int
    avals: Sequence[Any]  # for the captured tracers and then the arguments; the constants aren't included
    given: _Mixed
    returned: _Mixed
    out_avals: Sequence[Any]
    declares: Any  # the jaxpr of the function if it declares a derivative, otherwise None

    def __call__(self, used: Used) -> Narrowed:
        if used in self.refused:
            raise RuleInProgressError

        def narrowed(*operands: Any) -> list[Any]:
            captured, arrays = operands[: self.num_captured], operands[self.num_captured :]
            rule, statics = fill_tracers(self.held, captured)
            unused = dataclasses.replace(self.returned, others=[False] * len(self.returned.others))
            out = rule(*statics, unused.filled(used), *self.given.filled(arrays).values())
            return self._used_results(out, used)

        with compat.bind_axes(self.axes), _tracing(self.identity, self.refused | {used}):
            jaxpr, consts = compat.trace_to_jaxpr(narrowed, self.avals, self.debug_info)
        if any(isinstance(c, Tracer) for c in consts):
            raise UnexpectedTracerError(
                f"the rule {self.rule_name} of custom_dce function {self.name} uses a tracer "
                "that it was not passed; pass it to the function as an argument"
            )
        # If this rule calls other functions with a rule, then this applies their rules as well. It also
        # removes any operands no longer used.
        jaxpr = compat.with_consts(jaxpr, consts)
        jaxpr, used_ins = compat.dce(jaxpr, [True] * len(jaxpr.out_avals))
        used_ins = (*[False] * self.num_consts, *used_ins)
        if self.declares is None:
            return jaxpr, used_ins
        return with_derivative_of(self.declares, used, jaxpr, used_ins)

    @property
    def rule_name(self) -> str:
        rule = self.held[0]
        return getattr(rule, "__name__", repr(rule))

    def _used_results(self, out: Any, used: Used) -> list[Any]:
        paths = [path for path, _ in jtu.tree_flatten_with_path(self._like(object()))[0]]
        values = split(self.returned.mask, self._leaves(out))[0]
        paths = split(self.returned.mask, paths)[0]
        results = zip(paths, used, self.out_avals, values, strict=True)
        return [self._checked(path, aval, value) for path, is_used, aval, value in results if is_used]

    def _leaves(self, out: Any) -> list[Any]:
        """Returns the rule's result for each leaf, or None if it didn't return anything there."""
        unused = object()
        full = self._like(unused)
        if {type(out), type(full)} == {list, tuple} and len(out) == len(full):
            out = type(full)(out)
        try:
            out = jax.tree.broadcast(out, full, is_leaf=lambda x: x is None)
        except ValueError as error:
            raise TypeError(
                f"the rule {self.rule_name} of custom_dce function {self.name} must return the "
                f"structure that the function returns, {self.returned.tree}, with None for what is not used; "
                f"found {jtu.tree_structure(out)}"
            ) from error
        return self.returned.tree.flatten_up_to(out)

    def _like(self, leaf: Any) -> Any:
        return jtu.tree_unflatten(self.returned.tree, [leaf] * self.returned.tree.num_leaves)

    def _checked(self, path: Any, aval: Any, value: Any) -> Any:
        found = jax.typeof(value) if _is_array(value) else None
        if found is None or (found.shape, found.dtype) != (aval.shape, aval.dtype):
            raise ValueError(
                f"the rule {self.rule_name} of custom_dce function {self.name} must return every "
                f"result that is used; at output{jtu.keystr(path)} it returned "
                f"{value if found is None else found.str_short()}, expected {aval.str_short()}"
            )
        return compat.retyped(value, aval)


_progress = threading.local()


def _refused(identity: object) -> frozenset[Used]:
    """Returns the calls for which the rule is currently being traced.

    A rule may call its own function. However it mustn't be applied to the same call a second time: this would
    lead to infinite recursion.
    """
    return getattr(_progress, "refused", {}).get(identity, frozenset())


@contextlib.contextmanager
def _tracing(identity: object, refused: frozenset[Used]) -> Iterator[None]:
    before = getattr(_progress, "refused", {})
    _progress.refused = before | {identity: refused}
    try:
        yield
    finally:
        _progress.refused = before


def _is_array(x: Any) -> bool:
    if isinstance(x, type):  # it may have `__jax_array__`, but only for its instances
        return False
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


# Tracers that functions have closed over ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Hole:
    """A placeholder for the tracer with this index."""

    index: int


def extract_tracers(value: _T) -> tuple[_T, list[Any]]:
    """Extracts any tracers captured by functions in closures, defaults, partials or bound methods.

    Objects with `__jax_array__` are first converted to arrays.

    **Returns:** the tree without its tracers, together with a list of the tracers, each appearing once. Use
    `fill_tracers` for the inverse.
    """
    tracers: list[Any] = []

    def leaf(x: Any) -> Any:
        if becomes_array(x):
            x = x.__jax_array__()
        if not isinstance(x, Tracer):
            return x
        found = [i for i, t in enumerate(tracers) if t is x]
        if not found:
            tracers.append(x)
        return _Hole(found[0] if found else len(tracers) - 1)

    template = _Copy(leaf).tree(value)
    return (template, tracers) if tracers else (value, [])


def fill_tracers(template: _T, values: Sequence[Any]) -> _T:
    """The inverse of `extract_tracers`, but filling in `values` rather than the original tracers."""

    def fill(x: Any) -> Any:
        return values[x.index] if isinstance(x, _Hole) else x

    return _Copy(fill).tree(template) if values else template


def becomes_array(x: Any) -> bool:
    """Returns whether `x` (possibly a tree) can be converted to an array. (A type can opt out by setting
    `__jax_array__` to None.)
    """
    return not isinstance(x, type) and getattr(x, "__jax_array__", None) is not None


def _sorts_keys(x: Any) -> bool:
    """Returns whether JAX sorts the keys of `x`. This raises an error if they can't be compared. Untraced
    dictionaries can have any keys, so we look into them ourselves.
    """
    return type(x) in (dict, collections.defaultdict)


def _leaves(tree: Any) -> Iterator[Any]:
    for leaf in jtu.tree_leaves(tree, is_leaf=_sorts_keys):
        if _sorts_keys(leaf):
            yield from itertools.chain.from_iterable(map(_leaves, leaf.values()))
        else:
            yield leaf


class _Copy:
    """Copies functions together with everything inside them.

    Functions can contain themselves and each other, so each function is copied just once, and the copy is
    remembered before copying its contents.
    """

    def __init__(self, of_leaf: Callable[[Any], Any]) -> None:
        self._of_leaf = of_leaf
        # Keyed by id, which is safe: this also holds on to the original.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def tree(self, value: Any) -> Any:
        return jtu.tree_map(self._leaf, value, is_leaf=lambda x: becomes_array(x) or _sorts_keys(x))

    def _leaf(self, x: Any) -> Any:
        if _sorts_keys(x):
            new = copy.copy(x)
            new.update({key: self.tree(item) for key, item in x.items()})
            return new
        if id(x) in self._copies:
            return self._copies[id(x)][1]
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self._leaf(x.__func__), self.tree(x.__self__))
        if isinstance(x, functools.partial):
            return functools.partial(self._leaf(x.func), *self.tree(x.args), **self.tree(x.keywords))
        if hasattr(type(x), "functions_held"):
            new = self._remember(x, copy.copy(x))
            for name in x.functions_held:
                setattr(new, name, self._leaf(getattr(x, name)))
            return new
        return self._of_leaf(x)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
            return fn
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells)
        functools.update_wrapper(new, fn)
        vars(new).pop("__wrapped__")
        self._remember(fn, new)
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            try:
                contents = old.cell_contents
            except ValueError:  # the variable doesn't have a value yet
                continue
            cell.cell_contents = self.tree(contents)
        new.__defaults__ = self.tree(fn.__defaults__)
        new.__kwdefaults__ = self.tree(fn.__kwdefaults__)
        return new

    def _remember(self, old: Any, new: Any) -> Any:
        self._copies[id(old)] = (old, new)
        return new
