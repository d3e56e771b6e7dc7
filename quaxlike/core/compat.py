"""Access to JAX's private modules, and differences between JAX versions.

Nothing else in this package uses `jax._src`: a lint rule (TID251) enforces this. If something breaks with a
new JAX release, look for the cause here first; tests/core/test_compat.py should tell where.
"""

# pyright: reportPrivateUsage=false

import contextlib
import functools
import inspect
import re
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.core
import jax.extend as jex
import jax.extend.core as jexc
import jax.extend.linear_util as lu
from jax._src import (
    checkify,
    config,
    core,
    dispatch,
    dtypes,
    sharding_impls,
    source_info_util,
    traceback_util,
    tree_util,
    util,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax import lax as lax_internal

try:  # from JAX 0.11
    from jax._src import flattree
except ImportError:
    flattree = None

# A jit's unspecified sharding, for which JAX has no public name.
UNSPECIFIED = sharding_impls.UNSPECIFIED

# Hides the frames of JAX and of this package in tracebacks, according to `jax_traceback_filtering`.
api_boundary = traceback_util.api_boundary


def hide_file(path: str) -> None:
    """Hides the frames from a file, or from all files in a folder, in tracebacks and source lines."""
    traceback_util.register_exclusion(path)
    jex.source_info_util.register_exclusion(path)


def drops_frames(error: Exception) -> bool:
    """Returns whether `jax_traceback_filtering` allows dropping frames from this error's traceback.

    If so, also removes the first traceback attached by JAX, which shows where an equation was created.
    """
    if traceback_util._filtering_mode() == "off":
        return False
    if isinstance(error.__cause__, source_info_util.JaxStackTraceBeforeTransformation):
        error.__cause__ = error.__cause__.__cause__
    return True


def current_traceback() -> Any:
    """Returns the traceback recorded for JAX's current equation, or None."""
    return source_info_util.current().traceback


# Traces -------------------------------------------------------------------------------------------


def is_eval_trace(trace: jax.core.Trace | None) -> bool:  # i.e. there's no transform below it
    return type(trace) is core.EvalTrace


JVPTrace = ad.JVPTrace  # forward-mode differentiation


# Returns the current trace. (Every primitive needs it several times, and JAX's property takes twice as long.)
current_trace: Any = functools.partial(getattr, core.trace_state_strong_ref, "value")

# Makes a trace the current one. JAX's own context manager would add another microsecond to every primitive.
set_trace: Callable[[jax.core.Trace | None], None] = core.trace_ctx.set_trace


def bind_with_trace(
    primitive: jexc.Primitive,
    trace: jax.core.Trace,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> Any:
    """Binds `primitive` on `trace`, without looking up the current trace."""
    return primitive.bind_with_trace(trace, operands, [core.typeof(x) for x in operands], params)


# All of JAX's settings affecting jaxprs (the mesh, x64, axis names and so on).
trace_context: Callable[[], Hashable] = config.trace_context


# Returns whether 64-bit types are enabled. (Faster than looking up the setting by name.)
x64_enabled: Callable[[], bool] = functools.partial(getattr, config.enable_x64, "value")


def set_user_context(context: Any, value: Any) -> None:
    """Sets a context created by `jax.make_user_context`, without ever restoring its previous value."""
    context._obj.set_local(value)


class DecidedLate:
    """A setting determined only when JAX first uses it in a cache key.

    JAX's settings are thread-local, but asyncio tasks share one thread, so each task can't have its own
    value. To work around this, the context is set to an instance of this class, decided once JAX hashes or
    compares it. The context is then also reset to a new, undecided instance; the old one equals the decided
    value from then on.
    """

    __slots__ = ("_context", "_decide", "_decided")

    def __init__(self, context: Any, decide: Callable[[], Hashable]) -> None:
        self._context, self._decide = context, decide

    @property
    def decided(self) -> Hashable:
        try:
            return self._decided
        except AttributeError:
            self._decided: Hashable = self._decide()
            set_user_context(self._context, DecidedLate(self._context, self._decide))
            return self._decided

    def __eq__(self, other: object) -> bool:
        return self.decided == (other.decided if isinstance(other, DecidedLate) else other)

    def __hash__(self) -> int:
        return hash(self.decided)


def register_stand_in(cls: type, aval: Callable[[Any], jax.core.AbstractValue]) -> None:
    """Gives instances of `cls` a JAX type, for tracing functions with them as arguments."""
    core.pytype_aval_mappings[cls] = aval


def register_late_values(
    cls: type, canonicalise: Callable[[Any], Any], aval: Callable[[Any], jax.core.AbstractValue]
) -> None:
    """Allows instances of `cls` as operands, each converted to a JAX type by `canonicalise`."""
    register_stand_in(cls, aval)
    if hasattr(dtypes, "register_canonicalize_value_handler"):
        dtypes.register_canonicalize_value_handler(cls, canonicalise)
    else:
        dtypes.canonicalize_value_handlers[cls] = canonicalise


# Jaxprs -------------------------------------------------------------------------------------------

# A jaxpr along with its constants. Every jaxpr is one since JAX 0.11, and the old name will be removed.
if TYPE_CHECKING:
    ClosedJaxpr = jexc.Jaxpr
else:
    ClosedJaxpr = getattr(jexc, "ClosedJaxpr", jexc.Jaxpr)


def trace_to_jaxpr(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[jax.core.AbstractValue],
    debug_info: jexc.DebugInfo,
) -> tuple[Any, list[Any]]:
    """Traces `fun`, which must accept and return flat lists.

    **Returns:**

    A jaxpr without constants, and the values of its former constants, now its first inputs.
    """
    # Drop the names of arguments and results: JAX checks for precisely one each, but their number changes
    # here.
    wrapped = lu.wrap_init(fun, debug_info=debug_info.with_unknown_names())
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return partial_eval.convert_constvars_jaxpr(jaxpr), list(consts)


def with_consts(jaxpr: Any, consts: Sequence[Any]) -> ClosedJaxpr:
    """Closes a jaxpr over `consts`, the values of its first inputs (see `trace_to_jaxpr`)."""
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr
    n = len(consts)
    own = jaxpr.replace(constvars=jaxpr.invars[:n], invars=jaxpr.invars[n:])
    return ClosedJaxpr(own, list(consts))


def closed(jaxpr: Any, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """Closes an open jaxpr.

    Without constants, the same jaxpr always gives the same object, so the result can be a cache key.
    """
    if hasattr(jaxpr, "consts"):
        return jaxpr
    if consts:
        return ClosedJaxpr(jaxpr, list(consts))
    with _closed_lock:
        if jaxpr not in _closed:
            _closed[jaxpr] = ClosedJaxpr(jaxpr.replace(), ())
        return _closed[jaxpr]


_closed: "weakref.WeakKeyDictionary[Any, ClosedJaxpr]" = weakref.WeakKeyDictionary()
_closed_lock = threading.Lock()


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr inside a closed one without constants. Some primitives require it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


jvp_rule: Callable[[jexc.Primitive], Callable[..., Any]] = ad.primitive_jvps.__getitem__


def transpose_rule(primitive: jexc.Primitive) -> Callable[..., Any]:
    """Returns a primitive's transpose rule, as a function returning cotangents.

    Some of JAX's own rules add their cotangents to accumulators instead. These are wrapped, so that every
    rule can be called alike.
    """
    fancy = ad.fancy_transposes.get(primitive)
    return ad.primitive_transposes[primitive] if fancy is None else functools.partial(_returning, fancy)


def _returning(rule: Callable[..., Any], cts: Any, *operands: Any, **params: Any) -> list[Any]:
    linear = [ad.ValAccum(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else x for x in operands]
    rule(cts, *linear, **params)
    return [x.freeze() if isinstance(x, ad.ValAccum) else None for x in linear]


def weakly_cached(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Memoises a function on its first argument, without keeping this alive."""
    return util.weakref_lru_cache(fun, trace_context_in_key=False)


def all_invars(jaxpr: Any) -> list[Any]:
    """Returns the constvars of an open jaxpr, followed by its invars."""
    return jaxpr.all_invars if hasattr(jaxpr, "all_invars") else [*jaxpr.constvars, *jaxpr.invars]


def has_context(eqn: jexc.JaxprEqn) -> bool:
    """Returns whether an equation was traced under a setting relevant even to eager evaluation."""
    return eqn.ctx.compute_type is not None or eqn.ctx.xla_metadata is not None


def is_differentiated(x: Any) -> bool:
    """Returns whether an array is being differentiated.

    A best effort: only looks at the tracer itself.
    """
    while isinstance(x, batching.BatchTracer):
        x = x.val
    return isinstance(x, ad.JVPTracer | ad.LinearizeTracer)


def source_of(eqn: jexc.JaxprEqn) -> Any:
    """A context giving staged equations the source line and name stack of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)


def flat_tree(leaves: list[Any]) -> Any:
    """Wraps a list in shard_map's container for results and their metadata."""
    return cast(Any, getattr(tree_util, "FlatTree", flattree)).flatten(leaves)


def literal_of(x: Any) -> Any:
    """Returns the value of a tracer standing for a literal in a staged program.

    Anything else is returned unchanged.
    """
    literal = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else None
    return literal.val if isinstance(literal, jexc.Literal) else x


def debug_info_of(jaxpr: Any) -> jexc.DebugInfo:
    return getattr(jaxpr, "jaxpr", jaxpr).debug_info


# Parameters of primitives whose form changed ------------------------------------------------------


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants, and how many are its carry."""
    if "ft_in" in params:  # from JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(
    params: dict[str, Any], jaxpr: Any, consts: int, carry: int, xs: int, ys: int
) -> dict[str, Any]:
    """Returns a scan's parameters with another body, and other operand and result counts."""
    if flattree is not None:
        return params | {
            "jaxpr": jaxpr,
            "ft_in": flattree.pack(tuple(map(flattree.nones, (consts, carry, xs)))),
            "ft_out": flattree.pack(tuple(map(flattree.nones, (carry, ys)))),
        }
    linear = {"linear": (False,) * (consts + carry + xs)} if "linear" in params else {}
    return params | {"jaxpr": jaxpr, "num_consts": consts, "num_carry": carry} | linear


_JITTED = type(jax.jit(lambda: None))


def is_jit_without_options(fun: Any) -> bool:
    """Returns whether `fun` was created by `jax.jit(f)`, without any options."""
    if type(fun) is not _JITTED:  # another wrapper may have copied the attributes of a jit
        return False
    info = cast(Any, fun)._jit_info
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    said = (
        info.static_argnums or info.static_argnames or info.donate_argnums or info.donate_argnames,
        info.keep_unused or info.device or info.backend or info.compiler_options_kvs,
        any(x is not None for x in (*info.in_layouts_leaves, *info.out_layouts_leaves)),
        any(x is not UNSPECIFIED for x in leaves),
        getattr(info.inline, "name", info.inline) not in (False, "AUTO"),
    )
    return not any(said)


def is_inlined_jit(params: dict[str, Any], *, eager: bool) -> bool:
    """Returns whether a jit is inlined, i.e. has no equation of its own. (An enum since JAX 0.11.)"""
    inline = params["inline"]
    if isinstance(inline, bool):
        return inline
    return inline.name == "JAX_EARLY" or (eager and inline.name == "JAX_LATE")


# Whether the flat backward function of a custom_vjp returns logs, besides cotangents (since JAX 0.11).
BWD_RETURNS_LOGS = flattree is not None


# Names, source lines, avals -----------------------------------------------------------------------


@functools.cache
def named_primitives() -> dict[str, tuple[jexc.Primitive, ...]]:
    """Returns all primitives in JAX's tables of rules, by name.

    Libraries are free to choose any name, so several primitives may share one. A public JAX primitive takes
    precedence over all others.
    """
    found: dict[str, dict[jexc.Primitive, None]] = {}
    for p in [*mlir._lowerings, *ad.primitive_jvps, *batching.fancy_primitive_batchers]:
        if isinstance(p, jexc.Primitive) and not getattr(getattr(p, "root", p), "is_replaced", False):
            found.setdefault(p.name, {})[p] = None
    return {name: tuple(those) for name, those in found.items()} | public_primitives()


def public_primitives() -> dict[str, tuple[jexc.Primitive, ...]]:
    """Returns the primitives in `jax.extend.core.primitives`."""
    shown = {n: p for n, p in vars(jexc.primitives).items() if isinstance(p, jexc.Primitive)}
    return {name: (p,) for n, p in shown.items() for name in (n.removesuffix("_p"), p.name)}


def parameters_of(primitive: jexc.Primitive) -> frozenset[str]:
    """Returns a primitive's parameters, as found in its lowering rule's signature."""
    rule: Any = getattr(mlir._lowerings.get(primitive), "rule", None)
    is_function = isinstance(getattr(rule, "func", rule), types.FunctionType)  # may be a partial function
    known = inspect.signature(rule).parameters.values() if is_function else ()
    return frozenset(p.name for p in known if p.kind is p.KEYWORD_ONLY)


@weakly_cached
def arity_of(primitive: jexc.Primitive) -> int | None:
    """Returns a primitive's number of operands, or None if it varies or is unknown."""
    jvp = ad.primitive_jvps.get(primitive)
    lowering: Any = getattr(mlir._lowerings.get(primitive), "rule", None)
    if isinstance(jvp, functools.partial) and jvp.func in (ad.standard_jvp, ad.standard_jvp2):
        return len(jvp.args[0])  # there is one rule per operand
    function = getattr(lowering, "func", lowering)
    if function is lax_internal._nary_lower_hlo:
        builder = inspect.signature(lowering.args[0]).parameters.values()
        return sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in builder)
    if function is lax_internal._compare_lower_hlo:
        return 2
    if not isinstance(function, types.FunctionType):
        return None
    _, *rest = inspect.signature(lowering).parameters.values()  # the first is a context
    operands = [p for p in rest if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # Some lowering rules don't mark their parameters as keyword-only: these look like operands.
    clear = len(operands) == 1 or any(p.kind is p.KEYWORD_ONLY for p in rest)
    varies = any(p.kind is p.VAR_POSITIONAL for p in rest) or any(p.default is not p.empty for p in operands)
    return len(operands) if clear and not varies else None


# Private functions, variables and error messages of JAX 0.10 to 0.12, identified by name for lack of a public
# API. Each has a test in tests/core/test_compat.py, which fails if a new version of JAX changes it.


def is_operator_of_array(frame: types.FrameType) -> bool:
    """Returns whether this frame is an array's operator, which may defer to the other operand."""
    return frame.f_code.co_name.startswith("_operator_")


def is_check_of_argument(frame: types.FrameType) -> bool:
    """Returns whether this frame checks an argument of a jax.numpy function."""
    return frame.f_code.co_name == "_arraylike"


def asking_function(frame: Any) -> str | None:
    """Returns the name of the jax.numpy function checking its arguments in this frame."""
    return _local(frame, "fun_name", str)


def asking_primitive(frame: Any) -> jexc.Primitive | None:
    """Returns the primitive being bound, if this frame converts one of its operands."""
    return _local(frame, "self", jexc.Primitive)


def _local(frame: Any, variable: str, kind: type) -> Any:
    for _ in range(4):
        if frame is not None and isinstance(found := frame.f_locals.get(variable), kind):
            return found
        frame = getattr(frame, "f_back", None)
    return None


def traceback_of_equation(frame: types.FrameType) -> Any:
    """Returns the traceback recorded for the equation interpreted by this frame, or None.

    Reads a local variable of the interpreter: `eqn` in JAX's own, `step` in ours.
    """
    if {"eqn", "step"}.isdisjoint(frame.f_code.co_varnames):
        return None
    eqn = frame.f_locals.get("eqn") or getattr(frame.f_locals.get("step"), "eqn", None)
    return getattr(getattr(eqn, "source_info", None), "traceback", None)


def is_jacfwd(frame: types.FrameType) -> bool:
    """Returns whether this frame is a function from `jax.jacfwd`."""
    return frame.f_code.co_name == "jacfun" and "jacfwd" in frame.f_code.co_qualname


def lacks_forward_mode(error: TypeError) -> bool:
    """Returns whether JAX raised this because a `jax.custom_vjp` has no forward-mode derivative."""
    return "forward-mode autodiff (jvp) to a custom_vjp function" in str(error)


def has_unsortable_keys(error: ValueError) -> bool:
    """Returns whether JAX refuses to flatten a dictionary because its keys cannot be sorted."""
    return "sorting pytree dictionary keys" in str(error)


def wants_concrete(error: Exception) -> bool:
    """Returns whether JAX requires a concrete value in place of a tracer, e.g. for a shape or an `if`."""
    return re.search("concrete|must (have|be) static", str(error)) is not None


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an aval or a `ShapeDtypeStruct` if it is part of its type, or else None."""
    sharding = getattr(x, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types else None


def replicated_like(aval: Any, leaf: Any) -> Any:
    """Makes `aval` replicated on the mesh of a leaf whose sharding is part of its type."""
    if (sharding := explicit_sharding(leaf)) is None:
        return aval
    return aval.update(sharding=jax.NamedSharding(sharding.mesh, jax.P(*[None] * len(aval.shape))))


def place_aval_like(aval: Any, leaves: Sequence[Any]) -> Any:
    """Moves `aval` to the leaves' mesh, and makes it vary over every axis any leaf varies over.

    An explicit sharding is kept. Otherwise it's assumed to be sharded like a leaf of the same shape, if any.
    """
    placed = [a for a in leaves if getattr(a, "sharding", None) is not None and not a.sharding.mesh.empty]
    if not placed or not isinstance(aval, jax.core.ShapedArray):
        return aval
    own = [] if explicit_sharding(aval) is None else [aval.sharding]
    alike = [*own, *(a.sharding for a in placed if a.shape == aval.shape)]
    mesh = placed[0].sharding.mesh
    sharding = alike[0] if alike else jax.NamedSharding(mesh, jax.P(*[None] * len(aval.shape)))
    varying = frozenset().union(*(a.manual_axis_type.varying for a in placed))
    mat = placed[0].manual_axis_type.update(varying=varying)
    return aval.update(sharding=sharding, manual_axis_type=mat)


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the manual mesh axes over which `x` varies."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


# Lowering, and dead code --------------------------------------------------------------------------


def lower_with_devices(primitive: jexc.Primitive, needed: bool = True) -> None:
    """Makes JAX choose devices before lowering `primitive`, for lowering rules depending on them."""
    asking = dispatch.prim_requires_devices_during_lowering
    (asking.add if needed else asking.discard)(primitive)


def is_missing_tangent(x: Any) -> bool:
    """Returns whether a tracer represents the zeros of `jax.jacfwd` for a missing tangent."""
    operands = getattr(getattr(x, "parent", None), "in_tracers", ())
    return any(getattr(t.aval, "dtype", None) == dtypes.float0 for t in operands)


def lowers_with_devices(jaxpr: Any) -> bool:
    """Returns whether lowering any equation of a closed jaxpr requires the devices to be known."""
    return dispatch.jaxpr_has_prim_requiring_devices(open_jaxpr(jaxpr))


def lower_unvaried(rule: mlir.LoweringRule, context: Any, *args: Any, **params: Any) -> Any:
    """Lowers as if the operands didn't vary over any axis of a `shard_map`.

    A kernel can't declare which axes its results vary over, and its lowering doesn't depend on this.
    """
    unvaried = core.ManualAxisType()
    avals = [aval.update(manual_axis_type=unvaried) for aval in context.avals_in]
    with config._check_vma(False):
        return rule(context.replace(avals_in=avals), *args, **params)


def check_errors_like(primitive: Any, other: Any, as_other: Callable[..., tuple[Any, Any]]) -> None:
    """Makes `checkify` report the same errors for `primitive` as for `other`.

    `primitive` just returns its only operand; `as_other(operand, **params)` gives the operands and parameters
    of `other`.
    """

    def report(*args: Any, **params: Any) -> tuple[Any, Any]:
        *context, operand = args  # since JAX 0.11, the first argument is an error counter
        operands, others = as_other(operand, **params)
        return checkify.error_checks[other](*context, *operands, **others)[0], operand

    checkify.error_checks[primitive] = report


def register_dce(
    primitive: jexc.Primitive,
    rule: Callable[[list[bool], jexc.JaxprEqn], tuple[list[bool], jexc.JaxprEqn | None]],
) -> None:
    """Registers `rule(used_outs, eqn) -> (used_ins, eqn)`.

    Since JAX 0.12, rules are also passed the references read later on. None of our primitives use any.
    """
    takes_live = len(inspect.signature(partial_eval.dce_jaxpr_closed_call_rule).parameters) == 3
    registered: Any = (lambda outs, _, eqn: rule(outs, eqn)) if takes_live else rule
    partial_eval.dce_rules[primitive] = registered


# JAX eliminates dead code in the body of a `while_loop` from version 0.12.
WHILE_HAS_DCE = jexc.primitives.while_p in partial_eval.dce_rules


def dce(
    jaxpr: ClosedJaxpr, used_outs: Sequence[bool], *, keep_inputs: bool = False
) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Eliminates dead code in a closed jaxpr. Also returns which of its inputs remain."""
    live, used_ins = partial_eval.dce_jaxpr(open_jaxpr(jaxpr), list(used_outs), keep_inputs)
    return live if hasattr(live, "consts") else ClosedJaxpr(live, jaxpr.consts), tuple(used_ins)


# Returns whether an equation does anything besides computing its results.
has_effects: Callable[[jexc.JaxprEqn], bool] = partial_eval.has_effects


# Batching -----------------------------------------------------------------------------------------


def batch_jaxpr(
    jaxpr: ClosedJaxpr, axis: Any, dims: Sequence[int | None], out_mapped: Sequence[bool | None]
) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Maps a closed jaxpr over a new axis of its inputs.

    **Arguments:**

    - `axis`: JAX's description of the axis, as passed to batching rules.
    - `out_mapped`: for each result, True to add the axis as the first one, or None to do so only if the
        result depends on it.

    **Returns:**

    The mapped jaxpr, and which results have the axis.
    """
    dests = tuple(batching.zero_if_mapped if mapped is None else 0 for mapped in out_mapped)
    mapped, out_axes = batching.batch_jaxpr_axes(jaxpr, axis, tuple(dims), dests)
    return mapped, tuple(bool(b) for b in out_axes)


def retyped(x: Any, aval: jax.core.ShapedArray) -> Any:
    """Gives `x` the weak type and varying axes of `aval`, of the same shape and dtype."""
    if not aval.weak_type and jax.typeof(x).weak_type:
        x = jax.lax.convert_element_type(x, aval.dtype)
    return vary_over(x, aval.manual_axis_type.varying)


def vary_over(x: Any, axes: frozenset[Any]) -> Any:
    """Makes `x` vary over at least these mesh axes."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Makes all arrays vary over the same mesh axes.

    Inside a `shard_map`, primitives require this of their operands, but a new array doesn't vary over any
    axis.
    """
    axes = frozenset[Any]().union(*map(varying_axes, operands))
    return [vary_over(x, axes) for x in operands] if axes else list(operands)


def named_axes() -> dict[Hashable, int]:
    """Returns the named axes of `vmap` and `shard_map` available to collectives, with their sizes."""
    return dict(core.get_axis_env().axis_sizes)


def mapped_mesh_axes() -> frozenset[Any]:  # explicit mesh axes used by a `vmap`
    return core.get_axis_env().explicit_mesh_axis_names


def bind_axes(axes: dict[Hashable, int]) -> contextlib.AbstractContextManager[None]:
    """A context in which collectives can refer to `axes` by name."""
    return core.extend_axis_env_nd(axes.items())
