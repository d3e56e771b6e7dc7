"""`cached_trace`: rules that are traced once for each structure of operands, and replayed from then on."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jexc

from .. import compat, recording
from ..policy import MaterialisationError, losses_raised
from .evaluate import evaluate
from .slots import Slot, flatten, unflatten

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_LIMIT = 1024  # structures of operands that are cached for a rule


def cached_trace(rule: _Fn) -> _Fn:
    """Traces a rule once for operands of the same structures; the primitive must have one result.

    The layers of a model repeat the same product, so the computation of the rule is cached as a jaxpr, by the
    structures and avals of the operands. If an outer transform is tracing, its equations are bound again;
    eagerly it runs as one compiled function. Use it for rules that depend on nothing else and are long:
    running a short one costs less than the lookup.
    """
    known: dict[Any, _Traced | None] = {}
    lock = threading.Lock()

    @functools.wraps(rule)
    def on_operands(*args: Any, **params: Any) -> Any:
        if recording.active() is not None or jax.config.jax_disable_jit:
            return rule(*args, **params)
        n = isinstance(args[0], jexc.Primitive)
        leaves, slots = flatten(args[n:])
        key = (args[:n], slots, tuple(params.items()), compat.trace_context())
        try:
            traced = known[key]
        except TypeError:  # unhashable params
            return rule(*args, **params)
        except KeyError:
            traced = _trace(rule, args[:n], slots, params)
            with lock:
                if len(known) >= _LIMIT:
                    known.clear()
                known[key] = traced
        if traced is None:
            return rule(*args, **params)
        if compat.is_eval_trace(compat.current_trace()):
            return unflatten(traced.out, traced.compiled(*leaves))[0]
        return unflatten(traced.out, evaluate(None, traced.jaxpr, leaves, inlined=True))[0]

    return on_operands  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The computation of a rule on leaves, and the slot of its result."""

    jaxpr: jexc.ClosedJaxpr
    out: tuple[Slot, ...]

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return jax.jit(jexc.jaxpr_as_fun(self.jaxpr))


def _trace(
    rule: Callable[..., Any], primitive: tuple[Any, ...], slots: tuple[Slot, ...], params: dict[str, Any]
) -> _Traced | None:
    """Traces a rule; returns None if it must be called each time."""
    out: tuple[Slot, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        result = rule(*primitive, *unflatten(slots, leaves), **params)
        if result is NotImplemented:
            raise _NotReplayable
        flat, out = flatten([result])
        return flat

    debug_info = jexc.DebugInfo("rule", rule.__name__, None, None)
    try:
        with losses_raised():  # so that each is reported at its own place
            jaxpr, consts = compat.trace_to_jaxpr(on_leaves, [a for s in slots for a in s.avals], debug_info)
    except (_NotReplayable, MaterialisationError):
        return None
    if any(isinstance(c, jax.core.Tracer) for c in consts):
        return None
    return _Traced(compat.with_consts(jaxpr, consts), out)


class _NotReplayable(Exception):
    pass
