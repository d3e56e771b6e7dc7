"""The trace for dispatching primitives on Values, and the tracer of a Value.

A plain array must never be boxed: only Values become `ValueTracer`s, and a primitive with no Value among its
operands is bound on the parent trace, with its result returned as it is. Otherwise every intermediate in a
quaxified function would incur dispatch overhead. Worse still, a concrete `if` on a plain array would raise an
error.

`process_primitive` runs for every primitive, so it avoids allocations, and looks up rules in a single dict.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from . import compat, high_level, recording
from .levels import level_of, not_dispatched
from .plain_arrays import hooks
from .policy import by_default, dense
from .rules import Resolver
from .source_lines import calling_frame
from .values import (
    KINDS,
    Value,
    aval_of,
    has_missing_parts,
    is_value,
    kind_of,
    missing_field,
)

Operands = Sequence[Any]
Params = dict[str, Any]

_TAKES_INDICES = frozenset([lax.gather_p, lax.dynamic_slice_p, lax.dynamic_update_slice_p])

# The tracer ---------------------------------------------------------------------------------------


class ValueTracer(jax.core.Tracer):  # pyright: ignore[reportMissingTypeArgument]
    """Represents a Value inside a quaxified function. Plain arrays are never wrapped."""

    __slots__ = ("aval", "quax_is_late", "quax_tag", "quax_value")
    # No conversion to an operand. JAX looks this up several times per call, so setting it is a fast path.
    __jax_array__ = None  # pyright: ignore

    def __init__(self, trace: Any, value: Value) -> None:
        self._trace = trace
        self.quax_tag = trace.tag
        self.quax_value = value

    def __getattr__(self, name: str) -> Any:
        if name == "aval":  # filled in on demand: many intermediates never need it
            self.aval = aval = aval_of(self.quax_value)
            return aval
        if name == "quax_is_late":  # whether the Value was adopted (only set if it was)
            return False
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.quax_value, name)

    def full_lower(self) -> Any:
        # JAX calls this on a derivative's results without tangents, and on operands that should be concrete
        # arrays. The latter never happens for a tracer of a running level.
        if not self._trace.ended:
            return self
        raise recording.leaked(self.quax_value, self, self.quax_is_late)

    def _contents(self) -> list[tuple[str, Any]]:
        # JAX searches these for anything being differentiated, to check that it isn't closed over.
        return [(jtu.keystr(at), leaf) for at, leaf in jtu.tree_leaves_with_path(self.quax_value)]

    def _short_repr(self) -> str:
        return f"ValueTracer<{type(self.quax_value).__name__}[{self.aval}]>"

    # `bool(x)`, `int(x)` and so on all materialise. `to_concrete_value` won't do: JAX also calls it when the
    # user hasn't requested a concrete value.

    def __bool__(self) -> bool:
        return bool(self._concrete("bool"))

    def __int__(self) -> int:
        return int(self._concrete("int"))

    def __float__(self) -> float:
        return float(self._concrete("float"))

    def __complex__(self) -> complex:
        return complex(self._concrete("complex"))

    def __index__(self) -> int:
        return self._concrete("index").__index__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._concrete("array").__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._concrete("dlpack").__dlpack__(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        return self._concrete("item").item(*args)

    def tolist(self) -> Any:
        return self._concrete("tolist").tolist()

    def _concrete(self, what: str) -> Any:
        with jexc.set_current_trace(self._trace.parent_trace):
            return dense(self.quax_value, what, hint="Python asks for its elements.")


def _operator(method: str, op: Callable[..., Any], only_inexact: bool) -> Callable[[Any, Any], Any]:
    """Defines an arithmetic `method` on tracers.

    Fast path: two Values with the same aval need no promotion, so their primitive is bound directly. (Going
    through `jax.numpy` takes several times as long.) Everything else is left to JAX.
    """
    # JAX's own operator, for everything but the fast path.
    forward = getattr(jax.core.Tracer, method)
    dtypes = jnp.inexact if only_inexact else jnp.number

    @functools.cache
    def applies_to(dtype: Any) -> bool:
        return jnp.issubdtype(dtype, dtypes)

    @functools.cache
    def equation() -> jexc.JaxprEqn:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(op)(scalar, scalar).eqns[0]

    def operator(self: ValueTracer, other: Any) -> Any:
        if type(other) is ValueTracer and other.quax_tag is self.quax_tag:
            aval: Any = self.aval
            same = aval is other.aval or aval == other.aval
            level: Any = compat.current_trace()
            if same and getattr(level, "tag", None) is self.quax_tag and applies_to(aval.dtype):
                eqn = equation()
                return level.process_primitive(eqn.primitive, (self, other), eqn.params)
        return forward(self, other)

    operator.__name__ = method
    return operator


for _method, _op in {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "truediv": lax.div}.items():
    _name = f"__{_method}__"
    setattr(ValueTracer, _name, _operator(_name, _op, only_inexact=_method == "truediv"))


# The trace ----------------------------------------------------------------------------------------


class Level(jexc.TraceTag):
    """A single running `quaxify`, and the tag shared by its traces and tracers."""

    # Whether the level dispatches on a Value that wasn't one of its arguments. None: on any Value.
    dispatches_on: Callable[[Value], bool] | None = None
    # Called with each primitive on plain arrays. Only set if some Value at this level requires it.
    follow: Callable[..., None] | None = None


class QuaxTrace(jax.core.Trace):
    """One level of `quaxify`: unwraps Values, finds the rule, and wraps its results.

    A level can have several traces, all sharing its `tag`: the functions passed to custom derivatives and
    `shard_map` close over tracers of the level, but run under a second trace.
    """

    ended = False  # whether the quaxified function has returned
    in_rule = False  # whether a rule (or one of our built-ins) is running

    def __init__(self, parent_trace: Any, tag: Level, resolver: Resolver) -> None:
        super().__init__()
        self.parent_trace = parent_trace
        self.tag = tag
        self.resolver = resolver
        self.requires_low = False

    # Dispatch of a primitive

    def process_primitive(self, primitive: jexc.Primitive, operands: Operands, params: Params, /) -> Any:
        # A hot path: this runs for every primitive, even on plain arrays. So build the cache key while
        # unwrapping, and compare tags rather than call methods.
        tag = self.tag
        unwrapped = list(operands)
        key: list[Any] = [primitive]
        plain = True
        for i, x in enumerate(unwrapped):
            if type(x) is ValueTracer and (x.quax_tag is tag or self.claims(x)):
                unwrapped[i] = value = x.quax_value
                key.append(type(value))
                plain = False
            else:
                key.append(None)
        # Without Values there is nothing to dispatch on, except for a primitive creating a Value out of plain
        # arrays, either directly or in one of its jaxprs.
        if plain and not ((_staged or primitive.name == high_level.NAME) and makes_values(primitive, params)):
            out = compat.bind_with_trace(primitive, self.parent_trace, operands, params)
            if tag.follow is not None:
                tag.follow(primitive, operands, params, out)
            return out
        # Rules run under the parent trace. Otherwise the primitives they bind on leaves would be dispatched
        # at this level again, rather than passed on to JAX.
        before, within = compat.current_trace(), self.in_rule
        compat.set_trace(self.parent_trace)
        self.in_rule = True
        try:
            if plain:
                out = self.fallback(primitive, unwrapped, params)
            else:
                out = self.dispatch_key(tuple(key), unwrapped, params)
        finally:
            self.in_rule = within
            compat.set_trace(before)
        return [self.wrap(x) for x in out] if primitive.multiple_results else self.wrap(out)

    def fallback(self, primitive: jexc.Primitive, operands: list[Any], params: dict[str, Any]) -> Any:
        """Computes the result if no rule matches.

        Uses a built-in of the interpreter, or else the default.
        """
        builtin = BUILTIN.get(primitive.name) or BUILTIN.get(getattr(primitive, "family", ""))
        rest = functools.partial(builtin or by_default, self)
        if (recorder := recording.active()) is not None:
            return recorder.follow(rest, primitive, operands, params)
        return rest(primitive, operands, params)

    def dispatch_key(self, key: Any, operands: list[Any], params: Params, only_rules: bool = False) -> Any:
        """Like `dispatch`, but takes a cache key, i.e. the primitive and the operand types.

        With `only_rules`, returns `NotImplemented` if there are no rules, or all of them decline.
        """
        primitive = key[0]
        if "_param_types" in params and getattr(primitive, "family", "") == "defined":
            params = primitive.plain_params(params)  # without what is just for JAX's caches
        rules = self.resolver.cache.get(key)
        if rules is None:
            rules = self.resolver.candidates(key, params.keys())
        # Modify `operands` in place: if all rules decline, the default also uses the checked indices.
        if rules and primitive in _TAKES_INDICES and not compat.is_eval_trace(compat.current_trace()):
            from .index_checks import with_checks  # checkify always traces: eager programs need no checks

            operands[:] = with_checks(primitive, operands, params)
        if (recorder := recording.active()) is not None:
            rules = [functools.partial(recorder.follow, rule) for rule in rules]
        for rule in rules:
            out = rule(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented if only_rules else self.fallback(primitive, operands, params)

    def dispatch(self, primitive: jexc.Primitive, operands: list[Any], params: dict[str, Any]) -> Any:
        """Applies `primitive` to Values and plain arrays. Rules call this with changed operands."""
        return self.dispatch_key((primitive, *value_types(operands)), operands, params)

    # Late Values: closed over, built in the body of the function, or used inside a rule

    def dispatches_on(self, value: Value) -> bool:
        """Returns whether this level dispatches on a late Value."""
        return self.tag.dispatches_on is None or self.tag.dispatches_on(value)

    def holds(self, value: Any) -> bool:
        """Returns whether this level can reach the arrays of a late Value (or a tracer).

        If not, they belong to a transform inside the quaxified function. Boxing the Value here regardless
        would bypass the transform, and e.g. lose its derivative.
        """
        return _lives_below(self, value)

    def adopt(self, value: Value) -> Any:
        """Turns a late Value into an operand: a tracer of this level, or an equation for making one."""
        check_complete(value)
        return self.enter_late(value) if self.holds(value) else stage(value)

    def enter_late(self, value: Value) -> "ValueTracer":
        """Boxes a late Value with arrays held by this level."""
        tracer = self.enter(self.unwrap_tree(value))
        tracer.quax_is_late = True
        return tracer

    def claims(self, tracer: ValueTracer) -> bool:
        """Returns whether another level adopted the tracer's Value, but this level should dispatch on it.

        This can happen because JAX caches jaxprs. For example, suppose a function closes over a Value, and is
        called through `jax.jit` or a scan inside several `quaxify`s in turn. Then the cached constants
        include the tracer created by the first call.
        """
        # If the tracer's level is still running somewhere below us, it belongs there, and is just an operand
        # here.
        late = tracer.quax_is_late and not any(tracer.quax_tag is x for x in _below(self))
        return late and self.dispatches_on(tracer.quax_value) and _lives_below(self, tracer.quax_value)

    # Primitives that carry functions. JAX calls a separate method for each of them.

    def process_custom_jvp_call(self, primitive, fun, jvp, operands, /, **params):  # pyright: ignore
        with jexc.set_current_trace(self.parent_trace):
            return BUILTIN["custom_jvp_call"](self, primitive, fun, jvp, operands, **params)

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, operands, /, **params):  # pyright: ignore
        with jexc.set_current_trace(self.parent_trace):
            return BUILTIN["custom_vjp_call"](self, primitive, fun, fwd, bwd, operands, **params)

    def process_shard_map(self, primitive, fun, operands, /, **params):  # pyright: ignore
        with jexc.set_current_trace(self.parent_trace):
            return BUILTIN["shard_map"](self, primitive, fun, operands, **params)

    def process_call(self, primitive, fun, operands, params):  # pyright: ignore
        with jexc.set_current_trace(self):
            return fun.call_wrapped(*operands)

    def stage_value(self, val: Any) -> Any:
        return val if self.unwrap(val) is not val else self.parent_trace.stage_value(val)

    # Between tracers and Values

    def enter(self, value: Value) -> ValueTracer:
        """Boxes a Value from outside this level."""
        if hooks.following and self.tag.follow is None and hooks.following.asked_for_by(value):
            self.tag.follow = hooks.following.follow
        return ValueTracer(self, value)

    def wrap(self, x: Any) -> Any:
        """Converts a rule's result to something JAX accepts."""
        if KINDS[type(x)] != "value":
            return self.as_array(x)
        # The first Value requiring plain arrays to be followed may be created inside the level, so check
        # results as well.
        if hooks.following and hooks.following.asked_for_by_type(type(x)):
            self.tag.follow = hooks.following.follow
        return ValueTracer(self, x)

    def as_array(self, x: Any) -> Any:
        """Converts a rule's result to an array or a Value.

        (Rules may return NumPy arrays and numbers.)
        """
        if kind_of(x) != "other" or _is_no_array(x):
            return x
        with jexc.set_current_trace(self.parent_trace):
            return jnp.asarray(x)

    def box(self, x: Any) -> Any:
        """Boxes a Value. Anything else (for example, a symbolic zero) is returned unchanged."""
        return ValueTracer(self, x) if is_value(x) else x

    def unwrap(self, x: Any) -> Any:
        """Unboxes a tracer from this level. Anything else is returned unchanged."""
        ours = type(x) is ValueTracer and (x.quax_tag is self.tag or self.claims(x))
        return x.quax_value if ours else x

    def unwrap_tree(self, tree: Any) -> Any:
        """Unboxes this level's tracers in `tree`, including tracers inside Values."""
        if kind_of(tree) == "array":
            return self.unwrap(tree)
        return jtu.tree_map(self.unwrap, tree)


def _is_no_array(x: Any) -> bool:
    """Returns whether `x` has another JAX type, such as a token."""
    try:
        return not isinstance(jax.typeof(x), jax.core.ShapedArray)
    except TypeError:  # this may still be convertible to an array
        return False


def _below(level: QuaxTrace) -> list[Any]:
    """Returns a level's tag, followed by the traces below it and their tags."""
    below, trace = [level.tag], level.parent_trace
    while trace is not None:
        below += [trace, getattr(trace, "tag", trace)]
        trace = getattr(trace, "parent_trace", None)
    return below


def _lives_below(level: QuaxTrace, value: Any) -> bool:
    traces: list[Any] = [x._trace for x in jtu.tree_leaves(value) if isinstance(x, jax.core.Tracer)]  # pyright: ignore[reportPrivateUsage]
    below = _below(level)
    return all(any(x is y for x in (trace, getattr(trace, "tag", None)) for y in below) for trace in traces)


# A Value may be created inside a transform within a level. (Either it is constructed there, or passed to a
# jitted function, which flattens it.) Its arrays then belong to the transform, so it can't just be boxed.
# Instead it is represented by an equation mapping its leaves to an array. When the level later evaluates the
# transform's jaxpr, this equation gives back the Value.
value_p = jexc.Primitive("quaxlike_value")
_staged = False  # whether there is any such equation (otherwise we don't look)


def stage(value: Value) -> Any:
    """Binds an array representing `value` until some level dispatches on it."""
    global _staged
    _staged = True
    leaves, treedef = jtu.tree_flatten(value)
    return value_p.bind(*leaves, treedef=treedef)


def makes_values(primitive: jexc.Primitive, params: dict[str, Any]) -> bool:
    """Returns whether a primitive is (or carries) an equation for making a Value.

    This includes custom derivatives: their functions may create one when called.
    """
    if primitive.name not in BUILTIN:
        return False
    name, params = high_level.as_call(primitive, params)
    custom = name != primitive.name and name.startswith("custom")
    return custom or primitive is value_p or any(map(_holds_value, jexc.jaxprs_in_params(params)))


@compat.weakly_cached
def _holds_value(jaxpr: Any) -> bool:
    return any(makes_values(eqn.primitive, eqn.params) for eqn in jaxpr.eqns)


def _adopted(value: Value) -> Any:
    """Boxes a Value passed as an operand to a primitive, at the level to which it belongs."""
    check_complete(value)
    level = level_of(value)
    if level is None:
        primitive = compat.asking_primitive(calling_frame())
        raise RuntimeError(not_dispatched(value, f"`{primitive}`" if primitive else "a JAX primitive"))
    return level.adopt(value)


compat.register_late_values(Value, _adopted, aval_of)


def check_complete(value: Value) -> None:
    """Raises a `ValueError` if a Value has missing parts."""
    if has_missing_parts(value):
        raise ValueError(
            f"Parts of {type(value).__name__} are missing, as in the halves that `eqx.partition` makes, "
            f"so that it stands for no array. Join the halves with `eqx.combine` first; found {value}. "
            f"(Where `{missing_field(value)}` may be None, annotate it so.)"
        )


def value_types(operands: Sequence[Any]) -> list[type | None]:
    """Returns the class of each Value, and None for any other operand.

    This is a cache key.
    """
    return [type(x) if KINDS[type(x)] == "value" else None for x in operands]


# The interpreter's own rules, for primitives that carry code or just move data. Added by `higher_order`, and
# only used if no registered rule matches. The keys are names of primitives, or else their attribute `family`:
# JAX doesn't export every primitive.
BUILTIN: dict[str, Callable[..., Any]] = {}


def builtin(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(rule: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            BUILTIN[name] = rule
        return rule

    return decorator
