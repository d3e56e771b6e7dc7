"""The class for primitives defined using a single function.

JAX transforms require a primitive's parameters to be static and hashable, and its operands to be flat. So the
tree structure goes into a parameter `in_tree`, and any forms into a parameter `forms`. Neither is passed on
to rules. Nor is the parameter `_param_types`, see `parameters.py`.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive, mapped_aval
from jax.interpreters import mlir, xla

from ..core import compat
from .forms import Batching, Flat, Form, Jvp, Params, Transpose, Vjp, symbolic_tangents
from .parameters import unflatten, with_types, without_form, without_tree, without_types
from .partitioning import Partitioning

_F = TypeVar("_F", bound=Callable[..., Any])
_lock = threading.RLock()

_Impls = Mapping[str | None, Callable[..., Any]]
_Static = tuple[str | None, tuple[tuple[str, Hashable], ...]]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The handwritten rules for a primitive. See `define_primitive`."""

    jvp: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    vjp_with_results: bool = False
    transpose: Callable[..., Any] | None = None
    batching: Callable[..., Any] | None = None


class MissingRuleError(NotImplementedError):
    """Raised when calling an empty slot, i.e. one without a rule."""


class Slot:
    """A named slot holding one rule for a primitive. Calling the slot calls the rule.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.primitives import define_primitive

        half_p = define_primitive("half", lambda x: x / 2)

        @half_p.slot("cost").register
        def _(x):
            return x.size

        half_p.slot("cost")(jnp.ones(3))  # 3
        ```
    """

    def __init__(self, primitive_name: str, name: str) -> None:
        self.primitive_name = primitive_name
        self.name = name
        self._rule: Callable[..., Any] | None = None

    def register(self, rule: _F) -> _F:
        """Puts `rule` into the slot, replacing any existing rule, and returns it."""
        if not callable(rule):
            raise TypeError(
                f"slot {self.name!r} of primitive {self.primitive_name!r} takes a function; found {rule!r}"
            )
        self._rule = rule
        return rule

    @property
    def registered(self) -> bool:
        """Whether a rule has been registered in this slot."""
        return self._rule is not None

    @property
    def rule(self) -> Callable[..., Any]:
        """The rule in this slot. If there isn't one then a `MissingRuleError` is raised."""
        if self._rule is None:
            raise MissingRuleError(
                f"primitive {self.primitive_name!r} has no rule in slot {self.name!r}; register "
                f"one with `primitive.slot({self.name!r}).register(rule)`"
            )
        return self._rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(*args, **kwargs)

    def __repr__(self) -> str:
        state = "registered" if self.registered else "empty"
        return f"<slot {self.name!r} of {self.primitive_name!r}, {state}>"


class DefinedPrimitive(Primitive):
    """A JAX primitive made by [`define_primitive`][quaxlike.primitives.define_primitive].

    This is an ordinary `jax.extend.core.Primitive`: it appears in jaxprs, and you can register rules for it.
    Its derivatives and batched forms are primitives as well, so you can recognise them in a jaxpr and give
    them their own rules. These are available as `jvp_p` (tangents of the results), `vjp_p` (cotangents of the
    operands), `transpose_p` (the transpose with respect to the linear operands) and `batch_p` (mapped over an
    axis). Each has the same four attributes in turn.

    A derived primitive always has multiple results. It has the same parameters as its root, together with an
    additional parameter `forms`. This is a tuple, with a last entry specifying how its operands and results
    are related to its parent's.

    **Attributes:**

    - `root`: the primitive from which this was ultimately derived. This may be the primitive itself.
    - `parent`: the primitive of which this is a form, or None if it wasn't derived from anything.
    - `form`: either `"jvp"`, `"vjp"`, `"transpose"` or `"batch"`, or None if it wasn't derived from anything.
    - `impl_fn`: the root's implementation.
    """

    # The interpreter recognises these primitives by this.
    family: ClassVar[str] = "defined"
    # Whether this has been superseded by a call to `define_primitive(..., replace=True)` with the same name.
    is_replaced = False

    def __init__(
        self,
        name: str,
        impls: _Impls,
        *,
        multiple_results: bool,
        rules: Rules,
        install: Callable[["DefinedPrimitive"], None],
        partitioning: Partitioning | Callable[..., Partitioning] | None = None,
        parent: "DefinedPrimitive | None" = None,
        form: type[Form] | None = None,
    ) -> None:
        super().__init__(name)
        self.multiple_results = multiple_results
        self.rules = rules
        self._install = install
        self.parent = parent
        self.form = None if form is None else form.name
        self._impls = impls
        self._partitioning = partitioning
        self._slots: dict[str, Slot] = {}
        self._forms: dict[type[Form], DefinedPrimitive] = {}
        # JAX caches traces by the function object and the static arguments. So trace these methods rather
        # than closures over the parameters: a new closure is never found in the cache.
        self._trace = jax.make_jaxpr(self._evaluate_flat, static_argnums=0)
        self._trace_tree = jax.make_jaxpr(self._evaluate_tree, static_argnums=0, return_shape=True)
        self._trace_tangents = jax.make_jaxpr(self._tangents, static_argnums=(0, 1), return_shape=True)
        self._results_tree = functools.lru_cache(maxsize=None)(self._find_results_tree)

        self.def_impl(functools.partial(xla.apply_primitive, self))
        self.def_effectful_abstract_eval(self._abstract_eval)
        install(self)
        for platform in impls:
            lowered = functools.partial(self._evaluate_on, platform)
            rule = mlir.lower_fun(lowered, multiple_results=multiple_results)
            mlir.register_lowering(self, rule, platform=platform)

    def __call__(self, *args: Any, **params: Any) -> Any:
        """Binds this primitive.

        **Arguments:**

        - `args`: the operands, each an array or a pytree of arrays.
        - `params`: static, hashable parameters.

        **Returns:** the result of the primitive's function.

        **Raises:** `TypeError` if an operand isn't an array, or if a parameter is an array or isn't hashable.
        """
        for name, value in params.items():
            self._check_param(name, value)
        paths_and_leaves, in_tree = jtu.tree_flatten_with_path(args)
        leaves = [leaf for _, leaf in paths_and_leaves]
        avals = tuple(self._aval_of(path, leaf) for path, leaf in paths_and_leaves)
        if self.parent is None and in_tree != _flat_tree(len(args)):
            params["in_tree"] = in_tree
        out = self.bind(*leaves, **params)
        if not self.multiple_results:
            return out
        return jtu.tree_unflatten(self.results_tree(avals, params), out)

    def bind(self, *args: Any, **params: Any) -> Any:
        try:
            return super().bind(*args, **with_types(params))
        except TypeError:
            for name, value in params.items():
                self._check_param(name, value)
            raise

    def plain_params(self, params: Params) -> Params:
        """Returns an equation's parameters without `_param_types`."""
        return without_types(params)

    @property
    def root(self) -> "DefinedPrimitive":
        return self if self.parent is None else self.parent.root

    @property
    def impl_fn(self) -> Callable[..., Any]:
        return self.root._impls[None]

    @property
    def jvp_p(self) -> "DefinedPrimitive":
        return self._derived(Jvp)

    @property
    def vjp_p(self) -> "DefinedPrimitive":
        return self._derived(Vjp)

    @property
    def transpose_p(self) -> "DefinedPrimitive":
        return self._derived(Transpose)

    @property
    def batch_p(self) -> "DefinedPrimitive":
        return self._derived(Batching)

    def slot(self, name: str) -> Slot:
        """Returns the slot for the rule with this name.

        Register a rule with `p.slot("cost").register(rule)`, and call it with `p.slot("cost")(...)`.

        **Arguments:**

        - `name`: any name. Slots are created on demand.

        **Returns:** the [`Slot`][quaxlike.primitives.Slot].
        """
        with _lock:
            return self._slots.setdefault(name, Slot(self.name, name))

    def jaxpr(self, avals: Sequence[Any], params: Params) -> Any:
        """Returns the jaxpr implementing this primitive. It has flat operands."""
        return self._trace((None, _static_items(params)), *avals)

    def results_tree(self, avals: Iterable[Any], params: Params) -> Any:
        """Returns the tree structure of the result, given the types of the flat operands."""
        return self._results_tree(tuple(avals), _static_items(params))

    def nonzero_tangents(
        self, nonzero: tuple[bool, ...], avals: Sequence[Any], params: Params
    ) -> tuple[bool, ...]:
        """Returns which results can have nonzero tangents, if only the `nonzero` operands do."""
        tangents = [aval.to_tangent_aval() for aval, nz in zip(avals, nonzero, strict=True) if nz]
        _, out = self._trace_tangents((None, _static_items(params)), nonzero, list(avals), tangents)
        return tuple(tangent is not None for tangent in out)

    def _evaluate_flat(self, static: _Static, *operands: Any) -> list[Any]:
        platform, params = static
        return self._flat(platform, dict(params))(*operands)

    def _evaluate_tree(self, static: _Static, *operands: Any) -> Any:
        platform, params = static
        return self._call(platform, dict(params))(*operands)

    def _tangents(
        self, static: _Static, nonzero: Sequence[bool], primals: list[Any], tangents: list[Any]
    ) -> list[Any]:
        platform, params = static
        fn = self._flat(platform, dict(params))
        return symbolic_tangents(fn, nonzero, primals, tangents)

    def _derived(self, form: type[Form]) -> "DefinedPrimitive":
        with _lock:
            if form not in self._forms:
                # The implementations for other platforms can still be mapped over an axis. However they may
                # not be differentiable, so always use the default implementation for derivatives.
                impls: _Impls = self._impls if form is Batching else {None: self._impls[None]}
                self._forms[form] = DefinedPrimitive(
                    f"{self.name}.{form.name}",
                    impls,
                    multiple_results=True,
                    rules=Rules(),
                    install=self._install,
                    parent=self,
                    form=form,
                )
            return self._forms[form]

    def _flat(self, platform: str | None, params: dict[str, Any]) -> Flat:
        """Returns the implementation as a function from flat operands to a flat list of results."""
        if self.parent is not None:
            form, below = without_form(params)
            return functools.partial(form.evaluate, self.parent._flat(platform, below))
        fn = self._call(platform, params)
        return lambda *operands: jtu.tree_leaves(fn(*operands))

    def _call(self, platform: str | None, params: dict[str, Any]) -> Callable[..., Any]:
        """Returns the implementation as a function from flat operands to a tree of results."""
        if self.parent is not None:
            return self._flat(platform, params)
        in_tree, static = without_tree(params)
        impl = self._impls[platform]

        def fn(*operands: Any) -> Any:
            out = impl(*unflatten(in_tree, operands), **static)
            if not self.multiple_results and not jtu.all_leaves([out]):
                raise TypeError(
                    f"primitive {self.name!r} has one result, but {where(impl)} returned "
                    f"{jtu.tree_structure(out)}; define it with `multiple_results=True`"
                )
            return out

        return fn

    def _evaluate_on(self, platform: str | None, /, *operands: Any, **params: Any) -> Any:
        fn = functools.partial(self._evaluate_flat, (platform, _static_items(params)))
        avals = [jax.typeof(x) for x in operands]
        partitioning = self._partitioning_of(avals, params)
        if jax.sharding.get_abstract_mesh().manual_axes:
            partitioning = None  # JAX doesn't support this inside a `shard_map` over a subset of the axes
        out = (fn if partitioning is None else partitioning.apply(fn))(*operands)
        if platform is not None:
            expected: Any = self.jaxpr(avals, params).out_avals
            found: Any = [jax.typeof(x) for x in out]
            if [(a.shape, a.dtype) for a in expected] != [(a.shape, a.dtype) for a in found]:
                raise TypeError(
                    f"the {platform} implementation of primitive {self.name!r} "
                    f"({where(self._impls[platform])}) returned {_short(found)}, where its "
                    f"default implementation returns {_short(expected)}"
                )
        return out if self.multiple_results else out[0]

    def _partitioning_of(self, avals: Sequence[Any], params: Params) -> Partitioning | None:
        if self.parent is None:
            if self._partitioning is None or isinstance(self._partitioning, Partitioning):
                return self._partitioning
            return self._partitioning(*avals, **without_tree(params)[1])
        if self.form != "batch":
            return None
        form, below = without_form(params)
        # There may be a collective over this axis, making it wrong to split.
        if form.axis_name is not None:
            return None
        avals = [
            aval if dim is None else mapped_aval(form.size, dim, aval)
            for aval, dim in zip(avals, form.dims, strict=True)
        ]
        partitioning = self.parent._partitioning_of(avals, below)
        return None if partitioning is None else partitioning.batched(form.dims)

    def _abstract_eval(self, *avals: Any, **params: Any) -> tuple[Any, Any]:
        jaxpr = self.jaxpr(avals, params)
        if any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts):
            raise jax.errors.UnexpectedTracerError(
                f"the function of primitive {self.name!r}, {where(self.impl_fn)}, closes over an array that "
                "is being traced. Pass it as an operand"
            )
        if self._partitioning_of(avals, params) or compat.lowers_with_devices(jaxpr):
            compat.lower_with_devices(self)
        out = jaxpr.out_avals if self.multiple_results else jaxpr.out_avals[0]
        return out, jaxpr.effects

    def _find_results_tree(self, avals: tuple[Any, ...], params: Any) -> Any:
        return jtu.tree_structure(self._trace_tree((None, params), *avals)[1])

    def _aval_of(self, path: Any, leaf: Any) -> Any:
        try:
            return jax.typeof(leaf)
        except TypeError as error:
            index, *inside = path
            raise TypeError(
                f"operand {index.idx} of primitive {self.name!r} holds {leaf!r}"
                f"{' at ' + jtu.keystr(tuple(inside)) if inside else ''}, which is not an array; "
                "pass static values as keyword arguments"
            ) from error

    def _check_param(self, name: str, value: Any) -> None:
        if isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"parameter {name!r} of primitive {self.name!r} is an array of type "
                f"{jax.typeof(value).str_short()}; keyword arguments are static, pass it by "
                "position"
            )
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"parameter {name!r} of primitive {self.name!r} is static and must be hashable, got {value!r}"
            ) from error


@functools.cache
def _flat_tree(num_leaves: int) -> Any:
    return jtu.tree_structure((0,) * num_leaves)


def _static_items(params: Params) -> tuple[tuple[str, Hashable], ...]:
    return tuple(sorted(with_types(params).items()))


def _short(avals: Sequence[Any]) -> str:
    return "(" + ", ".join(aval.str_short() for aval in avals) + ")"


def where(fn: Callable[..., Any]) -> str:
    """Returns a function's name and where it was defined, for error messages."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    name = getattr(fn, "__qualname__", repr(fn))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
