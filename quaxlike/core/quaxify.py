"""`quaxify`: runs a function with Values in place of arrays.

A level must be closed exactly once, even if the function raises an error. So `levels` and JAX's current trace
are restored in a `finally` block, and the trace is marked as ended: using a leaked tracer raises an error,
rather than silently computing with a dead trace.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._checked import PyTree
from . import compat, recording
from .derivatives import check_jacobian
from .hooks import Endless, endless_error
from .levels import running
from .policy import MaterialisationError
from .rules import GLOBAL, RuleError, RuleSet, active_layers, mark_in_use, resolver, use_rule_sets
from .source_lines import shorten_traceback
from .trace import Level, QuaxTrace, ValueTracer
from .values import Value, aval_of, is_value, kind_of

_T = TypeVar("_T")


@jtu.register_pytree_with_keys_class
class _Quaxified(Generic[_T]):
    """A quaxified function: a pytree over the original function, which may contain Values."""

    __slots__ = ("__dict__", "__weakref__", "_filter_spec", "_fn", "_rules")

    def __init__(self, fn: Callable[..., _T], filter_spec: PyTree, rules: RuleSet | None) -> None:
        self._fn = fn
        self._filter_spec = filter_spec
        self._rules = rules
        functools.update_wrapper(self, fn, updated=())

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> _T:
        try:
            if self._whole is not None and active_layers.get() == (GLOBAL,) and _is_outermost():
                return self._whole(*args, **kwargs)
            return self._call(*args, **kwargs)
        except (MaterialisationError, RuleError) as error:
            shorten_traceback(error)
            raise
        except Endless as error:
            raise endless_error(error) from None
        except RecursionError as error:
            if (message := recording.endless(error)) is None:
                raise
            raise endless_error(Endless(message)) from None

    @functools.cached_property
    def _whole(self) -> Callable[..., Any] | None:
        """For a jitted function: the whole call as a single jitted function.

        An optimisation: eager calls go through a single jit, rather than dispatching the inner one.
        """
        if self._rules is not None or self._filter_spec is not True:
            return None
        if isinstance(self._fn, types.MethodType) and compat.is_jit_without_options(self._fn.__func__):
            return functools.partial(self._quaxified_jit(self._fn.__func__), self._fn.__self__)
        return self._quaxified_jit(self._fn) if compat.is_jit_without_options(self._fn) else None

    @staticmethod
    @compat.weakly_cached
    def _quaxified_jit(jitted: Any) -> Callable[..., Any]:
        """All quaxified versions of `jitted` share this: quaxifying it again doesn't recompile it."""
        of = weakref.ref(jitted)  # a strong reference would keep it in the cache forever

        @functools.wraps(jitted.__wrapped__)
        def whole(*args: Any, **kwargs: Any) -> Any:
            return _Quaxified(cast(Any, of()), True, None)._call(*args, **kwargs)

        return jax.jit(whole)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        layers = active_layers.get()
        # Move our rule set to the front. It may already be in the list, e.g. for a nested function quaxified
        # with the same rules.
        if self._rules is not None and self._rules is not layers[0]:
            with use_rule_sets((self._rules, *(x for x in layers if x is not self._rules))):
                return self._call(*args, **kwargs)
        mark_in_use()
        parent = compat.current_trace()
        trace = QuaxTrace(parent, Level(), resolver(layers))
        copies = None
        if "flax.nnx" in sys.modules:
            from .variables import Copies  # never loaded without Flax

            copies = Copies()
        levels = running.levels
        # Rules and operators look up the running level here, so remove it even on an error.
        levels.append(trace)
        given = self._fn, args, kwargs
        try:
            # Modules are copied under this trace, so the function may mutate them.
            compat.set_trace(trace)
            fn, args, kwargs = _select(trace, copies, self._filter_spec, *given)
            out = fn(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, Endless | RecursionError):
                _name_culprit(error, given)
            raise
        finally:
            compat.set_trace(parent)
            levels.pop()
            # From now on, using a leaked tracer (e.g. through a global) raises an error.
            trace.ended = True
        if copies is not None:
            # Not done after an error, which must leave the Variables unchanged.
            copies.write_back(trace.unwrap_tree)
        out = trace.unwrap_tree(out)
        return check_jacobian(out, is_value) if type(parent) is compat.JVPTrace else out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else jtu.Partial(self, instance)

    def __repr__(self) -> str:
        return f"quaxify({self._fn!r})"

    def tree_flatten_with_keys(self) -> Any:
        return [(jtu.GetAttrKey("_fn"), self._fn)], (self._filter_spec, self._rules)

    def tree_flatten(self) -> Any:
        return [self._fn], (self._filter_spec, self._rules)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "_Quaxified[Any]":
        out = object.__new__(cls)  # skip the checks, as children can be anything, e.g. bools
        out._fn, (out._filter_spec, out._rules) = children[0], aux
        functools.update_wrapper(out, out._fn, updated=())
        return out


def quaxify(
    fn: Callable[..., _T], /, filter_spec: PyTree = True, *, rules: RuleSet | None = None
) -> Callable[..., _T]:
    """Wraps a function to accept Values where it expects arrays.

    Every primitive called with a Value is dispatched to a registered rule, based on all operand types. If no
    rule matches, the Value is materialised, subject to [`quaxlike.on_materialise`][]. Plain arrays are never
    wrapped, and reach primitives as usual.

    **Arguments:**

    - `fn`: any callable, such as a function, a method, an Equinox module, or a transformed function.
    - `filter_spec`: which Values in `(fn, args, kwargs)` to dispatch on: a bool, a function on leaves (where
        each Value is a leaf), or a prefix of the tree `(fn, args, kwargs)`, as for `eqx.partition`. Other
        Values are passed through unchanged: a nested `quaxify` can dispatch on them, and otherwise they
        behave as outside `quaxify`. Values closed over or created by `fn` are treated as part of `fn`.
        Default: all Values.
    - `rules`: a [`quaxlike.RuleSet`][] to try before the global rules, inherited by any nested `quaxify`.

    **Returns:**

    A function with the same signature as `fn`, returning Values if the computation results in Values. Type
    checkers accept any arguments for it: those of `fn` are annotated as arrays.

    **Raises:**

    `ValueError` if `filter_spec` isn't a prefix of `(fn, args, kwargs)`; `TypeError` if it contains anything
    other than bools and functions. (Arguments for `fn` have to be passed in a second pair of parentheses.)

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w = ql.LoraArray(jnp.ones((4, 3)), a=jnp.ones((1, 3)), b=jnp.ones((4, 1)))
        ql.quaxify(jnp.matmul)(w, jnp.arange(3.0))
        ```
    """
    if not callable(fn):
        raise TypeError(f"quaxify takes a callable; found {fn!r}.")
    if filter_spec is not True:
        check_filter_spec("quaxify", filter_spec)
    if rules is not None and not isinstance(rules, RuleSet):
        raise TypeError(f"quaxify takes a quaxlike.RuleSet as rules; found {rules!r}.")
    return _Quaxified(fn, filter_spec, rules)


def check_filter_spec(caller: str, filter_spec: PyTree) -> None:
    """Raises a `TypeError` if a filter contains arrays, Values or other data.

    The user typically meant to pass these to the function.
    """
    if isinstance(filter_spec, bool | types.FunctionType | functools.partial):
        return
    for path, leaf in jtu.tree_leaves_with_path(filter_spec, is_leaf=_is_instance):
        if isinstance(leaf, type) and issubclass(leaf, Value):
            raise TypeError(
                f"{caller} takes as filter_spec a bool, a function on leaves, or a prefix of (fn, args, "
                f"kwargs) made of these; found the class {leaf.__name__}. To select its values, write "
                f"`lambda x: isinstance(x, {leaf.__name__})`."
            )
        if is_value(leaf) or not (isinstance(leaf, bool) or callable(leaf)):
            typed = is_value(leaf) or hasattr(leaf, "dtype")
            kind = "array" if kind_of(leaf) == "array" else type(leaf).__name__
            found = f"{kind} {leaf.dtype}{list(leaf.shape)}" if typed else repr(leaf)[:80]
            where = f" at {jtu.keystr(path)} of the {type(filter_spec).__name__}" if path else ""
            raise TypeError(
                f"{caller} takes as filter_spec a bool, a function on leaves, or a prefix of (fn, args, "
                f"kwargs) made of these; found {found}{where}. To call the function with it, write "
                f"`quaxlike.{caller}(fn)(...)`."
            )


def _is_outermost() -> bool:
    """Returns whether this call is neither being traced nor recorded."""
    return compat.is_eval_trace(compat.current_trace()) and recording.active() is None


def _select(
    trace: QuaxTrace,
    copies: Any,
    filter_spec: PyTree,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Replaces each selected Value in `(fn, args, kwargs)` by a tracer."""

    def box(leaf: Any) -> Any:
        return trace.enter(leaf) if is_value(leaf) else leaf

    def shared(tree: Any, copy: Any) -> Any:
        return copy if copies is None else copies.shared(tree, copy)

    def box_tree(tree: Any) -> Any:
        kind = kind_of(tree)
        if kind == "value":
            return box(tree)
        plain = kind == "array" or isinstance(tree, types.FunctionType)
        return tree if plain else shared(tree, jtu.tree_map(box, tree, is_leaf=_is_instance))

    # Fast path for the default: box each argument separately, without building one tree of them all.
    if filter_spec is True:
        return box_tree(fn), map(box_tree, args), {k: box_tree(v) for k, v in kwargs.items()}
    tree = (fn, args, kwargs)
    try:
        dynamic, static = eqx.partition(tree, filter_spec, is_leaf=_is_instance)
    except ValueError as error:
        found = str(jtu.tree_structure(tree, is_leaf=_is_instance))
        raise ValueError(
            "filter_spec of quaxify must be a bool, a function on leaves, or a prefix of (fn, args, kwargs); "
            f"found {filter_spec!r} for {found if len(found) < 300 else found[:300] + '...'}: "
            f"{' '.join(str(error).split())}"
        ) from None
    passed_by = [x for x in jtu.tree_leaves(static, is_leaf=_is_instance) if is_value(x)]
    # The filter also applies to Values that weren't arguments, so remember those it didn't select.
    trace.tag.dispatches_on = functools.partial(_dispatches_on, filter_spec, passed_by)
    boxed = jtu.tree_map(box, dynamic, is_leaf=_is_instance)
    return shared(tree, eqx.combine(boxed, static, is_leaf=_is_instance))


def _name_culprit(error: Exception, call: Any) -> None:
    """Adds a note to an error raised when computing an argument's shape."""
    try:
        leaves = jtu.tree_leaves_with_path(call, is_leaf=_is_instance)
    except Exception:  # not a pytree, which may be the very reason for the error
        return
    for path, leaf in leaves:
        try:
            if is_value(leaf):
                aval_of(leaf)
        except Exception as own:
            if str(own) == str(error):
                whose = ("function", "arguments", "keyword arguments")[path[0].idx]
                name = jtu.keystr(path[1:], simple=True, separator=".")
                error.add_note(f"It is {name} of the {whose}." if name else f"It is the {whose}.")
                return


def _is_instance(x: Any) -> bool:
    """Returns whether `x` is an instance of a Value type. Unlike `is_value`, this includes instances with
    missing parts.

    An incomplete Value isn't boxed, but passed through with everything nested inside it.
    """
    return kind_of(x) == "value"


def _dispatches_on(filter_spec: PyTree, passed_by: Sequence[Value], value: Value) -> bool:
    """Returns whether to dispatch on a late Value, i.e. one that wasn't an argument.

    False for any Value in `passed_by`, otherwise up to the filter. If this is a prefix of
    `(fn, args, kwargs)`, its entry for `fn` applies.
    """
    if any(value is x for x in passed_by):
        return False
    spec = filter_spec[0] if isinstance(filter_spec, tuple) else filter_spec
    return bool(spec(value)) if callable(spec) else spec is not False


def value_of(x: Any) -> Any:
    """Returns the Value behind an operand inside a quaxified function. Anything else is returned unchanged.

    Use this to inspect a Value (e.g. its static fields), or to compute something no primitive can express.
    The arrays inside the Value belong to the level outside the `quaxify`.
    """
    return x.quax_value if isinstance(x, ValueTracer) else x
